"""Which replica a client should read from: the plugin interface, the two selectors that are there, and their guard.

Rules: 392-11, 392-12. Loading a plugin by its name is `kipmesh.core.replica.selector_loader`; what a selector is shown
is made by `kipmesh.core.replica.selection_views`. A selector is called on the event loop, for each fetch that a leader
may redirect: it must be quick and must not block.

Invariant: a `GuardedSelector` always answers with a replica of the view, and never raises.
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
    """Who asks. Text is empty where it is not known."""

    rack_id: str = ""
    client_id: str = ""
    client_address: str = ""
    """Host without port."""
    principal: str = ""
    listener_name: str = ""


class ReplicaView(NamedTuple):
    """One online replica; None where whoever answers does not know (392-15)."""

    endpoint: NodeEndpoint
    """Its broker's id, address on the client's listener, and rack."""
    is_in_sync: bool = False
    log_start_offset: int | None = None
    log_end_offset: int | None = None
    time_since_caught_up_ms: int | None = None
    """0 for the leader."""

    @property
    def node_id(self) -> int:
        """The broker's id."""
        return self.endpoint.node_id

    @property
    def rack(self) -> str | None:
        """The broker's rack."""
        return self.endpoint.rack

    def holds(self, fetch_offset: int | None) -> bool:
        """Whether log start <= fetch offset <= log end; what is not known does not speak against it."""
        if fetch_offset is None:
            return True
        if self.log_start_offset is not None and fetch_offset < self.log_start_offset:
            return False
        return self.log_end_offset is None or fetch_offset <= self.log_end_offset


class PartitionView(NamedTuple):
    """A partition's online replicas, the leader among them, in the order of the assignment."""

    replicas: Sequence[ReplicaView]
    leader: ReplicaView
    fetch_offset: int | None = None
    """Where the client reads; None where there is no fetch yet (392-15, 392-16)."""

    def candidates(self) -> list[ReplicaView]:
        """The replicas that can serve the client well: in sync and holding its offset, and always the leader.

        A replica outside of these makes a consumer wait, or sends it back to the leader (392-04, 392-05).
        """
        leader, offset = self.leader, self.fetch_offset
        return [replica for replica in self.replicas if replica is leader or _is_good(replica, offset)]


def _is_good(replica: ReplicaView, fetch_offset: int | None) -> bool:
    return replica.is_in_sync and replica.holds(fetch_offset)


class ReplicaSelector(Protocol):
    """The plugin (392-11). A class without arguments; subclassing this one brings the two optional methods."""

    def configure(self, configs: Mapping[str, Any]) -> None:
        """Called once, before all else, with the service's configuration: dotted keys to values."""
        return

    def select(
        self, topic_partition: TopicPartition, client: ClientMetadata, view: PartitionView
    ) -> ReplicaView | None:
        """The replica of `view.replicas` that the client should read from; None has no preference: the leader."""
        ...

    def close(self) -> None:
        """Called once, when the service stops."""
        return


class LeaderSelector(ReplicaSelector):
    """Always the leader; the default (392-12)."""

    def select(self, topic_partition: TopicPartition, client: ClientMetadata, view: PartitionView) -> ReplicaView:
        """The leader."""
        return view.leader


class RackAwareReplicaSelector(ReplicaSelector):
    """A replica in exactly the client's rack (392-12).

    The leader if it is there; else, of the in-sync replicas there that hold the offset, the one that a stable hash of
    client id and partition picks; else the leader. The hash ranks replicas one by one (rendezvous), so that a client
    moves only when its own replica comes or goes.
    """

    def select(self, topic_partition: TopicPartition, client: ClientMetadata, view: PartitionView) -> ReplicaView:
        """A replica in the client's rack, or the leader."""
        leader, rack = view.leader, client.rack_id
        if not rack or leader.rack == rack:
            return leader
        near = [replica for replica in view.replicas if replica.rack == rack and _is_good(replica, view.fetch_offset)]
        if len(near) < 2:
            return near[0] if near else leader
        return max(near, key=lambda replica: stable_rank(client.client_id, topic_partition, replica.node_id))


def stable_rank(client_id: str, topic_partition: TopicPartition, node_id: int) -> bytes:
    """The replica's rank for this client and partition: the same in every process, to be compared only."""
    text = f"{topic_partition.topic}\0{topic_partition.partition}\0{node_id}\0{client_id}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


SELECTORS: Final[Mapping[str, Callable[[], ReplicaSelector]]] = {
    "": LeaderSelector,
    "LeaderSelector": LeaderSelector,
    "RackAwareReplicaSelector": RackAwareReplicaSelector,
    "org.apache.kafka.common.replica.LeaderSelector": LeaderSelector,
    "org.apache.kafka.common.replica.RackAwareReplicaSelector": RackAwareReplicaSelector,
}
"""Values of `replica.selector.class` that mean the given ones: Kafka's class names among them."""


class SelectorFailure(Enum):
    """What a plugin did wrong; the value is the label in metrics."""

    RAISED = "raised"
    UNKNOWN_REPLICA = "unknown-replica"


@dataclass(eq=False, slots=True)
class GuardedSelector:
    """A selector that cannot do harm: whatever it does wrong is told, counted, and means "the leader" (392-11).

    `on_failure` logs: it gets the partition, what was wrong, and the exception or what was returned. It should not log
    each one: a broken plugin fails at every fetch.
    """

    selector: ReplicaSelector
    on_failure: Callable[[TopicPartition, SelectorFailure, object], None] = lambda partition, failure, what: None
    failures: dict[SelectorFailure, int] = field(init=False, default_factory=lambda: dict.fromkeys(SelectorFailure, 0))

    @property
    def always_leader(self) -> bool:
        """Whether no view needs to be made, for the answer is the leader anyway."""
        return type(self.selector) is LeaderSelector

    def select(self, topic_partition: TopicPartition, client: ClientMetadata, view: PartitionView) -> ReplicaView:
        """The selector's choice, as the view has it."""
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
        """End the plugin; one that fails at that is told of, and no more."""
        try:
            self.selector.close()
        except Exception as error:
            self._failed(TopicPartition("", -1), SelectorFailure.RAISED, error)

    def _failed(self, topic_partition: TopicPartition, failure: SelectorFailure, what: object) -> None:
        self.failures[failure] += 1
        self.on_failure(topic_partition, failure, what)
