"""Produce (API key 0), on leaders.

Batches are opaque: the log checks CRC, size and header, and assigns offsets. acks=0 and 1 complete after the append,
and after an fsync if `flush.messages` requires one. acks=all completes when the high watermark passes the batch
(REP-04). A batch that an idempotent producer sends again is not appended again; its response is the first one's
(`kipmesh.core.producer.sequences`). `queued.max.request.bytes` limits the bytes of pending requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kipmesh import messages as m
from kipmesh.broker.observability.metrics import BrokerMetrics
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.replica import AckWaiter, Disk, Replica
from kipmesh.core import record_batch
from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.group.coordinator import INTERNAL_TOPICS
from kipmesh.transport.grpc.server import RequestContext

ACKS_ALL = -1
_RECORD_BYTES_MIN = 7
"""A record has seven fields of at least one byte."""
_EXPANSION_MAX = {0: 1, 1: 1032, 2: 22, 3: 255, 4: 32768}
"""Maximum bytes that one compressed byte expands to, by codec.

gzip: 258 bytes in two bits. snappy: 64 in three bytes. lz4: 255 per further length byte. zstd: 128 KiB per block of at
least four bytes.
"""


class _Acks:
    """Waits until the batches of one acks=all request are replicated.

    `codes` has the result (NONE: replicated) of each finished partition by its index in the request.
    """

    def __init__(self) -> None:
        self.codes: dict[int, ErrorCode] = {}
        self._waiting: dict[int, tuple[Replica, AckWaiter]] = {}
        self._done: asyncio.Future[None] | None = None

    def add(self, index: int, replica: Replica, offset: int, leader_epoch: int) -> None:
        """Track partition `index` of the request until the record at `offset` is committed or can no longer be.

        `leader_epoch` is the epoch of the append. Returns immediately.
        """

        def done(code: ErrorCode) -> None:
            self.codes[index] = code
            self._waiting.pop(index, None)
            if not self._waiting and self._done is not None and not self._done.done():
                self._done.set_result(None)

        waiter = replica.when_replicated(offset, leader_epoch, done)
        if waiter is not None:
            self._waiting[index] = (replica, waiter)

    async def wait(self, timeout_ms: int) -> None:
        """Wait until `codes` has every partition. Those not finished after `timeout_ms` get REQUEST_TIMED_OUT."""
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        timer = loop.call_later(timeout_ms / 1000, self._time_out)
        try:
            await self._done
        finally:
            timer.cancel()
            self._time_out()

    def _time_out(self) -> None:
        for replica, waiter in list(self._waiting.values()):
            replica.cancel_ack_waiter(waiter)
            waiter.done(ErrorCode.REQUEST_TIMED_OUT)


@dataclass(eq=False)
class ProduceHandler:
    """Responds to Produce. `now_ms` is wall time."""

    config: BrokerConfig
    hosted_replicas: HostedReplicas
    metrics: BrokerMetrics
    disk: Disk
    now_ms: Callable[[], int]
    _queued_bytes: int = field(default=0, init=False)

    async def produce(self, request: m.ProduceRequest, context: RequestContext) -> m.ProduceResponse:
        """Append the batch of each partition and respond when `acks` is satisfied.

        Errors are returned per partition, including REQUEST_TIMED_OUT after `timeout_ms` with acks=-1. All partitions
        get the same code if `acks` is not -1, 0 or 1 (INVALID_REQUIRED_ACKS), the request has a transactional id
        (INVALID_REQUEST), or it and the pending requests exceed `queued.max.request.bytes` (THROTTLING_QUOTA_EXCEEDED).
        A request of any size is accepted if none is pending.
        """
        size = sum(len(data.records) for topic in request.topic_data for data in topic.partition_data)
        refusal = self._refusal(request, size)
        if refusal:
            responses = [_error(data, refusal) for topic in request.topic_data for data in topic.partition_data]
            return _respond(request, responses)
        self._queued_bytes += size
        try:
            return await self._append_and_wait(request, context.listener)
        finally:
            self._queued_bytes -= size

    def _refusal(self, request: m.ProduceRequest, size: int) -> KafkaError | None:
        if request.acks not in (ACKS_ALL, 0, 1):
            return KafkaError(ErrorCode.INVALID_REQUIRED_ACKS, f"acks must be -1, 0 or 1, got {request.acks}")
        if request.transactional_id is not None:
            return KafkaError(ErrorCode.INVALID_REQUEST, "transactions are not supported, remove transactional.id")
        if self._queued_bytes and self._queued_bytes + size > self.config.queued_max_request_bytes:
            return KafkaError(
                ErrorCode.THROTTLING_QUOTA_EXCEEDED,
                f"queued.max.request.bytes={self.config.queued_max_request_bytes} is exceeded, retry later",
            )
        return None

    async def _append_and_wait(self, request: m.ProduceRequest, listener: str) -> m.ProduceResponse:
        hosted, acks, now_ms = self.hosted_replicas, _Acks(), self.now_ms()
        appended: dict[int, tuple[Replica, int, int]] = {}

        def append(index: int, topic: m.TopicProduceData, data: m.PartitionProduceData) -> m.PartitionProduceResponse:
            partition = topic.topic_id, topic.name, data.index
            replica: Replica | None = None
            try:
                replica = hosted.require(*partition)
                _check_not_internal(replica)
                _check_header(data.records)
                info = replica.append(data.records, request.acks, now_ms)
            except KafkaError as error:
                if replica is not None:
                    self.metrics.produce_failed.labels(error.code.name).inc()
                leader = hosted.leader_hint(error.code, *partition, replica)
                return _error(data, error)._replace(current_leader=leader)
            if info.size_bytes:
                self.metrics.produced(len(data.records), info.last_offset - info.first_offset + 1)
            else:
                self.metrics.duplicates.inc()
            appended[index] = replica, info.last_offset, replica.leader_epoch
            return m.PartitionProduceResponse(
                data.index, 0, info.first_offset, info.log_append_time_ms, replica.log.log_start_offset
            )

        partitions = [(topic, data) for topic in request.topic_data for data in topic.partition_data]
        responses = [append(index, *partition) for index, partition in enumerate(partitions)]
        failed = await self._flush({replica for replica, _, _ in appended.values() if replica.must_flush})
        if request.acks == ACKS_ALL:
            for index, entry in appended.items():
                acks.add(index, *entry)
            await acks.wait(request.timeout_ms)
        codes = acks.codes | {
            index: ErrorCode.KAFKA_STORAGE_ERROR for index in appended if appended[index][0] in failed
        }
        for index, code in codes.items():
            if code:
                topic, data = partitions[index]
                leader = hosted.leader_hint(code, topic.topic_id, topic.name, data.index, appended[index][0])
                responses[index] = _error(data, KafkaError(code, code.name))._replace(current_leader=leader)
        leaders = [each.current_leader for each in responses]
        response = _respond(request, responses)
        if not any(leaders):
            return response
        listener = listener or self.config.inter_broker_listener_name
        return response._replace(node_endpoints=hosted.hinted_endpoints(leaders, (), listener))

    async def _flush(self, replicas: Iterable[Replica]) -> set[Replica]:
        failed = set()
        for replica in replicas:
            try:
                await self.disk.run(replica.log.flush)
            except KafkaError:
                failed.add(replica)
        return failed


def _check_not_internal(replica: Replica) -> None:
    """Raise KafkaError with INVALID_TOPIC_EXCEPTION if only brokers may write to the replica's topic."""
    if replica.topic in INTERNAL_TOPICS:
        raise KafkaError(
            ErrorCode.INVALID_TOPIC_EXCEPTION, f"only brokers may write to the internal topic {replica.topic}"
        )


def _check_header(batch: bytes | memoryview) -> None:
    """Raise KafkaError for invalid batches that the log would accept because it does not decode records.

    Codes: INVALID_REQUEST if transactional; INVALID_RECORD if the record count exceeds what the bytes can hold even
    when decompressed; CORRUPT_MESSAGE instead of these if the CRC is wrong, or if the header cannot be parsed.
    """
    header = record_batch.parse_header(batch)
    expansion = _EXPANSION_MAX.get(header.compression)
    room = (header.size_bytes - record_batch.HEADER_BYTES) * (expansion or 0) // _RECORD_BYTES_MIN
    is_too_many = expansion is not None and header.record_count > room
    if header.size_bytes != len(batch) or not (is_too_many or header.is_transactional):
        return
    record_batch.check_crc(batch, 0, header)  # a corrupt batch gets CORRUPT_MESSAGE, which clients retry
    if header.is_transactional:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "transactions are not supported, remove transactional.id")
    raise KafkaError(
        ErrorCode.INVALID_RECORD, f"a batch of {len(batch)} bytes cannot hold {header.record_count} records"
    )


def _error(data: m.PartitionProduceData, error: KafkaError) -> m.PartitionProduceResponse:
    return m.PartitionProduceResponse(data.index, error.code, error_message=error.message)


def _respond(request: m.ProduceRequest, responses: Sequence[m.PartitionProduceResponse]) -> m.ProduceResponse:
    """Combine the responses of the partitions, which are in the order of the request, into one response."""
    remaining = iter(responses)
    return m.ProduceResponse(
        [
            m.TopicProduceResponse(topic.name, topic.topic_id, list(islice(remaining, len(topic.partition_data))))
            for topic in request.topic_data
        ]
    )
