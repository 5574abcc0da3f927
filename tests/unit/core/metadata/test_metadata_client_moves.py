"""Reassignments and drains of many partitions by the admin client, against a controller in memory."""

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


class FakeCluster:
    """A client's cluster: each call is one controller decision. Partitions in `refused` never reach the controller."""

    request_timeout_ms = 1000

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.altered: list[int] = []
        """Number of partitions of each AlterPartitionReassignments request."""
        self.plans = 0
        self.refused: set[int] = set()
        """Partitions whose reassignment fails."""
        self.fail_after = 1000
        """Number of requests before calls time out."""

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
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, "no response")
        self.altered.append(sum(len(topic.partitions) for topic in request.topics))
        refused = [
            m.ReassignableTopicResponse(
                topic.name,
                [
                    m.ReassignablePartitionResponse(
                        partition.partition_index, ErrorCode.INVALID_REPLICA_ASSIGNMENT, "no"
                    )
                    for partition in topic.partitions
                    if partition.partition_index in self.refused
                ],
            )
            for topic in request.topics
        ]
        accepted = [
            topic._replace(
                partitions=[
                    partition for partition in topic.partitions if partition.partition_index not in self.refused
                ]
            )
            for topic in request.topics
        ]
        response = self.controller.run(core.alter_partition_reassignments(request._replace(topics=accepted)))
        return response._replace(responses=[*refused, *response.responses])


class Admin(ReassignmentAdmin):
    """The reassignment part of the admin client, on a FakeCluster."""

    def __init__(self, cluster: FakeCluster, timeout_s: float) -> None:
        self._cluster = cluster  # type: ignore[assignment]
        self._timeout_s = timeout_s


def cluster(partitions: int, **values: Any) -> FakeCluster:
    """Create partitions on brokers 1 and 2; brokers 3 and 4 are empty."""
    controller = Controller(**{"max_partitions_per_request": partitions} | values)
    for broker in range(1, 5):
        controller.join(broker)
    controller.create_assigned("t", *[(1, 2)] * partitions)
    return FakeCluster(controller)


def target(fake: FakeCluster, partitions: int) -> NewReplicas:
    return {TopicPartition("t", number): (3, 2) for number in range(partitions)}


async def test_large_reassignment_is_split_into_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reassignments, "PARTITIONS_MAX", 10)
    fake = cluster(25)
    results = await Admin(fake, 1.0).alter_partition_reassignments(target(fake, 25))
    assert results == dict.fromkeys(target(fake, 25))
    assert fake.altered == [10, 10, 5]
    assert len(fake.controller.image.reassigning) == 25


async def test_reassignment_request_is_split_to_controller_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reassignments, "PARTITIONS_MAX", 10)
    fake = cluster(1, max_partitions_per_request=4)
    for name in "uvwxy":
        fake.controller.create_assigned(name, *[(1, 2)] * 3)
    wanted: dict[tuple[str, int], Sequence[int] | None] = {
        TopicPartition(name, number): (3, 2) for name in "uvwxy" for number in range(3)
    }
    wanted[TopicPartition("u", 7)] = (3, 2)
    results = await Admin(fake, 1.0).alter_partition_reassignments(wanted)
    refused = {partition: error.code for partition, error in results.items() if error is not None}
    assert refused == {TopicPartition("u", 7): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    assert results.keys() == wanted.keys()
    assert len(fake.controller.image.reassigning) == 15


async def test_failed_request_fails_remaining_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reassignments, "PARTITIONS_MAX", 10)
    fake = cluster(25)
    fake.fail_after = 1
    results = await Admin(fake, 1.0).alter_partition_reassignments(target(fake, 25))
    codes = [error and error.code for error in results.values()]
    assert codes == [None] * 10 + [ErrorCode.REQUEST_TIMED_OUT] * 15
    fake.fail_after = 0
    with pytest.raises(KafkaError, match="no response"):
        await Admin(fake, 1.0).alter_partition_reassignments(target(fake, 25))


async def test_drain_moves_other_partitions_and_reports_refused_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused plan does not block other partitions. The drain retries refused partitions at the end."""
    monkeypatch.setattr(draining, "PLANNED_MAX", 5)
    monkeypatch.setattr(reassignments, "POLL_S", 0.001)
    fake = cluster(25)
    fake.refused = set(range(7))
    with pytest.raises(KafkaError, match="7 partitions cannot be moved, for example t-0: no") as caught:
        await Admin(fake, 0.05).drain_broker(1, wait=True)
    assert caught.value.code is ErrorCode.INVALID_REPLICA_ASSIGNMENT
    assert len(fake.controller.image.reassigning) == 18
    fake.refused = set()
    done = await Admin(fake, 10.0).drain_broker(1, wait=False)
    assert done == DrainProgress(25, 25, 25)
    assert len(fake.controller.image.reassigning) == 25


async def test_drain_requests_plans_in_bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drain walks all partitions three times: check, move, and verify that all leave."""
    monkeypatch.setattr(draining, "PLANNED_MAX", 5)
    monkeypatch.setattr(draining, "CHECKED_MAX", 10)
    fake = cluster(45)
    reports: list[DrainProgress] = []
    await Admin(fake, 10.0).drain_broker(1, wait=False, on_progress=reports.append)
    assert sum(fake.altered) == 45
    assert len(fake.altered) == 10
    assert fake.plans == 5 + 10 + 5
    assert [progress.leaving for progress in reports[:3]] == [0, 1, 6], "the first step counts the topic's load"
    assert [progress.leaving for progress in reports[-2:]] == [40, 45]


async def test_drain_moves_nothing_if_a_partition_has_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "PLANNED_MAX", 5)
    monkeypatch.setattr(draining, "CHECKED_MAX", 5)
    fake = cluster(25)
    fake.controller.create_assigned("u", (1, 2, 3, 4))
    with pytest.raises(KafkaError, match="'u'"):
        await Admin(fake, 10.0).drain_broker(1, wait=False)
    assert not fake.altered
    assert not fake.controller.image.reassigning
