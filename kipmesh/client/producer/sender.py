"""Sends ready batches: one Produce request a broker carries every ready partition, one batch of each.

A batch is ready when it is full, `linger.ms` old, or when somebody flushes or waits for room. One task drains the
queues; each request is a task that ends in `_settle`, and the requests to a broker begin in the order of their making.
With idempotence, `kipmesh.core.producer.sequences` says which batch of a partition may go, and under which
numbers; without it, one of a partition is in flight at a time. Invariants: a partition is in `_ready` only while its
backoff is over; a batch that fails retriably goes back to its place in the queue; every batch is finished exactly once,
at the latest `delivery.timeout.ms` after it was made. After a `failure`, which is for good, all batches are finished
and nothing is taken any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from kipmesh.client.calls import Backoff, call, no_answer, task_failure
from kipmesh.client.compression import COMPRESSIONS, Compression
from kipmesh.client.metadata import Metadata
from kipmesh.client.producer.accumulator import Batch, BufferMemory, PartitionQueue
from kipmesh.client.producer.leader_watch import LeaderWatch
from kipmesh.client.producer.producer_ids import ProducerIds
from kipmesh.client.records import read_batch, restamped, seal
from kipmesh.core.config import ProducerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.producer.sequences import UNRESOLVED_MAX, Numbers, ProducerSequences, Verdict
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
    """The network side of a producer."""

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
        """Set when something changed that may let batches go: metadata, or a `send` that waits for room."""
        self._timer: asyncio.TimerHandle | None = None
        self._ready: dict[PartitionQueue, None] = {}
        self._delayed: dict[PartitionQueue, None] = {}
        self._lingering: deque[Batch] = deque()
        self._by_age: deque[Batch] = deque()
        self._requests: dict[int, int] = {}
        self._begun: dict[int, asyncio.Event] = {}  # of each leader the last request: set once it is on its way
        self._tasks: set[asyncio.Task[None]] = set()
        self._flushes = 0
        self._sequences = ProducerSequences()
        self._ids = ProducerIds(config, metadata, pool, self._sequences, self._identified, self.fail)
        self._in_flight_max = UNRESOLVED_MAX if config.enable_idempotence else 1
        if config.enable_idempotence:
            self._ids.want()
        self._task = asyncio.create_task(self._run(), name="kipmesh-producer")
        self._task.add_done_callback(self._ended)

    # -- from the producer

    def opened(self, batch: Batch) -> None:
        """A queue has a new open batch."""
        self.incomplete[batch] = None
        queue = batch.queue
        if queue.sequences is None and self._config.enable_idempotence:
            queue.sequences = self._sequences.of(queue.topic, queue.partition)
        self._by_age.append(batch)
        self._lingering.append(batch)
        if self._linger_s == 0 or self._flushes or self._memory.waiters or len(self._lingering) == 1:
            self.wake.set()

    def closed(self, queue: PartitionQueue) -> None:
        """A queue's open batch became full."""
        self._mark_ready(queue)
        self.wake.set()

    async def flush(self) -> None:
        """Send everything that is there now, and wait until it is delivered or has failed."""
        self._flushes += 1
        self.wake.set()
        try:
            for batch in list(self.incomplete):
                await self._finished(batch)
            if self._config.acks == 0 and self._tasks:
                await asyncio.wait(set(self._tasks))  # finished, but perhaps not on their way yet
        finally:
            self._flushes -= 1

    async def _finished(self, batch: Batch) -> None:
        if not batch.finished:
            await asyncio.shield(batch.future(self._loop))
        for _, child in batch.children:
            await self._finished(child)

    def discard(self, batch: Batch) -> None:
        """A new batch stays empty, because its first record is not one."""
        self._remove(batch.queue, batch)
        self._complete(batch, None)
        self._memory.give(batch.reserved_bytes)

    async def close(self) -> None:
        """Stop; what is not delivered fails."""
        tasks = [self._task, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, self._ids.close(), return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        self._fail_all(KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "the producer was closed before it was delivered"))

    # -- the task

    async def _run(self) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            self._drain(self._loop.time())

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        failure = task_failure(task, "the producer's sending task")
        if failure is not None:
            self.fail(failure)

    def fail(self, failure: KafkaError) -> None:
        """Something that nobody expected: what is not delivered fails, and nothing is sent any more."""
        if self.failure is None:
            self.failure = failure
            self._task.cancel()
            self._on_failure()
            self._fail_all(failure)

    def _drain(self, now: float) -> None:
        self._expire(now)
        self._ripen(now)
        for queue in [queue for queue in self._delayed if queue.retry_at_s <= now or self._leader_is_new(queue)]:
            del self._delayed[queue]
            self._mark_ready(queue)
        for leader_id, batches in self._plan():
            self._requests[leader_id] = self._requests.get(leader_id, 0) + 1
            before, begun = self._begun.get(leader_id), asyncio.Event()
            self._begun[leader_id] = begun
            task = asyncio.create_task(self._send(leader_id, batches, before, begun))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
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
        text = f"{batch.count} records for {queue.topic}-{queue.partition} were not delivered within {timeout_ms} ms"
        if batch.retried_for is not None:
            text += f", at last because of {batch.retried_for}"
        elif batch.numbers is None and self._ids.error is not None:
            text += f", there is no producer id: {self._ids.error}"
        self._complete(batch, KafkaError(ErrorCode.REQUEST_TIMED_OUT, text))
        if batch not in queue.in_flight:
            self._remove(queue, batch)
            self._memory.give(batch.reserved_bytes)
        if queue.sequences is not None and batch.numbers is not None:
            queue.sequences.gave_up(batch.numbers, is_certain=False)
            self._drop(queue, queue.sequences.renumber_if_due())
            self._resume(queue)

    def _remove(self, queue: PartitionQueue, batch: Batch) -> None:
        queue.batches.remove(batch)
        if queue.open is batch:
            queue.open = None
        if not queue.batches:
            self._ready.pop(queue, None)
            self._delayed.pop(queue, None)

    def _ripen(self, now: float) -> None:
        forced = self._flushes > 0 or bool(self._memory.waiters)
        while self._lingering:
            batch = self._lingering[0]
            if not batch.finished and batch.queue.open is batch:
                if not forced and now < batch.created_s + self._linger_s:
                    return
                batch.ripe = True
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
        """Take the ready batches that may go now, by request; the others stay ready."""
        plan: list[tuple[int, list[Batch]]] = []
        started: dict[int, int] = {}
        without_leader: set[str] = set()
        queues = list(self._ready)
        if self._config.enable_idempotence and self._sequences.identity is None:
            self._ids.want()
            queues = []
        while queues:  # a request has one batch of a partition
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
        """At most one batch of each queue; gives those that are ready with another one."""
        filling: dict[int, tuple[list[Batch], int]] = {}
        limit = self._config.max_in_flight_requests_per_connection
        now, again = self._loop.time(), []
        for queue in queues:
            partition = self._metadata.partition(queue.topic, queue.partition)
            if partition is None or partition.leader_id not in self._metadata.brokers:
                without_leader.add(queue.topic)
                continue
            leader_id = partition.leader_id
            batch = queue.batches[0]
            if queue.sequences is not None and not queue.sequences.may_send(batch.numbers, leader_id, now):
                if queue.in_flight:
                    del self._ready[queue]  # what is in flight marks it again
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
            self._take(queue, batch)
            if queue in self._ready:
                again.append(queue)
        return again

    def _take(self, queue: PartitionQueue, batch: Batch) -> None:
        del self._ready[queue]
        queue.batches.popleft()
        queue.in_flight.append(batch)
        if queue.open is batch:
            queue.open = None
            queue.report_closed(batch)
        if queue.sequences is not None:
            if batch.numbers is None:
                batch.numbers = queue.sequences.number(batch.count)
            queue.sequences.sent(batch.numbers)
        self._resume(queue)

    def _identified(self) -> None:
        """There is a producer id."""
        for queue in [*self._ready, *self._delayed]:
            if queue.sequences is not None:
                self._drop(queue, queue.sequences.renumber_if_due())
        self.wake.set()

    # -- one request

    async def _send(
        self, leader_id: int, batches: list[Batch], before: asyncio.Event | None, begun: asyncio.Event
    ) -> None:
        """One request, not begun before that of `before` is on its way; `begun` is set once this one is."""
        results: dict[tuple[str, int], PartitionProduceResponse] = {}
        failure: KafkaError | None = KafkaError(ErrorCode.NETWORK_EXCEPTION, "cancelled")
        try:
            request = await self._make_request(batches)
            address = self._metadata.address(leader_id)
            if not request.topic_data:
                return
            if address is None:
                failure = KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, f"broker {leader_id} is gone")
                return
            if self._config.acks == 0:
                for batch in batches:
                    self._complete(batch, None)
            if before is not None:
                await before.wait()
            begun.set()
            response = await self._call(leader_id, address, request, batches)
            self._learn_leaders(response)
            results = {
                (topic.name, each.index): each for topic in response.responses for each in topic.partition_responses
            }
            failure = None
        except TransportError as error:
            failure = KafkaError(ErrorCode.MESSAGE_TOO_LARGE, str(error)) if error.too_large else no_answer(error)
        except Exception as error:
            log.exception("a produce request failed")
            failure = KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, f"the request could not be made: {error}")
        finally:
            begun.set()
            self._requests[leader_id] -= 1
            for batch in batches:
                result = results.get((batch.queue.topic, batch.queue.partition))
                self._settle(batch, leader_id, result, failure)
            self.wake.set()

    async def _make_request(self, batches: Sequence[Batch]) -> ProduceRequest:
        """The request of at most one batch a partition; those that were finished meanwhile are left out."""
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
        """The answer; TransportError also when the leader is silent and another one leads all that was sent."""
        partitions = [(batch.queue.topic, batch.queue.partition) for batch in batches]
        try:
            async with LeaderWatch(self._metadata, leader_id, partitions):
                response: ProduceResponse = await call(
                    self._pool, address, request, self._config.request_timeout_ms / 1000
                )
        except TimeoutError:
            raise TransportError.no_response(address, "Produce") from None
        return response

    def _learn_leaders(self, response: ProduceResponse) -> None:
        leaders = [
            (topic.name, each.index, each.current_leader)
            for topic in response.responses
            for each in topic.partition_responses
            if each.current_leader is not None
        ]
        if leaders:
            self._metadata.apply_leaders(leaders, response.node_endpoints)

    def _leader_epoch(self, queue: PartitionQueue) -> int:
        """That of a leader that can be asked; -1 if there is none."""
        known = self._metadata.partition(queue.topic, queue.partition)
        return known.leader_epoch if known is not None and known.leader_id in self._metadata.brokers else -1

    # -- outcomes

    def _settle(
        self,
        batch: Batch,
        leader_id: int,
        result: PartitionProduceResponse | None,
        failure: KafkaError | None,
    ) -> None:
        """The request of `batch` to a leader has ended, however; decide about the batch and its queue."""
        queue = batch.queue
        queue.in_flight.remove(batch)
        error = failure
        if error is None and result is None:
            error = KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "the broker's answer does not mention the partition")
        elif error is None and result is not None and result.error_code:
            error = KafkaError(result.error_code, result.error_message or "")
        if error is not None and (error.code.refreshes_metadata or error.code is ErrorCode.REQUEST_TIMED_OUT):
            # A leader that says nothing may be held or cut off from the mesh: another one may lead by now.
            self._metadata.request_refresh((queue.topic,))
        if error is None and queue.sequences is not None and batch.numbers is not None:
            queue.sequences.acked(batch.numbers, leader_id, self._loop.time())
        if batch.finished:
            self._memory.give(batch.reserved_bytes)
        elif error is None and result is not None:
            batch.base_offset = result.base_offset
            batch.log_append_time_ms = result.log_append_time_ms
            self._complete(batch, None)
            self._memory.give(batch.reserved_bytes)
        elif error is not None:
            self._failed(queue, batch, error)
        if queue.sequences is not None:
            self._drop(queue, queue.sequences.settled())
        self._resume(queue)

    def _leader_is_new(self, queue: PartitionQueue) -> bool:
        """Whether somebody leads whom nobody has asked since the last try failed (KIP-951): no reason to wait."""
        return self._leader_epoch(queue) > queue.failed_epoch >= 0

    def _failed(self, queue: PartitionQueue, batch: Batch, error: KafkaError) -> None:
        """Once more later, or as soon as there is another leader than that of the try."""
        batch.attempts += 1
        verdict = Verdict.AGAIN if error.retriable else Verdict.FAILED
        if queue.sequences is not None and batch.numbers is not None:
            verdict = queue.sequences.refused(batch.numbers, error)
        if error.code is ErrorCode.MESSAGE_TOO_LARGE and batch.count > 1:
            self._split(queue, batch)
        elif verdict is Verdict.AGAIN and batch.attempts <= self._config.retries:
            batch.retried_for = error
            log.debug("produce to %s-%d failed: %s", queue.topic, queue.partition, error)
            queue.put_back(batch)
            epoch = batch.leader_epoch
            queue.failed_epoch = max(epoch, queue.failed_epoch) if queue in self._delayed else epoch
            is_turn = error.code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER and batch.attempts <= UNRESOLVED_MAX
            if not is_turn and not self._leader_is_new(queue):
                queue.retry_at_s = self._loop.time() + self._backoff.delay_s(batch.attempts)
                self._delayed[queue] = None
        else:
            is_written = verdict is Verdict.WRITTEN
            self._complete(batch, None if is_written else error)
            self._memory.give(batch.reserved_bytes)
            if queue.sequences is None or batch.numbers is None:
                return
            if is_written:
                queue.sequences.acked(batch.numbers, -1, self._loop.time())
            else:
                queue.sequences.gave_up(batch.numbers, is_certain=verdict is Verdict.FAILED)

    def _drop(self, queue: PartitionQueue, dropped: Sequence[Numbers]) -> None:
        """Batches that may be written already, and would be once more if they were sent again."""
        for batch in [batch for batch in queue.batches if dropped and batch.numbers in dropped]:
            text = "a batch before this one expired, so that this one may be written or not, and is not sent again"
            self._complete(batch, KafkaError(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, text))
            self._memory.give(batch.reserved_bytes)
            self._remove(queue, batch)

    def _resume(self, queue: PartitionQueue) -> None:
        if queue.batches and (queue.batches[0] is not queue.open or queue.batches[0].ripe):
            self._mark_ready(queue)

    def _complete(self, batch: Batch, error: KafkaError | None) -> None:
        if error is not None:
            queue = batch.queue
            log.warning("%d records for %s-%d failed: %s", batch.count, queue.topic, queue.partition, error)
        batch.error = error
        self.incomplete.pop(batch, None)
        batch.finish()

    def _split(self, queue: PartitionQueue, batch: Batch) -> None:
        """Two batches in place of one that the broker takes as too large."""
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
