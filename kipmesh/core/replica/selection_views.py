"""Input of replica selectors, and the calls that use them on brokers (392-13, 392-15).

A leader knows its followers' progress. A broker that responds to Metadata knows only assignment, ISR and brokers, and
leaves the other fields None, as does a consumer that selects for itself (392-16).

Invariant: a view has only online replicas, which are those with an endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from kipmesh.core.replica.leader import PartitionLeader
from kipmesh.core.replica.selection import ClientMetadata, GuardedSelector, PartitionView, ReplicaView, TopicPartition
from kipmesh.core.replica.serving import CONSUMER_ID
from kipmesh.messages import NodeEndpoint

NO_REPLICA = -1
"""Value of `preferred_read_replica` if there is none."""


class ReplicaProgress(NamedTuple):
    """Log offsets and lag of a replica, None if unknown."""

    log_start_offset: int | None = None
    log_end_offset: int | None = None
    time_since_caught_up_ms: int | None = None


_UNKNOWN = ReplicaProgress()


def _known(offset: int) -> int | None:
    return offset if offset >= 0 else None


def progress_of_leader(leader: PartitionLeader, log_start_offset: int, now_ms: int) -> dict[int, ReplicaProgress]:
    """Return the progress of all replicas, including the leader, by broker id, as known by the leader.

    `log_start_offset` is the leader's own; `now_ms` is from the clock that `leader` uses.
    """
    progress = {leader.broker_id: ReplicaProgress(log_start_offset, leader.log_end_offset, 0)}
    for replica, follower in leader.followers.items():
        follower.apply_session_fetches(leader.log_end_offset)
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
    progress: Mapping[int, ReplicaProgress] = MappingProxyType({}),
    fetch_offset: int | None = None,
) -> PartitionView | None:
    """Return the view of a partition, or None if its leader is not one of its online replicas.

    `endpoints` has the online brokers that have the client's listener. Without `progress` and `fetch_offset`, those
    fields of the view are None (392-15, 392-16).
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


def may_redirect(replica_id: int, client: ClientMetadata, selector: GuardedSelector) -> bool:
    """Whether a leader consults its selector for a fetch: only for a consumer (-1) with a rack (392-13, 392-17).

    False for brokers, for replica id -2 (the client has already selected a replica), and with `LeaderSelector`. Cheap:
    call it before building a view.
    """
    return replica_id == CONSUMER_ID and bool(client.rack_id) and not selector.always_leader


def preferred_read_replica(
    selector: GuardedSelector,
    topic_partition: TopicPartition,
    client: ClientMetadata,
    view: PartitionView | None,
) -> int:
    """Return the broker id of the selected follower, or -1 if there is no view or the leader is selected (392-13,
    392-15)."""
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
    """Return the broker id of the replica to redirect a fetch to, or -1 if the leader serves it (392-13).

    A leader calls this after checking epochs and before checking the offset, because a follower may still have records
    that the leader's retention has deleted.
    """
    if not may_redirect(replica_id, client, selector):
        return NO_REPLICA
    view = view_of(
        leader_id=leader.broker_id,
        replicas=[replica for replica in replicas if replica not in leader.offline],
        isr=leader.isr,
        endpoints=endpoints(),
        progress=progress_of_leader(leader, log_start_offset, now_ms),
        fetch_offset=fetch_offset,
    )
    return preferred_read_replica(selector, topic_partition, client, view)
