"""The partitions that this broker hosts, and the response to a request for another one.

A broker without metadata, because it has just started, cannot know that a topic does not exist: it responds with
NOT_LEADER_OR_FOLLOWER, and clients request metadata, here or elsewhere. Some give up on a topic that does not exist.

Leader hints (KIP-951): a response with NOT_LEADER_OR_FOLLOWER or FENCED_LEADER_EPOCH names the leader, its epoch and
its address, so that the client need not request metadata. The hint is what this broker knows, which may be old: clients
accept it only if its epoch is newer than theirs. There is none without a leader, nor from an isolated leader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kipmesh.broker.replication.replica import Replica
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.image import MetadataImage
from kipmesh.core.metadata.records import NO_LEADER
from kipmesh.messages import LeaderIdAndEpoch, NodeEndpoint

HINTED = frozenset({ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH})
_NONE: Mapping[int, Replica] = {}


class HostedReplicas:
    """The replicas by topic id and partition, beside the metadata image that names all the others."""

    def __init__(self, image: MetadataImage) -> None:
        self.image = image
        self._replicas: dict[bytes, dict[int, Replica]] = {}
        self.unhosted: set[tuple[bytes, int]] = set()
        """Partitions that are to be here and whose logs the disk refused."""
        self._endpoints: dict[str, dict[int, NodeEndpoint]] = {}

    def __iter__(self) -> Iterator[Replica]:
        for replicas in list(self._replicas.values()):
            yield from list(replicas.values())

    def broker_epoch(self, broker_id: int) -> int:
        """The epoch of the broker's present registration as far as this broker knows; -1 if it knows none."""
        broker = self.image.brokers.get(broker_id)
        return -1 if broker is None else broker.broker_epoch

    def eligible_epoch(self, broker_id: int) -> int:
        """The same for a broker that may be an ISR member, -1 for one that is fenced or shutting down."""
        broker = self.image.brokers.get(broker_id)
        return broker.broker_epoch if broker is not None and broker.can_lead else -1

    def endpoints(self, listener: str) -> Mapping[int, NodeEndpoint]:
        """Where the brokers that are not fenced listen for who comes by `listener`; kept until `brokers_changed`."""
        found = self._endpoints.get(listener)
        if found is None:
            found = self._endpoints[listener] = {
                broker.broker_id: NodeEndpoint(broker.broker_id, *broker.endpoints[listener], broker.rack)
                for broker in self.image.brokers.values()
                if not broker.fenced and listener in broker.endpoints
            }
        return found

    def brokers_changed(self) -> None:
        """The image has other brokers, or other things to say of them."""
        self._endpoints = {}

    def get(self, topic_id: bytes, partition: int) -> Replica | None:
        """The replica, if it is here."""
        return self._replicas.get(topic_id, _NONE).get(partition)

    def add(self, replica: Replica) -> None:
        """Host a partition."""
        self._replicas.setdefault(replica.topic_id, {})[replica.partition] = replica

    def remove(self, replica: Replica) -> None:
        """Host it no more."""
        replicas = self._replicas.get(replica.topic_id, {})
        replicas.pop(replica.partition, None)
        if not replicas:
            self._replicas.pop(replica.topic_id, None)

    def find_topic(self, topic_id: bytes, name: str) -> tuple[Mapping[int, Replica], ErrorCode]:
        """The topic's replicas here, by its id or else by its name; with UNKNOWN_... when there is no such topic."""
        if self.image.offset < 0:
            return _NONE, ErrorCode.NOT_LEADER_OR_FOLLOWER
        if not topic_id:
            topic = self.image.topic_by_name(name)
            if topic is None:
                return _NONE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            topic_id = topic.topic_id
        elif topic_id not in self.image.topics:
            return _NONE, ErrorCode.UNKNOWN_TOPIC_ID
        return self._replicas.get(topic_id, _NONE), ErrorCode.NONE

    def missing_code(self, topic_id: bytes, name: str, partition: int) -> ErrorCode:
        """Why a partition of a known topic is not here: another broker has it, or nobody."""
        topic = self.image.topics.get(topic_id) if topic_id else self.image.topic_by_name(name)
        if topic is not None and partition in topic.partitions:
            if (topic.topic_id, partition) in self.unhosted:
                return ErrorCode.KAFKA_STORAGE_ERROR
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    def require(self, topic_id: bytes, name: str, partition: int) -> Replica:
        """The replica here; raises KafkaError with the code that the request's partition is answered with."""
        replicas, code = self.find_topic(topic_id, name)
        replica = replicas.get(partition)
        if replica is None:
            code = code or self.missing_code(topic_id, name, partition)
            raise KafkaError(code, f"partition {partition} of topic {name or topic_id.hex()!r}")
        return replica

    def leader_hint(
        self, code: int, topic_id: bytes, name: str, partition: int, replica: Replica | None = None
    ) -> LeaderIdAndEpoch | None:
        """The leader of a partition, for a response with this error; None if there is no hint."""
        if code not in HINTED:
            return None
        if replica is not None and replica.has_role:
            known = replica.current_leader
            return known if known.leader_id != NO_LEADER else None
        topic = self.image.topics.get(topic_id) if topic_id else self.image.topic_by_name(name)
        state = topic.partitions.get(partition) if topic is not None else None
        if state is None or state.leader == NO_LEADER:
            return None
        return LeaderIdAndEpoch(state.leader, state.leader_epoch)

    def hinted_endpoints(
        self, leaders: Iterable[LeaderIdAndEpoch | None], others: Iterable[int], listener: str
    ) -> list[NodeEndpoint]:
        """The addresses of these leaders and other brokers on a listener: each once, without fenced ones."""
        known = self.endpoints(listener)
        wanted = sorted({*(each.leader_id for each in leaders if each is not None), *others})
        return [known[node_id] for node_id in wanted if node_id in known]
