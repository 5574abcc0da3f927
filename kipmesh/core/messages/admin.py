"""Topics and configurations, as in `protos/kipmesh/v1/admin.proto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class CreatableReplicaAssignment(NamedTuple):
    """See the message of the same name."""

    partition_index: int = 0
    broker_ids: Sequence[int] = ()


class ConfigEntry(NamedTuple):
    """See the message of the same name."""

    name: str = ""
    value: str | None = None


class CreatableTopic(NamedTuple):
    """See the message of the same name."""

    name: str = ""
    num_partitions: int = -1
    replication_factor: int = -1
    assignments: Sequence[CreatableReplicaAssignment] = ()
    configs: Sequence[ConfigEntry] = ()


class CreateTopicsRequest(NamedTuple):
    """See the message of the same name."""

    topics: Sequence[CreatableTopic] = ()
    timeout_ms: int = 0
    validate_only: bool = False


class CreatableTopicResult(NamedTuple):
    """See the message of the same name."""

    name: str = ""
    topic_id: bytes = b""
    error_code: int = 0
    error_message: str | None = None
    num_partitions: int = -1
    replication_factor: int = -1


class CreateTopicsResponse(NamedTuple):
    """See the message of the same name."""

    throttle_time_ms: int = 0
    topics: Sequence[CreatableTopicResult] = ()


class DeleteTopicState(NamedTuple):
    """See the message of the same name."""

    name: str | None = None
    topic_id: bytes = b""


class DeleteTopicsRequest(NamedTuple):
    """See the message of the same name."""

    topics: Sequence[DeleteTopicState] = ()
    timeout_ms: int = 0


class DeletableTopicResult(NamedTuple):
    """See the message of the same name."""

    name: str | None = None
    topic_id: bytes = b""
    error_code: int = 0
    error_message: str | None = None


class DeleteTopicsResponse(NamedTuple):
    """See the message of the same name."""

    throttle_time_ms: int = 0
    responses: Sequence[DeletableTopicResult] = ()


class CreatePartitionsAssignment(NamedTuple):
    """See the message of the same name."""

    broker_ids: Sequence[int] = ()


class CreatePartitionsTopic(NamedTuple):
    """See the message of the same name."""

    name: str = ""
    count: int = 0
    assignments: Sequence[CreatePartitionsAssignment] = ()


class CreatePartitionsRequest(NamedTuple):
    """See the message of the same name."""

    topics: Sequence[CreatePartitionsTopic] = ()
    timeout_ms: int = 0
    validate_only: bool = False


class CreatePartitionsTopicResult(NamedTuple):
    """See the message of the same name."""

    name: str = ""
    error_code: int = 0
    error_message: str | None = None


class CreatePartitionsResponse(NamedTuple):
    """See the message of the same name."""

    throttle_time_ms: int = 0
    results: Sequence[CreatePartitionsTopicResult] = ()


class DescribeConfigsResource(NamedTuple):
    """See the message of the same name."""

    resource_type: int = 0
    resource_name: str = ""
    configuration_keys: Sequence[str] = ()


class DescribeConfigsRequest(NamedTuple):
    """See the message of the same name."""

    resources: Sequence[DescribeConfigsResource] = ()
    include_documentation: bool = False


class DescribeConfigsResourceResult(NamedTuple):
    """See the message of the same name."""

    name: str = ""
    value: str | None = None
    read_only: bool = False
    config_source: int = 0
    documentation: str | None = None


class DescribeConfigsResult(NamedTuple):
    """See the message of the same name."""

    error_code: int = 0
    error_message: str | None = None
    resource_type: int = 0
    resource_name: str = ""
    configs: Sequence[DescribeConfigsResourceResult] = ()


class DescribeConfigsResponse(NamedTuple):
    """See the message of the same name."""

    throttle_time_ms: int = 0
    results: Sequence[DescribeConfigsResult] = ()


class AlterableConfig(NamedTuple):
    """See the message of the same name."""

    name: str = ""
    config_operation: int = 0
    value: str | None = None


class AlterConfigsResource(NamedTuple):
    """See the message of the same name."""

    resource_type: int = 0
    resource_name: str = ""
    configs: Sequence[AlterableConfig] = ()


class IncrementalAlterConfigsRequest(NamedTuple):
    """See the message of the same name."""

    resources: Sequence[AlterConfigsResource] = ()
    validate_only: bool = False


class AlterConfigsResourceResponse(NamedTuple):
    """See the message of the same name."""

    error_code: int = 0
    error_message: str | None = None
    resource_type: int = 0
    resource_name: str = ""


class IncrementalAlterConfigsResponse(NamedTuple):
    """See the message of the same name."""

    throttle_time_ms: int = 0
    responses: Sequence[AlterConfigsResourceResponse] = ()
