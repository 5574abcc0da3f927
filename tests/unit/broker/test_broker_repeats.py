"""A request that was repeated at the next controller: its own work is success, anything else is what it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from broker_images import ImageBuilder, topic_id_of

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import MetadataImage
from kipmesh.node.broker.reconcile import Creation, Deletion, Growth

EXISTS = ErrorCode.TOPIC_ALREADY_EXISTS


async def now(condition: Callable[[], bool], timeout_s: float) -> bool:
    return condition()


async def created(asked: m.CreatableTopic, *, was_there: bool = False, is_there: bool = True) -> m.CreatableTopicResult:
    """What a client sees whose repeated request got TOPIC_ALREADY_EXISTS; the topic has 2 partitions, 3 replicas."""
    builder = ImageBuilder(1, 2, 3)

    def make() -> None:
        builder.topic("t", topic_id_of(7), [(1, 2, 3), (2, 3, 1)], {"retention.ms": "5"})

    if was_there:
        make()
    creation = Creation(m.CreateTopicsRequest([asked], 1000), lambda: builder.image, now)
    if is_there and not was_there:
        make()
    refused = m.CreatableTopicResult("t", b"", EXISTS, "exists")
    response = await creation.settle(m.CreateTopicsResponse(topics=[refused]))
    return response.topics[0]


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
    creation = Creation(m.CreateTopicsRequest([m.CreatableTopic("t", 1, 1)], 1000), lambda: builder.image, now)
    builder.broker(1)
    builder.topic("t", topic_id_of(7), [(1,)])
    response = m.CreateTopicsResponse(topics=[m.CreatableTopicResult("t", b"", EXISTS)])
    assert await creation.settle(response) == response


async def test_the_image_is_waited_for() -> None:
    builder = ImageBuilder(1)

    async def later(condition: Callable[[], bool], timeout_s: float) -> bool:
        assert not condition()
        builder.topic("t", topic_id_of(7), [(1,)])
        return condition()

    creation = Creation(m.CreateTopicsRequest([m.CreatableTopic("t", 1, 1)], 1000), lambda: builder.image, later)
    response = m.CreateTopicsResponse(topics=[m.CreatableTopicResult("t", b"", EXISTS)])
    assert (await creation.settle(response)).topics[0].error_code == 0


async def test_other_topics_of_the_request_keep_their_answers() -> None:
    builder = ImageBuilder(1)
    asked = [m.CreatableTopic(name, 1, 1) for name in ("a", "b", "c")]
    creation = Creation(m.CreateTopicsRequest(asked, 1000), lambda: builder.image, now)
    builder.topic("b", topic_id_of(2), [(1,)])
    results = [
        m.CreatableTopicResult("a", topic_id_of(1)),
        m.CreatableTopicResult("b", b"", EXISTS),
        m.CreatableTopicResult("c", b"", ErrorCode.INVALID_CONFIG),
    ]
    settled = (await creation.settle(m.CreateTopicsResponse(topics=results))).topics
    assert [result.error_code for result in settled] == [0, 0, ErrorCode.INVALID_CONFIG]
    assert settled[0] == results[0]


async def test_a_topic_that_was_there_and_is_gone_was_deleted_by_the_request() -> None:
    image = _with_topic()
    asked = [m.DeleteTopicState("t"), m.DeleteTopicState(None, topic_id_of(7)), m.DeleteTopicState("never")]
    deletion = Deletion(m.DeleteTopicsRequest(asked, timeout_ms=1000), lambda: image, now)
    results = [
        m.DeletableTopicResult("t", b"", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        m.DeletableTopicResult(None, topic_id_of(7), ErrorCode.UNKNOWN_TOPIC_ID),
        m.DeletableTopicResult("never", b"", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ]
    settled = (await deletion.settle(m.DeleteTopicsResponse(responses=results))).responses
    assert [result.error_code for result in settled] == [0, 0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert settled[0].topic_id == topic_id_of(7)


def _with_topic() -> MetadataImage:
    builder = ImageBuilder(1)
    builder.topic("t", topic_id_of(7), [(1,)])
    return builder.image


@pytest.mark.parametrize(("count", "code"), [(3, 0), (4, ErrorCode.INVALID_PARTITIONS)])
async def test_partitions_that_are_there_as_asked_were_made_by_the_request(count: int, code: int) -> None:
    builder = ImageBuilder(1)
    builder.topic("t", topic_id_of(7), [(1,)])
    growth = Growth(m.CreatePartitionsRequest([m.CreatePartitionsTopic("t", count)], 1000), lambda: builder.image, now)
    for partition in (1, 2):
        builder.partition(topic_id_of(7), partition, (1,))
    refused = m.CreatePartitionsTopicResult("t", ErrorCode.INVALID_PARTITIONS, "3 partitions")
    settled = await growth.settle(m.CreatePartitionsResponse(results=[refused]))
    assert settled.results[0].error_code == code


async def test_partitions_that_were_too_few_from_the_start_are_refused() -> None:
    image = _with_topic()
    growth = Growth(m.CreatePartitionsRequest([m.CreatePartitionsTopic("t", 1)], 1000), lambda: image, now)
    refused = m.CreatePartitionsTopicResult("t", ErrorCode.INVALID_PARTITIONS)
    response = m.CreatePartitionsResponse(results=[refused])
    assert await growth.settle(response) == response
