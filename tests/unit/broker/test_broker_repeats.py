"""A request that was repeated at the next controller: its own work is success, anything else is what it is."""

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


async def now(condition: Callable[[], bool], timeout_s: float) -> bool:
    return condition()


async def repeated(
    api: str,
    builder: ImageBuilder,
    request: Any,
    response: Any,
    meanwhile: Callable[[], None] = lambda: None,
    until: WaitUntil = now,
) -> Any:
    """The broker's response to a request that was repeated and got `response` the second time."""

    class Channel:
        async def forward(self, api: Api, request: Any, timeout_s: float) -> Forwarded:
            meanwhile()
            return Forwarded(response, is_repeated=True)

    channel: Any = Channel()
    hosted: Any = builder
    return await Forwarder(channel, hosted, until).forward(find_api(api), request, RequestContext("client", ""))


async def created(asked: m.CreatableTopic, *, was_there: bool = False, is_there: bool = True) -> m.CreatableTopicResult:
    """What a client sees whose repeated request got TOPIC_ALREADY_EXISTS; the topic has 2 partitions, 3 replicas."""
    builder = ImageBuilder(1, 2, 3)

    def make() -> None:
        builder.topic("t", topic_id_of(7), [(1, 2, 3), (2, 3, 1)], {"retention.ms": "5"})

    if was_there:
        make()

    def meanwhile() -> None:
        if is_there and not was_there:
            make()

    refused = m.CreateTopicsResponse(topics=[m.CreatableTopicResult("t", b"", EXISTS, "exists")])
    response = await repeated("CreateTopics", builder, m.CreateTopicsRequest([asked], 1000), refused, meanwhile)
    result: m.CreatableTopicResult = response.topics[0]
    return result


CONFIGS = [m.ConfigEntry("retention.ms", "5")]


@pytest.mark.parametrize(
    "asked",
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
async def test_a_topic_that_is_there_as_asked_was_made_by_the_request(asked: m.CreatableTopic) -> None:
    assert await created(asked) == m.CreatableTopicResult("t", topic_id_of(7), 0, None, 2, 3)


@pytest.mark.parametrize(
    "asked",
    [
        m.CreatableTopic("t", 3, 3, configs=CONFIGS),
        m.CreatableTopic("t", 2, 2, configs=CONFIGS),
        m.CreatableTopic("t", 2, 3),
        m.CreatableTopic("t", 2, 3, configs=[m.ConfigEntry("retention.ms", "6")]),
        m.CreatableTopic("t", -1, -1, [m.CreatableReplicaAssignment(0, [1, 2, 3])], CONFIGS),
    ],
)
async def test_another_topic_of_that_name_is_not(asked: m.CreatableTopic) -> None:
    assert (await created(asked)).error_code == EXISTS


async def test_a_topic_that_was_there_before_is_refused() -> None:
    assert (await created(m.CreatableTopic("t", 2, 3, configs=CONFIGS), was_there=True)).error_code == EXISTS


async def test_a_topic_that_this_broker_does_not_see_is_refused() -> None:
    assert (await created(m.CreatableTopic("t", 2, 3, configs=CONFIGS), is_there=False)).error_code == EXISTS


async def test_a_broker_that_knows_nothing_yet_takes_nothing_for_new() -> None:
    builder = ImageBuilder()

    def meanwhile() -> None:
        builder.broker(1)
        builder.topic("t", topic_id_of(7), [(1,)])

    request = m.CreateTopicsRequest([m.CreatableTopic("t", 1, 1)], 1000)
    response = m.CreateTopicsResponse(topics=[m.CreatableTopicResult("t", b"", EXISTS)])
    assert await repeated("CreateTopics", builder, request, response, meanwhile) == response


async def test_the_image_is_waited_for() -> None:
    builder = ImageBuilder(1)

    async def later(condition: Callable[[], bool], timeout_s: float) -> bool:
        assert not condition()
        builder.topic("t", topic_id_of(7), [(1,)])
        return condition()

    request = m.CreateTopicsRequest([m.CreatableTopic("t", 1, 1)], 1000)
    response = m.CreateTopicsResponse(topics=[m.CreatableTopicResult("t", b"", EXISTS)])
    assert (await repeated("CreateTopics", builder, request, response, until=later)).topics[0].error_code == 0


async def test_other_topics_of_the_request_keep_their_answers() -> None:
    builder = ImageBuilder(1)
    asked = [m.CreatableTopic(name, 1, 1) for name in ("a", "b", "c")]
    results = [
        m.CreatableTopicResult("a", topic_id_of(1)),
        m.CreatableTopicResult("b", b"", EXISTS),
        m.CreatableTopicResult("c", b"", ErrorCode.INVALID_CONFIG),
    ]
    response = await repeated(
        "CreateTopics",
        builder,
        m.CreateTopicsRequest(asked, 1000),
        m.CreateTopicsResponse(topics=results),
        lambda: builder.topic("b", topic_id_of(2), [(1,)]),
    )
    settled = response.topics
    assert [result.error_code for result in settled] == [0, 0, ErrorCode.INVALID_CONFIG]
    assert settled[0] == results[0]


async def test_a_topic_that_was_there_and_is_gone_was_deleted_by_the_request() -> None:
    builder = _with_topic()
    asked = [m.DeleteTopicState("t"), m.DeleteTopicState(None, topic_id_of(7)), m.DeleteTopicState("never")]
    results = [
        m.DeletableTopicResult("t", b"", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        m.DeletableTopicResult(None, topic_id_of(7), ErrorCode.UNKNOWN_TOPIC_ID),
        m.DeletableTopicResult("never", b"", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ]
    request, refused = m.DeleteTopicsRequest(asked, timeout_ms=1000), m.DeleteTopicsResponse(responses=results)
    settled = (await repeated("DeleteTopics", builder, request, refused)).responses
    assert [result.error_code for result in settled] == [0, 0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert settled[0].topic_id == topic_id_of(7)


def _with_topic() -> ImageBuilder:
    builder = ImageBuilder(1)
    builder.topic("t", topic_id_of(7), [(1,)])
    return builder


@pytest.mark.parametrize(("count", "code"), [(3, 0), (4, ErrorCode.INVALID_PARTITIONS)])
async def test_partitions_that_are_there_as_asked_were_made_by_the_request(count: int, code: int) -> None:
    builder = ImageBuilder(1)
    builder.topic("t", topic_id_of(7), [(1,)])

    def meanwhile() -> None:
        for partition in (1, 2):
            builder.partition(topic_id_of(7), partition, (1,))

    request = m.CreatePartitionsRequest([m.CreatePartitionsTopic("t", count)], 1000)
    refused = m.CreatePartitionsTopicResult("t", ErrorCode.INVALID_PARTITIONS, "3 partitions")
    response = m.CreatePartitionsResponse(results=[refused])
    settled = await repeated("CreatePartitions", builder, request, response, meanwhile)
    assert settled.results[0].error_code == code


async def test_partitions_that_were_too_few_from_the_start_are_refused() -> None:
    request = m.CreatePartitionsRequest([m.CreatePartitionsTopic("t", 1)], 1000)
    refused = m.CreatePartitionsTopicResult("t", ErrorCode.INVALID_PARTITIONS)
    response = m.CreatePartitionsResponse(results=[refused])
    assert await repeated("CreatePartitions", _with_topic(), request, response) == response
