"""What a consumer knows about one assigned partition: its position, what is fetched, and what is asked.

Invariants: the ledger's `buffered_bytes` are the sum of all partitions'; a partition whose state changed in a way that
may let it be asked for again is in the ledger's `changed`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from kipmesh.client.records import consumer_records
from kipmesh.client.types import ConsumerRecord, FetchedBatches, TopicPartition
from kipmesh.core.consumer import EpochSpan, PartitionReader, State, TruncationFound
from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.core.record_batch import BatchHeader, check_crc, iterate
from kipmesh.messages import FetchPartition

if TYPE_CHECKING:
    from kipmesh.client.broker_fetches import BrokerFetches, Exchange

DECODE_ON_LOOP_BYTES_MAX = 64 << 10
"""Compressed batches that are larger are decoded on a thread."""


class AskUser:
    """Stands behind what is buffered: only the user can say how to go on."""


ASK_USER = AskUser()


class Parsed(NamedTuple):
    """The records of an answer: whole batches from the fetch offset on, and their epochs."""

    batches: list[tuple[int, BatchHeader]]
    spans: list[EpochSpan]
    failure: KafkaError | None
    """Set only where there is not one whole batch."""


def parse_records(records: bytes, fetch_offset: int) -> Parsed:
    """What is in an answer; garbage behind whole batches is found by the next fetch."""
    batches: list[tuple[int, BatchHeader]] = []
    spans: list[EpochSpan] = []
    failure: KafkaError | None = None
    offset = fetch_offset
    try:
        for position, header in iterate(records, allow_partial=True):
            if header.next_offset <= offset:
                continue
            batches.append((position, header))
            offset, epoch = header.next_offset, header.partition_leader_epoch
            if spans and spans[-1].epoch == epoch:
                spans[-1] = spans[-1]._replace(next_offset=offset)
            else:
                spans.append(EpochSpan(header.base_offset, offset, epoch))
    except CorruptRecordError as error:
        failure = error
    if records and not batches:
        return Parsed([], [], failure or CorruptRecordError("an answer without a whole batch at the offset"))
    return Parsed(batches, spans, None)


class Chunk:
    """The batches of one answer, taken batch by batch; batches are decoded when they are taken."""

    __slots__ = ("_batches", "_index", "_records", "_taken", "data", "node_id", "size_bytes")

    def __init__(self, data: bytes, batches: list[tuple[int, BatchHeader]], node_id: int) -> None:
        self.data = data
        self.size_bytes = len(data)
        self.node_id = node_id
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
            state.reader.position = max(state.position or 0, header.next_offset)
        else:
            state.reader.position = taken[-1].offset + 1
        return taken

    def rest(self, state: PartitionState, topic_id: bytes) -> FetchedBatches:
        """What was not taken yet, as whole batches; moves the position past it."""
        start = self._batches[self._index][0]
        header = self._batches[-1][1]
        position = state.position or 0
        state.reader.position = header.next_offset
        self._index = len(self._batches)
        return FetchedBatches(
            state.topic,
            state.partition,
            topic_id,
            position,
            header.next_offset,
            state.high_watermark,
            state.log_start_offset,
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
    """One assigned partition: its reader, which decides, and what is fetched. What is buffered lies between the
    reader's position and fetch offset."""

    __slots__ = (
        "asked",
        "attempts",
        "broker",
        "buffer",
        "buffered_bytes",
        "exchange",
        "generation",
        "in_session",
        "ledger",
        "listed",
        "number",
        "partition",
        "paused",
        "reader",
        "renew_at_s",
        "reset_to",
        "retry_at_s",
        "topic",
        "topic_id",
        "verdict",
    )

    def __init__(self, topic: str, partition: int, ledger: Ledger, reader: PartitionReader) -> None:
        self.ledger = ledger
        self.topic = topic
        self.partition = partition
        self.reader = reader
        self.topic_id = b""
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
        self.renew_at_s = 0.0
        """When somebody else may have to be asked than now; 0 for never."""
        self.reset_to: int | None = None
        """The user's own reset that is not done yet."""
        self.verdict: KafkaError | None = None
        """Why it does not go on until the user seeks, where the reader does not know."""
        self.clear()

    @property
    def where(self) -> TopicPartition:
        """Topic and partition."""
        return TopicPartition(self.topic, self.partition)

    @property
    def position(self) -> int | None:
        """The offset of the next record that the user gets; None while it is not known."""
        return self.reader.position

    @property
    def high_watermark(self) -> int:
        """The highest of all replicas (392-10); -1 before there is one."""
        return self.reader.high_watermark

    @property
    def log_start_offset(self) -> int:
        """That of the last answer."""
        return self.reader.log_start_offset

    @property
    def is_halted(self) -> bool:
        """Whether only the user can say how to go on, or can if `auto.offset.reset` does not."""
        return self.verdict is not None or self.reader.state in (State.HALTED, State.RESETTING)

    def ask_user(self) -> KafkaError | None:
        """Why the partition does not go on until the user seeks; None if it does."""
        if self.verdict is not None:
            return self.verdict
        problem, where = self.reader.ask_user(), f"{self.topic}-{self.partition}"
        if problem is None:
            return None
        if isinstance(problem, TruncationFound):
            to = f"to offset {problem.end_offset}" if problem.end_offset is not None else "to an unknown offset"
            text = f"{where}: the log was truncated {to}, below {problem.position}"
            return KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, text)
        if problem.offset < 0:
            return KafkaError(problem.code, f"{where} has no position and auto.offset.reset is none")
        bounds = f"{problem.log_start_offset} and {problem.high_watermark}"
        return KafkaError(problem.code, f"{where}: offset {problem.offset} is not between {bounds}")

    def clear(self) -> None:
        """Without what was fetched; answers under way are void."""
        self.generation += 1
        self.asked: FetchPartition | None = None  # what answers have to be to
        self.number = 0  # the reader's for them
        self.buffer: deque[Chunk | AskUser | KafkaError] = deque()
        self.ledger.buffered_bytes -= self.buffered_bytes
        self.buffered_bytes = 0
        self.ledger.changed[self] = None

    def seek(self, offset: int) -> None:
        """Go on at `offset`."""
        self.verdict = self.reset_to = None
        self.retry_at_s = 0.0
        self.reader.seek(offset)
        self.clear()

    def reset(self, timestamp: int) -> None:
        """Find the position by ListOffsets."""
        self.verdict = None
        self.reset_to = timestamp
        self.retry_at_s = 0.0
        self.reader.reset(timestamp)
        self.clear()

    def drop_first(self) -> None:
        """The first of what is buffered was taken."""
        item = self.buffer.popleft()
        if isinstance(item, Chunk):
            self.buffered_bytes -= item.size_bytes
            self.ledger.buffered_bytes -= item.size_bytes
        self.ledger.changed[self] = None

    def put(self, chunk: Chunk) -> None:
        """Buffer an answer's batches."""
        self.buffer.append(chunk)
        self.buffered_bytes += chunk.size_bytes
        self.ledger.buffered_bytes += chunk.size_bytes

    def located(self, error: KafkaError) -> KafkaError:
        """The error with partition and offset in its message."""
        where = f"{self.topic}-{self.partition} at offset {self.reader.fetch_offset}"
        return KafkaError(error.code, f"{where}: {error.message}")
