"""Apache Kafka's metadata records: what the log of `__cluster_metadata-0` says, one value a record.

Types, fields, numbers and versions are those of Kafka's schemas; a record on disk is framed as Kafka frames it (frame
version 1, type and version as unsigned varints, then the body), so that Kafka's own tools read the log. Ids are 16
bytes. Where a version is written, it is one that `METADATA_VERSION_LEVEL` allows.

Invariants: `decode_record(encode_record(r)) == r`; a type or version that is not known raises CorruptRecordError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.metadata.partition_codec import decode_partition, encode_partition
from kipmesh.core.metadata.schema import ZERO_UUID, Reader, Schema, write_unsigned_varint

METADATA_VERSION = "metadata.version"
METADATA_VERSION_LEVEL = 25
"""Kafka's 4.0-IV3, the level that Kafka 4.0 and later know and under which the versions here are written."""

FRAME_VERSION = 1
KIPMESH_TAG = 10_000
"""The first tag of fields that Kafka's schemas do not have; Kafka numbers its own from 0."""


class FeatureLevelRecord(NamedTuple):
    """A finalized feature level; `metadata.version` comes first in a log."""

    name: str = ""
    feature_level: int = 0


class BrokerEndpoint(NamedTuple):
    """A listener of a broker or controller."""

    name: str = ""
    host: str = ""
    port: int = 0
    security_protocol: int = 0


class BrokerFeature(NamedTuple):
    """A range of levels that a node supports."""

    name: str = ""
    min_supported_version: int = 0
    max_supported_version: int = 0


class RegisterBrokerRecord(NamedTuple):
    """A broker's registration; its broker epoch is the offset of this record."""

    broker_id: int = 0
    is_migrating_zk_broker: bool = False
    incarnation_id: bytes = ZERO_UUID
    broker_epoch: int = 0
    end_points: Sequence[BrokerEndpoint] = ()
    features: Sequence[BrokerFeature] = ()
    rack: str | None = None
    fenced: bool = True
    in_controlled_shutdown: bool = False
    log_dirs: Sequence[bytes] = ()


class UnregisterBrokerRecord(NamedTuple):
    """A broker that is gone for good."""

    broker_id: int = 0
    broker_epoch: int = 0


class TopicRecord(NamedTuple):
    """A new topic."""

    name: str = ""
    topic_id: bytes = ZERO_UUID


class PartitionRecord(NamedTuple):
    """A new partition, whole."""

    partition_id: int = -1
    topic_id: bytes = ZERO_UUID
    replicas: Sequence[int] = ()
    isr: Sequence[int] = ()
    removing_replicas: Sequence[int] = ()
    adding_replicas: Sequence[int] = ()
    leader: int = -1
    leader_recovery_state: int = 0
    leader_epoch: int = -1
    partition_epoch: int = -1
    directories: Sequence[bytes] = ()
    eligible_leader_replicas: Sequence[int] | None = None
    last_known_elr: Sequence[int] | None = None


NO_LEADER = -1
NO_LEADER_CHANGE = -2


class PartitionChangeRecord(NamedTuple):
    """What changed of a partition: None, -2 (leader) and -1 (recovery state) stand for "as before".

    Each adds one to the partition epoch; one that names a leader, even the same one, adds one to the leader epoch.
    """

    partition_id: int = -1
    topic_id: bytes = ZERO_UUID
    isr: Sequence[int] | None = None
    leader: int = NO_LEADER_CHANGE
    replicas: Sequence[int] | None = None
    removing_replicas: Sequence[int] | None = None
    adding_replicas: Sequence[int] | None = None
    leader_recovery_state: int = -1
    directories: Sequence[bytes] | None = None
    eligible_leader_replicas: Sequence[int] | None = None
    last_known_elr: Sequence[int] | None = None


class ConfigRecord(NamedTuple):
    """One configuration key of a topic (type 2) or broker (4); None removes it."""

    resource_type: int = 0
    resource_name: str = ""
    name: str = ""
    value: str | None = None


class FenceBrokerRecord(NamedTuple):
    """A broker is fenced (older form; `BrokerRegistrationChangeRecord` is the newer one)."""

    id: int = 0
    epoch: int = 0


class UnfenceBrokerRecord(NamedTuple):
    """A broker is unfenced (older form)."""

    id: int = 0
    epoch: int = 0


class RemoveTopicRecord(NamedTuple):
    """A topic and all its partitions are gone."""

    topic_id: bytes = ZERO_UUID


class DelegationTokenRecord(NamedTuple):
    """A delegation token."""

    owner: str = ""
    requester: str = ""
    renewers: Sequence[str] = ()
    issue_timestamp: int = 0
    max_timestamp: int = 0
    expiration_timestamp: int = 0
    token_id: str = ""


class UserScramCredentialRecord(NamedTuple):
    """A SCRAM credential."""

    name: str = ""
    mechanism: int = 0
    salt: bytes = b""
    stored_key: bytes = b""
    server_key: bytes = b""
    iterations: int = 0


class EntityData(NamedTuple):
    """Whom a quota is for; a name of None is the default entity."""

    entity_type: str = ""
    entity_name: str | None = ""


class ClientQuotaRecord(NamedTuple):
    """A quota of an entity."""

    entity: Sequence[EntityData] = ()
    key: str = ""
    value: float = 0.0
    remove: bool = False


class ProducerIdsRecord(NamedTuple):
    """The next block of producer ids begins here."""

    broker_id: int = 0
    broker_epoch: int = -1
    next_producer_id: int = 0


class BrokerRegistrationChangeRecord(NamedTuple):
    """What changed of a broker: fenced is 1, unfenced -1, as before 0.

    What it does to the broker's partitions: `fencing`. The last two fields are ours, in tags that Kafka skips.
    """

    broker_id: int = 0
    broker_epoch: int = 0
    fenced: int = 0
    in_controlled_shutdown: int = 0
    log_dirs: Sequence[bytes] = ()
    also_gone: Sequence[int] = ()
    """Brokers whose turn comes next: none of them is elected."""
    proven: bool = False
    """The broker was alive after the last change of every partition that it leads."""


class AccessControlEntryRecord(NamedTuple):
    """An access control entry."""

    id: bytes = ZERO_UUID
    resource_type: int = 0
    resource_name: str = ""
    pattern_type: int = 0
    principal: str = ""
    host: str = ""
    operation: int = 0
    permission_type: int = 0


class RemoveAccessControlEntryRecord(NamedTuple):
    """An access control entry is gone."""

    id: bytes = ZERO_UUID


class NoOpRecord(NamedTuple):
    """Nothing; keeps the log moving."""


class ZkMigrationStateRecord(NamedTuple):
    """The state of a migration from ZooKeeper."""

    zk_migration_state: int = 0


class RemoveUserScramCredentialRecord(NamedTuple):
    """A SCRAM credential is gone."""

    name: str = ""
    mechanism: int = 0


class BeginTransactionRecord(NamedTuple):
    """The records up to the end of the transaction hold together."""

    name: str | None = None


class EndTransactionRecord(NamedTuple):
    """The transaction's records hold."""


class AbortTransactionRecord(NamedTuple):
    """The transaction's records do not hold."""

    reason: str | None = None


class RemoveDelegationTokenRecord(NamedTuple):
    """A delegation token is gone."""

    token_id: str = ""


class RegisterControllerRecord(NamedTuple):
    """A controller's registration."""

    controller_id: int = 0
    incarnation_id: bytes = ZERO_UUID
    zk_migration_ready: bool = False
    end_points: Sequence[BrokerEndpoint] = ()
    features: Sequence[BrokerFeature] = ()


Record = Any
"""One of the types above."""


class RecordType(NamedTuple):
    """A record's number, the highest version that is known, and its schema."""

    api_key: int
    version_max: int
    schema: Schema


_STRUCTS = {
    "BrokerEndpoint": Schema(BrokerEndpoint, ("name string", "host string", "port uint16", "security_protocol int16")),
    "BrokerFeature": Schema(
        BrokerFeature, ("name string", "min_supported_version int16", "max_supported_version int16")
    ),
    "EntityData": Schema(EntityData, ("entity_type string", "entity_name string?")),
}


def _type(api_key: int, version_max: int, value_type: Any, *lines: str) -> RecordType:
    return RecordType(api_key, version_max, Schema(value_type, lines, _STRUCTS))


RECORD_TYPES: Sequence[RecordType] = (
    _type(
        0,
        3,
        RegisterBrokerRecord,
        "broker_id int32",
        "is_migrating_zk_broker bool 2+",
        "incarnation_id uuid",
        "broker_epoch int64",
        "end_points []BrokerEndpoint",
        "features []BrokerFeature",
        "rack string?",
        "fenced bool",
        "in_controlled_shutdown bool 1+",
        "log_dirs []uuid 3+ @0",
    ),
    _type(1, 0, UnregisterBrokerRecord, "broker_id int32", "broker_epoch int64"),
    _type(2, 0, TopicRecord, "name string", "topic_id uuid"),
    _type(
        3,
        2,
        PartitionRecord,
        "partition_id int32",
        "topic_id uuid",
        "replicas []int32",
        "isr []int32",
        "removing_replicas []int32",
        "adding_replicas []int32",
        "leader int32",
        "leader_recovery_state int8 @0",
        "leader_epoch int32",
        "partition_epoch int32",
        "directories []uuid 1+",
        "eligible_leader_replicas []int32? 2+ @1",
        "last_known_elr []int32? 2+ @2",
    ),
    _type(4, 0, ConfigRecord, "resource_type int8", "resource_name string", "name string", "value string?"),
    _type(
        5,
        2,
        PartitionChangeRecord,
        "partition_id int32",
        "topic_id uuid",
        "isr []int32? @0",
        "leader int32 @1",
        "replicas []int32? @2",
        "removing_replicas []int32? @3",
        "adding_replicas []int32? @4",
        "leader_recovery_state int8 @5",
        "directories []uuid? 1+ @8",
        "eligible_leader_replicas []int32? 2+ @6",
        "last_known_elr []int32? 2+ @7",
    ),
    _type(7, 0, FenceBrokerRecord, "id int32", "epoch int64"),
    _type(8, 0, UnfenceBrokerRecord, "id int32", "epoch int64"),
    _type(9, 0, RemoveTopicRecord, "topic_id uuid"),
    _type(
        10,
        0,
        DelegationTokenRecord,
        "owner string",
        "requester string",
        "renewers []string",
        "issue_timestamp int64",
        "max_timestamp int64",
        "expiration_timestamp int64",
        "token_id string",
    ),
    _type(
        11,
        0,
        UserScramCredentialRecord,
        "name string",
        "mechanism int8",
        "salt bytes",
        "stored_key bytes",
        "server_key bytes",
        "iterations int32",
    ),
    _type(12, 0, FeatureLevelRecord, "name string", "feature_level int16"),
    _type(14, 0, ClientQuotaRecord, "entity []EntityData", "key string", "value float64", "remove bool"),
    _type(15, 0, ProducerIdsRecord, "broker_id int32", "broker_epoch int64", "next_producer_id int64"),
    _type(
        17,
        2,
        BrokerRegistrationChangeRecord,
        "broker_id int32",
        "broker_epoch int64",
        "fenced int8 @0",
        "in_controlled_shutdown int8 1+ @1",
        "log_dirs []uuid 2+ @2",
        f"also_gone []int32 @{KIPMESH_TAG}",
        f"proven bool @{KIPMESH_TAG + 1}",
    ),
    _type(
        18,
        0,
        AccessControlEntryRecord,
        "id uuid",
        "resource_type int8",
        "resource_name string",
        "pattern_type int8",
        "principal string",
        "host string",
        "operation int8",
        "permission_type int8",
    ),
    _type(19, 0, RemoveAccessControlEntryRecord, "id uuid"),
    _type(20, 0, NoOpRecord),
    _type(21, 0, ZkMigrationStateRecord, "zk_migration_state int8"),
    _type(22, 0, RemoveUserScramCredentialRecord, "name string", "mechanism int8"),
    _type(23, 0, BeginTransactionRecord, "name string? @0"),
    _type(24, 0, EndTransactionRecord),
    _type(25, 0, AbortTransactionRecord, "reason string? @0"),
    _type(26, 0, RemoveDelegationTokenRecord, "token_id string"),
    _type(
        27,
        0,
        RegisterControllerRecord,
        "controller_id int32",
        "incarnation_id uuid",
        "zk_migration_ready bool",
        "end_points []BrokerEndpoint",
        "features []BrokerFeature",
    ),
)

_BY_KEY: Mapping[int, RecordType] = MappingProxyType({type_.api_key: type_ for type_ in RECORD_TYPES})
_BY_TYPE: Mapping[Any, RecordType] = MappingProxyType({type_.schema.value_type: type_ for type_ in RECORD_TYPES})


def encode_record(record: Record, version: int | None = None) -> bytes:
    """The record as the value of a record in the metadata log, by default in the highest version that is known."""
    type_ = _BY_TYPE[type(record)]
    if version is None and type(record) is PartitionRecord:
        frame = _encode_new_partition(record)
        if frame is not None:
            return frame
    if version is None:
        version = type_.version_max
    out = bytearray((FRAME_VERSION,))
    write_unsigned_varint(out, type_.api_key)
    write_unsigned_varint(out, version)
    type_.schema.write(out, record, version)
    return bytes(out)


def _encode_new_partition(record: PartitionRecord) -> bytes | None:
    """The frame of a partition of the usual shape, as the tables would write it; None for others."""
    if (
        record.removing_replicas
        or record.adding_replicas
        or record.leader_recovery_state
        or record.eligible_leader_replicas is not None
        or record.last_known_elr is not None
        or {len(record.topic_id), *map(len, record.directories)} != {len(ZERO_UUID)}
    ):
        return None
    numbers = (record.leader, record.leader_epoch, record.partition_epoch)
    return encode_partition(
        record.topic_id, record.partition_id, record.replicas, record.isr, numbers, record.directories
    )


def decode_record(data: bytes) -> Record:
    """The record that `data` says; raises CorruptRecordError, naming the type and version if they are not known."""
    partition = decode_partition(data)
    if partition is not None:
        return PartitionRecord(*partition)
    reader = Reader(data)
    frame_version = reader.unsigned_varint()
    if frame_version != FRAME_VERSION:
        raise CorruptRecordError(f"metadata record of frame version {frame_version}, {FRAME_VERSION} is known")
    api_key = reader.unsigned_varint()
    version = reader.unsigned_varint()
    type_ = _BY_KEY.get(api_key)
    if type_ is None or version > type_.version_max:
        name = type_.schema.value_type.__name__ if type_ else "unknown type"
        raise CorruptRecordError(f"metadata record of type {api_key} ({name}) version {version} is not known")
    record = type_.schema.read(reader, version)
    reader.expect_end()
    return record
