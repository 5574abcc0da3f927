"""What a consumer knows about one assigned partition: its position, what is fetched, and what is asked.

Invariants: the ledger's `buffered_bytes` are the sum of all partitions'; a partition whose state changed in a way that
may let it be asked for again is in the ledger's `changed`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from kipmesh.client.records import consumer_records
from kipmesh.client.types import ConsumerRecord, FetchedBatches, TopicPartition
from kipmesh.core.errors import CorruptRecordError, KafkaError
from kipmesh.core.messages import FetchPartition, PartitionData
from kipmesh.core.record_batch import BatchHeader, check_crc, iterate

if TYPE_CHECKING:
    from kipmesh.client.broker_fetches import BrokerFetches, Exchange

DECODE_ON_LOOP_BYTES_MAX = 64 << 10
"""Compressed batches that are larger are decoded on a thread."""


class OutOfRange(NamedTuple):
    """The broker does not have this offset."""

    offset: int
    log_start_offset: int
    high_watermark: int


class Chunk:
    """The batches of one answer, taken batch by batch; batches are decoded when they are taken."""

    __slots__ = ("_batches", "_index", "_records", "_taken", "answer", "data", "size_bytes")

    def __init__(self, data: bytes, batches: list[tuple[int, BatchHeader]], answer: PartitionData) -> None:
        self.data = data
        self.size_bytes = len(data)
        self.answer = answer
        self._batches = batches
        self._index = 0
        self._records: list[ConsumerRecord] = []
        self._taken = 0

    @property
    def exhausted(self) -> bool:
        """Whether everything was taken."""
        return self._index >= len(self._batches)

    @property
    def decodes_slowly(self) -> bool:
        """Whether the next batch should be decoded on a thread."""
        if self._records or self.exhausted:
            return False
        header = self._batches[self._index][1]
        return header.compression != 0 and header.size_bytes > DECODE_ON_LOOP_BYTES_MAX

    def decode(self, state: PartitionState, check_crcs: bool) -> list[ConsumerRecord]:
        """The records of the next batch, for `take`; raises KafkaError. Changes nothing; may run on a thread."""
        if self._records:
            return self._records
        position, header = self._batches[self._index]
        if check_crcs:
            check_crc(self.data, position, header)
        return consumer_records(state.topic, state.partition, self.data, position, header, state.position or 0)

    def take(self, state: PartitionState, records: list[ConsumerRecord], count_max: int) -> list[ConsumerRecord]:
        """Up to `count_max` of the batch's decoded records; moves the position."""
        header = self._batches[self._index][1]
        whole = self._taken == 0 and len(records) <= count_max
        taken = records if whole else records[self._taken : self._taken + count_max]
        self._taken += len(taken)
        self._records = records
        if self._taken >= len(records):
            self._records = []
            self._taken = 0
            self._index += 1
            state.position = max(state.position or 0, header.next_offset)
        else:
            state.position = taken[-1].offset + 1
        state.position_epoch = header.partition_leader_epoch
        return taken

    def rest(self, state: PartitionState, topic_id: bytes) -> FetchedBatches:
        """What was not taken yet, as whole batches; moves the position past it."""
        start = self._batches[self._index][0]
        header = self._batches[-1][1]
        position = state.position or 0
        state.position = header.next_offset
        state.position_epoch = header.partition_leader_epoch
        self._index = len(self._batches)
        return FetchedBatches(
            state.topic,
            state.partition,
            topic_id,
            position,
            header.next_offset,
            self.answer.high_watermark,
            self.answer.log_start_offset,
            self.data[start:] if start else self.data,
        )


class Ledger:
    """What the partitions of one consumer have in common, so that nobody has to go through all of them."""

    __slots__ = ("buffered_bytes", "changed")

    def __init__(self) -> None:
        self.buffered_bytes = 0
        self.changed: dict[PartitionState, None] = {}

    def take_changed(self) -> dict[PartitionState, None]:
        """Those that changed since the last call, in that order."""
        changed, self.changed = self.changed, {}
        return changed


class PartitionState:
    """One assigned partition. Invariants: `fetch_offset` >= `position`; what is buffered lies between them."""

    __slots__ = (
        "asked",
        "attempts",
        "broker",
        "buffer",
        "buffered_bytes",
        "exchange",
        "fetch_epoch",
        "fetch_offset",
        "generation",
        "high_watermark",
        "in_session",
        "leader_epoch",
        "ledger",
        "listed",
        "log_start_offset",
        "partition",
        "paused",
        "position",
        "position_epoch",
        "reset_to",
        "retry_at_s",
        "topic",
        "topic_id",
        "unvalidated",
    )

    def __init__(self, topic: str, partition: int, ledger: Ledger) -> None:
        self.ledger = ledger
        self.topic = topic
        self.partition = partition
        self.topic_id = b""
        self.leader_epoch = -1
        self.paused = False
        self.broker: BrokerFetches | None = None
        """Where it is fetched."""
        self.in_session = False
        self.exchange: Exchange | None = None
        """The request without a session that it is in."""
        self.listed = False
        """Whether the fetcher lists it among those that have something to take."""
        self.buffered_bytes = 0
        self.generation = 0
        self.attempts = 0
        self.retry_at_s = 0.0
        self.high_watermark = -1
        self.log_start_offset = -1
        self.reset_to: int | None = None
        self.clear(None)

    @property
    def where(self) -> TopicPartition:
        """Topic and partition."""
        return TopicPartition(self.topic, self.partition)

    def clear(self, position: int | None, epoch: int = -1) -> None:
        """Go on at `position` (None: not known), without what was fetched; answers under way are void."""
        self.generation += 1
        self.asked: FetchPartition | None = None  # what answers have to be to
        self.position = self.fetch_offset = position
        self.position_epoch = self.fetch_epoch = epoch
        self.unvalidated = False
        self.buffer: deque[Chunk | OutOfRange | KafkaError] = deque()
        self.ledger.buffered_bytes -= self.buffered_bytes
        self.buffered_bytes = 0
        self.ledger.changed[self] = None
        if position is not None:
            self.reset_to = None

    def reset(self, timestamp: int) -> None:
        """Find the position by ListOffsets."""
        self.clear(None)
        self.reset_to = timestamp

    def drop_first(self) -> None:
        """The first of what is buffered was taken."""
        item = self.buffer.popleft()
        if isinstance(item, Chunk):
            self.buffered_bytes -= item.size_bytes
            self.ledger.buffered_bytes -= item.size_bytes
        self.ledger.changed[self] = None

    def put(self, answer: PartitionData) -> None:
        """Buffer an answer's batches."""
        batches: list[tuple[int, BatchHeader]] = []
        failure: KafkaError | None = None
        offset = self.fetch_offset or 0
        try:
            for position, header in iterate(answer.records, allow_partial=True):
                if header.next_offset <= offset:
                    continue
                batches.append((position, header))
                offset = header.next_offset
        except CorruptRecordError as error:
            failure = error
        if batches:
            chunk = Chunk(answer.records, batches, answer)
            self.buffer.append(chunk)
            self.buffered_bytes += chunk.size_bytes
            self.ledger.buffered_bytes += chunk.size_bytes
            self.fetch_offset = offset
            self.fetch_epoch = batches[-1][1].partition_leader_epoch
        elif answer.records and failure is None:
            failure = CorruptRecordError("an answer without a whole batch at the offset")
        if failure is not None:
            self.buffer.append(self.located(failure))

    def located(self, error: KafkaError) -> KafkaError:
        """The error with partition and offset in its message."""
        return KafkaError(error.code, f"{self.topic}-{self.partition} at offset {self.fetch_offset}: {error.message}")
