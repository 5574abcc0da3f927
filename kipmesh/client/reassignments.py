"""Moving replicas to other brokers, and brokers that leave, by any broker, which forwards to the active controller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from kipmesh import messages as m
from kipmesh.client.cluster import Cluster
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
Targets = Mapping[TopicPartition, Sequence[int] | None]
"""For each partition its replicas, the preferred leader first; None cancels what is running."""


async def _call(cluster: Cluster, method: str, request: Any, timeout_s: float) -> Any:
    """One call; raises KafkaError for an error at the top of the answer."""
    said: str | None = None

    def retry(response: Any) -> ErrorCode | None:
        nonlocal said
        said = response.error_message or said
        code = ErrorCode.of(response.error_code)
        return code if code.retriable else None

    try:
        response = await cluster.call_any("Admin", method, request, timeout_s, retry)
    except KafkaError as error:
        if said is None:
            raise
        raise KafkaError(error.code, said) from None
    if response.error_code:
        raise KafkaError(response.error_code, response.error_message or method)
    return response


def _request_timeout_ms(cluster: Cluster, timeout_s: float) -> int:
    return int(min(timeout_s, cluster.request_timeout_ms / 1000) * 1000)


async def alter_reassignments(
    cluster: Cluster, targets: Targets, timeout_s: float
) -> dict[TopicPartition, KafkaError | None]:
    """Begin, change or cancel reassignments, some at a time: for each partition why that was refused, or None.

    Raises KafkaError when nothing was answered. When that happens later, it is why the rest was refused.
    """
    left = dict(targets)
    results: dict[TopicPartition, KafkaError | None] = {}
    while left:
        some = dict(islice(left.items(), PARTITIONS_MAX))
        try:
            answered = await _alter(cluster, some, timeout_s)
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


async def _alter(cluster: Cluster, targets: Targets, timeout_s: float) -> dict[TopicPartition, KafkaError | None]:
    """One request."""
    topics: dict[str, list[m.ReassignablePartition]] = {}
    for (topic, partition), replicas in targets.items():
        asked = m.ReassignablePartition(partition, None if replicas is None else tuple(replicas))
        topics.setdefault(topic, []).append(asked)
    request = m.AlterPartitionReassignmentsRequest(
        _request_timeout_ms(cluster, timeout_s), [m.ReassignableTopic(*each) for each in topics.items()]
    )
    response: m.AlterPartitionReassignmentsResponse = await _call(
        cluster, "AlterPartitionReassignments", request, timeout_s
    )
    return {
        TopicPartition(result.name, each.partition_index): (
            KafkaError(each.error_code, each.error_message or "") if each.error_code else None
        )
        for result in response.responses
        for each in result.partitions
    }


async def list_reassignments(
    cluster: Cluster, partitions: Iterable[TopicPartition] | None, timeout_s: float
) -> dict[TopicPartition, PartitionReassignment]:
    """The reassignments that are running: all, or those of these partitions."""
    topics: dict[str, list[int]] = {}
    for topic, partition in partitions or ():
        topics.setdefault(topic, []).append(partition)
    request = m.ListPartitionReassignmentsRequest(
        _request_timeout_ms(cluster, timeout_s),
        None if partitions is None else [m.ListPartitionReassignmentsTopics(*each) for each in topics.items()],
    )
    response: m.ListPartitionReassignmentsResponse = await _call(
        cluster, "ListPartitionReassignments", request, timeout_s
    )
    return {
        TopicPartition(topic.name, each.partition_index): PartitionReassignment(
            tuple(each.replicas), tuple(each.adding_replicas), tuple(each.removing_replicas)
        )
        for topic in response.topics
        for each in topic.partitions
    }


async def wait_reassigned(
    cluster: Cluster,
    partitions: Iterable[TopicPartition],
    timeout_s: float,
    on_progress: OnMoved | None = None,
) -> None:
    """Until no reassignment of these partitions is running; `on_progress` is told how many are done, and of how many.

    Waits for as long as it takes; `timeout_s` is for each question.
    """
    wanted = list(partitions)
    while True:
        running = await list_reassignments(cluster, wanted, timeout_s)
        if on_progress is not None:
            on_progress(len(wanted) - len(running), len(wanted))
        if not running:
            return
        await asyncio.sleep(POLL_S)


async def drain_broker(
    cluster: Cluster, broker_id: int, timeout_s: float, *, wait: bool, on_progress: OnDrain | None = None
) -> DrainProgress:
    """Move every replica of a broker to others; with `wait` returns when it has none, for as long as that takes.

    Raises KafkaError: INVALID_REPLICATION_FACTOR when there are too few other brokers, before anything is moved; what
    was refused for `timeout_s` while nothing else began, after all that could begin.
    """
    drain = _Drain(cluster, broker_id, timeout_s, on_progress)
    await drain.walk(is_check=True)
    refused_until = time.monotonic() + timeout_s
    while True:
        started = time.monotonic()
        begun = await drain.walk()
        now = time.monotonic()
        if begun:
            refused_until = now + timeout_s
        elif drain.refused and now >= refused_until:
            raise drain.refusal()
        if not drain.progress.left or not (begun or drain.refused or wait):
            return drain.progress
        # Nobody is kept busy by somebody who waits.
        await asyncio.sleep(max(POLL_S, 9 * (now - started)) if not begun else 0)


class _Drain:
    """Walks over the replicas of a broker that is being drained."""

    def __init__(self, cluster: Cluster, broker_id: int, timeout_s: float, on_progress: OnDrain | None) -> None:
        self._cluster = cluster
        self._broker_id = broker_id
        self._timeout_s = timeout_s
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
            request = m.PlanBrokerDrainRequest(
                self._broker_id, _request_timeout_ms(self._cluster, self._timeout_s), cursor, is_check
            )
            plan: m.PlanBrokerDrainResponse = await _call(self._cluster, "PlanBrokerDrain", request, self._timeout_s)
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
        targets: dict[TopicPartition, Sequence[int] | None] = {
            TopicPartition(topic.name, each.partition_index): each.replicas
            for topic in plan.topics
            for each in topic.partitions
        }
        results = await alter_reassignments(self._cluster, targets, self._timeout_s)
        for where, error in results.items():
            if error is not None and error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                self.refused[where] = error
        return sum(error is None for error in results.values())

    def refusal(self) -> KafkaError:
        """What was refused to the end, as one error."""
        (topic, partition), error = next(iter(self.refused.items()))
        text = f"{len(self.refused)} partitions cannot be moved, such as partition {partition} of topic {topic!r}"
        return KafkaError(error.code, f"{text}: {error.message}")


async def unregister_broker(cluster: Cluster, broker_id: int, timeout_s: float) -> None:
    """Let the cluster forget a broker that is stopped and has no replica; raises KafkaError."""
    await _call(cluster, "UnregisterBroker", m.UnregisterBrokerRequest(broker_id), timeout_s)
