"""CreateTopics (19), DeleteTopics (20), CreatePartitions (37)."""

from collections.abc import Sequence

from kipmesh.messages.schema import ITEM, Bool, Int8, Int16, Int32, Message, Uuid, field


class CreatableReplicaAssignment(Message):
    partition_index: Int32 = field(1)
    broker_ids: Sequence[Int32] = field(2)


class ConfigEntry(Message):
    name: str = field(1)
    value: str | None = field(2)


class CreatableTopic(Message):
    name: str = field(1)
    # -1: `num.partitions`.
    num_partitions: Int32 = field(2, default=-1)
    # -1: `default.replication.factor`.
    replication_factor: Int16 = field(3, default=-1)
    # A manual assignment; then the two numbers above are -1.
    assignments: Sequence[CreatableReplicaAssignment] = field(4)
    configs: Sequence[ConfigEntry] = field(5)


class CreateTopicsRequest(Message):
    topics: Sequence[CreatableTopic] = field(1)
    timeout_ms: Int32 = field(2)
    validate_only: Bool = field(3)


class CreatableTopicConfigs(Message):
    name: str = field()
    value: str | None = field(nullable="5+")
    read_only: Bool = field()
    config_source: Int8 = field()
    is_sensitive: Bool = field()


class CreatableTopicResult(Message):
    name: str = field(1)
    topic_id: Uuid = field(2, versions="7+")
    error_code: Int16 = field(3)
    error_message: str | None = field(4)
    num_partitions: Int32 = field(5, versions="5+", default=-1)
    replication_factor: Int16 = field(6, versions="5+", default=-1)
    configs: Sequence[CreatableTopicConfigs] | None = field(versions="5+", default=())
    topic_config_error_code: Int16 = field(versions="5+", tag=0)


class CreateTopicsResponse(Message):
    throttle_time_ms: Int32 = field(1)
    topics: Sequence[CreatableTopicResult] = field(2, mirrors="topics")


class DeleteTopicState(Message):
    name: str | None = field(1, nullable="6+")
    topic_id: Uuid = field(2)


class DeleteTopicsRequest(Message):
    topics: Sequence[DeleteTopicState] = field(1, versions="6+")
    topic_names: Sequence[str] = field(versions="1-5")
    timeout_ms: Int32 = field(2)


class DeletableTopicResult(Message):
    name: str | None = field(1, nullable="6+", mirrors=("name", ITEM))
    topic_id: Uuid = field(2, versions="6+")
    error_code: Int16 = field(3)
    error_message: str | None = field(4, versions="5+")


class DeleteTopicsResponse(Message):
    throttle_time_ms: Int32 = field(1)
    responses: Sequence[DeletableTopicResult] = field(2, mirrors=("topics", "topic_names"))


class CreatePartitionsAssignment(Message):
    broker_ids: Sequence[Int32] = field(1)


class CreatePartitionsTopic(Message):
    name: str = field(1)
    # The new number of partitions.
    count: Int32 = field(2)
    assignments: Sequence[CreatePartitionsAssignment] = field(3, nullable="0+", null=())


class CreatePartitionsRequest(Message):
    topics: Sequence[CreatePartitionsTopic] = field(1)
    timeout_ms: Int32 = field(2)
    validate_only: Bool = field(3)


class CreatePartitionsTopicResult(Message):
    name: str = field(1)
    error_code: Int16 = field(2)
    error_message: str | None = field(3)


class CreatePartitionsResponse(Message):
    throttle_time_ms: Int32 = field(1)
    results: Sequence[CreatePartitionsTopicResult] = field(2, mirrors="topics")
