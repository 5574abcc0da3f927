"""Handlers that depend on the version of a request: older formats, pages, controller ids, and refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kipmesh import messages as m
from kipmesh.broker.handlers.admin import describe_configs
from kipmesh.broker.handlers.groups import find_coordinator
from kipmesh.broker.handlers.metadata import describe_topic_partitions, metadata
from kipmesh.broker.handlers.records import fetch, list_offsets, produce
from kipmesh.core.config import TopicConfig
from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode
from kipmesh.messages.schema import MAX_INT32
from kipmesh.messages.table import KAFKA_APIS, Api
from kipmesh.transport.kafka.limits import ResponseMemory
from kipmesh.transport.pipeline import CloseConnection

CONTEXT = RequestContext("me", "ipv4:127.0.0.1:1", listener="KAFKA")


def call(version: int) -> RequestContext:
    return CONTEXT._replace(version=version)


def broker(**parts: Any) -> Any:
    """Return a fake broker whose parts return the given responses and record their requests."""
    requested: list[Any] = []

    def part(response: Any) -> Any:
        async def respond(request: Any, context: RequestContext, **options: Any) -> Any:
            assert context._replace(version=None, response_bytes_max=MAX_INT32) == CONTEXT
            requested.append((request, options) if options else request)
            return response

        return respond

    async def forward(api: Api, request: Any, context: RequestContext) -> Any:
        return await getattr(target, api.method)(request, context)

    target = SimpleNamespace(**{name: part(response) for name, response in parts.items()})
    return SimpleNamespace(
        metadata=target,
        produce=target,
        fetch=target,
        offsets=target,
        groups=target,
        forwarder=SimpleNamespace(forward=forward),
        config=SimpleNamespace(node_id=2, cluster_id="the-id"),
        requests=requested,
    )


BROKERS = [m.MetadataResponseBroker(1, "a", 1), m.MetadataResponseBroker(2, "b", 2)]


@pytest.mark.parametrize(
    ("version", "topics", "is_all"), [(0, (), True), (1, (), False), (1, None, True), (12, None, True)]
)
async def test_metadata_distinguishes_no_topics_from_all_topics_by_version(
    version: int, topics: Any, is_all: bool
) -> None:
    node = broker(metadata=m.MetadataResponse(brokers=BROKERS, controller_id=1001))
    request = m.MetadataRequest(topics)
    response = await metadata(node, request, call(version))
    assert (node.requests[0].topics is None) is is_all
    assert response.controller_id == 2  # a broker that forwards, not a controller of the quorum
    node = broker(metadata=m.MetadataResponse(brokers=BROKERS[:1], controller_id=1001))
    assert (await metadata(node, request, call(version))).controller_id == 1


async def test_metadata_without_image_returns_leader_not_available() -> None:
    node = broker(metadata=m.MetadataResponse(error_code=ErrorCode.BROKER_NOT_AVAILABLE))
    response = await metadata(node, m.MetadataRequest([m.MetadataRequestTopic(name="t")]), call(9))
    assert [topic.error_code for topic in response.topics] == [ErrorCode.LEADER_NOT_AVAILABLE]
    assert response.cluster_id == "the-id"


def _topic(name: str, partitions: int) -> m.MetadataResponseTopic:
    return m.MetadataResponseTopic(
        0, name, name.encode() * 16, False, [m.MetadataResponsePartition(0, index) for index in range(partitions)]
    )


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 7, 100])
async def test_describe_topic_partitions_pages_have_each_partition_once(limit: int) -> None:
    topics = [_topic("b", 3), _topic("a", 2), m.MetadataResponseTopic(3, "missing"), _topic("c", 2)]
    node = broker(metadata=m.MetadataResponse(topics=topics))
    cursor, found = None, []
    for _ in range(20):
        request = m.DescribeTopicPartitionsRequest((), limit, cursor)
        page = await describe_topic_partitions(node, request, call(0))
        assert sum(len(topic.partitions) for topic in page.topics) <= limit
        found += [(topic.name, state.partition_index) for topic in page.topics for state in topic.partitions]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert found == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2), ("c", 0), ("c", 1)]


async def test_find_coordinator_supports_single_and_batched_versions() -> None:
    found = [m.Coordinator("g", 3, "host", 9), m.Coordinator("h", error_code=15, error_message="none")]
    node = broker(find_coordinator=m.FindCoordinatorResponse(coordinators=found))
    response = await find_coordinator(node, m.FindCoordinatorRequest("g"), call(3))
    assert (response.node_id, response.host, response.port) == (3, "host", 9)
    assert (node.requests[0].key_type, node.requests[0].coordinator_keys) == (0, ("g",))
    request = m.FindCoordinatorRequest(coordinator_keys=["g", "h"])
    assert (await find_coordinator(node, request, call(4))).coordinators == found


def _produced(acks: int, code: int, batch: bytes = b"") -> tuple[Any, m.ProduceRequest]:
    response = m.ProduceResponse([m.TopicProduceResponse("t", b"", [m.PartitionProduceResponse(0, code)])])
    data = [m.TopicProduceData("t", b"", [m.PartitionProduceData(0, batch)])]
    return broker(produce=response), m.ProduceRequest(None, acks, 1000, data)


async def test_produce_with_acks_0_sends_no_response_and_closes_connection_on_error() -> None:
    node, request = _produced(0, 0)
    assert await produce(node, request, call(9)) is None
    node, request = _produced(0, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    with pytest.raises(CloseConnection, match="t-0: NOT_LEADER_OR_FOLLOWER"):
        await produce(node, request, call(9))
    node, request = _produced(1, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    response = await produce(node, request, call(9))
    assert response is not None
    assert response.responses[0].partition_responses[0].error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER


async def test_zstd_batches_are_refused_for_old_versions() -> None:
    batch = bytes(22) + b"\x04" + bytes(40)
    node, request = _produced(1, 0, batch)
    response = await produce(node, request, call(6))
    assert response is not None
    assert response.responses[0].partition_responses[0].error_code == ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
    assert node.requests == []
    response = await produce(node, request, call(7))
    assert response is not None
    assert response.responses[0].partition_responses[0].error_code == 0
    data = m.PartitionData(0, records=batch)
    node = broker(fetch=m.FetchResponse(responses=[m.FetchableTopicResponse("t", b"", [data])]))
    old = await fetch(node, m.FetchRequest(), call(9))
    assert old.responses[0].partitions == [
        data._replace(error_code=ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, records=b"")
    ]
    assert (await fetch(node, m.FetchRequest(), call(10))).responses[0].partitions == [data]


@pytest.mark.parametrize(("version", "names_rack"), [(10, False), (11, True), (17, True)])
async def test_fetch_can_name_rack_since_version_11(version: int, names_rack: bool) -> None:
    node = broker(fetch=m.FetchResponse())
    request = m.FetchRequest(max_wait_ms=7, topics=[m.FetchTopic("t")], rack_id="r", session_id=3, session_epoch=4)
    await fetch(node, request, call(version))
    expected = m.FetchRequest(max_wait_ms=7, topics=[m.FetchTopic("t")], rack_id="r", session_id=3, session_epoch=4)
    assert node.requests == [(expected, {"names_rack": names_rack})]


@pytest.mark.parametrize(("used", "wanted"), [(0, 900), (600, 400), (1000, 1), (5000, 1)])
async def test_fetch_max_bytes_is_limited_by_response_memory_and_at_least_1(used: int, wanted: int) -> None:
    """With max_bytes 0, each fetch would return immediately without data."""
    unsent = ResponseMemory(1000)
    unsent.bytes_used = used
    node = broker(fetch=m.FetchResponse())
    request = m.FetchRequest(max_bytes=900, min_bytes=1, max_wait_ms=500)
    await fetch(node, request, call(12)._replace(response_bytes_max=unsent.left))
    assert [fetched.max_bytes for fetched, _ in node.requests] == [wanted]


@pytest.mark.parametrize("version", [12, 16])
async def test_kafka_listener_refuses_follower_fetches(version: int) -> None:
    node = broker(fetch=m.FetchResponse())
    state = m.FetchReplicaState(1, 5)
    request = m.FetchRequest(replica_state=state) if version > 14 else m.FetchRequest(replica_id=1)
    response = await fetch(node, request, call(version))
    assert response.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    assert node.requests == []
    debugging = m.FetchRequest(replica_state=m.FetchReplicaState(-2)) if version > 14 else m.FetchRequest(replica_id=-2)
    await fetch(node, debugging, call(version))
    assert node.requests[0][0].replica_id == -2


@pytest.mark.parametrize(("replica_id", "forwarded_id"), [(-2, -2), (-1, -1), (0, -1), (7, -1)])
async def test_list_offsets_treats_broker_as_consumer(replica_id: int, forwarded_id: int) -> None:
    node = broker(list_offsets=m.ListOffsetsResponse())
    partitions = [m.ListOffsetsTopic("t", partitions=[m.ListOffsetsPartition(4)])]
    await list_offsets(node, m.ListOffsetsRequest(replica_id, topics=partitions), call(7))
    assert node.requests == [m.ListOffsetsRequest(forwarded_id, topics=partitions)]


async def test_describe_configs_returns_config_types_of_kafka() -> None:
    names = sorted(TopicConfig.keys())
    configs = [m.DescribeConfigsResourceResult(name, "1") for name in (*names, "no.such.key")]
    found = m.DescribeConfigsResponse(results=[m.DescribeConfigsResult(resource_name="t", configs=configs)])
    node = broker(describe_configs=found)
    (result,) = (await describe_configs(node, m.DescribeConfigsRequest(), call(4))).results
    types = {config.name: config.config_type for config in result.configs}
    assert types.pop("no.such.key") == 0
    assert set(types) == set(names)
    assert 0 not in types.values()
    assert (types["retention.ms"], types["segment.bytes"], types["cleanup.policy"]) == (5, 3, 7)


def test_kafka_apis_have_keys_and_names_of_kafka() -> None:
    from kio.index import load_payload_module
    from kio.static.constants import EntityType

    for key, api in KAFKA_APIS.items():
        assert api.key == key
        module = load_payload_module(key, api.versions.last, EntityType.request)
        assert hasattr(module, f"{api.name}Request"), api.name
