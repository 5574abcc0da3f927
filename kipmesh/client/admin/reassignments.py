"""Moving replicas to other brokers, and brokers that leave, by any broker, which forwards to the active controller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from kipmesh import messages as m
from kipmesh.client.admin.requests import AdminRequests, failure_of
from kipmesh.client.cluster import by_topic
from kipmesh.client.types import TopicPartition
from kipmesh.core.errors import ErrorCode, KafkaError

POLL_S = 0.2
PARTITIONS_MAX = 500
"""Most partitions of one AlterPartitionReassignments: a short step of the controller."""


class PartitionReassignment(NamedTuple):
    """A partition whose replicas are being moved."""

    replicas: Sequence[int]
    """Those that it is to have, and then those that leave."""
    adding_replicas: Sequence[int]
    removing_replicas: Sequence[int]


class DrainProgress(NamedTuple):
    """How far a drain is."""

    total: int
    """Replicas that the broker had, at most, since the drain began."""
    left: int
    """Replicas that it has now."""
    leaving: int
    """Those of them that are known to be moved, in the walk over all of them that is under way."""


_NOT_TOLD = KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "the answer does not say")

OnDrain = Callable[[DrainProgress], None]
OnMoved = Callable[[int, int], None]
"""How many partitions are done, and of how many."""
NewReplicas = Mapping[tuple[str, int], Sequence[int] | None]
"""Topic and partition -> its replicas, the preferred leader first; None cancels what is running."""


class ReassignmentAdmin(AdminRequests):
    """The part of `AdminClient` that moves replicas, and lets brokers leave."""

    async def alter_partition_reassignments(self, targets: NewReplicas) -> dict[TopicPartition, KafkaError | None]:
        """Give partitions other replicas, the preferred leader first; None cancels a reassignment that is running.

        For each partition why that was refused, or None. The replicas move after that: see `wait_reassigned`. Some are
        asked for at a time. Raises KafkaError when nothing was answered; when that happens later, it is why the rest
        was refused.
        """
        left = {TopicPartition(*where): replicas for where, replicas in targets.items()}
        results: dict[TopicPartition, KafkaError | None] = {}
        while left:
            some = dict(islice(left.items(), PARTITIONS_MAX))
            try:
                answered = await self._alter_some(some)
            except KafkaError as error:
                if not results:
                    raise
                return results | dict.fromkeys(left, error)
            begun = None in answered.values()
            for where in some:
                refused = answered.get(where, _NOT_TOLD)
                # What is too many for one request, and alone is not, is asked for again.
                if not begun or refused is None or refused.code is not ErrorCode.POLICY_VIOLATION:
                    results[where] = refused
                    del left[where]
        return results

    async def _alter_some(
        self, targets: Mapping[TopicPartition, Sequence[int] | None]
    ) -> dict[TopicPartition, KafkaError | None]:
        """One request."""
        topics = [
            m.ReassignableTopic(
                topic,
                [m.ReassignablePartition(index, _tuple(targets[TopicPartition(topic, index)])) for index in partitions],
            )
            for topic, partitions in by_topic(targets).items()
        ]
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
        """The reassignments that are running: all, or those of these partitions."""
        topics = None
        if partitions is not None:
            topics = [m.ListPartitionReassignmentsTopics(*each) for each in by_topic(partitions).items()]
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
        """Until no reassignment of these partitions is running, for as long as it takes."""
        wanted = list(partitions)
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
        """Move every replica of a broker to the others; with `wait` returns when it has none.

        Raises KafkaError: INVALID_REPLICATION_FACTOR, before anything is moved, when there are too few other brokers;
        what was refused for `default.api.timeout.ms` while nothing else began, after all that could begin.
        """
        drain = _Drain(self, broker_id, on_progress)
        await drain.walk(is_check=True)
        refused_until = time.monotonic() + self._timeout_s
        while True:
            started = time.monotonic()
            begun = await drain.walk()
            now = time.monotonic()
            if begun:
                refused_until = now + self._timeout_s
            elif drain.refused and now >= refused_until:
                raise drain.refusal()
            if not drain.progress.left or not (begun or drain.refused or wait):
                return drain.progress
            # A client that waits must not keep the controller busy.
            await asyncio.sleep(max(POLL_S, 9 * (now - started)) if not begun else 0)

    async def plan_drain(self, broker_id: int, cursor: m.DrainCursor | None, *, is_check: bool) -> Any:
        """One step of a walk over the replicas of a broker that is being drained."""
        request = m.PlanBrokerDrainRequest(broker_id, self._request_timeout_ms, cursor, is_check)
        return await self._call(request)

    async def unregister_broker(self, broker_id: int) -> None:
        """Let the cluster forget a broker that is stopped and has no replica."""
        await self._call(m.UnregisterBrokerRequest(broker_id))


def _tuple(replicas: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if replicas is None else tuple(replicas)


class _Drain:
    """Walks over the replicas of a broker that is being drained."""

    def __init__(self, admin: ReassignmentAdmin, broker_id: int, on_progress: OnDrain | None) -> None:
        self._admin = admin
        self._broker_id = broker_id
        self._on_progress = on_progress
        self.progress = DrainProgress(0, 0, 0)
        self.refused: dict[TopicPartition, KafkaError] = {}
        """In the last walk; topics may be deleted meanwhile, which is no refusal."""

    async def walk(self, *, is_check: bool = False) -> int:
        """Once over all of them; begins what can begin unless it is a check. Returns how many reassignments began."""
        cursor: m.DrainCursor | None = None
        begun = leaving = 0
        self.refused = {}
        while True:
            plan: m.PlanBrokerDrainResponse
            plan = await self._admin.plan_drain(self._broker_id, cursor, is_check=is_check)
            leaving += plan.leaving
            if not is_check:
                self._tell(plan.replicas, begun + leaving)
                begun += await self._move(plan)
            cursor = plan.next_cursor
            if cursor is None:
                return begun

    def _tell(self, left: int, leaving: int) -> None:
        self.progress = DrainProgress(max(self.progress.total, left), left, min(leaving, left))
        if self._on_progress is not None:
            self._on_progress(self.progress)

    async def _move(self, plan: m.PlanBrokerDrainResponse) -> int:
        targets: NewReplicas = {
            TopicPartition(topic.name, each.partition_index): each.replicas
            for topic in plan.topics
            for each in topic.partitions
        }
        results = await self._admin.alter_partition_reassignments(targets)
        for where, error in results.items():
            if error is not None and error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                self.refused[where] = error
        return sum(error is None for error in results.values())

    def refusal(self) -> KafkaError:
        """What was refused to the end, as one error."""
        (topic, partition), error = next(iter(self.refused.items()))
        text = f"{len(self.refused)} partitions cannot be moved, such as partition {partition} of topic {topic!r}"
        return KafkaError(error.code, f"{text}: {error.message}")
