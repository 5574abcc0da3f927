"""What a client makes of many partitions to move: its requests, against the decisions of a controller in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kipmesh import messages as m
from kipmesh.client.admin import reassignments
from kipmesh.client.admin.reassignments import DrainProgress, NewReplicas, ReassignmentAdmin
from kipmesh.client.types import TopicPartition
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata import draining
from tests.unit.core.metadata.metadata_support import Controller


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

    async def call_any(self, request: Any, _timeout_s: float, _retry: Any) -> Any:
        core = self.controller.core
        if isinstance(request, m.PlanBrokerDrainRequest):
            self.plans += 1
            response = self.controller.run(core.plan_broker_drain(request))
            if response.error_code:
                raise KafkaError(response.error_code, response.error_message)
            return response
        assert isinstance(request, m.AlterPartitionReassignmentsRequest)
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
        response = self.controller.run(core.alter_partition_reassignments(request._replace(topics=taken)))
        return response._replace(responses=[*refused, *response.responses])


class Admin(ReassignmentAdmin):
    """The part of the admin client that moves replicas, over a link."""

    def __init__(self, link: Link, timeout_s: float) -> None:
        self._cluster = link  # type: ignore[assignment]
        self._timeout_s = timeout_s


def cluster(partitions: int, **values: Any) -> Link:
    """Partitions on brokers 1 and 2, and 3 and 4 beside them."""
    controller = Controller(**{"max_partitions_per_request": partitions} | values)
    for broker in range(1, 5):
        controller.join(broker)
    controller.assigned("t", *[(1, 2)] * partitions)
    return Link(controller)


def target(link: Link, partitions: int) -> NewReplicas:
    return {TopicPartition("t", number): (3, 2) for number in range(partitions)}


async def test_many_are_asked_for_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reassignments, "PARTITIONS_MAX", 10)
    link = cluster(25)
    results = await Admin(link, 1.0).alter_partition_reassignments(target(link, 25))
    assert results == dict.fromkeys(target(link, 25))
    assert link.altered == [10, 10, 5]
    assert len(link.controller.image.reassigning) == 25


async def test_a_controller_that_takes_fewer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reassignments, "PARTITIONS_MAX", 10)
    link = cluster(1, max_partitions_per_request=4)
    for name in "uvwxy":
        link.controller.assigned(name, *[(1, 2)] * 3)
    wanted: dict[tuple[str, int], Sequence[int] | None] = {
        TopicPartition(name, number): (3, 2) for name in "uvwxy" for number in range(3)
    }
    wanted[TopicPartition("u", 7)] = (3, 2)
    results = await Admin(link, 1.0).alter_partition_reassignments(wanted)
    refused = {where: error.code for where, error in results.items() if error is not None}
    assert refused == {TopicPartition("u", 7): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    assert results.keys() == wanted.keys()
    assert len(link.controller.image.reassigning) == 15


async def test_a_part_that_fails_is_why_the_rest_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reassignments, "PARTITIONS_MAX", 10)
    link = cluster(25)
    link.fail_after = 1
    results = await Admin(link, 1.0).alter_partition_reassignments(target(link, 25))
    codes = [error and error.code for error in results.values()]
    assert codes == [None] * 10 + [ErrorCode.REQUEST_TIMED_OUT] * 15
    link.fail_after = 0
    with pytest.raises(KafkaError, match="nobody answers"):
        await Admin(link, 1.0).alter_partition_reassignments(target(link, 25))


async def test_what_is_refused_holds_up_nothing_else_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole plan is refused again and again: all others are moved, and then those are tried once more."""
    monkeypatch.setattr(draining, "PLANNED_MAX", 5)
    monkeypatch.setattr(reassignments, "POLL_S", 0.001)
    link = cluster(25)
    link.refused = set(range(7))
    with pytest.raises(
        KafkaError, match="7 partitions cannot be moved, for example t-0: no"
    ) as caught:
        await Admin(link, 0.05).drain_broker(1, wait=True)
    assert caught.value.code is ErrorCode.INVALID_REPLICA_ASSIGNMENT
    assert len(link.controller.image.reassigning) == 18
    link.refused = set()
    done = await Admin(link, 10.0).drain_broker(1, wait=False)
    assert done == DrainProgress(25, 25, 25)
    assert len(link.controller.image.reassigning) == 25


async def test_a_drain_asks_as_often_as_there_are_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once over all to check, once to move, once to see that all leaves."""
    monkeypatch.setattr(draining, "PLANNED_MAX", 5)
    monkeypatch.setattr(draining, "CHECKED_MAX", 10)
    link = cluster(45)
    said: list[DrainProgress] = []
    await Admin(link, 10.0).drain_broker(1, wait=False, on_progress=said.append)
    assert sum(link.altered) == 45
    assert len(link.altered) == 10
    assert link.plans == 5 + 10 + 5
    assert [one.leaving for one in said[:3]] == [0, 1, 6], "the topic's load is counted first"
    assert [one.leaving for one in said[-2:]] == [40, 45]


async def test_nothing_is_moved_when_one_has_nowhere_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "PLANNED_MAX", 5)
    monkeypatch.setattr(draining, "CHECKED_MAX", 5)
    link = cluster(25)
    link.controller.assigned("u", (1, 2, 3, 4))
    with pytest.raises(KafkaError, match="'u'"):
        await Admin(link, 10.0).drain_broker(1, wait=False)
    assert not link.altered
    assert not link.controller.image.reassigning
