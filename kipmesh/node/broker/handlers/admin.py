"""Administrative requests for which a broker has work of its own, besides forwarding them to the active controller.

- CreateTopics (19): from version 5 on the response has the configuration of the topic.
- DescribeConfigs (32): null or no keys are all. A resource that is named twice is described once. The broker adds its
  own static values, types from version 3 on, and as the only synonym the value itself.
- ElectLeaders (43): version 0 has no field for an error of the whole request: each partition has it.
- DescribeQuorum (55): version 2 names the controllers' addresses. They speak gRPC, on the listener CONTROLLER.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kipmesh import messages as m
from kipmesh.core.config.resources import ConfigSource, ResourceType
from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode
from kipmesh.messages.table import CREATE_TOPICS, find_api
from kipmesh.node.broker.parts import BrokerParts
from kipmesh.node.broker.static_configs import each_once, with_static

_DELETE_TOPICS, _DESCRIBE_CONFIGS = find_api("DeleteTopics"), find_api("DescribeConfigs")
_ELECT_LEADERS, _DESCRIBE_QUORUM = find_api("ElectLeaders"), find_api("DescribeQuorum")
_CONFIGS_SINCE = 5
_TOPIC_IDS_SINCE = 6
_ELECTION_ERROR_SINCE = 1
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
"""Apache Kafka's types, by which clients read values."""


async def create_topics(
    broker: BrokerParts, request: m.CreateTopicsRequest, context: RequestContext
) -> m.CreateTopicsResponse:
    """Create topics."""
    response: m.CreateTopicsResponse = await broker.forwarder.forward(CREATE_TOPICS, request, context)
    if context.version is None or context.version < _CONFIGS_SINCE:
        return response
    results = response.topics
    if request.validate_only:
        wanted = {topic.name: [_requested(entry) for entry in topic.configs] for topic in request.topics}
        results = [one._replace(configs=() if one.error_code else wanted[one.name]) for one in results]
    elif made := [one.name for one in results if not one.error_code]:
        found = await _configs(broker, made, context)
        results = [one if one.error_code else _with_configs(one, found.get(one.name)) for one in results]
    return response._replace(topics=results)


def _requested(entry: m.ConfigEntry) -> m.CreatableTopicConfigs:
    return m.CreatableTopicConfigs(entry.name, entry.value, config_source=ConfigSource.TOPIC)


async def _configs(
    broker: BrokerParts, names: Sequence[str], context: RequestContext
) -> dict[str, m.DescribeConfigsResult]:
    resources = [m.DescribeConfigsResource(ResourceType.TOPIC, name) for name in names]
    response = await describe_configs(broker, m.DescribeConfigsRequest(resources), context)
    return {one.resource_name: one for one in response.results}


def _with_configs(result: m.CreatableTopicResult, found: m.DescribeConfigsResult | None) -> m.CreatableTopicResult:
    if found is None or found.error_code:
        code = ErrorCode.UNKNOWN_SERVER_ERROR if found is None else ErrorCode.of(found.error_code)
        return result._replace(configs=None, num_partitions=-1, replication_factor=-1, topic_config_error_code=code)
    configs = [m.CreatableTopicConfigs(one.name, one.value, one.read_only, one.config_source) for one in found.configs]
    return result._replace(configs=configs)


async def delete_topics(
    broker: BrokerParts, request: m.DeleteTopicsRequest, context: RequestContext
) -> m.DeleteTopicsResponse:
    """Delete topics, by name, and by id from version 6 on."""
    if context.is_before(_TOPIC_IDS_SINCE):
        topics = [m.DeleteTopicState(name) for name in request.topic_names]
        request = m.DeleteTopicsRequest(topics, timeout_ms=request.timeout_ms)
    response: m.DeleteTopicsResponse = await broker.forwarder.forward(_DELETE_TOPICS, request, context)
    return response


async def describe_configs(
    broker: BrokerParts, request: m.DescribeConfigsRequest, context: RequestContext
) -> m.DescribeConfigsResponse:
    """Describe configurations, with this broker's static values if it is named."""
    request = each_once(request)
    response: m.DescribeConfigsResponse = await broker.forwarder.forward(_DESCRIBE_CONFIGS, request, context)
    response = with_static(response, request, broker.config)
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


async def elect_leaders(
    broker: BrokerParts, request: m.ElectLeadersRequest, context: RequestContext
) -> m.ElectLeadersResponse:
    """Elect leaders, preferred or (from version 1 on) unclean. Null partitions are all."""
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
    """Describe the metadata quorum."""
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
