"""Partition reassignments, draining of brokers and their removal. Any broker forwards to the active controller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from kipmesh import messages as m
from kipmesh.client import arguments
from kipmesh.client.admin.requests import AdminRequests, failure_of
from kipmesh.client.cluster import by_topic
from kipmesh.client.types import TopicPartition
from kipmesh.core.errors import ErrorCode, KafkaError

POLL_S = 0.2
PARTITIONS_MAX = 500
"""Maximum partitions of one AlterPartitionReassignments request, so that the controller handles it quickly."""


class PartitionReassignment(NamedTuple):
    """A running reassignment of a partition. All fields are broker ids."""

    replicas: Sequence[int]
    """The target replicas, followed by those being removed."""
    adding_replicas: Sequence[int]
    removing_replicas: Sequence[int]


class DrainProgress(NamedTuple):
    """Progress of draining a broker, in replicas."""

    total: int
    """Maximum number of replicas on the broker since the drain started."""
    left: int
    """Current number of replicas on the broker."""
    leaving: int
    """Replicas that are being moved, as counted so far in the current pass."""


_NO_PROGRESS = DrainProgress(0, 0, 0)
_NO_RESULT = KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "AlterPartitionReassignments response lacks the partition")

OnDrain = Callable[[DrainProgress], None]
OnMoved = Callable[[int, int], None]
"""Called with the number of finished partitions and the total."""
NewReplicas = Mapping[tuple[str, int], Sequence[int] | None]
"""Target replicas by (topic, partition), preferred leader first. None cancels a running reassignment."""


class ReassignmentAdmin(AdminRequests):
    """The part of `AdminClient` that moves replicas and removes brokers. Methods raise KafkaError."""

    async def alter_partition_reassignments(self, targets: NewReplicas) -> dict[TopicPartition, KafkaError | None]:
        """Start or cancel partition reassignments and return each partition's error, or None if it was accepted.

        The replicas move afterwards; `wait_reassigned` waits for that. `targets` has the new replicas by partition, or
        None to cancel. Errors: INVALID_REPLICA_ASSIGNMENT, UNKNOWN_TOPIC_OR_PARTITION, NO_REASSIGNMENT_IN_PROGRESS for
        a cancellation. Sends several requests if there are many partitions. Raises KafkaError if the first request
        fails; if a later one fails, the remaining partitions get its error.
        """
        remaining = {
            arguments.topic_partition(key): None
            if replicas is None
            else arguments.integers("replicas", replicas, "broker ids")
            for key, replicas in arguments.mapping(
                "targets", targets, "(topic, partition) to a list of broker ids"
            ).items()
        }
        results: dict[TopicPartition, KafkaError | None] = {}
        while remaining:
            chunk = dict(islice(remaining.items(), PARTITIONS_MAX))
            try:
                chunk_results = await self._alter_chunk(chunk)
            except KafkaError as error:
                if not results:
                    raise
                return results | dict.fromkeys(remaining, error)
            has_progress = None in chunk_results.values()
            for topic_partition in chunk:
                failure = chunk_results.get(topic_partition, _NO_RESULT)
                # POLICY_VIOLATION: the request exceeds a limit of the controller. The next request may not.
                if not has_progress or failure is None or failure.code is not ErrorCode.POLICY_VIOLATION:
                    results[topic_partition] = failure
                    del remaining[topic_partition]
        return results

    async def _alter_chunk(
        self, targets: Mapping[TopicPartition, Sequence[int] | None]
    ) -> dict[TopicPartition, KafkaError | None]:
        topics = []
        for topic, partitions in by_topic(targets).items():
            new = ((index, targets[TopicPartition(topic, index)]) for index in partitions)
            topics.append(
                m.ReassignableTopic(
                    topic,
                    [m.ReassignablePartition(index, None if ids is None else tuple(ids)) for index, ids in new],
                )
            )
        request = m.AlterPartitionReassignmentsRequest(self._request_timeout_ms, topics)
        response: m.AlterPartitionReassignmentsResponse = await self._call(request)
        return {
            TopicPartition(result.name, each.partition_index): failure_of(each, "")
            for result in response.responses
            for each in result.partitions
        }

    async def list_partition_reassignments(
        self, partitions: Iterable[tuple[str, int]] | None = None
    ) -> dict[TopicPartition, PartitionReassignment]:
        """Return the running reassignments of these partitions (None: all). Partitions without one are omitted."""
        topics = None
        if partitions is not None:
            listed = by_topic(arguments.topic_partitions(partitions))
            topics = [m.ListPartitionReassignmentsTopics(*each) for each in listed.items()]
        request = m.ListPartitionReassignmentsRequest(self._request_timeout_ms, topics)
        response: m.ListPartitionReassignmentsResponse = await self._call(request)
        return {
            TopicPartition(topic.name, each.partition_index): PartitionReassignment(
                tuple(each.replicas), tuple(each.adding_replicas), tuple(each.removing_replicas)
            )
            for topic in response.topics
            for each in topic.partitions
        }

    async def wait_reassigned(self, partitions: Iterable[tuple[str, int]], on_progress: OnMoved | None = None) -> None:
        """Wait without a time limit until no reassignment of these partitions is running.

        `on_progress` is called at each check with the number of finished partitions and the total number. Raises
        KafkaError.
        """
        wanted = arguments.topic_partitions(partitions)
        while True:
            running = await self.list_partition_reassignments(wanted)
            if on_progress is not None:
                on_progress(len(wanted) - len(running), len(wanted))
            if not running:
                return
            await asyncio.sleep(POLL_S)

    async def drain_broker(
        self, broker_id: int, *, wait: bool = True, on_progress: OnDrain | None = None
    ) -> DrainProgress:
        """Move all replicas of a broker to other brokers, and return the last progress.

        With `wait`, waits without a time limit until the broker has no replicas, otherwise only until all reassignments
        have started. Raises KafkaError before any move: BROKER_ID_NOT_REGISTERED, or INVALID_REPLICATION_FACTOR if
        there are too few other brokers. If no new reassignment starts for `default.api.timeout.ms`, raises the error of
        a partition that cannot be moved.
        """
        drain = _Drain(self, broker_id, on_progress)
        await drain.run_pass(is_check=True)
        fail_at = time.monotonic() + self._timeout_s
        while True:
            pass_begin = time.monotonic()
            started = await drain.run_pass()
            now = time.monotonic()
            if started:
                fail_at = now + self._timeout_s
            elif drain.rejected and now >= fail_at:
                raise drain.failure()
            if not drain.progress.left or not (started or drain.rejected or wait):
                return drain.progress
            # Passes without progress use at most a tenth of the time, so that waiting does not load the controller.
            await asyncio.sleep(max(POLL_S, 9 * (now - pass_begin)) if not started else 0)

    async def plan_drain(self, broker_id: int, cursor: m.DrainCursor | None, *, is_check: bool) -> Any:
        """Return the controller's plan for the next replicas of a broker, starting at `cursor` (None: the first).

        With `is_check` the controller only verifies that the replicas can be moved. Raises KafkaError:
        BROKER_ID_NOT_REGISTERED, INVALID_REPLICATION_FACTOR.
        """
        request = m.PlanBrokerDrainRequest(broker_id, self._request_timeout_ms, cursor, is_check)
        return await self._call(request)

    async def unregister_broker(self, broker_id: int) -> None:
        """Remove a stopped broker without replicas from the cluster.

        Raises KafkaError: BROKER_ID_NOT_REGISTERED, POLICY_VIOLATION if it has replicas, INVALID_REQUEST if it is
        running.
        """
        await self._call(m.UnregisterBrokerRequest(broker_id))


@dataclass(eq=False)
class _Drain:
    """Drains one broker in passes over all its replicas."""

    admin: ReassignmentAdmin
    broker_id: int
    on_progress: OnDrain | None
    progress: DrainProgress = _NO_PROGRESS
    rejected: dict[TopicPartition, KafkaError] = field(default_factory=dict)
    """Partitions that could not be moved in the last pass, except those of deleted topics."""

    async def run_pass(self, *, is_check: bool = False) -> int:
        """Check all replicas and, unless `is_check`, start to move them. Returns the number of started reassignments.

        Raises the KafkaError of `plan_drain`.
        """
        cursor: m.DrainCursor | None = None
        started = leaving = 0
        self.rejected = {}
        while True:
            plan: m.PlanBrokerDrainResponse
            plan = await self.admin.plan_drain(self.broker_id, cursor, is_check=is_check)
            leaving += plan.leaving
            if not is_check:
                self._report(plan.replicas, started + leaving)
                started += await self._move(plan)
            cursor = plan.next_cursor
            if cursor is None:
                return started

    def _report(self, left: int, leaving: int) -> None:
        self.progress = DrainProgress(max(self.progress.total, left), left, min(leaving, left))
        if self.on_progress is not None:
            self.on_progress(self.progress)

    async def _move(self, plan: m.PlanBrokerDrainResponse) -> int:
        targets: NewReplicas = {
            TopicPartition(topic.name, each.partition_index): each.replicas
            for topic in plan.topics
            for each in topic.partitions
        }
        results = await self.admin.alter_partition_reassignments(targets)
        for topic_partition, error in results.items():
            if error is not None and error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                self.rejected[topic_partition] = error
        return sum(error is None for error in results.values())

    def failure(self) -> KafkaError:
        """Return (do not raise) one error for all rejected partitions, of which there is at least one."""
        (topic, partition), error = next(iter(self.rejected.items()))
        text = f"{arguments.counted(len(self.rejected), 'partition')} cannot be moved, for example {topic}-{partition}"
        return KafkaError(error.code, f"{text}: {error.message}")
