"""Administrative requests that a broker completes itself, besides forwarding them to the active controller.

- CreateTopics (19): from version 5 on the response has the topic's configuration.
- DescribeConfigs (32): no keys mean all. A repeated resource is described once. The broker adds its own static values,
  types from version 3 on, and the value as its only synonym.
- ElectLeaders (43): version 0 has no top-level error, so each partition has it.
- DescribeQuorum (55): version 2 names the controllers' addresses, which speak gRPC, on the listener CONTROLLER.
- ListConfigResources (74): topics and registered brokers. The cluster-wide default (empty name) is not listed, as in
  Apache Kafka. Groups and client metrics have no configuration. Unknown types return UNSUPPORTED_VERSION.
- InjectFault, ListFaults, ClearFaults: faults for tests. POLICY_VIOLATION unless `fault.injection.enable`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kipmesh import messages as m
from kipmesh.broker.parts import BrokerParts
from kipmesh.core.config import BrokerConfig
from kipmesh.core.config.base import ConfigSource, ResourceType, dotted
from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages.apis.admin import list_config_resources as config_resources
from kipmesh.messages.table import CREATE_TOPICS, find_api

if TYPE_CHECKING:
    from kipmesh.transport.faults import Faults

_DELETE_TOPICS, _DESCRIBE_CONFIGS = find_api("DeleteTopics"), find_api("DescribeConfigs")
_ELECT_LEADERS, _DESCRIBE_QUORUM = find_api("ElectLeaders"), find_api("DescribeQuorum")
_CONFIGS_SINCE = 5
_TOPIC_IDS_SINCE = 6
_ELECTION_ERROR_SINCE = 1
_TYPES_SINCE = 1
BROKER_LOGGER, CLIENT_METRICS, GROUP = 8, 16, 32
CONTROLLER_LISTENER = "CONTROLLER"
UNKNOWN_TYPE, BOOLEAN, STRING, INT, LONG, DOUBLE, LIST = 0, 1, 2, 3, 5, 6, 7
TYPES: Mapping[str, int] = {
    "cleanup.policy": LIST,
    "compression.type": STRING,
    "delete.retention.ms": LONG,
    "file.delete.delay.ms": LONG,
    "flush.messages": LONG,
    "flush.ms": LONG,
    "follower.replication.throttled.rate": LONG,
    "index.interval.bytes": INT,
    "max.compaction.lag.ms": LONG,
    "max.message.bytes": INT,
    "message.timestamp.after.max.ms": LONG,
    "message.timestamp.before.max.ms": LONG,
    "message.timestamp.type": STRING,
    "min.cleanable.dirty.ratio": DOUBLE,
    "min.compaction.lag.ms": LONG,
    "min.insync.replicas": INT,
    "retention.bytes": LONG,
    "retention.ms": LONG,
    "segment.bytes": INT,
    "segment.index.bytes": INT,
    "segment.ms": LONG,
    "unclean.leader.election.enable": BOOLEAN,
}
"""Apache Kafka's types of configuration keys. Clients parse values by them."""


async def create_topics(
    broker: BrokerParts, request: m.CreateTopicsRequest, context: RequestContext
) -> m.CreateTopicsResponse:
    """Create topics, or only validate the request. From version 5 on the response has their configuration."""
    response: m.CreateTopicsResponse = await broker.forwarder.forward(CREATE_TOPICS, request, context)
    if context.version is None or context.version < _CONFIGS_SINCE:
        return response
    results = response.topics
    if request.validate_only:
        wanted = {topic.name: [_requested(entry) for entry in topic.configs] for topic in request.topics}
        results = [one._replace(configs=() if one.error_code else wanted[one.name]) for one in results]
    elif created := [one.name for one in results if not one.error_code]:
        configs = await _configs(broker, created, context)
        results = [one if one.error_code else _with_configs(one, configs.get(one.name)) for one in results]
    return response._replace(topics=results)


def _requested(entry: m.ConfigEntry) -> m.CreatableTopicConfigs:
    return m.CreatableTopicConfigs(entry.name, entry.value, config_source=ConfigSource.TOPIC)


async def _configs(
    broker: BrokerParts, names: Sequence[str], context: RequestContext
) -> dict[str, m.DescribeConfigsResult]:
    resources = [m.DescribeConfigsResource(ResourceType.TOPIC, name) for name in names]
    response = await describe_configs(broker, m.DescribeConfigsRequest(resources), context)
    return {one.resource_name: one for one in response.results}


def _with_configs(result: m.CreatableTopicResult, described: m.DescribeConfigsResult | None) -> m.CreatableTopicResult:
    if described is None or described.error_code:
        code = ErrorCode.UNKNOWN_SERVER_ERROR if described is None else ErrorCode.of(described.error_code)
        return result._replace(configs=None, num_partitions=-1, replication_factor=-1, topic_config_error_code=code)
    configs = [
        m.CreatableTopicConfigs(one.name, one.value, one.read_only, one.config_source) for one in described.configs
    ]
    return result._replace(configs=configs)


async def delete_topics(
    broker: BrokerParts, request: m.DeleteTopicsRequest, context: RequestContext
) -> m.DeleteTopicsResponse:
    """Delete topics, by name, or by id from version 6 on."""
    if context.is_before(_TOPIC_IDS_SINCE):
        topics = [m.DeleteTopicState(name) for name in request.topic_names]
        request = m.DeleteTopicsRequest(topics, timeout_ms=request.timeout_ms)
    response: m.DeleteTopicsResponse = await broker.forwarder.forward(_DELETE_TOPICS, request, context)
    return response


async def describe_configs(
    broker: BrokerParts, request: m.DescribeConfigsRequest, context: RequestContext
) -> m.DescribeConfigsResponse:
    """Describe the configuration of resources. This broker's own resource includes its static values."""
    request = merge_resources(request)
    response: m.DescribeConfigsResponse = await broker.forwarder.forward(_DESCRIBE_CONFIGS, request, context)
    response = with_static_configs(response, request, broker.config)
    if context.version is None:
        return response
    results = []
    for result in response.results:
        configs = [_with_type(one, has_synonyms=request.include_synonyms) for one in result.configs]
        results.append(result._replace(configs=configs))
    return response._replace(results=results)


def _with_type(one: m.DescribeConfigsResourceResult, *, has_synonyms: bool) -> m.DescribeConfigsResourceResult:
    synonyms = [m.DescribeConfigsSynonym(one.name, one.value, one.config_source)] if has_synonyms else ()
    return one._replace(synonyms=synonyms, config_type=TYPES.get(one.name, UNKNOWN_TYPE))


def merge_resources(request: m.DescribeConfigsRequest) -> m.DescribeConfigsRequest:
    """Return the request with duplicate resources merged into one entry that has the keys of all of them.

    If one of the duplicates has no keys, which means all, the merged entry has none. A broker has more than a hundred
    keys, so a response with duplicates would be far larger than the request.
    """
    requested: dict[tuple[int, str], dict[str, None] | None] = {}  # None: all keys
    for each in request.resources:
        resource = each.resource_type, each.resource_name
        keys = requested.setdefault(resource, {})
        if not each.configuration_keys:
            requested[resource] = None
        elif keys is not None:
            keys.update(dict.fromkeys(each.configuration_keys))
    if len(requested) == len(request.resources):
        return request
    return request._replace(
        resources=[m.DescribeConfigsResource(kind, name, tuple(keys or ())) for (kind, name), keys in requested.items()]
    )


def with_static_configs(
    response: m.DescribeConfigsResponse, request: m.DescribeConfigsRequest, config: BrokerConfig
) -> m.DescribeConfigsResponse:
    """Return the controllers' response, with this broker's static, read-only values if the request names the broker.

    The request must name each resource once.
    """
    mine = ResourceType.BROKER, str(config.node_id)
    wanted = {(each.resource_type, each.resource_name): each.configuration_keys for each in request.resources}
    if mine not in wanted:
        return response
    static = static_configs(config, wanted[mine], has_documentation=request.include_documentation)
    results = [
        _with_missing(one, static) if (one.resource_type, one.resource_name) == mine and not one.error_code else one
        for one in response.results
    ]
    return response._replace(results=results)


def static_configs(
    config: BrokerConfig, keys: Collection[str] = (), *, has_documentation: bool = False
) -> list[m.DescribeConfigsResourceResult]:
    """Return the broker's static values of `keys`, or of all keys if empty, sorted by name. Skips unknown keys."""
    configs = []
    for name, field in type(config).model_fields.items():
        key = dotted(name)
        if keys and key not in keys:
            continue
        source = ConfigSource.STATIC_BROKER if name in config.model_fields_set else ConfigSource.DEFAULT
        text = " ".join((field.description or "").split()) if has_documentation else None
        configs.append(
            m.DescribeConfigsResourceResult(key, _text(getattr(config, name)), True, source, documentation=text)
        )
    return sorted(configs)


def _with_missing(
    one: m.DescribeConfigsResult, static: list[m.DescribeConfigsResourceResult]
) -> m.DescribeConfigsResult:
    dynamic = {each.name for each in one.configs}
    return one._replace(configs=[*one.configs, *(each for each in static if each.name not in dynamic)])


def _text(value: Any) -> str | None:
    """Format a value as in a configuration file. None stays None."""
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


async def list_config_resources(
    broker: BrokerParts, request: config_resources.ListConfigResourcesRequest, context: RequestContext
) -> config_resources.ListConfigResourcesResponse:
    """List the resources of the requested types that have a configuration, or of all types if none is requested.

    Top-level error: UNSUPPORTED_VERSION for an unknown type. Version 0 lists client metrics only, so it is empty. Each
    broker on the request's listener is listed both as BROKER and as BROKER_LOGGER.
    """
    image, listener = broker.hosted_replicas.image, context.listener or broker.config.inter_broker_listener_name
    brokers = [str(number) for number, one in sorted(image.brokers.items()) if listener in one.endpoints]
    known: Mapping[int, Iterable[str]] = {CLIENT_METRICS: ()}
    if not context.is_before(_TYPES_SINCE):
        topics = sorted(topic.name for topic in image.topics.values())
        known = {
            GROUP: (),
            CLIENT_METRICS: (),
            BROKER_LOGGER: brokers,
            ResourceType.BROKER: brokers,
            ResourceType.TOPIC: topics,
        }
    wanted = set(request.resource_types) or known.keys()
    if not wanted <= known.keys():
        return config_resources.ListConfigResourcesResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)
    return config_resources.ListConfigResourcesResponse(
        config_resources=[
            config_resources.ListedConfigResource(name, kind)
            for kind, names in known.items()
            if kind in wanted
            for name in names
        ]
    )


async def elect_leaders(
    broker: BrokerParts, request: m.ElectLeadersRequest, context: RequestContext
) -> m.ElectLeadersResponse:
    """Elect preferred leaders or, if requested (from version 1 on), unclean ones. Null partitions mean all.

    In version 0 each partition has the top-level error.
    """
    response: m.ElectLeadersResponse = await broker.forwarder.forward(_ELECT_LEADERS, request, context)
    if response.error_code and context.is_before(_ELECTION_ERROR_SINCE):
        results: Sequence[m.ReplicaElectionResult] = [
            m.ReplicaElectionResult(
                one.topic, [m.PartitionResult(number, response.error_code) for number in one.partitions]
            )
            for one in request.topic_partitions or ()
        ]
        return response._replace(replica_election_results=results)
    return response


async def describe_quorum(
    broker: BrokerParts, request: m.DescribeQuorumRequest, context: RequestContext
) -> m.DescribeQuorumResponse:
    """Describe the metadata quorum. On Kafka listeners the response also has the controllers' addresses."""
    if context.version is not None:
        topics = [
            m.DescribeQuorumTopic(topic.topic_name, [one.partition_index for one in topic.partitions])
            for topic in request.topics
        ]
        request = m.DescribeQuorumRequest(topics)
    response: m.DescribeQuorumResponse = await broker.forwarder.forward(_DESCRIBE_QUORUM, request, context)
    if context.version is None:
        return response
    nodes = [
        m.QuorumNode(one.node_id, [m.QuorumListener(CONTROLLER_LISTENER, one.host, one.port)])
        for one in response.endpoints
    ]
    return response._replace(nodes=nodes)


def _enabled(broker: BrokerParts) -> Faults:
    if broker.faults is None:
        raise KafkaError(
            ErrorCode.POLICY_VIOLATION, "fault.injection.enable is false on this broker, set it to inject faults"
        )
    return broker.faults


async def inject_fault(
    broker: BrokerParts, request: m.InjectFaultRequest, context: RequestContext
) -> m.InjectFaultResponse:
    """Add a fault and return its id.

    Raises KafkaError: INVALID_REQUEST if the request has no fault, POLICY_VIOLATION unless `fault.injection.enable`.
    """
    if request.fault is None:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "the request must have a fault")
    return m.InjectFaultResponse(fault_id=_enabled(broker).add(request.fault))


async def list_faults(
    broker: BrokerParts, request: m.ListFaultsRequest, context: RequestContext
) -> m.ListFaultsResponse:
    """List the active faults. Raises KafkaError with POLICY_VIOLATION unless `fault.injection.enable`."""
    return m.ListFaultsResponse(faults=_enabled(broker).all())


async def clear_faults(
    broker: BrokerParts, request: m.ClearFaultsRequest, context: RequestContext
) -> m.ClearFaultsResponse:
    """Remove the faults with the given ids, or all faults if there are no ids, and return the number removed.

    Raises KafkaError with POLICY_VIOLATION unless `fault.injection.enable`.
    """
    return m.ClearFaultsResponse(cleared=_enabled(broker).clear(frozenset(request.fault_ids)))
