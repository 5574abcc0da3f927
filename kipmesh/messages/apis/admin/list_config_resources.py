"""ListConfigResources (74): the resources that have a configuration. Version 0 is ListClientMetricsResources."""

from collections.abc import Sequence

from kipmesh.messages.schema import Int8, Int16, Int32, Message, field


class ListConfigResourcesRequest(Message):
    # 2 topic, 4 broker, 8 broker logger, 16 client metrics, 32 group. Empty: all.
    resource_types: Sequence[Int8] = field(1, versions="1+")


class ListedConfigResource(Message):
    resource_name: str = field(1)
    resource_type: Int8 = field(2, versions="1+", default=16)


class ListConfigResourcesResponse(Message):
    throttle_time_ms: Int32 = field(1)
    error_code: Int16 = field(2)
    config_resources: Sequence[ListedConfigResource] = field(3)
