"""Decisions of an active controller in one epoch of the quorum, and the answers that wait for them.

A decision is made, appended and applied at once, in one step of the event loop; its answer waits until the high
watermark has passed everything that the decision saw, while this node leads the same epoch. When the epoch ends, what
still waits is refused with NOT_CONTROLLER: its records may be kept by the next leader or cut, nobody can say.

Invariants: an answer is never sent before all records that its decision saw are committed; answers go out in the order
of decisions; nothing is decided after the epoch ended. What cannot be decided, encoded or appended (a bug, a full disk)
is the error of that one operation; records that were appended and cannot be applied end the node, never silently.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import structlog

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.decision import Decision
from kipmesh.core.metadata.records import Record

log = structlog.get_logger(__name__)

OPERATIONS_MAX = 10_000
"""Answers that wait to be committed; more are refused with REQUEST_TIMED_OUT, which clients retry."""
_TEXT_LENGTH_MAX = 500

Decide = Callable[[], Decision[Any]]


class _Waiting(NamedTuple):
    end_offset: int
    answer: asyncio.Future[Any]
    response: Any


class Owner:
    """Makes decisions from its making until `end`; use it inside one event loop."""

    def __init__(
        self,
        *,
        append: Callable[[Sequence[Record]], bytes],
        apply: Callable[[Sequence[Record], bytes], None],
        end_offset: Callable[[], int],
        high_watermark: int,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`append` gives the batch, or raises and leaves the log as it was; `apply` must not fail."""
        self.high_watermark = high_watermark
        self._append = append
        self._apply = apply
        self._end_offset = end_offset
        self._on_failure = on_failure
        self._waiting: deque[_Waiting] = deque()
        self._drained = asyncio.Event()
        self._refusal: KafkaError | None = None

    @property
    def waiting(self) -> int:
        """Answers that wait to be committed."""
        return len(self._waiting)

    async def do(self, decide: Decide) -> Any:
        """Decide, and return the response when it is committed; raises KafkaError when that cannot be."""
        return await self.submit(decide)

    def submit(self, decide: Decide) -> asyncio.Future[Any]:
        """Decide now; the response comes later. Raises KafkaError for what is not decided or not appended."""
        if len(self._waiting) >= OPERATIONS_MAX:
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, f"{OPERATIONS_MAX} operations are waiting")
        response = self.decide(decide)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        end = self._end_offset()
        if end <= self.high_watermark:
            answer.set_result(response)
        else:
            self._waiting.append(_Waiting(end, answer, response))
        return answer

    def decide(self, decide: Decide) -> Any:
        """The same for what nobody waits for: gives the response, which must not be told to anybody."""
        self._check()
        try:
            decision = decide()
            batch = self._append(decision.records) if decision.records else b""
        except KafkaError as error:  # not the leader any more, a full disk
            log.warning("operation refused", error=str(error))
            self._check()
            raise
        except Exception as error:  # a bug: this request fails, the state is as it was
            log.error("operation failed", exc_info=error)
            raise as_kafka_error(error) from error
        if batch:
            try:
                self._apply(decision.records, batch)
            except Exception as error:
                log.error("what was appended cannot be applied", exc_info=error)
                refusal = as_kafka_error(error)
                self.end(refusal)
                self._on_failure(error)
                raise refusal from error
        self._check()  # leadership may have ended with the append
        return decision.response

    def _check(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def committed(self, high_watermark: int) -> None:
        """Send the answers that waited for it."""
        self.high_watermark = max(self.high_watermark, high_watermark)
        while self._waiting and self._waiting[0].end_offset <= self.high_watermark:
            waiting = self._waiting.popleft()
            if not waiting.answer.done():
                waiting.answer.set_result(waiting.response)
        if not self._waiting:
            self._drained.set()

    def end(self, refusal: KafkaError) -> None:
        """The epoch is over: refuse what waits, and all that comes; the first call counts."""
        if self._refusal is None:
            self._refusal = refusal
        while self._waiting:
            answer = self._waiting.popleft().answer
            if not answer.done():
                answer.set_exception(refusal)
        self._drained.set()

    async def drain(self, grace_s: float, refusal: KafkaError) -> None:
        """Take no more, and give what waits `grace_s` to be committed; what is left is refused."""
        if self._refusal is None:
            self._refusal = refusal
        if self._waiting:
            self._drained.clear()
            try:
                async with asyncio.timeout(grace_s):
                    await self._drained.wait()
            except TimeoutError:
                log.warning("stopping with unfinished operations", operations=len(self._waiting))
        self.end(refusal)


def as_kafka_error(error: BaseException) -> KafkaError:
    """Any error as one that a client can be told."""
    if isinstance(error, KafkaError):
        return error
    if isinstance(error, OSError):
        return KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, str(error))
    return KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, f"{type(error).__name__}: {error}"[:_TEXT_LENGTH_MAX])
