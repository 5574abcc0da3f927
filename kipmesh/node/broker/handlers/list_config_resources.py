"""ListConfigResources (74): topics, and registered brokers that have the request's listener, twice: with their loggers.

As in Apache Kafka, the default of all brokers (the empty name) is not listed. Groups and client metrics have no
configuration here. A type that the version does not know is UNSUPPORTED_VERSION.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kipmesh.core.config.resources import ResourceType
from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode
from kipmesh.messages.apis.admin import list_config_resources as m
from kipmesh.node.broker.parts import BrokerParts

BROKER_LOGGER, CLIENT_METRICS, GROUP = 8, 16, 32
_TYPES_SINCE = 1


async def list_config_resources(
    broker: BrokerParts, request: m.ListConfigResourcesRequest, context: RequestContext
) -> m.ListConfigResourcesResponse:
    """List the resources that have a configuration, of the types that the request names."""
    image, listener = broker.image(), context.listener or broker.config.inter_broker_listener_name
    brokers = [str(number) for number, one in sorted(image.brokers.items()) if listener in one.endpoints]
    found: Mapping[int, Iterable[str]] = {CLIENT_METRICS: ()}
    if not context.is_before(_TYPES_SINCE):
        topics = sorted(topic.name for topic in image.topics.values())
        found = {
            GROUP: (),
            CLIENT_METRICS: (),
            BROKER_LOGGER: brokers,
            ResourceType.BROKER: brokers,
            ResourceType.TOPIC: topics,
        }
    wanted = set(request.resource_types) or found.keys()
    if not wanted <= found.keys():
        return m.ListConfigResourcesResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)
    return m.ListConfigResourcesResponse(
        config_resources=[
            m.ListedConfigResource(name, kind) for kind, names in found.items() if kind in wanted for name in names
        ]
    )
