"""The producer id of an idempotent producer: asked of any broker, at the start and when the epochs are used up.

What may pass is tried again without end, at one broker after the other; batches wait meanwhile, each for at most
`delivery.timeout.ms`. A broker that does not know the call, or refuses it for good, ends the producer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kipmesh.client.calls import Backoff, call, task_failure
from kipmesh.client.metadata import Metadata
from kipmesh.core.config import ProducerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.producer.sequences import ProducerSequences
from kipmesh.messages import InitProducerIdRequest, InitProducerIdResponse
from kipmesh.transport.grpc.client import ConnectionPool, TransportError

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ProducerIds:
    """Keeps `sequences` identified."""

    config: ProducerConfig
    metadata: Metadata
    pool: ConnectionPool
    sequences: ProducerSequences
    on_identified: Callable[[], None]
    on_failure: Callable[[KafkaError], None]

    def __post_init__(self) -> None:
        self.error: KafkaError | None = None
        """Why there is no producer id yet."""
        self._backoff = Backoff(self.config.retry_backoff_ms, self.config.retry_backoff_max_ms)
        self._task: asyncio.Task[None] | None = None

    def want(self) -> None:
        """Get a producer id, unless there is one or it is asked for already."""
        if self._task is None and self.sequences.identity is None:
            self._task = asyncio.create_task(self._obtain(), name="kipmesh-producer-id")
            self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        error = None if task.cancelled() else task.exception()
        if isinstance(error, KafkaError):
            self.on_failure(error)
        elif error is not None:
            self.on_failure(task_failure(task, "the task that gets a producer id") or KafkaError(-1))
        elif not task.cancelled():
            self.on_identified()

    async def _obtain(self) -> None:
        attempt = 0
        while True:
            brokers = sorted(self.metadata.brokers)
            if brokers:
                answer = await self._ask(brokers[attempt % len(brokers)])
                if answer is not None:
                    self.sequences.identified(answer.producer_id, answer.producer_epoch)
                    self.error = None
                    log.debug("producer id %d", answer.producer_id)
                    return
            attempt += 1
            await asyncio.sleep(self._backoff.delay_s(attempt))

    async def _ask(self, broker_id: int) -> InitProducerIdResponse | None:
        address = self.metadata.address(broker_id)
        if address is None:
            return None
        try:
            answer: InitProducerIdResponse = await call(
                self.pool, address, InitProducerIdRequest(), self.config.request_timeout_ms / 1000
            )
        except TransportError as error:
            if error.unimplemented:
                text = f"the broker at {address} does not know idempotent producers: say enable.idempotence=false"
                raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, text) from None
            self.error = KafkaError(ErrorCode.NETWORK_EXCEPTION, str(error))
            return None
        if not answer.error_code:
            return answer
        self.error = KafkaError(answer.error_code, answer.error_message or "")
        if not self.error.retriable:
            raise self.error
        log.debug("no producer id: %s", self.error)
        return None
