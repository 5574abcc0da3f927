"""Records of an image, as a snapshot of `__cluster_metadata` stores them (630-02, 630-03).

The order is Kafka's: features (`metadata.version` first), brokers, topics each followed by its partitions,
configurations, producer ids, SCRAM credentials. All functions are lazy generators over a `CapturedImage`; the caller
decides the step size.

Invariant: applying the records to `MetadataImage(offset, epoch)` gives an image equal to the captured one, except that
the offsets of `unproven` become the snapshot's. A leader proves itself by having applied that offset.
"""

from __future__ import annotations

from collections.abc import Iterator

from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import CapturedImage
from kipmesh.core.metadata.records import encode_partition
from kipmesh.core.metadata.states import BrokerState, PartitionState


def image_records(image: CapturedImage) -> Iterator[r.Record]:
    """Yield the records that build the image, in the order that the module defines."""
    return map(r.decode_record, image_values(image))


def image_values(image: CapturedImage) -> Iterator[bytes]:
    """Yield the encoded records that build the image, in the order that the module defines."""
    encode = r.encode_record
    for name in sorted(image.features, key=lambda name: name != r.METADATA_VERSION):
        yield encode(r.FeatureLevelRecord(name, image.features[name]))
    for broker in image.brokers.values():
        yield encode(broker_record(broker))
    for topic in image.topics.values():
        yield encode(r.TopicRecord(topic.name, topic.topic_id))
        for partition, state in topic.partitions.items():
            yield _encode_partition(topic.topic_id, partition, state)
    for (resource_type, resource_name), values in image.configs.items():
        for name, value in values.items():
            yield encode(r.ConfigRecord(resource_type, resource_name, name, value))
    if image.next_producer_id:
        yield encode(r.ProducerIdsRecord(-1, -1, image.next_producer_id))
    for user, credentials in image.credentials.items():
        for mechanism, credential in credentials.items():
            yield encode(r.UserScramCredentialRecord(user, mechanism, *credential))


def broker_record(broker: BrokerState) -> r.RegisterBrokerRecord:
    """Return the registration record that defines this broker."""
    return r.RegisterBrokerRecord(
        broker.broker_id,
        False,
        broker.incarnation_id,
        broker.broker_epoch,
        tuple([r.BrokerEndpoint(name, host, port) for name, (host, port) in broker.endpoints.items()]),
        tuple(broker.features),
        broker.rack,
        broker.fenced,
        broker.in_controlled_shutdown,
        tuple(broker.log_dirs),
    )


def partition_record(topic_id: bytes, partition: int, state: PartitionState) -> r.PartitionRecord:
    """Return the record that defines this partition. As in Kafka, an empty list of eligible leader replicas or last
    known ELR becomes None."""
    return r.PartitionRecord(
        partition,
        topic_id,
        state.replicas,
        state.isr,
        state.removing_replicas,
        state.adding_replicas,
        state.leader,
        state.leader_recovery_state,
        state.leader_epoch,
        state.partition_epoch,
        state.directories,
        state.eligible_leader_replicas or None,
        state.last_known_elr or None,
    )


def _encode_partition(topic_id: bytes, partition: int, state: PartitionState) -> bytes:
    (replicas, isr, leader, leader_epoch, partition_epoch, recovery, last_known, eligible, removing, adding, dirs) = (
        state
    )
    if not (recovery or last_known or eligible or removing or adding):
        encoded = encode_partition(topic_id, partition, replicas, isr, (leader, leader_epoch, partition_epoch), dirs)
        if encoded is not None:
            return encoded
    return r.encode_record(partition_record(topic_id, partition, state))
