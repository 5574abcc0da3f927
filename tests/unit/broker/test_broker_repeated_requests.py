"""Requests repeated at the next controller: the broker turns errors caused by their first attempt into success."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kipmesh import messages as m
from kipmesh.broker.membership.controller_channel import Forwarded
from kipmesh.broker.membership.forwarder import Forwarder, WaitUntil
from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode
from kipmesh.messages.table import Api, find_api
from tests.unit.broker.broker_images import ImageBuilder, topic_id_of

EXISTS = ErrorCode.TOPIC_ALREADY_EXISTS


async def check_now(condition: Callable[[], bool], timeout_s: float) -> bool:
    return condition()


async def repeated(
    api: str,
    builder: ImageBuilder,
    request: Any,
    response: Any,
    between_attempts: Callable[[], None] = lambda: None,
    until: WaitUntil = check_now,
) -> Any:
    """Return the response of the broker to a request whose second attempt got `response`."""

    class Channel:
        async def forward(self, api: Api, request: Any, timeout_s: float) -> Forwarded:
            between_attempts()
            return Forwarded(response, is_repeated=True)

    channel: Any = Channel()
    hosted: Any = builder
    return await Forwarder(channel, hosted, until).forward(find_api(api), request, RequestContext("client", ""))


async def create_repeatedly(
    requested: m.CreatableTopic, *, existed_before: bool = False, is_in_image: bool = True
) -> m.CreatableTopicResult:
    """Return the result of a repeated request that got TOPIC_ALREADY_EXISTS. The topic has 2 partitions, 3 replicas."""
    builder = ImageBuilder(1, 2, 3)

    def add_topic() -> None:
        builder.topic("t", topic_id_of(7), [(1, 2, 3), (2, 3, 1)], {"retention.ms": "5"})

    if existed_before:
        add_topic()

    def change_image() -> None:
        if is_in_image and not existed_before:
            add_topic()

    refused = m.CreateTopicsResponse(topics=[m.CreatableTopicResult("t", b"", EXISTS, "exists")])
    response = await repeated("CreateTopics", builder, m.CreateTopicsRequest([requested], 1000), refused, change_image)
    result: m.CreatableTopicResult = response.topics[0]
    return result


CONFIGS = [m.ConfigEntry("retention.ms", "5")]


@pytest.mark.parametrize(
    "requested",
    [
        m.CreatableTopic("t", 2, 3, configs=CONFIGS),
        m.CreatableTopic("t", -1, -1, configs=CONFIGS),
        m.CreatableTopic(
            "t",
            -1,
            -1,
            [m.CreatableReplicaAssignment(0, [1, 2, 3]), m.CreatableReplicaAssignment(1, [2, 3, 1])],
            CONFIGS,
        ),
    ],
)
async def test_repeated_create_succeeds_if_topic_matches_request(requested: m.CreatableTopic) -> None:
    assert await create_repeatedly(requested) == m.CreatableTopicResult("t", topic_id_of(7), 0, None, 2, 3)


@pytest.mark.parametrize(
    "requested",
    [
        m.CreatableTopic("t", 3, 3, configs=CONFIGS),
        m.CreatableTopic("t", 2, 2, configs=CONFIGS),
        m.CreatableTopic("t", 2, 3),
        m.CreatableTopic("t", 2, 3, configs=[m.ConfigEntry("retention.ms", "6")]),
        m.CreatableTopic("t", -1, -1, [m.CreatableReplicaAssignment(0, [1, 2, 3])], CONFIGS),
    ],
)
async def test_repeated_create_fails_if_topic_differs_from_request(requested: m.CreatableTopic) -> None:
    assert (await create_repeatedly(requested)).error_code == EXISTS


async def test_repeated_create_fails_if_topic_existed_before() -> None:
    assert (
        await create_repeatedly(m.CreatableTopic("t", 2, 3, configs=CONFIGS), existed_before=True)
    ).error_code == EXISTS


async def test_repeated_create_fails_if_topic_is_not_in_image() -> None:
    assert (
        await create_repeatedly(m.CreatableTopic("t", 2, 3, configs=CONFIGS), is_in_image=False)
    ).error_code == EXISTS


async def test_repeated_create_fails_if_first_image_was_empty() -> None:
    builder = ImageBuilder()

    def change_image() -> None:
        builder.broker(1)
        builder.topic("t", topic_id_of(7), [(1,)])

    request = m.CreateTopicsRequest([m.CreatableTopic("t", 1, 1)], 1000)
    response = m.CreateTopicsResponse(topics=[m.CreatableTopicResult("t", b"", EXISTS)])
    assert await repeated("CreateTopics", builder, request, response, change_image) == response


async def test_repeated_create_waits_for_image() -> None:
    builder = ImageBuilder(1)

    async def check_later(condition: Callable[[], bool], timeout_s: float) -> bool:
        assert not condition()
        builder.topic("t", topic_id_of(7), [(1,)])
        return condition()

    request = m.CreateTopicsRequest([m.CreatableTopic("t", 1, 1)], 1000)
    response = m.CreateTopicsResponse(topics=[m.CreatableTopicResult("t", b"", EXISTS)])
    assert (await repeated("CreateTopics", builder, request, response, until=check_later)).topics[0].error_code == 0


async def test_repeated_create_keeps_results_of_other_topics() -> None:
    builder = ImageBuilder(1)
    requested = [m.CreatableTopic(name, 1, 1) for name in ("a", "b", "c")]
    results = [
        m.CreatableTopicResult("a", topic_id_of(1)),
        m.CreatableTopicResult("b", b"", EXISTS),
        m.CreatableTopicResult("c", b"", ErrorCode.INVALID_CONFIG),
    ]
    response = await repeated(
        "CreateTopics",
        builder,
        m.CreateTopicsRequest(requested, 1000),
        m.CreateTopicsResponse(topics=results),
        lambda: builder.topic("b", topic_id_of(2), [(1,)]),
    )
    final = response.topics
    assert [result.error_code for result in final] == [0, 0, ErrorCode.INVALID_CONFIG]
    assert final[0] == results[0]


async def test_repeated_delete_succeeds_if_topic_existed_before() -> None:
    builder = _with_topic()
    requested = [m.DeleteTopicState("t"), m.DeleteTopicState(None, topic_id_of(7)), m.DeleteTopicState("never")]
    results = [
        m.DeletableTopicResult("t", b"", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        m.DeletableTopicResult(None, topic_id_of(7), ErrorCode.UNKNOWN_TOPIC_ID),
        m.DeletableTopicResult("never", b"", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ]
    request, refused = m.DeleteTopicsRequest(requested, timeout_ms=1000), m.DeleteTopicsResponse(responses=results)
    final = (await repeated("DeleteTopics", builder, request, refused)).responses
    assert [result.error_code for result in final] == [0, 0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert final[0].topic_id == topic_id_of(7)


def _with_topic() -> ImageBuilder:
    builder = ImageBuilder(1)
    builder.topic("t", topic_id_of(7), [(1,)])
    return builder


@pytest.mark.parametrize(("count", "code"), [(3, 0), (4, ErrorCode.INVALID_PARTITIONS)])
async def test_repeated_create_partitions_succeeds_if_count_matches(count: int, code: int) -> None:
    builder = ImageBuilder(1)
    builder.topic("t", topic_id_of(7), [(1,)])

    def change_image() -> None:
        for partition in (1, 2):
            builder.partition(topic_id_of(7), partition, (1,))

    request = m.CreatePartitionsRequest([m.CreatePartitionsTopic("t", count)], 1000)
    refused = m.CreatePartitionsTopicResult("t", ErrorCode.INVALID_PARTITIONS, "3 partitions")
    response = m.CreatePartitionsResponse(results=[refused])
    final = await repeated("CreatePartitions", builder, request, response, change_image)
    assert final.results[0].error_code == code


async def test_repeated_create_partitions_fails_if_count_is_too_low() -> None:
    request = m.CreatePartitionsRequest([m.CreatePartitionsTopic("t", 1)], 1000)
    refused = m.CreatePartitionsTopicResult("t", ErrorCode.INVALID_PARTITIONS)
    response = m.CreatePartitionsResponse(results=[refused])
    assert await repeated("CreatePartitions", _with_topic(), request, response) == response
