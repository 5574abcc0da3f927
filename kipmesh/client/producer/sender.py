"""Sends ready batches. A Produce request has at most one batch of each ready partition of its leader.

A batch is ready when it is full, `linger.ms` old, or when a caller flushes or waits for memory. One task drains the
queues; each request runs in its own task, and requests to one broker are sent in order. With idempotence,
`kipmesh.core.producer.sequences` decides when a batch may be sent and with which sequences; without it, each partition
has one batch in flight. Invariants: a partition in `_ready` is not in backoff; a retried batch returns to its position
in the queue; every batch is finished once, at the latest `delivery.timeout.ms` after its creation. After `failure` is
set, all batches are finished and no records are accepted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from kipmesh.client.arguments import counted
from kipmesh.client.calls import Backoff, call, task_failure, transport_failure
from kipmesh.client.compression import COMPRESSIONS, Compression
from kipmesh.client.metadata import Metadata
from kipmesh.client.producer.accumulator import Batch, BufferMemory, PartitionQueue
from kipmesh.client.producer.leader_watch import LeaderWatch
from kipmesh.client.producer.producer_ids import ProducerIds
from kipmesh.client.records import read_batch, restamped, seal
from kipmesh.core.config import ProducerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.producer.sequences import UNRESOLVED_MAX, BatchSequence, ProducerSequences, Verdict
from kipmesh.core.record_batch import parse_header
from kipmesh.messages import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from kipmesh.transport.grpc.client import ConnectionPool, TransportError

log = logging.getLogger(__name__)

_REQUEST_OVERHEAD_BYTES = 128
_COMPRESS_ON_LOOP_BYTES_MAX = 32 << 10


class Sender:
    """Sends the batches of one producer. `on_failure` is called once when a fatal error ends the producer."""

    def __init__(
        self,
        config: ProducerConfig,
        metadata: Metadata,
        pool: ConnectionPool,
        memory: BufferMemory,
        on_failure: Callable[[], None],
    ) -> None:
        self.incomplete: dict[Batch, None] = {}
        self.failure: KafkaError | None = None
        self._on_failure = on_failure
        self._config = config
        self._metadata = metadata
        self._pool = pool
        self._memory = memory
        level = {
            "gzip": config.compression_gzip_level,
            "lz4": config.compression_lz4_level,
            "zstd": config.compression_zstd_level,
        }.get(config.compression_type, 0)
        self._compression = Compression(COMPRESSIONS.index(config.compression_type), level)
        self._linger_s = config.linger_ms / 1000
        self._delivery_timeout_s = config.delivery_timeout_ms / 1000
        self._backoff = Backoff(config.retry_backoff_ms, config.retry_backoff_max_ms)
        self._loop = asyncio.get_running_loop()
        self.wake = asyncio.Event()
        """Set after a change that may allow sending: new metadata, or a `send` that waits for memory."""
        self._timer: asyncio.TimerHandle | None = None
        self._ready: dict[PartitionQueue, None] = {}
        self._delayed: dict[PartitionQueue, None] = {}
        self._lingering: deque[Batch] = deque()
        self._by_age: deque[Batch] = deque()
        self._requests: dict[int, int] = {}
        self._last_sent: dict[int, asyncio.Event] = {}  # by leader: set once its latest request has been sent
        self._tasks: set[asyncio.Task[None]] = set()
        self._flushes = 0
        self._sequences = ProducerSequences()
        self._ids = ProducerIds(config, metadata, pool, self._sequences, self._on_producer_id, self.fail)
        self._in_flight_max = UNRESOLVED_MAX if config.enable_idempotence else 1
        if config.enable_idempotence:
            self._ids.request()
        self._task = asyncio.create_task(self._run(), name="kipmesh-producer")
        self._task.add_done_callback(self._on_task_done)

    # -- called by the producer

    def batch_opened(self, batch: Batch) -> None:
        """Register a new open batch. It becomes ready to be sent after `linger.ms` at the latest."""
        self.incomplete[batch] = None
        queue = batch.queue
        if queue.sequences is None and self._config.enable_idempotence:
            queue.sequences = self._sequences.of(queue.topic, queue.partition)
        self._by_age.append(batch)
        self._lingering.append(batch)
        if self._linger_s == 0 or self._flushes or self._memory.waiters or len(self._lingering) == 1:
            self.wake.set()

    def batch_full(self, queue: PartitionQueue) -> None:
        """Schedule a queue for sending because its open batch is full."""
        self._mark_ready(queue)
        self.wake.set()

    async def flush(self) -> None:
        """Send all current batches and wait until each is delivered or has failed. Does not raise their errors."""
        self._flushes += 1
        self.wake.set()
        try:
            for batch in list(self.incomplete):
                await self._wait_finished(batch)
            if self._config.acks == 0 and self._tasks:
                await asyncio.wait(set(self._tasks))  # with acks=0 batches finish before their request is sent
        finally:
            self._flushes -= 1

    async def _wait_finished(self, batch: Batch) -> None:
        if not batch.finished:
            await asyncio.shield(batch.future(self._loop))
        for _, child in batch.children:
            await self._wait_finished(child)

    def discard(self, batch: Batch) -> None:
        """Remove a new batch that is still empty because its first record is invalid, and release its memory."""
        self._remove(batch.queue, batch)
        self._complete(batch, None)
        self._memory.release(batch.reserved_bytes)

    async def close(self) -> None:
        """Stop sending, and fail undelivered batches with UNKNOWN_SERVER_ERROR."""
        tasks = [self._task, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, self._ids.close(), return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        self._fail_all(KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "producer was closed before delivery"))

    # -- the task

    async def _run(self) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            self._send_ready(self._loop.time())

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        failure = task_failure(task, "the producer's sending task")
        if failure is not None:
            self.fail(failure)

    def fail(self, failure: KafkaError) -> None:
        """End the producer after a fatal error: fail all undelivered batches and send nothing more."""
        if self.failure is None:
            self.failure = failure
            self._task.cancel()
            self._on_failure()
            self._fail_all(failure)

    def _send_ready(self, now: float) -> None:
        self._expire(now)
        self._expire_linger(now)
        for queue in [queue for queue in self._delayed if queue.retry_at_s <= now or self._leader_is_new(queue)]:
            del self._delayed[queue]
            self._mark_ready(queue)
        for leader_id, batches in self._plan():
            self._requests[leader_id] = self._requests.get(leader_id, 0) + 1
            previous_sent, sent = self._last_sent.get(leader_id), asyncio.Event()
            self._last_sent[leader_id] = sent
            task = asyncio.create_task(self._send(leader_id, batches, previous_sent, sent))
            self._tasks.add(task)
            task.add_done_callback(self._on_task_done)
        self._set_timer()

    def _mark_ready(self, queue: PartitionQueue) -> None:
        if len(queue.in_flight) < self._in_flight_max and queue not in self._delayed:
            self._ready[queue] = None

    def _expire(self, now: float) -> None:
        while self._by_age:
            batch = self._by_age[0]
            if not batch.finished:
                if now < batch.created_s + self._delivery_timeout_s:
                    return
                self._expire_batch(batch)
            self._by_age.popleft()

    def _expire_batch(self, batch: Batch) -> None:
        queue = batch.queue
        timeout_ms = self._config.delivery_timeout_ms
        records = counted(batch.count, "record")
        text = f"{records} for {queue.topic}-{queue.partition} not delivered within {timeout_ms} ms"
        if batch.retried_for is not None:
            text += f", last error: {batch.retried_for}"
        elif batch.numbers is None and self._ids.error is not None:
            text += f", no producer id: {self._ids.error}"
        self._complete(batch, KafkaError(ErrorCode.REQUEST_TIMED_OUT, text))
        if batch not in queue.in_flight:
            self._remove(queue, batch)
            self._memory.release(batch.reserved_bytes)
        if queue.sequences is not None and batch.numbers is not None:
            queue.sequences.abandoned(batch.numbers, is_certain=False)
            self._drop(queue, queue.sequences.renumber_if_due())
            self._mark_if_ready(queue)

    def _remove(self, queue: PartitionQueue, batch: Batch) -> None:
        queue.batches.remove(batch)
        if queue.open is batch:
            queue.open = None
        if not queue.batches:
            self._ready.pop(queue, None)
            self._delayed.pop(queue, None)

    def _expire_linger(self, now: float) -> None:
        forced = self._flushes > 0 or bool(self._memory.waiters)
        while self._lingering:
            batch = self._lingering[0]
            if not batch.finished and batch.queue.open is batch:
                if not forced and now < batch.created_s + self._linger_s:
                    return
                batch.linger_expired = True
                self._mark_ready(batch.queue)
            self._lingering.popleft()

    def _set_timer(self) -> None:
        due = [queue.retry_at_s for queue in self._delayed]
        if self._lingering:
            due.append(self._lingering[0].created_s + self._linger_s)
        if self._by_age:
            due.append(self._by_age[0].created_s + self._delivery_timeout_s)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due:
            self._timer = self._loop.call_at(min(due), self.wake.set)

    def _plan(self) -> list[tuple[int, list[Batch]]]:
        """Take the ready batches that may be sent now. Return a (leader id, batches) pair per request."""
        plan: list[tuple[int, list[Batch]]] = []
        started: dict[int, int] = {}
        without_leader: set[str] = set()
        queues = list(self._ready)
        if self._config.enable_idempotence and self._sequences.identity is None:
            self._ids.request()
            queues = []
        while queues:  # each round adds at most one batch of a partition to a request
            queues = self._plan_round(queues, plan, started, without_leader)
        if without_leader:
            self._metadata.request_refresh(without_leader)
        return plan

    def _plan_round(
        self,
        queues: Sequence[PartitionQueue],
        plan: list[tuple[int, list[Batch]]],
        started: dict[int, int],
        without_leader: set[str],
    ) -> list[PartitionQueue]:
        """Add at most one batch of each queue to the plan. Returns the queues with another ready batch."""
        filling: dict[int, tuple[list[Batch], int]] = {}
        limit = self._config.max_in_flight_requests_per_connection
        now, remaining = self._loop.time(), []
        for queue in queues:
            partition = self._metadata.partition(queue.topic, queue.partition)
            if partition is None or partition.leader_id not in self._metadata.brokers:
                without_leader.add(queue.topic)
                continue
            leader_id = partition.leader_id
            batch = queue.batches[0]
            if queue.sequences is not None and not queue.sequences.may_send(batch.numbers, leader_id, now):
                if queue.in_flight:
                    del self._ready[queue]  # the response to a batch in flight marks the queue ready again
                continue
            size = batch.size_bytes() + _REQUEST_OVERHEAD_BYTES
            batches, total = filling.get(leader_id, ([], 0))
            if not batches or total + size > self._config.max_request_size:
                if self._requests.get(leader_id, 0) + started.get(leader_id, 0) >= limit:
                    continue
                started[leader_id] = started.get(leader_id, 0) + 1
                batches, total = [], 0
                plan.append((leader_id, batches))
            batch.leader_epoch = partition.leader_epoch
            batches.append(batch)
            filling[leader_id] = (batches, total + size)
            self._dequeue(queue, batch)
            if queue in self._ready:
                remaining.append(queue)
        return remaining

    def _dequeue(self, queue: PartitionQueue, batch: Batch) -> None:
        del self._ready[queue]
        queue.batches.popleft()
        queue.in_flight.append(batch)
        if queue.open is batch:
            queue.close_batch(batch)
        if queue.sequences is not None:
            if batch.numbers is None:
                batch.numbers = queue.sequences.number(batch.count)
            queue.sequences.sent(batch.numbers)
        self._mark_if_ready(queue)

    def _on_producer_id(self) -> None:
        for queue in [*self._ready, *self._delayed]:
            if queue.sequences is not None:
                self._drop(queue, queue.sequences.renumber_if_due())
        self.wake.set()

    # -- one request

    async def _send(
        self, leader_id: int, batches: list[Batch], previous_sent: asyncio.Event | None, sent: asyncio.Event
    ) -> None:
        """Send one request after `previous_sent` is set, set `sent`, and handle the response."""
        results: dict[tuple[str, int], PartitionProduceResponse] = {}
        failure: KafkaError | None = KafkaError(ErrorCode.NETWORK_EXCEPTION, "cancelled")
        try:
            request = await self._make_request(batches)
            address = self._metadata.address(leader_id)
            if not request.topic_data:
                return
            if address is None:
                failure = KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, f"leader {leader_id} is not in the metadata")
                return
            if self._config.acks == 0:
                for batch in batches:
                    self._complete(batch, None)
            if previous_sent is not None:
                await previous_sent.wait()
            sent.set()
            response = await self._call(leader_id, address, request, batches)
            self._apply_leaders(response)
            results = {
                (topic.name, each.index): each for topic in response.responses for each in topic.partition_responses
            }
            failure = None
        except TransportError as error:
            too_large = KafkaError(ErrorCode.MESSAGE_TOO_LARGE, str(error))
            failure = too_large if error.too_large else transport_failure(error)
        except Exception as error:
            log.exception("produce request failed")
            failure = KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, f"produce request failed: {error!r}")
        finally:
            sent.set()
            self._requests[leader_id] -= 1
            for batch in batches:
                result = results.get((batch.queue.topic, batch.queue.partition))
                self._handle_result(batch, leader_id, result, failure)
            self.wake.set()

    async def _make_request(self, batches: Sequence[Batch]) -> ProduceRequest:
        """Build the request, without the batches that have expired in the meantime."""
        await self._seal([batch for batch in batches if batch.payload is None and not batch.finished])
        topics: dict[str, list[PartitionProduceData]] = {}
        for batch in batches:
            if batch.payload is not None:
                if batch.numbers is not None and batch.stamp != batch.numbers.stamp:
                    batch.stamp = batch.numbers.stamp
                    batch.payload = restamped(batch.payload, batch.stamp)
                queue = batch.queue
                topics.setdefault(queue.topic, []).append(PartitionProduceData(queue.partition, batch.payload))
        topic_data = []
        for name, partitions in topics.items():
            known = self._metadata.topic(name)
            topic_data.append(TopicProduceData(name, known.topic_id if known is not None else b"", partitions))
        return ProduceRequest(
            acks=self._config.acks, timeout_ms=self._config.request_timeout_ms, topic_data=tuple(topic_data)
        )

    async def _seal(self, fresh: Sequence[Batch]) -> None:
        for batch in fresh:
            if batch.numbers is not None:
                batch.stamp = batch.numbers.stamp
                batch.builder.set_producer_state(*batch.stamp)
        builders = [batch.builder for batch in fresh]
        if self._compression.number and sum(map(Batch.size_bytes, fresh)) > _COMPRESS_ON_LOOP_BYTES_MAX:
            payloads = await asyncio.to_thread(_seal_all, builders, self._compression)
        else:
            payloads = _seal_all(builders, self._compression)
        for batch, payload in zip(fresh, payloads, strict=True):
            if not batch.finished:
                batch.payload = payload

    async def _call(
        self, leader_id: int, address: str, request: ProduceRequest, batches: Sequence[Batch]
    ) -> ProduceResponse:
        """Send the request and return the response.

        Raises TransportError if the request fails, or if the node hangs and no longer leads any of the partitions.
        """
        partitions = [(batch.queue.topic, batch.queue.partition) for batch in batches]
        try:
            async with LeaderWatch(self._metadata, leader_id, partitions):
                response: ProduceResponse = await call(
                    self._pool, address, request, self._config.request_timeout_ms / 1000
                )
        except TimeoutError:
            raise TransportError.no_response(address, "Produce") from None
        return response

    def _apply_leaders(self, response: ProduceResponse) -> None:
        leaders = [
            (topic.name, each.index, each.current_leader)
            for topic in response.responses
            for each in topic.partition_responses
            if each.current_leader is not None
        ]
        if leaders:
            self._metadata.apply_leaders(leaders, response.node_endpoints)

    def _leader_epoch(self, queue: PartitionQueue) -> int:
        """Return the partition's leader epoch, or -1 if its leader is not available."""
        known = self._metadata.partition(queue.topic, queue.partition)
        return known.leader_epoch if known is not None and known.leader_id in self._metadata.brokers else -1

    # -- results

    def _handle_result(
        self,
        batch: Batch,
        leader_id: int,
        result: PartitionProduceResponse | None,
        failure: KafkaError | None,
    ) -> None:
        """Complete, retry or fail a batch whose request has ended with `result` or `failure`."""
        queue = batch.queue
        queue.in_flight.remove(batch)
        error = failure
        if error is None and result is None:
            error = KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "Produce response lacks the partition")
        elif error is None and result is not None and result.error_code:
            error = KafkaError(result.error_code, result.error_message or "")
        if error is not None and (error.code.refreshes_metadata or error.code is ErrorCode.REQUEST_TIMED_OUT):
            # A leader that does not respond may be hung or partitioned: the partition may have a new leader.
            self._metadata.request_refresh((queue.topic,))
        if error is None and queue.sequences is not None and batch.numbers is not None:
            queue.sequences.acked(batch.numbers, leader_id, self._loop.time())
        if batch.finished:
            self._memory.release(batch.reserved_bytes)
        elif error is None and result is not None:
            batch.base_offset = result.base_offset
            batch.log_append_time_ms = result.log_append_time_ms
            self._complete(batch, None)
            self._memory.release(batch.reserved_bytes)
        elif error is not None:
            self._retry_or_fail(queue, batch, error)
        if queue.sequences is not None:
            self._drop(queue, queue.sequences.request_done())
        self._mark_if_ready(queue)

    def _leader_is_new(self, queue: PartitionQueue) -> bool:
        """Whether the leader changed after the last failed attempt, so that no backoff is needed (KIP-951)."""
        return self._leader_epoch(queue) > queue.failed_epoch >= 0

    def _retry_or_fail(self, queue: PartitionQueue, batch: Batch, error: KafkaError) -> None:
        """Split a batch (if it is too large), queue it for a retry or complete it, depending on `error`."""
        batch.attempts += 1
        verdict = Verdict.RETRY if error.retriable else Verdict.FAILED
        if queue.sequences is not None and batch.numbers is not None:
            verdict = queue.sequences.refused(batch.numbers, error)
        if error.code is ErrorCode.MESSAGE_TOO_LARGE and batch.count > 1:
            self._split(queue, batch)
        elif verdict is Verdict.RETRY and batch.attempts <= self._config.retries:
            batch.retried_for = error
            log.debug("produce failed topic=%s partition=%d error=%s", queue.topic, queue.partition, error)
            queue.put_back(batch)
            epoch = batch.leader_epoch
            queue.failed_epoch = max(epoch, queue.failed_epoch) if queue in self._delayed else epoch
            # Out of order: the batch only has to wait for the batches before it, so it needs no backoff.
            is_reordered = error.code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER and batch.attempts <= UNRESOLVED_MAX
            if not is_reordered and not self._leader_is_new(queue):
                queue.retry_at_s = self._loop.time() + self._backoff.delay_s(batch.attempts)
                self._delayed[queue] = None
        else:
            is_written = verdict is Verdict.WRITTEN
            self._complete(batch, None if is_written else error)
            self._memory.release(batch.reserved_bytes)
            if queue.sequences is None or batch.numbers is None:
                return
            if is_written:
                queue.sequences.acked(batch.numbers, -1, self._loop.time())
            else:
                queue.sequences.abandoned(batch.numbers, is_certain=verdict is Verdict.FAILED)

    def _drop(self, queue: PartitionQueue, dropped: Sequence[BatchSequence]) -> None:
        """Fail batches that may already have been written, because sending them again could duplicate records."""
        for batch in [batch for batch in queue.batches if dropped and batch.numbers in dropped]:
            text = "not retried because an earlier batch expired; the record may or may not be written"
            self._complete(batch, KafkaError(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, text))
            self._memory.release(batch.reserved_bytes)
            self._remove(queue, batch)

    def _mark_if_ready(self, queue: PartitionQueue) -> None:
        if queue.batches and (queue.batches[0] is not queue.open or queue.batches[0].linger_expired):
            self._mark_ready(queue)

    def _complete(self, batch: Batch, error: KafkaError | None) -> None:
        if error is not None:
            queue = batch.queue
            log.warning(
                "records failed topic=%s partition=%d records=%d error=%s",
                queue.topic,
                queue.partition,
                batch.count,
                error,
            )
        batch.error = error
        self.incomplete.pop(batch, None)
        batch.finish()

    def _split(self, queue: PartitionQueue, batch: Batch) -> None:
        """Split a batch that the broker rejected as too large into two halves, and queue both."""
        payload = batch.payload or b""
        records = read_batch(payload, 0, parse_header(payload))
        middle = len(records) // 2
        children = []
        for first, part in ((0, records[:middle]), (middle, records[middle:])):
            child = Batch(queue, 0, len(payload) + (1 << 31), batch.created_s, (*batch.order, first))
            for each in part:
                child.append(child.count, each.timestamp, each.key, each.value, list(each.headers))
                child.count += 1
            children.append((first, child))
            self.incomplete[child] = None
        children[0][1].reserved_bytes = batch.reserved_bytes
        batch.children = children
        if queue.sequences is not None and batch.numbers is not None:
            numbers = queue.sequences.split(batch.numbers, [child.count for _, child in children])
            for (_, child), part_numbers in zip(children, numbers, strict=True):
                child.numbers = part_numbers
        for _, child in children:
            queue.put_back(child)
        self._by_age.extendleft(child for _, child in reversed(children))
        self.incomplete.pop(batch, None)
        batch.finish()

    def _fail_all(self, error: KafkaError) -> None:
        for batch in list(self.incomplete):
            self._complete(batch, error)
        self._memory.refuse_waiters()


def _seal_all(builders: Sequence[object], compression: Compression) -> list[bytes]:
    return [seal(builder, compression) for builder in builders]
