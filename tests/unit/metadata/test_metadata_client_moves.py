"""What a client makes of many partitions to move: its requests, against the decisions of a controller in memory."""

from __future__ import annotations

from typing import Any

import pytest
from metadata_support import Controller

from kipmesh.client import reassignments
from kipmesh.client.reassignments import alter_reassignments
from kipmesh.client.types import TopicPartition
from kipmesh.core import messages as m
from kipmesh.core.errors import ErrorCode, KafkaError


class Link:
    """A client's cluster whose every call is one decision; what a test has a broker refuse never gets that far."""

    request_timeout_ms = 1000

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.altered: list[int] = []
        """Partitions of each AlterPartitionReassignments."""
        self.plans = 0
        self.refused: set[int] = set()
        """Partitions that are not moved."""
        self.fail_after = 1000
        """Requests."""

    async def call_any(self, _service: str, method: str, request: Any, _timeout_s: float, _retry: Any) -> Any:
        core = self.controller.core
        if method == "PlanBrokerDrain":
            self.plans += 1
            return self.controller.run(core.plan_drain(request))
        assert method == "AlterPartitionReassignments"
        if len(self.altered) >= self.fail_after:
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, "nobody answers")
        self.altered.append(sum(len(topic.partitions) for topic in request.topics))
        refused = [
            m.ReassignableTopicResponse(
                topic.name,
                [
                    m.ReassignablePartitionResponse(each.partition_index, ErrorCode.INVALID_REPLICA_ASSIGNMENT, "no")
                    for each in topic.partitions
                    if each.partition_index in self.refused
                ],
            )
            for topic in request.topics
        ]
        taken = [
            topic._replace(partitions=[one for one in topic.partitions if one.partition_index not in self.refused])
            for topic in request.topics
        ]
        response = self.controller.run(core.alter_reassignments(request._replace(topics=taken)))
        return response._replace(responses=[*refused, *response.responses])


def cluster(partitions: int, **values: Any) -> Link:
    """Partitions on brokers 1 and 2, and 3 and 4 beside them."""
    controller = Controller(**{"max_partitions_per_request": partitions} | values)
    for broker in range(1, 5):
        controller.join(broker)
    controller.assigned("t", *[(1, 2)] * partitions)
    return Link(controller)


def target(link: Link, partitions: int) -> dict[TopicPartition, Any]:
    return {TopicPartition("t", number): (3, 2) for number in range(partitions)}


async def test_many_are_asked_for_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reassignments, "PARTITIONS_MAX", 10)
    link = cluster(25)
    results = await alter_reassignments(link, target(link, 25), 1.0)  # type: ignore[arg-type]
    assert results == dict.fromkeys(target(link, 25))
    assert link.altered == [10, 10, 5]
    assert len(link.controller.image.reassigning) == 25


async def test_a_controller_that_takes_fewer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reassignments, "PARTITIONS_MAX", 10)
    link = cluster(1, max_partitions_per_request=4)
    for name in "uvwxy":
        link.controller.assigned(name, *[(1, 2)] * 3)
    wanted = {TopicPartition(name, number): (3, 2) for name in "uvwxy" for number in range(3)}
    wanted[TopicPartition("u", 7)] = (3, 2)
    results = await alter_reassignments(link, wanted, 1.0)  # type: ignore[arg-type]
    refused = {where: error.code for where, error in results.items() if error is not None}
    assert refused == {TopicPartition("u", 7): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    assert results.keys() == wanted.keys()
    assert len(link.controller.image.reassigning) == 15


async def test_a_part_that_fails_is_why_the_rest_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reassignments, "PARTITIONS_MAX", 10)
    link = cluster(25)
    link.fail_after = 1
    results = await alter_reassignments(link, target(link, 25), 1.0)  # type: ignore[arg-type]
    codes = [error and error.code for error in results.values()]
    assert codes == [None] * 10 + [ErrorCode.REQUEST_TIMED_OUT] * 15
    link.fail_after = 0
    with pytest.raises(KafkaError, match="nobody answers"):
        await alter_reassignments(link, target(link, 25), 1.0)  # type: ignore[arg-type]
