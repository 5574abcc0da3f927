"""The replicas that this broker hosts, the metadata image, and the errors for partitions that are elsewhere.

A broker without metadata has just started and cannot know that a topic does not exist. It returns
NOT_LEADER_OR_FOLLOWER, because some clients give up on UNKNOWN_TOPIC_OR_PARTITION.

Leader hints (KIP-951): a response with NOT_LEADER_OR_FOLLOWER or FENCED_LEADER_EPOCH names the leader, its epoch and
its address, so that the client need not request metadata. The hint may be outdated; clients accept it only with a newer
epoch than theirs. There is no hint without a leader, nor from an isolated leader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kipmesh.broker.replication.replica import Replica
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.image import MetadataImage, TopicState
from kipmesh.core.metadata.records import NO_LEADER
from kipmesh.messages import LeaderIdAndEpoch, NodeEndpoint

HINTED = frozenset({ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH})
_NONE: Mapping[int, Replica] = {}


class HostedReplicas:
    """The hosted replicas by topic id and partition, and the metadata image of the cluster. Iterable over replicas."""

    def __init__(self, image: MetadataImage) -> None:
        self.image = image
        self._replicas: dict[bytes, dict[int, Replica]] = {}
        self.unhosted: set[tuple[bytes, int]] = set()
        """Topic id and number of each partition that is assigned to this broker but has no usable log here."""
        self._endpoints: dict[str, dict[int, NodeEndpoint]] = {}

    def __iter__(self) -> Iterator[Replica]:
        for replicas in list(self._replicas.values()):
            yield from list(replicas.values())

    def broker_epoch(self, broker_id: int) -> int:
        """Return the epoch of a broker's registration in the image, or -1 if it is not registered."""
        broker = self.image.brokers.get(broker_id)
        return -1 if broker is None else broker.broker_epoch

    def eligible_epoch(self, broker_id: int) -> int:
        """Return the epoch of a broker that may be in an ISR; -1 if it is unknown, fenced or shutting down."""
        broker = self.image.brokers.get(broker_id)
        return broker.broker_epoch if broker is not None and broker.can_lead else -1

    def endpoints(self, listener: str) -> Mapping[int, NodeEndpoint]:
        """Return the endpoints of unfenced brokers on a listener by broker id. Cached until `brokers_changed`."""
        endpoints = self._endpoints.get(listener)
        if endpoints is None:
            endpoints = self._endpoints[listener] = {
                broker.broker_id: NodeEndpoint(broker.broker_id, *broker.endpoints[listener], broker.rack)
                for broker in self.image.brokers.values()
                if not broker.fenced and listener in broker.endpoints
            }
        return endpoints

    def brokers_changed(self) -> None:
        """Drop cached endpoints because the brokers of the image changed."""
        self._endpoints = {}

    def get(self, topic_id: bytes, partition: int) -> Replica | None:
        """Return the replica of a partition, or None if it is not hosted."""
        return self._replicas.get(topic_id, _NONE).get(partition)

    def add(self, replica: Replica) -> None:
        """Add a replica to the hosted ones. It replaces a replica of the same partition."""
        self._replicas.setdefault(replica.topic_id, {})[replica.partition] = replica

    def remove(self, replica: Replica) -> None:
        """Remove a replica from the hosted ones. No effect if it is not hosted."""
        replicas = self._replicas.get(replica.topic_id, {})
        replicas.pop(replica.partition, None)
        if not replicas:
            self._replicas.pop(replica.topic_id, None)

    def find_topic(self, topic_id: bytes, name: str) -> tuple[Mapping[int, Replica], ErrorCode]:
        """Return the hosted replicas of a topic by partition, and an error code.

        The topic is found by id, or by name if the id is empty. The code is NONE, UNKNOWN_TOPIC_ID (by id) or
        UNKNOWN_TOPIC_OR_PARTITION (by name) if the metadata has no such topic, or NOT_LEADER_OR_FOLLOWER without
        metadata. With an error there are no replicas.
        """
        if self.image.offset < 0:
            return _NONE, ErrorCode.NOT_LEADER_OR_FOLLOWER
        # Not `_topic`: each partition of a fetch comes here.
        topic = self.image.topics.get(topic_id) if topic_id else self.image.topic_by_name(name)
        if topic is None:
            return _NONE, ErrorCode.UNKNOWN_TOPIC_ID if topic_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return self._replicas.get(topic.topic_id, _NONE), ErrorCode.NONE

    def _topic(self, topic_id: bytes, name: str) -> TopicState | None:
        return self.image.topics.get(topic_id) if topic_id else self.image.topic_by_name(name)

    def missing_code(self, topic_id: bytes, name: str, partition: int) -> ErrorCode:
        """Return the error for a partition that is not hosted.

        KAFKA_STORAGE_ERROR if it is assigned to this broker but has no usable log, NOT_LEADER_OR_FOLLOWER if it exists
        elsewhere, UNKNOWN_TOPIC_OR_PARTITION if the metadata has no such partition.
        """
        topic = self._topic(topic_id, name)
        if topic is not None and partition in topic.partitions:
            if (topic.topic_id, partition) in self.unhosted:
                return ErrorCode.KAFKA_STORAGE_ERROR
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    def require(self, topic_id: bytes, name: str, partition: int) -> Replica:
        """Return the hosted replica, found by topic id, or by name if the id is empty.

        Raises KafkaError: UNKNOWN_TOPIC_ID, UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER without metadata or if
        the partition is elsewhere, KAFKA_STORAGE_ERROR if its log is unusable.
        """
        replicas, code = self.find_topic(topic_id, name)
        replica = replicas.get(partition)
        if replica is None:
            code = code or self.missing_code(topic_id, name, partition)
            raise KafkaError(code, f"partition {partition} of topic {name or topic_id.hex()!r} is not on this broker")
        return replica

    def leader_hint(
        self, code: int, topic_id: bytes, name: str, partition: int, replica: Replica | None = None
    ) -> LeaderIdAndEpoch | None:
        """Return the leader of a partition for a response with error `code`.

        Returns None for codes other than NOT_LEADER_OR_FOLLOWER and FENCED_LEADER_EPOCH, if no leader is known, or if
        `replica` is an isolated leader.
        """
        if code not in HINTED:
            return None
        if replica is not None and replica.has_role:
            known = replica.current_leader
            return known if known.leader_id != NO_LEADER else None
        topic = self._topic(topic_id, name)
        state = topic.partitions.get(partition) if topic is not None else None
        if state is None or state.leader == NO_LEADER:
            return None
        return LeaderIdAndEpoch(state.leader, state.leader_epoch)

    def hinted_endpoints(
        self, leaders: Iterable[LeaderIdAndEpoch | None], others: Iterable[int], listener: str
    ) -> list[NodeEndpoint]:
        """Return the endpoints of hinted leaders and other brokers on a listener. Omits repeated and fenced ones."""
        known = self.endpoints(listener)
        wanted = sorted({*(each.leader_id for each in leaders if each is not None), *others})
        return [known[node_id] for node_id in wanted if node_id in known]
