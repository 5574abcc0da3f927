"""DescribeConfigs (32) and IncrementalAlterConfigs (44)."""

from collections.abc import Sequence

from kipmesh.messages.schema import Bool, Int8, Int16, Int32, Message, field


class DescribeConfigsResource(Message):
    # 2 topic, 4 broker.
    resource_type: Int8 = field(1)
    resource_name: str = field(2)
    # Empty: all keys.
    configuration_keys: Sequence[str] = field(3, nullable="0+", null=())


class DescribeConfigsRequest(Message):
    resources: Sequence[DescribeConfigsResource] = field(1)
    include_synonyms: Bool = field(versions="1+")
    include_documentation: Bool = field(2, versions="3+")


class DescribeConfigsSynonym(Message):
    name: str = field()
    value: str | None = field()
    source: Int8 = field()


class DescribeConfigsResourceResult(Message):
    name: str = field(1)
    value: str | None = field(2)
    read_only: Bool = field(3)
    # 1 the topic's own, 4 the broker's file or environment, 5 default.
    config_source: Int8 = field(4, versions="1+")
    is_sensitive: Bool = field()
    synonyms: Sequence[DescribeConfigsSynonym] = field(versions="1+")
    config_type: Int8 = field(versions="3+")
    documentation: str | None = field(5, versions="3+")


class DescribeConfigsResult(Message):
    error_code: Int16 = field(1)
    error_message: str | None = field(2)
    resource_type: Int8 = field(3)
    resource_name: str = field(4)
    configs: Sequence[DescribeConfigsResourceResult] = field(5)


class DescribeConfigsResponse(Message):
    throttle_time_ms: Int32 = field(1)
    results: Sequence[DescribeConfigsResult] = field(2, mirrors="resources")


class AlterableConfig(Message):
    name: str = field(1)
    # 0 set, 1 delete, 2 append, 3 subtract.
    config_operation: Int8 = field(2)
    value: str | None = field(3)


class AlterConfigsResource(Message):
    resource_type: Int8 = field(1)
    resource_name: str = field(2)
    configs: Sequence[AlterableConfig] = field(3)


class IncrementalAlterConfigsRequest(Message):
    resources: Sequence[AlterConfigsResource] = field(1)
    validate_only: Bool = field(2)


class AlterConfigsResourceResponse(Message):
    error_code: Int16 = field(1)
    error_message: str | None = field(2)
    resource_type: Int8 = field(3)
    resource_name: str = field(4)


class IncrementalAlterConfigsResponse(Message):
    throttle_time_ms: Int32 = field(1)
    responses: Sequence[AlterConfigsResourceResponse] = field(2, mirrors="resources")
