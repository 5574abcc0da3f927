"""Replica selection (392-11, 392-12): plugin interface, the two included selectors, and a guard around plugins.

`kipmesh.core.replica.selector_loader` loads a plugin by name, `kipmesh.core.replica.selection_views` builds its input.
A selector is called on the event loop for each fetch that a leader may redirect: it must be fast and must not block.

Invariant: a `GuardedSelector` always returns a replica of the view and never raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol

from kipmesh.messages import NodeEndpoint


class TopicPartition(NamedTuple):
    """One partition of a topic."""

    topic: str
    partition: int


class ClientMetadata(NamedTuple):
    """The client that sent a request. Strings are empty if unknown."""

    rack_id: str = ""
    client_id: str = ""
    client_address: str = ""
    """Host without port."""
    principal: str = ""
    listener_name: str = ""


class ReplicaView(NamedTuple):
    """One online replica. Fields are None if the selecting broker or client does not know them (392-15)."""

    endpoint: NodeEndpoint
    """Broker id, address on the client's listener, and rack."""
    is_in_sync: bool = False
    log_start_offset: int | None = None
    log_end_offset: int | None = None
    time_since_caught_up_ms: int | None = None
    """0 for the leader."""

    @property
    def node_id(self) -> int:
        """Broker id."""
        return self.endpoint.node_id

    @property
    def rack(self) -> str | None:
        """Rack of the broker, or None if it has no rack."""
        return self.endpoint.rack

    def holds(self, fetch_offset: int | None) -> bool:
        """Whether log start <= fetch offset <= log end. A comparison with an unknown value (None) counts as true."""
        if fetch_offset is None:
            return True
        if self.log_start_offset is not None and fetch_offset < self.log_start_offset:
            return False
        return self.log_end_offset is None or fetch_offset <= self.log_end_offset

    def is_eligible(self, fetch_offset: int | None) -> bool:
        """Whether the replica is in sync and has the fetch offset."""
        return self.is_in_sync and self.holds(fetch_offset)


class PartitionView(NamedTuple):
    """The online replicas of a partition, including the leader, in the order of the assignment."""

    replicas: Sequence[ReplicaView]
    leader: ReplicaView
    fetch_offset: int | None = None
    """Offset of the client's fetch; None outside of Fetch requests (392-15, 392-16)."""

    def candidates(self) -> list[ReplicaView]:
        """Return the leader and all in-sync replicas that have the fetch offset.

        Any other replica would make a consumer wait, or send it back to the leader (392-04, 392-05).
        """
        leader, offset = self.leader, self.fetch_offset
        return [replica for replica in self.replicas if replica is leader or replica.is_eligible(offset)]


class ReplicaSelector(Protocol):
    """Interface and base class of a plugin (392-11). The constructor has no arguments; only `select` is required."""

    def configure(self, configs: Mapping[str, Any]) -> None:
        """Receive the service's configuration (dotted keys to values). Called once before any other method."""
        return

    def select(
        self, topic_partition: TopicPartition, client: ClientMetadata, view: PartitionView
    ) -> ReplicaView | None:
        """Return the replica of `view.replicas` that the client should read from, or None for the leader."""
        ...

    def close(self) -> None:
        """Release resources. Called once when the service stops."""
        return


class LeaderSelector(ReplicaSelector):
    """The default `ReplicaSelector`, which always selects the leader (392-12)."""

    def select(self, topic_partition: TopicPartition, client: ClientMetadata, view: PartitionView) -> ReplicaView:
        """Return the leader."""
        return view.leader


class RackAwareReplicaSelector(ReplicaSelector):
    """A `ReplicaSelector` that selects a replica in the client's rack (392-12).

    The leader is selected if it is in that rack, or if no in-sync replica in the rack has the fetch offset. If several
    replicas qualify, a stable hash of client id and partition selects one, instead of the most caught-up one as in
    Apache Kafka. The hash ranks each replica separately (rendezvous hashing), so a client moves only if its replica is
    removed or a replica with a higher rank is added.
    """

    def select(self, topic_partition: TopicPartition, client: ClientMetadata, view: PartitionView) -> ReplicaView:
        """Return the leader if it is in the client's rack, or the client has none; otherwise a follower in that rack.

        The follower is in sync and has the fetch offset. Of several, the one with the greatest `stable_rank` is
        returned, not the most caught-up one as in Apache Kafka. Without such a follower, returns the leader.
        """
        leader, rack = view.leader, client.rack_id
        if not rack or leader.rack == rack:
            return leader
        near = [replica for replica in view.replicas if replica.rack == rack and replica.is_eligible(view.fetch_offset)]
        if len(near) < 2:
            return near[0] if near else leader
        return max(near, key=lambda replica: stable_rank(client.client_id, topic_partition, replica.node_id))


def stable_rank(client_id: str, topic_partition: TopicPartition, node_id: int) -> bytes:
    """Return the rank of a replica for this client and partition. The replica with the greatest rank is selected. Ranks
    are the same in every process."""
    text = f"{topic_partition.topic}\0{topic_partition.partition}\0{node_id}\0{client_id}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


SELECTORS: Final[Mapping[str, Callable[[], ReplicaSelector]]] = {
    "": LeaderSelector,
    "LeaderSelector": LeaderSelector,
    "RackAwareReplicaSelector": RackAwareReplicaSelector,
    "org.apache.kafka.common.replica.LeaderSelector": LeaderSelector,
    "org.apache.kafka.common.replica.RackAwareReplicaSelector": RackAwareReplicaSelector,
}
"""Included selectors by value of `replica.selector.class`, with Kafka's class names as aliases."""


class SelectorFailure(Enum):
    """How a plugin failed: it raised an exception, or returned something other than a replica of the view. The value is
    a metric label."""

    RAISED = "raised"
    UNKNOWN_REPLICA = "unknown-replica"


@dataclass(eq=False, slots=True)
class GuardedSelector:
    """Wraps a selector so that any failure is counted and reported, and the leader is selected instead (392-11).

    `on_failure(topic_partition, failure, detail)` receives the exception or the invalid return value. It should limit
    its log output: a broken plugin fails on every fetch.
    """

    selector: ReplicaSelector
    on_failure: Callable[[TopicPartition, SelectorFailure, object], None] = lambda partition, failure, detail: None
    failures: dict[SelectorFailure, int] = field(init=False, default_factory=lambda: dict.fromkeys(SelectorFailure, 0))

    @property
    def always_leader(self) -> bool:
        """Whether the selector always selects the leader, so that no view is needed."""
        return type(self.selector) is LeaderSelector

    def select(self, topic_partition: TopicPartition, client: ClientMetadata, view: PartitionView) -> ReplicaView:
        """Return the replica of the view that the selector chose, or the leader if it chose none or failed."""
        try:
            chosen: object = self.selector.select(topic_partition, client, view)
        except Exception as error:
            self._failed(topic_partition, SelectorFailure.RAISED, error)
            return view.leader
        if chosen is None:
            return view.leader
        if isinstance(chosen, ReplicaView):
            for replica in view.replicas:
                if replica.node_id == chosen.node_id:
                    return replica
        self._failed(topic_partition, SelectorFailure.UNKNOWN_REPLICA, chosen)
        return view.leader

    def close(self) -> None:
        """Close the plugin. An exception is counted and reported, not raised."""
        try:
            self.selector.close()
        except Exception as error:
            self._failed(TopicPartition("", -1), SelectorFailure.RAISED, error)

    def _failed(self, topic_partition: TopicPartition, failure: SelectorFailure, detail: object) -> None:
        self.failures[failure] += 1
        self.on_failure(topic_partition, failure, detail)
