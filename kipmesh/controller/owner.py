"""Decisions of an active controller in one epoch of the quorum, and the responses that wait for them.

A decision is made and appended in one step of the event loop, then applied before the next one is made; its response
waits until the high watermark has passed everything that the decision saw, while this node leads the same epoch. To
apply it may take long (630-16), so that others have the loop in between; operations that come meanwhile wait their
turn. When the epoch ends, what still waits is refused with NOT_CONTROLLER: its records may be kept by the next leader
or cut, nobody can say.

Invariants: a response is never sent before all records that its decision saw are committed; responses go out in the
order of decisions; nothing is decided on an image that has a part of a batch, nor after the epoch ended; what was
appended is applied to its end, even then. What cannot be decided, encoded or appended (a bug, a full disk) is the error
of that one operation; records that were appended and cannot be applied end the node, never silently.
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
"""Responses that wait for their turn or to be committed; more are refused with REQUEST_TIMED_OUT, a retriable error."""
_TEXT_LENGTH_MAX = 500

Decide = Callable[[], Decision[Any]]
DecideWith = Callable[[MetadataController], Decision[Any]]
Do = Callable[[str, DecideWith], Awaitable[Any]]
"""Name and decision of an operation -> its response, once committed; raises KafkaError."""


class DoOrCleanUp(Protocol):
    """`Do`, and for what an operation must undo at its end a way past OPERATIONS_MAX (`Owner.submit`)."""

    def __call__(self, operation: str, decide: DecideWith, /, *, is_cleanup: bool = False) -> Awaitable[Any]:
        """The same arguments and errors; `is_cleanup` for that way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerParts:
    """Made once per controller, before it listens."""

    do: DoOrCleanUp
    """Makes one decision while this controller is active; its response comes when the decision is committed."""
    now_ms: Callable[[], int]
    """The monotonic clock."""
    next_offset: Callable[[], int]
    """The log end offset of the metadata log."""
    disconnected: Callable[[int, int], None]
    """Called with a broker and the number of its heartbeat stream when that ended."""
    heartbeat_streams: dict[int, int] = field(default_factory=dict)
    """Open heartbeat streams, and the broker of each."""

    def stream_ended(self, context: RequestContext) -> None:
        """Handle the end of a heartbeat stream: the broker ended it, or it broke."""
        broker_id = self.heartbeat_streams.pop(context.stream, None)
        if broker_id is not None:
            self.disconnected(broker_id, context.stream)


class _Turn(NamedTuple):
    """Decisions with none of others between them."""

    steps: Iterator[None]
    future: asyncio.Future[Any]


class _Waiting(NamedTuple):
    end_offset: int
    future: asyncio.Future[Any]
    response: Any


@dataclass(eq=False)
class Owner:
    """Makes decisions from its making until `end`; use it inside one event loop.

    `append` gives the batch, or raises and leaves the log as it was; the steps of `apply` must not fail.
    """

    _: KW_ONLY
    append: Callable[[Sequence[Record]], bytes]
    apply: Callable[[Sequence[Record], bytes], Iterator[None]]
    end_offset: Callable[[], int]
    high_watermark: int
    on_failure: Callable[[BaseException], None]

    def __post_init__(self) -> None:
        self._turns: deque[_Turn] = deque()
        """The first has begun."""
        self._waiting: deque[_Waiting] = deque()
        self._drained = asyncio.Event()
        self._refusal: KafkaError | None = None
        self._is_over = False

    @property
    def waiting(self) -> int:
        """Responses that wait for their turn or to be committed."""
        return len(self._waiting) + len(self._turns)

    def submit(self, decide: Decide, *, is_cleanup: bool = False) -> asyncio.Future[Any]:
        """Decide as soon as nothing is half applied, most often now; the response comes when it is committed.

        Raises KafkaError for what is not decided or not appended now; what waits for its turn has it in the response.
        A cleanup ends what an earlier operation began, so there is at most one for each: it is never one too many.
        """
        return self._begin(partial(self._operation, decide), is_limited=not is_cleanup)

    def decide_all(self, decisions: Iterable[Decide]) -> asyncio.Future[Any]:
        """The same with several decisions, asked for one by one, that nobody else's come between, nor wait for.

        The response is there when the last one is applied, which need not be committed then.
        """
        return self._begin(partial(self._decide_all, decisions))

    def _begin(
        self, steps: Callable[[asyncio.Future[Any]], Iterator[None]], *, is_limited: bool = True
    ) -> asyncio.Future[Any]:
        self._check()
        if is_limited and self.waiting >= OPERATIONS_MAX:
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, f"{OPERATIONS_MAX} operations are waiting")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._turns.append(_Turn(steps(future), future))
        if len(self._turns) == 1:
            self._go_on()
            if future.done() and not future.cancelled() and (error := future.exception()) is not None:
                raise error
        return future

    def _go_on(self) -> None:
        """One turn after the other, for a slice of time."""
        end = time.perf_counter() + SLICE_S
        while self._turns:
            turn = self._turns[0]
            try:
                next(turn.steps)
            except StopIteration:
                self._turns.popleft()
            except Exception as error:
                self._turns.popleft()
                if not turn.future.done():
                    turn.future.set_exception(as_kafka_error(error))
            if self._turns and time.perf_counter() >= end:
                asyncio.get_running_loop().call_soon(self._go_on)
                return
        self._look_if_drained()

    def _operation(self, decide: Decide, future: asyncio.Future[Any]) -> Iterator[None]:
        if future.done():
            return  # whoever asked left before its turn
        response = yield from self._decide(decide)
        end = self.end_offset()
        if future.done():
            return
        if end <= self.high_watermark:
            future.set_result(response)
        else:
            self._waiting.append(_Waiting(end, future, response))

    def _decide_all(self, decisions: Iterable[Decide], future: asyncio.Future[Any]) -> Iterator[None]:
        for decide in decisions:
            yield from self._decide(decide)
        if not future.done():
            future.set_result(None)

    def _decide(self, decide: Decide) -> Generator[None, None, Any]:
        """Gives the response, which must not be told to anybody yet."""
        self._check()
        try:
            decision = decide()
            batch = self.append(decision.records) if decision.records else b""
        except KafkaError as error:  # not the leader any more, a full disk
            log.warning("operation refused", error=str(error))
            self._check()
            raise
        except Exception as error:  # a bug: this request fails, the state is as it was
            log.error("operation failed", exc_info=error)
            raise as_kafka_error(error) from error
        if batch:
            try:
                yield from self.apply(decision.records, batch)
            except Exception as error:
                log.error("what was appended cannot be applied", exc_info=error)
                refusal = as_kafka_error(error)
                self.end(refusal)
                self.on_failure(error)
                raise refusal from error
        if self._is_over:  # leadership may have ended with the append, or since
            self._check()
        return decision.response

    def _check(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def committed(self, high_watermark: int) -> None:
        """Send the responses that waited for it."""
        self.high_watermark = max(self.high_watermark, high_watermark)
        while self._waiting and self._waiting[0].end_offset <= self.high_watermark:
            waiting = self._waiting.popleft()
            if not waiting.future.done():
                waiting.future.set_result(waiting.response)
        self._look_if_drained()

    def _look_if_drained(self) -> None:
        if not self._waiting and not self._turns:
            self._drained.set()

    def end(self, refusal: KafkaError) -> None:
        """The epoch is over: refuse what waits, and all that comes; the first call counts.

        What is half applied goes on, for the image's sake.
        """
        self._is_over = True
        if self._refusal is None:
            self._refusal = refusal
        for turn in self._turns:
            if not turn.future.done():
                turn.future.set_exception(refusal)
        while self._waiting:
            future = self._waiting.popleft().future
            if not future.done():
                future.set_exception(refusal)
        self._drained.set()

    async def drain(self, grace_s: float, refusal: KafkaError) -> None:
        """Take no more, and give what waits `grace_s` to be committed; what is left is refused."""
        if self._refusal is None:
            self._refusal = refusal
        if self.waiting:
            self._drained.clear()
            try:
                async with asyncio.timeout(grace_s):
                    await self._drained.wait()
            except TimeoutError:
                log.warning("stopping with unfinished operations", operations=self.waiting)
        self.end(refusal)


def as_kafka_error(error: BaseException) -> KafkaError:
    """Any error as one that a client can be told."""
    if isinstance(error, KafkaError):
        return error
    if isinstance(error, OSError):
        return KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, str(error))
    return KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, f"{type(error).__name__}: {error}"[:_TEXT_LENGTH_MAX])
