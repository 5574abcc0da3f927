"""Which partitions this broker hosts, and what a request for another one is answered with.

A broker that has no metadata yet, for it has just started, cannot say that there is no such topic: it answers
NOT_LEADER_OR_FOLLOWER, and clients ask, here or elsewhere, who leads. Some give up on a topic that does not exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.image import MetadataImage
from kipmesh.messages import NodeEndpoint
from kipmesh.node.broker.replica import Replica

_NONE: Mapping[int, Replica] = {}


class Partitions:
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
