"""The one task that owns the controller's state, and the group commit behind it.

Operations wait in a bounded queue and are decided one after the other: a decision's records are appended and applied
at once, and its answer waits until they are on disk. One fsync at a time runs on a thread and covers everything
appended before it, so many operations share one. Observers are shown what is on disk only: `high_watermark`.

Invariants: an answer is never sent before all records that its decision saw are durable; answers go out in the order
of decisions; the high watermark never goes back; after a failure of the disk nothing is answered but with an error.
What cannot be decided, encoded or appended (a bug, a full disk) and left nothing in a healthy log is the error of that
one operation; anything else that is not expected ends the node, never silently.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import structlog

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.decision import Decision
from kipmesh.core.metadata.records import Record

log = structlog.get_logger(__name__)

OPERATIONS_MAX = 10_000
"""Operations that wait to be decided; more are refused with REQUEST_TIMED_OUT, which clients retry."""
OPERATIONS_BEFORE_YIELD = 64
_TEXT_LENGTH_MAX = 500

Decide = Callable[[], Decision[Any]]
Append = Callable[[Sequence[Record]], None]


class _Operation(NamedTuple):
    decide: Decide
    answer: asyncio.Future[Any]


class _Waiting(NamedTuple):
    end_offset: int
    answer: asyncio.Future[Any]
    response: Any


class Owner:
    """Runs operations; make it inside the event loop."""

    def __init__(
        self,
        *,
        append: Append,
        flush: Callable[[], None],
        end_offset: Callable[[], int],
        on_high_watermark: Callable[[int], None],
        on_failure: Callable[[BaseException], None],
        is_log_healthy: Callable[[], bool],
    ) -> None:
        """`is_log_healthy` says after a failed append whether the next may succeed."""
        self._append = append
        self._flush = flush
        self._end_offset = end_offset
        self._on_high_watermark = on_high_watermark
        self._on_failure = on_failure
        self._is_log_healthy = is_log_healthy
        self._queue: asyncio.Queue[_Operation] = asyncio.Queue(OPERATIONS_MAX)
        self._next: deque[_Operation] = deque()
        self._waiting: deque[_Waiting] = deque()
        self._unflushed = asyncio.Event()
        self._durable = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metadata-fsync")
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None
        self._is_stopping = False
        self.high_watermark = end_offset()

    @property
    def is_active(self) -> bool:
        """Whether operations are taken."""
        return bool(self._tasks) and not self._is_stopping and self._failure is None

    @property
    def queued(self) -> int:
        """Operations that wait to be decided."""
        return self._queue.qsize()

    def start(self) -> None:
        """Take operations from now on; everything in the log is durable."""
        self.high_watermark = self._end_offset()
        self._tasks = [
            asyncio.create_task(self._decide_all(), name="controller-owner"),
            asyncio.create_task(self._commit_all(), name="controller-commit"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def do(self, decide: Decide) -> Any:
        """Decide, and return the response when it is durable; raises KafkaError when that cannot be."""
        answer = self.submit(decide)
        return await answer

    def submit(self, decide: Decide) -> asyncio.Future[Any]:
        """The same without waiting; raises KafkaError when the operation is not taken."""
        if not self.is_active:
            raise KafkaError(ErrorCode.NOT_CONTROLLER, "this controller is not active")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            self._queue.put_nowait(_Operation(decide, answer))
        except asyncio.QueueFull:
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, f"{OPERATIONS_MAX} operations are waiting") from None
        return answer

    def submit_next(self, decide: Decide) -> None:
        """From within a decision: one that follows it before any other operation, and that nobody waits for."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_take_note)
        self._next.append(_Operation(decide, answer))

    async def _decide_all(self) -> None:
        done = 0
        while True:
            self._decide(await self._queue.get())
            while self._next:
                self._decide(self._next.popleft())
            done += 1
            if done % OPERATIONS_BEFORE_YIELD == 0:
                await asyncio.sleep(0)

    def _decide(self, operation: _Operation) -> None:
        if operation.answer.cancelled():
            return
        try:
            decision = operation.decide()
        except Exception as error:  # a bug: this request fails, the state is as it was
            self._refuse_one(operation, error)
            return
        before = self._end_offset()
        if decision.records:
            try:
                self._append(decision.records)
            except Exception as error:
                self._refuse_one(operation, error)
                if self._end_offset() != before or not self._is_log_healthy():
                    self._fail(error)
                return
        end = self._end_offset()
        if end <= self.high_watermark:
            operation.answer.set_result(decision.response)
            return
        self._waiting.append(_Waiting(end, operation.answer, decision.response))
        self._unflushed.set()

    async def _commit_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._unflushed.wait()
            self._unflushed.clear()
            end = self._end_offset()
            if end > self.high_watermark:
                try:
                    await loop.run_in_executor(self._thread, self._flush)
                except Exception as error:
                    self._fail(error)
                    return
                self.high_watermark = end
                self._on_high_watermark(end)
            while self._waiting and self._waiting[0].end_offset <= self.high_watermark:
                waiting = self._waiting.popleft()
                if not waiting.answer.done():
                    waiting.answer.set_result(waiting.response)
            self._durable.set()

    def _refuse_one(self, operation: _Operation, error: Exception) -> None:
        log.error("operation failed", exc_info=error)
        if not operation.answer.done():
            operation.answer.set_exception(_as_kafka_error(error))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Both tasks run until they are cancelled, or until the failure that ends the node."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a task of the controller failed", task=task.get_name(), exc_info=error)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None:
            return
        self._failure = error
        refusal = _as_kafka_error(error)
        while self._waiting:
            _refuse(self._waiting.popleft().answer, refusal)
        while not self._queue.empty():
            _refuse(self._queue.get_nowait().answer, refusal)
        self._durable.set()
        self._on_failure(error)

    async def stop(self, grace_s: float) -> None:
        """Take no more, end what was taken within `grace_s`, and refuse the rest."""
        self._is_stopping = True
        try:
            async with asyncio.timeout(grace_s):
                while self._failure is None and (not self._queue.empty() or self._waiting):
                    self._durable.clear()
                    if self._waiting:
                        await self._durable.wait()
                    else:
                        await asyncio.sleep(0)
        except TimeoutError:
            log.warning("stopping with unfinished operations", operations=self.queued + len(self._waiting))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        refusal = KafkaError(ErrorCode.NOT_CONTROLLER, "this controller stops")
        while self._waiting:
            _refuse(self._waiting.popleft().answer, refusal)
        while not self._queue.empty():
            _refuse(self._queue.get_nowait().answer, refusal)
        self._thread.shutdown(wait=False)


def _take_note(answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled():
        answer.exception()  # a failure is told by `on_failure`


def _refuse(answer: asyncio.Future[Any], error: KafkaError) -> None:
    if not answer.done():
        answer.set_exception(error)


def _as_kafka_error(error: BaseException) -> KafkaError:
    if isinstance(error, KafkaError):
        return error
    if isinstance(error, OSError):
        return KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, str(error))
    return KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, f"{type(error).__name__}: {error}"[:_TEXT_LENGTH_MAX])
