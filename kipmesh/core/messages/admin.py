"""Topics and configurations, as in `protos/kipmesh/v1/admin.proto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class CreatableReplicaAssignment(NamedTuple):
    partition_index: int = 0
    broker_ids: Sequence[int] = ()


class ConfigEntry(NamedTuple):
    name: str = ""
    value: str | None = None


class CreatableTopic(NamedTuple):
    name: str = ""
    num_partitions: int = -1
    replication_factor: int = -1
    assignments: Sequence[CreatableReplicaAssignment] = ()
    configs: Sequence[ConfigEntry] = ()


class CreateTopicsRequest(NamedTuple):
    topics: Sequence[CreatableTopic] = ()
    timeout_ms: int = 0
    validate_only: bool = False


class CreatableTopicResult(NamedTuple):
    name: str = ""
    topic_id: bytes = b""
    error_code: int = 0
    error_message: str | None = None
    num_partitions: int = -1
    replication_factor: int = -1


class CreateTopicsResponse(NamedTuple):
    throttle_time_ms: int = 0
    topics: Sequence[CreatableTopicResult] = ()


class DeleteTopicState(NamedTuple):
    name: str | None = None
    topic_id: bytes = b""


class DeleteTopicsRequest(NamedTuple):
    topics: Sequence[DeleteTopicState] = ()
    timeout_ms: int = 0


class DeletableTopicResult(NamedTuple):
    name: str | None = None
    topic_id: bytes = b""
    error_code: int = 0
    error_message: str | None = None


class DeleteTopicsResponse(NamedTuple):
    throttle_time_ms: int = 0
    responses: Sequence[DeletableTopicResult] = ()


class CreatePartitionsAssignment(NamedTuple):
    broker_ids: Sequence[int] = ()


class CreatePartitionsTopic(NamedTuple):
    name: str = ""
    count: int = 0  # type: ignore[assignment]
    assignments: Sequence[CreatePartitionsAssignment] = ()


class CreatePartitionsRequest(NamedTuple):
    topics: Sequence[CreatePartitionsTopic] = ()
    timeout_ms: int = 0
    validate_only: bool = False


class CreatePartitionsTopicResult(NamedTuple):
    name: str = ""
    error_code: int = 0
    error_message: str | None = None


class CreatePartitionsResponse(NamedTuple):
    throttle_time_ms: int = 0
    results: Sequence[CreatePartitionsTopicResult] = ()


class DescribeConfigsResource(NamedTuple):
    resource_type: int = 0
    resource_name: str = ""
    configuration_keys: Sequence[str] = ()


class DescribeConfigsRequest(NamedTuple):
    resources: Sequence[DescribeConfigsResource] = ()
    include_documentation: bool = False


class DescribeConfigsResourceResult(NamedTuple):
    name: str = ""
    value: str | None = None
    read_only: bool = False
    config_source: int = 0
    documentation: str | None = None


class DescribeConfigsResult(NamedTuple):
    error_code: int = 0
    error_message: str | None = None
    resource_type: int = 0
    resource_name: str = ""
    configs: Sequence[DescribeConfigsResourceResult] = ()


class DescribeConfigsResponse(NamedTuple):
    throttle_time_ms: int = 0
    results: Sequence[DescribeConfigsResult] = ()


class AlterableConfig(NamedTuple):
    name: str = ""
    config_operation: int = 0
    value: str | None = None


class AlterConfigsResource(NamedTuple):
    resource_type: int = 0
    resource_name: str = ""
    configs: Sequence[AlterableConfig] = ()


class IncrementalAlterConfigsRequest(NamedTuple):
    resources: Sequence[AlterConfigsResource] = ()
    validate_only: bool = False


class AlterConfigsResourceResponse(NamedTuple):
    error_code: int = 0
    error_message: str | None = None
    resource_type: int = 0
    resource_name: str = ""


class IncrementalAlterConfigsResponse(NamedTuple):
    throttle_time_ms: int = 0
    responses: Sequence[AlterConfigsResourceResponse] = ()
