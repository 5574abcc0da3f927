"""OffsetCommit (8), OffsetFetch (9), OffsetDelete (47): the offsets of consumer groups."""

from collections.abc import Sequence

from kipmesh.messages.schema import ITEM, Bool, Int16, Int32, Int64, Message, field


class OffsetCommitRequestPartition(Message):
    partition_index: Int32 = field(1)
    committed_offset: Int64 = field(2)
    committed_leader_epoch: Int32 = field(3, versions="6+", default=-1)
    committed_metadata: str | None = field(4)


class OffsetCommitRequestTopic(Message):
    name: str = field(1)
    partitions: Sequence[OffsetCommitRequestPartition] = field(2)


class OffsetCommitRequest(Message):
    group_id: str = field(1)
    # -1 if the committer is not a member.
    generation_id_or_member_epoch: Int32 = field(2, default=-1)
    member_id: str = field(3)
    group_instance_id: str | None = field(4, versions="7+")
    retention_time_ms: Int64 = field(versions="2-4", default=-1)
    topics: Sequence[OffsetCommitRequestTopic] = field(5)


class OffsetCommitResponsePartition(Message):
    partition_index: Int32 = field(1)
    error_code: Int16 = field(2)


class OffsetCommitResponseTopic(Message):
    name: str = field(1)
    partitions: Sequence[OffsetCommitResponsePartition] = field(2, mirrors="partitions")


class OffsetCommitResponse(Message):
    throttle_time_ms: Int32 = field(1, versions="3+")
    topics: Sequence[OffsetCommitResponseTopic] = field(2, mirrors="topics")


class OffsetFetchRequestTopics(Message):
    name: str = field(1)
    partition_indexes: Sequence[Int32] = field(2)


class OffsetFetchRequestGroup(Message):
    group_id: str = field(1)
    member_id: str | None = field(versions="9+")
    member_epoch: Int32 = field(versions="9+", default=-1)
    topics: Sequence[OffsetFetchRequestTopics] | None = field(3, nullable="8+", default=(), null_flag=("all_topics", 2))


class OffsetFetchRequest(Message):
    group_id: str = field(versions="1-7")
    topics: Sequence[OffsetFetchRequestTopics] | None = field(versions="1-7", nullable="2-7")
    groups: Sequence[OffsetFetchRequestGroup] = field(1, versions="8+")
    require_stable: Bool = field(2, versions="7+")


class OffsetFetchResponsePartitions(Message):
    partition_index: Int32 = field(1, mirrors=ITEM)
    # -1: none.
    committed_offset: Int64 = field(2, default=-1)
    committed_leader_epoch: Int32 = field(3, versions="5+", default=-1)
    metadata: str | None = field(4)
    error_code: Int16 = field(5)


class OffsetFetchResponseTopics(Message):
    name: str = field(1)
    partitions: Sequence[OffsetFetchResponsePartitions] = field(2, mirrors="partition_indexes")


class OffsetFetchResponseGroup(Message):
    group_id: str = field(1)
    topics: Sequence[OffsetFetchResponseTopics] = field(2)
    error_code: Int16 = field(3)


class OffsetFetchResponse(Message):
    throttle_time_ms: Int32 = field(1, versions="3+")
    topics: Sequence[OffsetFetchResponseTopics] = field(versions="1-7", mirrors="topics")
    error_code: Int16 = field(versions="2-7")
    groups: Sequence[OffsetFetchResponseGroup] = field(2, versions="8+", mirrors="groups")


class OffsetDeleteRequestPartition(Message):
    partition_index: Int32 = field(1)


class OffsetDeleteRequestTopic(Message):
    name: str = field(1)
    partitions: Sequence[OffsetDeleteRequestPartition] = field(2)


class OffsetDeleteRequest(Message):
    group_id: str = field(1)
    topics: Sequence[OffsetDeleteRequestTopic] = field(2)


class OffsetDeleteResponsePartition(Message):
    partition_index: Int32 = field(1)
    error_code: Int16 = field(2)


class OffsetDeleteResponseTopic(Message):
    name: str = field(1)
    partitions: Sequence[OffsetDeleteResponsePartition] = field(2)


class OffsetDeleteResponse(Message):
    error_code: Int16 = field(1)
    throttle_time_ms: Int32 = field(2)
    topics: Sequence[OffsetDeleteResponseTopic] = field(3)
