"""The producer id of an idempotent producer: asked of any broker, at the start and when the epochs are used up.

What may pass is tried again without end, at one broker after the other; batches wait meanwhile, each for at most
`delivery.timeout.ms`. A broker that does not know the call, or refuses it for good, ends the producer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kipmesh.client.backoff import Backoff
from kipmesh.client.metadata import Metadata
from kipmesh.client.supervision import task_failure
from kipmesh.core.config import ProducerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.producer_sequences import ProducerSequences
from kipmesh.messages import InitProducerIdRequest, InitProducerIdResponse
from kipmesh.rpc.client import ConnectionPool, TransportError

log = logging.getLogger(__name__)


class ProducerIds:
    """Keeps `sequences` identified."""

    def __init__(
        self,
        config: ProducerConfig,
        metadata: Metadata,
        pool: ConnectionPool,
        sequences: ProducerSequences,
        on_identified: Callable[[], None],
        on_failure: Callable[[KafkaError], None],
    ) -> None:
        self.error: KafkaError | None = None
        """Why there is no producer id yet."""
        self._config = config
        self._metadata = metadata
        self._pool = pool
        self._sequences = sequences
        self._on_identified = on_identified
        self._on_failure = on_failure
        self._backoff = Backoff(config.retry_backoff_ms, config.retry_backoff_max_ms)
        self._task: asyncio.Task[None] | None = None

    def want(self) -> None:
        """Get a producer id, unless there is one or it is asked for already."""
        if self._task is None and self._sequences.identity is None:
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
            self._on_failure(error)
        elif error is not None:
            self._on_failure(task_failure(task, "the task that gets a producer id") or KafkaError(-1))
        elif not task.cancelled():
            self._on_identified()

    async def _obtain(self) -> None:
        attempt = 0
        while True:
            brokers = sorted(self._metadata.brokers)
            if brokers:
                answer = await self._ask(brokers[attempt % len(brokers)])
                if answer is not None:
                    self._sequences.identified(answer.producer_id, answer.producer_epoch)
                    self.error = None
                    log.debug("producer id %d", answer.producer_id)
                    return
            attempt += 1
            await asyncio.sleep(self._backoff.delay_s(attempt))

    async def _ask(self, broker_id: int) -> InitProducerIdResponse | None:
        address = self._metadata.address(broker_id)
        if address is None:
            return None
        try:
            answer: InitProducerIdResponse = await self._pool.get(address).call(
                "Broker", "InitProducerId", InitProducerIdRequest(), self._config.request_timeout_ms / 1000
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
