"""Apache Kafka's metadata records: the content of the log `__cluster_metadata-0` and its snapshots.

Types, fields, numbers and versions are those of Apache Kafka's schemas, so that its tools can read the files. Ids have
16 bytes. `kipmesh.core.metadata.records` frames them.
"""

from collections.abc import Sequence

from kipmesh.messages.kafka import ZERO_ID
from kipmesh.messages.schema import Bool, Float64, Int8, Int16, Int32, Int64, Message, UInt16, Uuid, field

ZERO_UUID = ZERO_ID
KIPMESH_TAG = 10_000
"""The first tag of fields that only kipmesh has. Apache Kafka numbers its tags from 0 and skips unknown ones."""


class BrokerEndpoint(Message):
    """A listener of a broker or controller."""

    name: str = field()
    host: str = field()
    port: UInt16 = field()
    security_protocol: Int16 = field()


class BrokerFeature(Message):
    """The range of levels of one feature, for example `metadata.version`, that a node supports."""

    name: str = field()
    min_supported_version: Int16 = field()
    max_supported_version: Int16 = field()


class EntityData(Message):
    """The entity of a quota; None is the default entity."""

    entity_type: str = field()
    entity_name: str | None = field(default="")


class RegisterBrokerRecord(Message, key=0, versions="0-3", flexible="0+"):
    """A registration of a broker. The broker epoch is the offset of this record."""

    broker_id: Int32 = field()
    is_migrating_zk_broker: Bool = field(versions="2+")
    incarnation_id: Uuid = field(default=ZERO_UUID)
    broker_epoch: Int64 = field()
    end_points: Sequence[BrokerEndpoint] = field()
    features: Sequence[BrokerFeature] = field()
    rack: str | None = field()
    fenced: Bool = field(default=True)
    in_controlled_shutdown: Bool = field(versions="1+")
    log_dirs: Sequence[Uuid] = field(versions="3+", tag=0)


class UnregisterBrokerRecord(Message, key=1, versions="0", flexible="0+"):
    """Removes the registration of a broker."""

    broker_id: Int32 = field()
    broker_epoch: Int64 = field()


class TopicRecord(Message, key=2, versions="0", flexible="0+"):
    """Creates a topic."""

    name: str = field()
    topic_id: Uuid = field(default=ZERO_UUID)


class PartitionRecord(Message, key=3, versions="0-2", flexible="0+"):
    """Creates a partition."""

    partition_id: Int32 = field(default=-1)
    topic_id: Uuid = field(default=ZERO_UUID)
    replicas: Sequence[Int32] = field()
    isr: Sequence[Int32] = field()
    removing_replicas: Sequence[Int32] = field()
    adding_replicas: Sequence[Int32] = field()
    leader: Int32 = field(default=-1)
    leader_recovery_state: Int8 = field(tag=0)
    leader_epoch: Int32 = field(default=-1)
    partition_epoch: Int32 = field(default=-1)
    directories: Sequence[Uuid] = field(versions="1+")
    eligible_leader_replicas: Sequence[Int32] | None = field(versions="2+", tag=1)
    last_known_elr: Sequence[Int32] | None = field(versions="2+", tag=2)


class ConfigRecord(Message, key=4, versions="0", flexible="0+"):
    """Sets a configuration key of a topic (`resource_type` 2) or broker (4). A `value` of None removes the key."""

    resource_type: Int8 = field()
    resource_name: str = field()
    name: str = field()
    value: str | None = field()


class PartitionChangeRecord(Message, key=5, versions="0-2", flexible="0+"):
    """A change of a partition. None, -2 (leader) and -1 (recovery state) leave a field unchanged.

    Each record increments the partition epoch. A record that sets a leader, even the same one, also increments the
    leader epoch.
    """

    partition_id: Int32 = field(default=-1)
    topic_id: Uuid = field(default=ZERO_UUID)
    isr: Sequence[Int32] | None = field(tag=0)
    leader: Int32 = field(tag=1, default=-2)
    replicas: Sequence[Int32] | None = field(tag=2)
    removing_replicas: Sequence[Int32] | None = field(tag=3)
    adding_replicas: Sequence[Int32] | None = field(tag=4)
    leader_recovery_state: Int8 = field(tag=5, default=-1)
    directories: Sequence[Uuid] | None = field(versions="1+", tag=8)
    eligible_leader_replicas: Sequence[Int32] | None = field(versions="2+", tag=6)
    last_known_elr: Sequence[Int32] | None = field(versions="2+", tag=7)


class FenceBrokerRecord(Message, key=7, versions="0", flexible="0+"):
    """Fences a broker (older form of BrokerRegistrationChangeRecord)."""

    id: Int32 = field()
    epoch: Int64 = field()


class UnfenceBrokerRecord(Message, key=8, versions="0", flexible="0+"):
    """Unfences a broker (older form of BrokerRegistrationChangeRecord)."""

    id: Int32 = field()
    epoch: Int64 = field()


class RemoveTopicRecord(Message, key=9, versions="0", flexible="0+"):
    """Deletes a topic and its partitions."""

    topic_id: Uuid = field(default=ZERO_UUID)


class DelegationTokenRecord(Message, key=10, versions="0", flexible="0+"):
    """A delegation token."""

    owner: str = field()
    requester: str = field()
    renewers: Sequence[str] = field()
    issue_timestamp: Int64 = field()
    max_timestamp: Int64 = field()
    expiration_timestamp: Int64 = field()
    token_id: str = field()


class UserScramCredentialRecord(Message, key=11, versions="0", flexible="0+"):
    """Sets the SCRAM credential of a user for one mechanism."""

    name: str = field()
    mechanism: Int8 = field()
    salt: bytes = field()
    stored_key: bytes = field()
    server_key: bytes = field()
    iterations: Int32 = field()


class FeatureLevelRecord(Message, key=12, versions="0", flexible="0+"):
    """Sets the finalized level of a feature. The first record of a log is the one for `metadata.version`."""

    name: str = field()
    feature_level: Int16 = field()


class ClientQuotaRecord(Message, key=14, versions="0", flexible="0+"):
    """Sets a quota of an entity, or removes it if `remove` is true."""

    entity: Sequence[EntityData] = field()
    key: str = field()
    value: Float64 = field()
    remove: Bool = field()


class ProducerIdsRecord(Message, key=15, versions="0", flexible="0+"):
    """Allocates a block of producer ids to a broker; `next_producer_id` is the first id after it."""

    broker_id: Int32 = field()
    broker_epoch: Int64 = field(default=-1)
    next_producer_id: Int64 = field()


class BrokerRegistrationChangeRecord(Message, key=17, versions="0-2", flexible="0+"):
    """A change of a broker. `fenced` and `in_controlled_shutdown` are 1 (true), -1 (false) or 0 (unchanged).

    `kipmesh.core.metadata.fencing` describes the effect on partitions. Only kipmesh has the last two fields."""

    broker_id: Int32 = field()
    broker_epoch: Int64 = field()
    fenced: Int8 = field(tag=0)
    in_controlled_shutdown: Int8 = field(versions="1+", tag=1)
    log_dirs: Sequence[Uuid] = field(versions="2+", tag=2)
    # Brokers that will be fenced next, so that they are not elected.
    also_gone: Sequence[Int32] = field(tag=KIPMESH_TAG)
    # Whether the broker was alive after the last change of every partition that it leads.
    proven: Bool = field(tag=KIPMESH_TAG + 1)


class AccessControlEntryRecord(Message, key=18, versions="0", flexible="0+"):
    """An access control entry."""

    id: Uuid = field(default=ZERO_UUID)
    resource_type: Int8 = field()
    resource_name: str = field()
    pattern_type: Int8 = field()
    principal: str = field()
    host: str = field()
    operation: Int8 = field()
    permission_type: Int8 = field()


class RemoveAccessControlEntryRecord(Message, key=19, versions="0", flexible="0+"):
    """Removes an access control entry."""

    id: Uuid = field(default=ZERO_UUID)


class NoOpRecord(Message, key=20, versions="0", flexible="0+"):
    """Changes nothing; advances the log."""


class ZkMigrationStateRecord(Message, key=21, versions="0", flexible="0+"):
    """The state of a migration from ZooKeeper."""

    zk_migration_state: Int8 = field()


class RemoveUserScramCredentialRecord(Message, key=22, versions="0", flexible="0+"):
    """Removes the SCRAM credential of a user for one mechanism."""

    name: str = field()
    mechanism: Int8 = field()


class BeginTransactionRecord(Message, key=23, versions="0", flexible="0+"):
    """Starts a transaction, whose records are applied together."""

    name: str | None = field(tag=0)


class EndTransactionRecord(Message, key=24, versions="0", flexible="0+"):
    """Commits a transaction."""


class AbortTransactionRecord(Message, key=25, versions="0", flexible="0+"):
    """Aborts a transaction."""

    reason: str | None = field(tag=0)


class RemoveDelegationTokenRecord(Message, key=26, versions="0", flexible="0+"):
    """Removes a delegation token."""

    token_id: str = field()


class RegisterControllerRecord(Message, key=27, versions="0", flexible="0+"):
    """A registration of a controller."""

    controller_id: Int32 = field()
    incarnation_id: Uuid = field(default=ZERO_UUID)
    zk_migration_ready: Bool = field()
    end_points: Sequence[BrokerEndpoint] = field()
    features: Sequence[BrokerFeature] = field()
