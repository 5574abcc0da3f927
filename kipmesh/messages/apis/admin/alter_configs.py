"""AlterConfigs (33): replaces the whole dynamic configuration of a resource."""

from collections.abc import Sequence

from kipmesh.messages.apis.admin.configs import AlterConfigsResourceResponse
from kipmesh.messages.schema import Bool, Int8, Int32, Message, field


class ReplacedConfig(Message):
    name: str = field(1)
    value: str | None = field(2)


class ReplacedConfigsResource(Message):
    # 2 topic, 4 broker.
    resource_type: Int8 = field(1)
    resource_name: str = field(2)
    # All keys that the resource will have. Other keys are deleted.
    configs: Sequence[ReplacedConfig] = field(3)


class AlterConfigsRequest(Message):
    resources: Sequence[ReplacedConfigsResource] = field(1)
    validate_only: Bool = field(2)


class AlterConfigsResponse(Message):
    throttle_time_ms: Int32 = field(1)
    responses: Sequence[AlterConfigsResourceResponse] = field(2, mirrors="resources")
