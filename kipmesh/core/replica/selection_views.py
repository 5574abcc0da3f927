"""What a selector is shown, and the two places on a broker that ask one (392-13, 392-15).

A leader knows how far its followers are; whoever answers Metadata knows the assignment, the ISR and the brokers, and
leaves the rest None. A consumer that selects for itself (392-16) makes its view with `view_of_metadata`, too.

Invariant: a view has online replicas only: those with an endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from kipmesh.core.replica.leader import PartitionLeader
from kipmesh.core.replica.selection import ClientMetadata, GuardedSelector, PartitionView, ReplicaView, TopicPartition
from kipmesh.core.replica.serving import CONSUMER_ID
from kipmesh.messages import NodeEndpoint

NO_REPLICA = -1
"""`preferred_read_replica` when there is none."""


class ReplicaProgress(NamedTuple):
    """How far a replica is, where that is known."""

    log_start_offset: int | None = None
    log_end_offset: int | None = None
    time_since_caught_up_ms: int | None = None


_UNKNOWN = ReplicaProgress()


def _known(offset: int) -> int | None:
    return offset if offset >= 0 else None


def progress_of_leader(leader: PartitionLeader, log_start_offset: int, now_ms: int) -> dict[int, ReplicaProgress]:
    """What a leader knows of all replicas; `log_start_offset` is its own, `now_ms` of the clock that it was given."""
    progress = {leader.broker_id: ReplicaProgress(log_start_offset, leader.log_end_offset, 0)}
    for replica, follower in leader.followers.items():
        follower.settle(leader.log_end_offset)  # fetches of its session that did not read this partition count, too
        progress[replica] = ReplicaProgress(
            _known(follower.log_start_offset),
            _known(follower.log_end_offset),
            max(now_ms - follower.last_caught_up_ms, 0),
        )
    return progress


def view_of(
    *,
    leader_id: int,
    replicas: Sequence[int],
    isr: Collection[int],
    endpoints: Mapping[int, NodeEndpoint],
    progress: Mapping[int, ReplicaProgress],
    fetch_offset: int | None,
) -> PartitionView | None:
    """The view; None without an online leader, for then there is nothing to fall back on.

    `endpoints` has the online brokers that listen where the client asked.
    """
    if leader_id not in endpoints:
        return None
    views = [
        ReplicaView(endpoints[replica], replica in isr, *progress.get(replica, _UNKNOWN))
        for replica in replicas
        if replica in endpoints
    ]
    leader = next((view for view in views if view.node_id == leader_id), None)
    return PartitionView(tuple(views), leader, fetch_offset) if leader is not None else None


def view_of_metadata(
    *, leader_id: int, replicas: Sequence[int], isr: Collection[int], endpoints: Mapping[int, NodeEndpoint]
) -> PartitionView | None:
    """The view of somebody who has only metadata: offsets and times are None (392-15, 392-16)."""
    return view_of(leader_id=leader_id, replicas=replicas, isr=isr, endpoints=endpoints, progress={}, fetch_offset=None)


def may_redirect(replica_id: int, client: ClientMetadata, selector: GuardedSelector) -> bool:
    """Whether a leader asks its selector about a fetch: a consumer's that has named its rack (392-13, 392-17).

    Brokers replicate from leaders; replica id -2 has chosen already. Cheap: asked before any view is made.
    """
    return replica_id == CONSUMER_ID and bool(client.rack_id) and not selector.always_leader


def preferred_read_replica(
    selector: GuardedSelector,
    topic_partition: TopicPartition,
    client: ClientMetadata,
    view: PartitionView | None,
) -> int:
    """The replica to send the client to, -1 to serve it here.

    A leader that gets another one answers at once, with it and without records (392-13). Metadata carries what this
    gives when it is another than the leader (392-15).
    """
    if view is None:
        return NO_REPLICA
    chosen = selector.select(topic_partition, client, view).node_id
    return NO_REPLICA if chosen == view.leader.node_id else chosen


def redirect_by_leader(
    selector: GuardedSelector,
    topic_partition: TopicPartition,
    client: ClientMetadata,
    leader: PartitionLeader,
    *,
    replica_id: int,
    replicas: Sequence[int],
    endpoints: Callable[[], Mapping[int, NodeEndpoint]],
    log_start_offset: int,
    fetch_offset: int,
    now_ms: int,
) -> int:
    """392-13 as a leader's read calls it, after the epochs were checked and before the offset is: -1 to serve it here.

    Before the offset, because a follower may still hold what the leader's retention has deleted.
    """
    if not may_redirect(replica_id, client, selector):
        return NO_REPLICA
    view = view_of(
        leader_id=leader.broker_id,
        replicas=[replica for replica in replicas if replica not in leader.lost],
        isr=leader.isr,
        endpoints=endpoints(),
        progress=progress_of_leader(leader, log_start_offset, now_ms),
        fetch_offset=fetch_offset,
    )
    return preferred_read_replica(selector, topic_partition, client, view)
