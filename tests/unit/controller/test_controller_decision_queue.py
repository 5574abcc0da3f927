"""DecisionQueue over a list as its log: completion, errors of operations, draining and limits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kipmesh.controller import decision_queue
from kipmesh.controller.decision_queue import DecisionQueue
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.decision import Decision

ENDED = KafkaError(ErrorCode.NOT_CONTROLLER, "controller 1 is active")


class ListLog:
    """A log and image whose appends and applies can fail."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.steps = 0
        """Steps in which a batch is applied."""
        self.refuse: Exception | None = None
        self.fail_apply: Exception | None = None
        self.failures: list[BaseException] = []
        self.queue = DecisionQueue(
            append=self.append,
            apply=self.apply,
            end_offset=lambda: len(self.records),
            high_watermark=0,
            on_failure=self.failures.append,
        )

    def append(self, records: Sequence[Any]) -> bytes:
        if self.refuse is not None:
            raise self.refuse
        self.records += records
        return b"batch"

    def apply(self, records: Sequence[Any], batch: bytes) -> Iterator[None]:
        assert batch == b"batch"
        for _ in range(self.steps):
            yield
        if self.fail_apply is not None:
            raise self.fail_apply

    def submit(self, name: str = "decision", records: int = 1) -> asyncio.Future[Any]:
        return self.queue.submit(lambda: Decision([name] * records, name))


async def error_of(future: asyncio.Future[Any]) -> ErrorCode:
    with pytest.raises(KafkaError) as caught:
        await asyncio.wait_for(future, 30)
    return caught.value.code


async def test_decision_completes_after_records_it_observed_are_committed() -> None:
    log = ListLog()
    first, second, reads = log.submit("first", 2), log.submit("second"), log.submit("reads", 0)
    log.queue.committed(2)
    assert await first == "first"
    assert not second.done()
    assert not reads.done(), "the decision depends on an uncommitted record"
    assert log.queue.pending == 2
    log.queue.committed(3)
    assert (await second, await reads) == ("second", "reads")
    assert await log.submit("no records", 0) == "no records"


async def test_ended_queue_fails_uncommitted_decisions() -> None:
    log = ListLog()
    done, open_ = log.submit("done"), log.submit("open")
    log.queue.committed(1)
    log.queue.end(ENDED)
    log.queue.end(KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "later"))
    assert await done == "done"
    assert await error_of(open_) is ErrorCode.NOT_CONTROLLER
    log.queue.committed(2)
    with pytest.raises(KafkaError, match="controller 1 is active"):
        log.submit()
    assert len(log.records) == 2


async def test_decision_fails_if_leadership_ends_during_append() -> None:
    log = ListLog()
    log.fail_apply = None

    def append(records: Sequence[Any]) -> bytes:
        log.records += records
        log.queue.end(ENDED)
        return b"batch"

    log.queue.append = append
    with pytest.raises(KafkaError, match="controller 1 is active"):
        log.submit()
    assert not log.failures


async def test_failed_append_fails_only_its_operation() -> None:
    log = ListLog()

    def broken() -> Decision[None]:
        raise ZeroDivisionError

    with pytest.raises(KafkaError) as caught:
        log.queue.submit(broken)
    assert caught.value.code is ErrorCode.UNKNOWN_SERVER_ERROR
    for refusal, expected in (
        (ValueError("cannot be encoded"), ErrorCode.UNKNOWN_SERVER_ERROR),
        (KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, "full"), ErrorCode.KAFKA_STORAGE_ERROR),
    ):
        log.refuse = refusal
        with pytest.raises(KafkaError) as caught:
            log.submit()
        assert caught.value.code is expected
    log.refuse = None
    response = log.submit("next")
    log.queue.committed(1)
    assert await response == "next"
    assert not log.failures


async def test_failed_apply_stops_node() -> None:
    log = ListLog()
    pending = log.submit()
    log.fail_apply = error = ValueError("bug")
    with pytest.raises(KafkaError):
        log.submit()
    assert log.failures == [error]
    assert await error_of(pending) is ErrorCode.UNKNOWN_SERVER_ERROR
    with pytest.raises(KafkaError):
        log.submit()
    assert log.failures == [error]


async def test_queue_refuses_operations_above_limit_except_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_queue, "OPERATIONS_MAX", 2)
    log = ListLog()
    taken = [log.submit(), log.submit()]
    with pytest.raises(KafkaError) as caught:
        log.submit()
    assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
    taken.append(log.queue.submit(lambda: Decision([], "cleanup"), is_cleanup=True))
    log.queue.committed(2)
    assert await asyncio.gather(*taken) == ["decision", "decision", "cleanup"]


async def test_cancelled_operation_does_not_affect_next_operation() -> None:
    log = ListLog()
    cancelled, other = log.submit("cancelled"), log.submit("other")
    cancelled.cancel()
    log.queue.committed(2)
    assert await other == "other"


async def test_drain_refuses_new_operations_and_waits_for_pending_ones() -> None:
    log = ListLog()
    pending = log.submit("pending")
    draining = asyncio.create_task(log.queue.drain(20, ENDED))
    await asyncio.sleep(0)
    with pytest.raises(KafkaError, match="controller 1"):
        log.submit()
    log.queue.committed(1)
    await draining
    assert await pending == "pending"
    late = ListLog()
    pending = late.submit()
    await late.queue.drain(0.01, ENDED)
    assert await error_of(pending) is ErrorCode.NOT_CONTROLLER


@pytest.fixture
def _short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_queue, "SLICE_S", 0.0)


@pytest.mark.usefixtures("_short_slices")
async def test_queue_decides_after_previous_batch_is_fully_applied() -> None:
    log = ListLog()
    log.steps = 3
    decided: list[str] = []

    def decide(name: str) -> asyncio.Future[Any]:
        def decision() -> Decision[str]:
            decided.append(name)
            return Decision([name], name)

        return log.queue.submit(decision)

    first, second, third = decide("first"), decide("second"), decide("third")
    assert decided == ["first"]
    log.queue.committed(1)
    assert not first.done(), "the batch is not applied yet"
    third.cancel()
    assert await first == "first"
    while len(log.records) < 2:  # noqa: ASYNC110 - each iteration of the loop is a step
        await asyncio.sleep(0)
    log.queue.committed(2)
    assert await second == "second"
    while log.queue.pending:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert decided == ["first", "second"], "a cancelled operation decides nothing"


@pytest.mark.usefixtures("_short_slices")
async def test_decide_all_is_not_interleaved_with_other_decisions() -> None:
    log = ListLog()
    log.steps = 2
    all_ = log.queue.decide_all([lambda name=name: Decision([name], None) for name in "abc"])  # type: ignore[misc]
    other = log.submit("other")
    await all_
    assert log.records == ["a", "b", "c"], "decide_all does not wait for the high watermark"
    log.queue.committed(4)
    assert await other == "other"
    assert log.records == ["a", "b", "c", "other"]

    def broken() -> Iterator[decision_queue.Decide]:
        yield lambda: Decision(["d"], None)
        raise ZeroDivisionError

    assert await error_of(log.queue.decide_all(broken())) is ErrorCode.UNKNOWN_SERVER_ERROR
    log.steps = 0
    log.queue.committed(6)
    assert await log.submit("next") == "next"


@pytest.mark.usefixtures("_short_slices")
async def test_epoch_end_during_apply_fails_decision_and_finishes_apply() -> None:
    """The batch is still applied completely. Its decision and the queued decisions fail."""
    log = ListLog()
    applied: list[bytes] = []

    def apply(records: Sequence[Any], batch: bytes) -> Iterator[None]:
        yield from ListLog.apply(log, records, batch)
        applied.append(batch)

    log.queue.apply = apply
    log.steps = 3
    partial, several = log.submit("partial"), log.queue.decide_all([lambda: Decision(["never"], None)])
    queued = log.submit("queued")
    log.queue.end(ENDED)
    assert log.queue.high_watermark == 0
    for response in (partial, several, queued):
        assert await error_of(response) is ErrorCode.NOT_CONTROLLER
    while log.queue.pending:  # noqa: ASYNC110 - each iteration of the loop is a step
        await asyncio.sleep(0)
    assert applied == [b"batch"]
    assert log.records == ["partial"]


@pytest.mark.usefixtures("_short_slices")
async def test_drain_completes_partly_applied_decision() -> None:
    log = ListLog()
    log.steps = 5
    partial, queued = log.submit("partial"), log.submit("queued")
    draining = asyncio.create_task(log.queue.drain(20, ENDED))
    assert await error_of(queued) is ErrorCode.NOT_CONTROLLER
    assert not partial.done()
    log.queue.committed(1)
    await draining
    assert await partial == "partial"


@pytest.mark.usefixtures("_short_slices")
async def test_queued_decisions_count_against_operation_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_queue, "OPERATIONS_MAX", 2)
    log = ListLog()
    log.steps = 3
    taken = [log.submit(), log.submit()]
    with pytest.raises(KafkaError):
        log.submit()
    log.queue.committed(2)
    assert await asyncio.gather(*taken) == ["decision", "decision"]
