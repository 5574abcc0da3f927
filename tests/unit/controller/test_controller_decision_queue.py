"""The decision queue alone, over a log that is a list: what is answered when, and which errors are one operation's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kipmesh.controller import decision_queue
from kipmesh.controller.decision_queue import DecisionQueue
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.decision import Decision

OVER = KafkaError(ErrorCode.NOT_CONTROLLER, "controller 1 is active")


class ListLog:
    """A log whose appends can be refused, and an image that can fail."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.steps = 0
        """Of each application."""
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

    def submit(self, name: str = "one", records: int = 1) -> asyncio.Future[Any]:
        return self.queue.submit(lambda: Decision([name] * records, name))


async def code(answer: asyncio.Future[Any]) -> ErrorCode:
    with pytest.raises(KafkaError) as caught:
        await asyncio.wait_for(answer, 30)
    return caught.value.code


async def test_answers_wait_for_all_that_their_decisions_saw() -> None:
    log = ListLog()
    first, second, reads = log.submit("first", 2), log.submit("second"), log.submit("reads", 0)
    log.queue.committed(2)
    assert await first == "first"
    assert not second.done()
    assert not reads.done(), "what it saw may not be there after all"
    assert log.queue.pending == 2
    log.queue.committed(3)
    assert (await second, await reads) == ("second", "reads")
    assert await log.submit("nothing new", 0) == "nothing new"


async def test_the_end_refuses_what_is_not_committed() -> None:
    log = ListLog()
    done, open_ = log.submit("done"), log.submit("open")
    log.queue.committed(1)
    log.queue.end(OVER)
    log.queue.end(KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "later"))
    assert await done == "done"
    assert await code(open_) is ErrorCode.NOT_CONTROLLER
    log.queue.committed(2)
    with pytest.raises(KafkaError, match="controller 1 is active"):
        log.submit()
    assert len(log.records) == 2


async def test_leadership_that_ends_with_the_append() -> None:
    log = ListLog()
    log.fail_apply = None

    def append(records: Sequence[Any]) -> bytes:
        log.records += records
        log.queue.end(OVER)
        return b"batch"

    log.queue.append = append
    with pytest.raises(KafkaError, match="controller 1 is active"):
        log.submit()
    assert not log.failures


async def test_an_error_that_left_nothing_is_one_operations() -> None:
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
    answer = log.submit("next")
    log.queue.committed(1)
    assert await answer == "next"
    assert not log.failures


async def test_what_cannot_be_applied_ends_the_node() -> None:
    log = ListLog()
    waits = log.submit()
    log.fail_apply = error = ValueError("bug")
    with pytest.raises(KafkaError):
        log.submit()
    assert log.failures == [error]
    assert await code(waits) is ErrorCode.UNKNOWN_SERVER_ERROR
    with pytest.raises(KafkaError):
        log.submit()
    assert log.failures == [error]


async def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_queue, "OPERATIONS_MAX", 2)
    log = ListLog()
    taken = [log.submit(), log.submit()]
    with pytest.raises(KafkaError) as caught:
        log.submit()
    assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
    taken.append(log.queue.submit(lambda: Decision([], "undone"), is_cleanup=True))
    log.queue.committed(2)
    assert await asyncio.gather(*taken) == ["one", "one", "undone"]


async def test_a_client_that_left_is_no_matter() -> None:
    log = ListLog()
    left, stays = log.submit("left"), log.submit("stays")
    left.cancel()
    log.queue.committed(2)
    assert await stays == "stays"


async def test_draining_takes_no_more_and_waits_for_the_rest() -> None:
    log = ListLog()
    waits = log.submit("waits")
    draining = asyncio.create_task(log.queue.drain(20, OVER))
    await asyncio.sleep(0)
    with pytest.raises(KafkaError, match="controller 1"):
        log.submit()
    log.queue.committed(1)
    await draining
    assert await waits == "waits"
    late = ListLog()
    waits = late.submit()
    await late.queue.drain(0.01, OVER)
    assert await code(waits) is ErrorCode.NOT_CONTROLLER


@pytest.fixture
def _short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_queue, "SLICE_S", 0.0)


@pytest.mark.usefixtures("_short_slices")
async def test_nothing_is_decided_while_something_is_half_applied() -> None:
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
    assert not first.done(), "it is not applied yet"
    third.cancel()
    assert await first == "first"
    while len(log.records) < 2:  # noqa: ASYNC110 - a turn of the loop is a step
        await asyncio.sleep(0)
    log.queue.committed(2)
    assert await second == "second"
    while log.queue.pending:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert decided == ["first", "second"], "who left before its turn decides nothing"


@pytest.mark.usefixtures("_short_slices")
async def test_decisions_of_one_turn_have_none_of_others_between_them() -> None:
    log = ListLog()
    log.steps = 2
    all_ = log.queue.decide_all([lambda name=name: Decision([name], None) for name in "abc"])  # type: ignore[misc]
    other = log.submit("other")
    await all_
    assert log.records == ["a", "b", "c"], "and nobody waits for the watermark"
    log.queue.committed(4)
    assert await other == "other"
    assert log.records == ["a", "b", "c", "other"]

    def broken() -> Iterator[decision_queue.Decide]:
        yield lambda: Decision(["d"], None)
        raise ZeroDivisionError

    assert await code(log.queue.decide_all(broken())) is ErrorCode.UNKNOWN_SERVER_ERROR
    log.steps = 0
    log.queue.committed(6)
    assert await log.submit("goes on") == "goes on"


@pytest.mark.usefixtures("_short_slices")
async def test_an_epoch_that_ends_within_a_batch() -> None:
    """What is half applied comes to its end; it and what waits for its turn is refused."""
    log = ListLog()
    applied: list[bytes] = []

    def apply(records: Sequence[Any], batch: bytes) -> Iterator[None]:
        yield from ListLog.apply(log, records, batch)
        applied.append(batch)

    log.queue.apply = apply
    log.steps = 3
    half, several = log.submit("half"), log.queue.decide_all([lambda: Decision(["never"], None)])
    queued = log.submit("queued")
    log.queue.end(OVER)
    assert log.queue.high_watermark == 0
    for answer in (half, several, queued):
        assert await code(answer) is ErrorCode.NOT_CONTROLLER
    while log.queue.pending:  # noqa: ASYNC110 - a turn of the loop is a step
        await asyncio.sleep(0)
    assert applied == [b"batch"]
    assert log.records == ["half"]


@pytest.mark.usefixtures("_short_slices")
async def test_draining_gives_what_is_half_applied_its_time() -> None:
    log = ListLog()
    log.steps = 5
    half, queued = log.submit("half"), log.submit("queued")
    draining = asyncio.create_task(log.queue.drain(20, OVER))
    assert await code(queued) is ErrorCode.NOT_CONTROLLER
    assert not half.done()
    log.queue.committed(1)
    await draining
    assert await half == "half"


@pytest.mark.usefixtures("_short_slices")
async def test_turns_count_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_queue, "OPERATIONS_MAX", 2)
    log = ListLog()
    log.steps = 3
    taken = [log.submit(), log.submit()]
    with pytest.raises(KafkaError):
        log.submit()
    log.queue.committed(2)
    assert await asyncio.gather(*taken) == ["one", "one"]
