"""Obtains the producer id of an idempotent producer at start and when its epochs are used up (InitProducerId).

Any broker may serve the request. Retriable errors are retried without limit, at one broker after another; batches wait
meanwhile, each for at most `delivery.timeout.ms`. Any other error ends the producer.
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
    """Requests producer ids for `sequences`.

    Calls `on_identified` after success, and `on_failure` after an error that is not retriable.
    """

    config: ProducerConfig
    metadata: Metadata
    pool: ConnectionPool
    sequences: ProducerSequences
    on_identified: Callable[[], None]
    on_failure: Callable[[KafkaError], None]

    def __post_init__(self) -> None:
        self.error: KafkaError | None = None
        """The error of the last attempt; None after success."""
        self._backoff = Backoff(self.config.retry_backoff_ms, self.config.retry_backoff_max_ms)
        self._task: asyncio.Task[None] | None = None

    def request(self) -> None:
        """Start requesting a producer id, unless there is one or a request is pending."""
        if self._task is None and self.sequences.identity is None:
            self._task = asyncio.create_task(self._obtain(), name="kipmesh-producer-id")
            self._task.add_done_callback(self._on_task_done)

    async def close(self) -> None:
        """Stop requesting a producer id. Calls neither callback."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        error = None if task.cancelled() else task.exception()
        if isinstance(error, KafkaError):
            self.on_failure(error)
        elif error is not None:
            self.on_failure(task_failure(task, "the producer id task") or KafkaError(-1))
        elif not task.cancelled():
            self.on_identified()

    async def _obtain(self) -> None:
        attempt = 0
        while True:
            brokers = sorted(self.metadata.brokers)
            if brokers:
                response = await self._request_from(brokers[attempt % len(brokers)])
                if response is not None:
                    self.sequences.set_identity(response.producer_id, response.producer_epoch)
                    self.error = None
                    log.debug("obtained producer id producer_id=%d", response.producer_id)
                    return
            attempt += 1
            await asyncio.sleep(self._backoff.delay_s(attempt))

    async def _request_from(self, broker_id: int) -> InitProducerIdResponse | None:
        address = self.metadata.address(broker_id)
        if address is None:
            return None
        try:
            response: InitProducerIdResponse = await call(
                self.pool, address, InitProducerIdRequest(), self.config.request_timeout_ms / 1000
            )
        except TransportError as error:
            if error.unimplemented:
                text = f"broker at {address} does not support idempotent producers; set enable.idempotence=false"
                raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, text) from None
            self.error = KafkaError(ErrorCode.NETWORK_EXCEPTION, str(error))
            return None
        if not response.error_code:
            return response
        self.error = KafkaError(response.error_code, response.error_message or "")
        if not self.error.retriable:
            raise self.error
        log.debug("producer id request failed error=%s", self.error)
        return None
