"""Decisions of the active controller in one epoch of the quorum, and the responses that wait for their commit.

A decision is made and appended in one step of the event loop, then applied to the image before the next one is made.
Its response waits until the high watermark has passed every record that the decision saw. Applying a batch may take
long (630-16), so it yields to the event loop; operations that arrive meanwhile are queued. When the epoch ends, pending
operations fail with NOT_CONTROLLER: the next leader may keep or truncate their records.

Invariants: responses are sent in the order of decisions, and only after all records that the decision saw are
committed. No decision sees a partially applied batch or is made after the epoch ended. An appended batch is always
applied in full.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import structlog

from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.controller import MetadataController
from kipmesh.core.metadata.decision import Decision
from kipmesh.core.metadata.records import Record
from kipmesh.node.quorum.pacing import SLICE_S

log = structlog.get_logger(__name__)

OPERATIONS_MAX = 10_000
"""Maximum number of queued and uncommitted operations; more are refused with REQUEST_TIMED_OUT, a retriable error."""
_TEXT_LENGTH_MAX = 500

Decide = Callable[[], Decision[Any]]
DecideWith = Callable[[MetadataController], Decision[Any]]
Do = Callable[[str, DecideWith], Awaitable[Any]]
"""Takes the name and the decision of an operation. Returns the response after the commit, or raises KafkaError."""


class DoOrCleanUp(Protocol):
    """A `Do` with the option `is_cleanup`, which exempts an operation from OPERATIONS_MAX (see
    `DecisionQueue.submit`)."""

    def __call__(self, operation: str, decide: DecideWith, /, *, is_cleanup: bool = False) -> Awaitable[Any]:
        """Return the response of the operation after its commit, or raise KafkaError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerParts:
    """The functions of one controller that its request handlers call."""

    do: DoOrCleanUp
    """Makes one decision while this controller is active and returns the response once it is committed."""
    now_ms: Callable[[], int]
    """Reads the monotonic clock."""
    next_offset: Callable[[], int]
    """Returns the log end offset of the metadata log."""
    disconnected: Callable[[int, int], None]
    """Called with a broker id and the number of its heartbeat stream when that stream ends."""
    heartbeat_streams: dict[int, int] = field(default_factory=dict)
    """Open heartbeat streams: stream number -> broker id."""

    def stream_ended(self, context: RequestContext) -> None:
        """Report the end of a heartbeat stream, whether the broker closed it or it broke. Ignored for a stream without
        heartbeats."""
        broker_id = self.heartbeat_streams.pop(context.stream, None)
        if broker_id is not None:
            self.disconnected(broker_id, context.stream)


class _Operation(NamedTuple):
    """Decisions that are made and applied without other operations between them."""

    steps: Iterator[None]
    future: asyncio.Future[Any]


class _Uncommitted(NamedTuple):
    end_offset: int
    future: asyncio.Future[Any]
    response: Any


@dataclass(eq=False)
class DecisionQueue:
    """Makes decisions one after the other until `end`. Not thread-safe: use it within one event loop.

    Args: append: appends records and returns the batch, or raises and leaves the log unchanged; apply: applies a batch
    to the image in steps, which must not fail; end_offset: returns the log end offset; high_watermark: the current high
    watermark; on_failure: called if a batch could not be applied, after which the node must stop.
    """

    _: KW_ONLY
    append: Callable[[Sequence[Record]], bytes]
    apply: Callable[[Sequence[Record], bytes], Iterator[None]]
    end_offset: Callable[[], int]
    high_watermark: int
    on_failure: Callable[[BaseException], None]

    def __post_init__(self) -> None:
        self._queue: deque[_Operation] = deque()
        """The first operation has started."""
        self._uncommitted: deque[_Uncommitted] = deque()
        self._drained = asyncio.Event()
        self._refusal: KafkaError | None = None
        self._is_over = False

    @property
    def pending(self) -> int:
        """Number of operations that are queued or not yet committed."""
        return len(self._uncommitted) + len(self._queue)

    def submit(self, decide: Decide, *, is_cleanup: bool = False) -> asyncio.Future[Any]:
        """Make a decision now, or after the queued operations. The future completes with the response after the commit.

        Raises KafkaError if the operation is refused (REQUEST_TIMED_OUT at OPERATIONS_MAX, or the refusal passed to
        `end` or `drain`) or fails immediately; a later failure is set on the future. A cleanup is exempt from
        OPERATIONS_MAX. Each cleanup undoes an earlier operation, so their number is limited too.
        """
        return self._enqueue(partial(self._run_one, decide), is_limited=not is_cleanup)

    def decide_all(self, decisions: Iterable[Decide]) -> asyncio.Future[Any]:
        """Make several decisions without other operations between them.

        Each decision is taken from the iterable only after the previous one has been applied. The future completes with
        None when the last one is applied, which may be before its commit. Raises KafkaError if the operation is refused
        or fails immediately, as `submit` does; a later failure is set on the future.
        """
        return self._enqueue(partial(self._run_all, decisions))

    def _enqueue(
        self, steps: Callable[[asyncio.Future[Any]], Iterator[None]], *, is_limited: bool = True
    ) -> asyncio.Future[Any]:
        self._check()
        if is_limited and self.pending >= OPERATIONS_MAX:
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, f"{OPERATIONS_MAX} operations are pending; retry later")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.append(_Operation(steps(future), future))
        if len(self._queue) == 1:
            self._advance()
            if future.done() and not future.cancelled() and (error := future.exception()) is not None:
                raise error
        return future

    def _advance(self) -> None:
        """Run operations in order, for one time slice per iteration of the event loop."""
        end = time.perf_counter() + SLICE_S
        while self._queue:
            operation = self._queue[0]
            try:
                next(operation.steps)
            except StopIteration:
                self._queue.popleft()
            except Exception as error:
                self._queue.popleft()
                if not operation.future.done():
                    operation.future.set_exception(as_kafka_error(error))
            if self._queue and time.perf_counter() >= end:
                asyncio.get_running_loop().call_soon(self._advance)
                return
        self._signal_if_drained()

    def _run_one(self, decide: Decide, future: asyncio.Future[Any]) -> Iterator[None]:
        if future.done():
            return  # the client left while the operation was queued
        response = yield from self._decide(decide)
        end = self.end_offset()
        if future.done():
            return
        if end <= self.high_watermark:
            future.set_result(response)
        else:
            self._uncommitted.append(_Uncommitted(end, future, response))

    def _run_all(self, decisions: Iterable[Decide], future: asyncio.Future[Any]) -> Iterator[None]:
        for decide in decisions:
            yield from self._decide(decide)
        if not future.done():
            future.set_result(None)

    def _decide(self, decide: Decide) -> Generator[None, None, Any]:
        """Make the decision, then append and apply its records. Return the response, which must not be sent before the
        commit. Raises KafkaError."""
        self._check()
        try:
            decision = decide()
            batch = self.append(decision.records) if decision.records else b""
        except KafkaError as error:  # for example after a lost election or on a full disk
            log.warning("operation refused", error=str(error))
            self._check()
            raise
        except Exception as error:  # a bug: it fails this request only, the state is unchanged
            log.error("operation failed", exc_info=error)
            raise as_kafka_error(error) from error
        if batch:
            try:
                yield from self.apply(decision.records, batch)
            except Exception as error:
                log.error("applying an appended batch failed", exc_info=error)
                refusal = as_kafka_error(error)
                self.end(refusal)
                self.on_failure(error)
                raise refusal from error
        if self._is_over:  # the epoch may have ended during the append or the application
            self._check()
        return decision.response

    def _check(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def committed(self, high_watermark: int) -> None:
        """Raise the high watermark to `high_watermark`, and complete the responses whose records are below it."""
        self.high_watermark = max(self.high_watermark, high_watermark)
        while self._uncommitted and self._uncommitted[0].end_offset <= self.high_watermark:
            operation = self._uncommitted.popleft()
            if not operation.future.done():
                operation.future.set_result(operation.response)
        self._signal_if_drained()

    def _signal_if_drained(self) -> None:
        if not self.pending:
            self._drained.set()

    def end(self, refusal: KafkaError) -> None:
        """End the epoch: fail all pending and later operations with `refusal`. Later calls do not change the error.

        A partially applied batch is still applied in full, so that the image stays consistent.
        """
        self._is_over = True
        if self._refusal is None:
            self._refusal = refusal
        for future in [each.future for each in self._queue] + [each.future for each in self._uncommitted]:
            if not future.done():
                future.set_exception(refusal)
        self._uncommitted.clear()
        self._drained.set()

    async def drain(self, grace_s: float, refusal: KafkaError) -> None:
        """Refuse new operations with `refusal`, wait up to `grace_s` for the commit of the pending ones, then `end` the
        epoch."""
        if self._refusal is None:
            self._refusal = refusal
        if self.pending:
            self._drained.clear()
            try:
                async with asyncio.timeout(grace_s):
                    await self._drained.wait()
            except TimeoutError:
                log.warning("stopping with unfinished operations", operations=self.pending)
        self.end(refusal)


def as_kafka_error(error: BaseException) -> KafkaError:
    """Return a KafkaError unchanged, an OSError as KAFKA_STORAGE_ERROR and any other error as UNKNOWN_SERVER_ERROR."""
    if isinstance(error, KafkaError):
        return error
    if isinstance(error, OSError):
        return KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, str(error))
    return KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, f"{type(error).__name__}: {error}"[:_TEXT_LENGTH_MAX])
