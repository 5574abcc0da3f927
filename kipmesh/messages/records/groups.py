"""Records of consumer groups: of `__consumer_offsets`, and of the protocol between the members of a group.

Types, fields and versions are Apache Kafka's (`OffsetCommitKey`, `ConsumerProtocolSubscription` and the others).
"""

from collections.abc import Sequence

from kipmesh.messages.schema import Int32, Int64, Message, field


class OffsetCommitKey(Message, versions="0-1"):
    """Key of an OffsetCommitValue: group and partition of the committed offset."""

    group: str = field()
    topic: str = field()
    partition: Int32 = field()


class OffsetCommitValue(Message, versions="0-4", flexible="4+"):
    """A committed offset. `expire_timestamp` is -1 unless an old version of OffsetCommit set it."""

    offset: Int64 = field()
    leader_epoch: Int32 = field(versions="3+", default=-1)
    metadata: str = field()
    commit_timestamp: Int64 = field()
    expire_timestamp: Int64 = field(versions="1", default=-1)


class GroupMetadataKey(Message, versions="2"):
    """Key of a GroupMetadataValue: the group id."""

    group: str = field()


class MemberMetadata(Message):
    """A member as it was when its generation became stable."""

    member_id: str = field()
    group_instance_id: str | None = field(versions="3+")
    client_id: str = field()
    client_host: str = field()
    rebalance_timeout: Int32 = field(versions="1+", default=-1)
    session_timeout: Int32 = field()
    subscription: bytes = field()
    assignment: bytes = field()


class GroupMetadataValue(Message, versions="0-4", flexible="4+"):
    """A generation of a group. A group without members has been empty since `current_state_timestamp` (ms)."""

    protocol_type: str = field()
    generation: Int32 = field()
    protocol: str | None = field()
    leader: str | None = field()
    current_state_timestamp: Int64 = field(versions="2+", default=-1)
    members: Sequence[MemberMetadata] = field()


class TopicPartitionList(Message):
    """Partitions of one topic."""

    topic: str = field()
    partitions: Sequence[Int32] = field()


class Subscription(Message, versions="0-3"):
    """The topics that a member subscribes to, and the partitions that it owned in `generation_id` (-1: unknown)."""

    topics: Sequence[str] = field()
    user_data: bytes | None = field()
    owned_partitions: Sequence[TopicPartitionList] = field(versions="1+")
    generation_id: Int32 = field(versions="2+", default=-1)
    rack_id: str | None = field(versions="3+")


class Assignment(Message, versions="0-3"):
    """The partitions that are assigned to a member."""

    assigned_partitions: Sequence[TopicPartitionList] = field()
    user_data: bytes | None = field()


class SubscribedTopics(Message, versions="0"):
    """The first field of a Subscription: reads the topics of a subscription of any version."""

    topics: Sequence[str] = field()
