"""Sequence numbers of idempotent producers, on the broker and in the producer.

Each record has a sequence from 0 to INT_MAX, followed by 0 again. A batch header has the sequence of the first record.
Each producer id and epoch has separate sequences in every partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.record_batch import BatchHeader
from kipmesh.messages.schema import MAX_INT32

NO_SEQUENCE = -1
PRODUCER_EPOCH_MAX = 2**15 - 1
UNRESOLVED_MAX = 5
"""Maximum batches in flight per producer and partition. Brokers remember the same number."""

_COUNT = MAX_INT32 + 1


def sequence_after(sequence: int, records: int) -> int:
    """Return the sequence that is `records` after `sequence`, with wrap-around."""
    return (sequence + records) % _COUNT


def sequence_before(sequence: int, records: int) -> int:
    """Return the sequence that is `records` before `sequence`, with wrap-around."""
    return (sequence - records) % _COUNT


def follows(last_sequence: int, next_sequence: int) -> bool:
    """Return whether `next_sequence` directly follows `last_sequence`. NO_SEQUENCE is followed by 0."""
    return next_sequence == (last_sequence + 1) % _COUNT


# --- broker

BATCHES_KEPT = UNRESOLVED_MAX
"""Batches remembered per producer: as many as it may have in flight."""


class WrittenBatch(NamedTuple):
    """A producer's batch in the log of a partition."""

    last_sequence: int
    last_offset: int
    offset_delta: int
    """Number of records minus one."""
    timestamp: int
    """Maximum timestamp of the records in ms."""

    @property
    def first_sequence(self) -> int:
        """Sequence of the batch's first record."""
        return sequence_before(self.last_sequence, self.offset_delta)

    @property
    def first_offset(self) -> int:
        """Offset of the batch's first record."""
        return self.last_offset - self.offset_delta


class ProducerEntry(NamedTuple):
    """One producer's entry in a snapshot: Kafka's fields, in Kafka's order. `timestamp` is in ms."""

    producer_id: int
    epoch: int
    last_sequence: int
    """-1 if the producer has written nothing in this epoch."""
    last_offset: int
    offset_delta: int
    timestamp: int
    coordinator_epoch: int = -1
    current_txn_first_offset: int = -1


@dataclass(slots=True)
class _Producer:
    """State of one producer id."""

    epoch: int
    began_at: int
    """Offset of its first batch, or -1 if unknown."""
    seen_ms: int
    batches: list[WrittenBatch] = field(default_factory=list)

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE


class ProducerStates:
    """State of a partition's idempotent producers; classifies their batches as Apache Kafka 4.x does.

    Each producer id has one epoch and the last five batches of that epoch. A repeated batch is a duplicate and gets the
    offset of the original. Any other batch must follow the last one, or start at 0 in a newer epoch. A batch of an
    unknown or forgotten producer id is accepted with any sequence. Followers accept what the leader accepted.

    Invariants: the state follows from the log's batches in order, so leader and followers agree except for forgotten
    producers; batches of a producer belong to its current epoch, oldest first, and the last one is its last in the log.
    The cost of a check or append does not depend on the number of producers.
    """

    __slots__ = ("_producers",)

    def __init__(self) -> None:
        self._producers: dict[int, _Producer] = {}

    def __len__(self) -> int:
        return len(self._producers)

    def check(self, header: BatchHeader) -> WrittenBatch | None:
        """Return the written batch that this one duplicates, or None if it may be appended (also for an unknown
        producer id).

        Raises KafkaError: INVALID_RECORD (negative sequence or epoch, or transactional), INVALID_PRODUCER_EPOCH (older
        epoch), OUT_OF_ORDER_SEQUENCE_NUMBER (a gap).
        """
        producer = self._producers.get(header.producer_id)
        if header.base_sequence < 0 or header.producer_epoch < 0 or header.is_transactional:
            raise KafkaError(
                ErrorCode.INVALID_RECORD,
                "transactions are not supported"
                if header.is_transactional
                else f"producer {header.producer_id} sent epoch {header.producer_epoch} and sequence "
                f"{header.base_sequence}; both must be at least 0",
            )
        if producer is None:
            return None
        if header.producer_epoch == producer.epoch:
            batches = producer.batches
            if not batches or follows(batches[-1].last_sequence, header.base_sequence):
                return None
            for batch in batches:
                if batch.offset_delta == header.last_offset_delta and batch.first_sequence == header.base_sequence:
                    return batch
        elif header.producer_epoch > producer.epoch and header.base_sequence == 0:
            return None
        elif header.producer_epoch < producer.epoch:
            raise KafkaError(
                ErrorCode.INVALID_PRODUCER_EPOCH,
                f"producer {header.producer_id} sent epoch {header.producer_epoch}, its epoch is {producer.epoch}",
            )
        raise KafkaError(
            ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
            f"producer {header.producer_id} sent sequence {header.base_sequence} in epoch {header.producer_epoch}, "
            f"its last sequence is {producer.last_sequence} in epoch {producer.epoch}",
        )

    def append(self, header: BatchHeader, base_offset: int, seen_ms: int) -> None:
        """Record that a producer's batch is in the log at `base_offset`. `seen_ms` is the time in ms that `expire`
        compares with its limit.

        Control batches update only the epoch and the time. Batches of an older epoch are ignored.
        """
        producer = self._producers.get(header.producer_id)
        if producer is None:
            producer = _Producer(header.producer_epoch, base_offset, seen_ms)
            self._producers[header.producer_id] = producer
        elif header.producer_epoch < producer.epoch:
            return  # written by a leader that did not know the newer epoch
        elif header.producer_epoch > producer.epoch:
            producer.epoch = header.producer_epoch
            producer.batches.clear()
        producer.seen_ms = seen_ms
        if header.is_control:
            return
        batches = producer.batches
        batches.append(_written(header, base_offset + header.last_offset_delta))
        if len(batches) > BATCHES_KEPT:
            del batches[0]

    def truncate(self, end_offset: int) -> bool:
        """Forget batches from `end_offset` on, after a truncation of the log. Return whether the state is correct
        afterwards.

        Returns False, with the state unchanged, if the last batch of a producer before the truncation is not known. The
        caller must then rebuild the state.
        """
        changed = []
        for producer_id, producer in self._producers.items():
            kept = [batch for batch in producer.batches if batch.last_offset < end_offset]
            if len(kept) == len(producer.batches):
                continue
            if not kept and not 0 <= end_offset <= producer.began_at:
                return False
            changed.append((producer_id, producer, kept))
        for producer_id, producer, kept in changed:
            producer.batches = kept
            if not kept:
                del self._producers[producer_id]
        return True

    def expire(self, seen_before_ms: int) -> int:
        """Forget producers whose last batch was seen before `seen_before_ms`. Return how many were forgotten."""
        expired = [producer_id for producer_id, each in self._producers.items() if each.seen_ms < seen_before_ms]
        for producer_id in expired:
            del self._producers[producer_id]
        return len(expired)

    # --- snapshots

    def entries(self) -> Iterator[ProducerEntry]:
        """Yield one snapshot entry per producer: its last batch, or -1 as sequence and offset if it has none in this
        epoch."""
        for producer_id, producer in self._producers.items():
            no_batch = WrittenBatch(NO_SEQUENCE, -1, 0, producer.seen_ms)
            yield ProducerEntry(producer_id, producer.epoch, *(producer.batches[-1] if producer.batches else no_batch))

    def load(self, entries: Iterable[ProducerEntry]) -> None:
        """Replace the state with the entries of a snapshot. Pass no entries for an empty log."""
        self._producers.clear()
        for entry in entries:
            producer = self._producers[entry.producer_id] = _Producer(entry.epoch, -1, entry.timestamp)
            if entry.last_sequence != NO_SEQUENCE:
                producer.batches.append(
                    WrittenBatch(entry.last_sequence, entry.last_offset, entry.offset_delta, entry.timestamp)
                )

    def add_history(self, headers: Iterable[BatchHeader]) -> None:
        """Add batches that precede the loaded snapshot in the log, in log order. Batches of unknown producers or other
        epochs are ignored.

        A snapshot has only the last batch per producer. A producer with several batches in flight may resend older
        batches, which must also be recognized as duplicates.
        """
        by_producer: dict[int, list[WrittenBatch]] = {}
        for header in headers:
            producer = self._producers.get(header.producer_id)
            if producer is None or header.producer_epoch != producer.epoch or header.is_control:
                continue
            by_producer.setdefault(header.producer_id, []).append(_written(header, header.last_offset))
        for producer_id, batches in by_producer.items():
            producer = self._producers[producer_id]
            if producer.batches and batches[-1].last_offset == producer.batches[-1].last_offset:
                producer.batches = batches[-BATCHES_KEPT:]


def _written(header: BatchHeader, last_offset: int) -> WrittenBatch:
    delta = header.last_offset_delta
    last_sequence = (header.base_sequence + delta) & 0x7FFF_FFFF
    return WrittenBatch(last_sequence, last_offset, delta, header.max_timestamp)


# --- producer

PIPELINE_AFTER_ACK_S = 60.0
"""Time after an acknowledgement for which the leader is assumed to know the producer."""

Identity = tuple[int, int]
"""(producer id, epoch)."""


class Verdict(Enum):
    """Outcome of a batch that a broker refused."""

    RETRY = "retry"
    """Send it again, possibly with a new sequence."""
    WRITTEN = "written"
    """It is in the log at an unknown offset."""
    FAILED = "failed"
    """It is not in the log, and will not be."""


@dataclass(slots=True, eq=False)
class BatchSequence:
    """Producer id, epoch and sequence of a batch, assigned on its first send and replaced when the epoch is bumped."""

    records: int
    identity: Identity
    base_sequence: int
    ordinal: int
    """Position of the batch among all of the partition, in the order of first sends."""
    may_be_written: bool = False
    """Whether a request with the batch ended without confirming that it was not written."""
    was_oldest: bool = False
    """Whether it was the oldest unresolved batch when last sent. Only then does an out-of-order error mean a gap."""

    @property
    def last_sequence(self) -> int:
        """Sequence of the batch's last record."""
        return sequence_after(self.base_sequence, self.records - 1)

    @property
    def stamp(self) -> tuple[int, int, int]:
        """(producer id, epoch, base sequence), as in the batch header."""
        return (*self.identity, self.base_sequence)


@dataclass(slots=True, eq=False)
class PartitionSequences:
    """Sequences of an idempotent producer in one partition: when a batch may be sent, and its outcome after an error.

    A batch keeps its sequence when it is sent again, so that the broker recognizes it (`ProducerStates`). The rules are
    those of Kafka's TransactionManager for idempotent producers:

    - At most five batches are in flight, counted from the oldest unresolved one. Only the oldest is retried, alone; new
      batches follow once it is resolved.
    - OUT_OF_ORDER_SEQUENCE_NUMBER for the oldest unresolved batch means a gap in the log: the epoch is bumped, and
      unresolved batches start at 0 in the new one. For a later batch it means that an earlier one is missing, so the
      later batch is sent again.
    - A batch that failed for good leaves a gap, with the same effect. An expired batch without a response may or may
      not have been written: no new batch is sent until the others are resolved. If its sequence was not reached by
      then, the epoch is bumped.
    - The epoch is bumped locally. After the last epoch a new producer id is needed. Other partitions switch once
      their batches are resolved.

    Three rules differ from Kafka, because requests may overtake each other here and a broker accepts any sequence of an
    unknown producer. Batches are pipelined only to a leader that acknowledged one in this epoch within the last minute.
    Sequences are reassigned only while the partition has no request in flight. After an expired batch, a batch that had
    a request without a response is failed rather than written again in the new epoch, because a late request could
    close the gap and duplicate it.

    Invariants: sequences of a partition in one epoch have no gap and no duplicate; unresolved batches are in record
    order; the epoch in use never decreases.
    """

    _producer: ProducerSequences
    _identity: Identity | None = None
    _next: int = 0
    _last_acked: int = NO_SEQUENCE
    _acked_by: int = -1
    _acked_s: float = 0.0
    _in_flight: int = 0
    _ordinal: int = 0
    _needs_new_epoch: bool = False
    _may_have_gap: bool = False
    unresolved: list[BatchSequence] = field(default_factory=list)

    # --- sending

    def may_send(self, numbers: BatchSequence | None, leader_id: int, now_s: float) -> bool:
        """Return whether the oldest waiting batch may be sent to this leader now. `numbers` is None if the batch has
        not been sent before.

        Returns False without a producer id, or while the partition waits for a new epoch. A retry must be the oldest
        unresolved batch.
        """
        if self._needs_new_epoch or self._producer.identity is None:
            return False
        if numbers is not None:
            return bool(self.unresolved) and self.unresolved[0] is numbers
        if self._may_have_gap:
            return False
        if not self.unresolved:
            return not self._in_flight
        return (
            self._identity == self._producer.identity
            and self._ordinal - self.unresolved[0].ordinal < UNRESOLVED_MAX
            and leader_id == self._acked_by
            and now_s - self._acked_s < PIPELINE_AFTER_ACK_S
            and self._in_flight == len(self.unresolved)
        )

    def number(self, records: int) -> BatchSequence:
        """Assign sequences to a batch of `records` records that is sent for the first time, after `may_send`. Raises
        RuntimeError without a producer id."""
        identity = self._producer.identity
        if identity is None:
            raise RuntimeError("the producer has no producer id yet")
        if self._identity != identity:
            self._start_epoch(identity)
        numbers = BatchSequence(records, identity, self._next, self._ordinal)
        self._ordinal += 1
        self._next = sequence_after(self._next, records)
        self.unresolved.append(numbers)
        return numbers

    def sent(self, numbers: BatchSequence) -> None:
        """Record that a request with the batch was sent. `request_done` must follow, whatever the outcome."""
        self._in_flight += 1
        numbers.was_oldest = self.unresolved[0] is numbers

    def _start_epoch(self, identity: Identity) -> None:
        self._identity = identity
        self._next, self._last_acked, self._acked_by = 0, NO_SEQUENCE, -1
        self._needs_new_epoch = self._may_have_gap = False

    # --- outcomes

    def acked(self, numbers: BatchSequence, leader_id: int, now_s: float) -> None:
        """Record that the leader acknowledged the batch, even if it was abandoned before."""
        if numbers in self.unresolved:
            self.unresolved.remove(numbers)
        if numbers.identity != self._identity:
            return
        ahead = sequence_after(self._next, -1 - numbers.last_sequence)  # records after it, minus one
        if ahead <= sequence_after(self._next, -1 - self._last_acked) or self._last_acked == NO_SEQUENCE:
            self._last_acked = numbers.last_sequence
        self._acked_by, self._acked_s = leader_id, now_s

    def refused(self, numbers: BatchSequence, error: KafkaError) -> Verdict:
        """Return the outcome of a batch after an error or a missing response. Call `abandoned` if the batch will not be
        sent again.

        WRITTEN for DUPLICATE_SEQUENCE_NUMBER, RETRY for OUT_OF_ORDER_SEQUENCE_NUMBER, UNKNOWN_PRODUCER_ID and retriable
        errors, else FAILED.
        """
        code = error.code
        if code is ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
            return Verdict.WRITTEN
        if code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
            if numbers.was_oldest:
                self._bump()
            return Verdict.RETRY
        if code is ErrorCode.UNKNOWN_PRODUCER_ID:  # from brokers before Kafka 2.4
            self._bump()
            return Verdict.RETRY
        if not error.retriable:
            return Verdict.FAILED
        numbers.may_be_written = True
        return Verdict.RETRY

    def abandoned(self, numbers: BatchSequence, *, is_certain: bool) -> None:
        """Record that the batch will not be sent again. `is_certain` means that it is known not to be in the log.
        Ignored for a resolved batch."""
        if numbers not in self.unresolved:
            return
        self.unresolved.remove(numbers)
        if not is_certain:
            self._may_have_gap = True
        elif not self.unresolved:
            self._bump()  # otherwise a later batch detects the gap, and earlier batches keep their sequences

    def split(self, numbers: BatchSequence, records: list[int]) -> list[BatchSequence]:
        """Split an unresolved batch that was too large into batches with these numbers of records. Return their
        sequences. Raises ValueError if the batch is resolved."""
        parts: list[BatchSequence] = []
        sequence = numbers.base_sequence
        for count in records:
            parts.append(BatchSequence(count, numbers.identity, sequence, numbers.ordinal + len(parts)))
            sequence = sequence_after(sequence, count)
        place = self.unresolved.index(numbers)
        for later in self.unresolved[place + 1 :]:
            later.ordinal += len(parts) - 1
        self._ordinal += len(parts) - 1
        self.unresolved[place : place + 1] = parts
        return parts

    def request_done(self) -> list[BatchSequence]:
        """Record that a request has ended and its outcome was reported. Like `renumber_if_due`, return the batches that
        must not be sent again."""
        self._in_flight -= 1
        return self.renumber_if_due()

    def renumber_if_due(self) -> list[BatchSequence]:
        """Start a new epoch if it is due and no request is in flight. Call this after `abandoned` and after a change of
        producer id.

        Returns the batches that must not be sent again, because an earlier request may have written them; usually none.
        These batches no longer count as unresolved.
        """
        if self._may_have_gap and not self.unresolved and not self._in_flight:
            self._may_have_gap = False
            if not follows(self._last_acked, self._next):
                self._bump()
        identity = self._producer.identity
        if not self._needs_new_epoch or self._in_flight or identity is None:
            return []
        dropped = [numbers for numbers in self.unresolved if self._may_have_gap and numbers.may_be_written]
        self.unresolved = [numbers for numbers in self.unresolved if numbers not in dropped]
        self._start_epoch(identity)
        for numbers in self.unresolved:
            numbers.identity, numbers.base_sequence = identity, self._next
            self._next = sequence_after(self._next, numbers.records)
        return dropped

    def _bump(self) -> None:
        """End this epoch in this partition, and switch the producer to the next epoch unless another partition has
        already done so."""
        if not self._needs_new_epoch:
            self._needs_new_epoch = True
            if self._identity == self._producer.identity:
                self._producer.bump()


class ProducerSequences:
    """Producer id and epoch of a producer, and the sequences of all its partitions."""

    __slots__ = ("_partitions", "bumps", "identity")

    def __init__(self) -> None:
        self._partitions: dict[tuple[str, int], PartitionSequences] = {}
        self.identity: Identity | None = None
        """None while a producer id must be requested."""
        self.bumps = 0

    def of(self, topic: str, partition: int) -> PartitionSequences:
        """Return the partition's sequences, created on first use and kept for the producer's lifetime."""
        key = (topic, partition)
        sequences = self._partitions.get(key)
        if sequences is None:
            sequences = self._partitions[key] = PartitionSequences(self)
        return sequences

    def set_identity(self, producer_id: int, epoch: int) -> None:
        """Set the producer id and epoch that a broker assigned. Next, call `PartitionSequences.renumber_if_due` for the
        waiting partitions."""
        self.identity = (producer_id, epoch)

    def bump(self) -> None:
        """Switch to the next epoch. After the last epoch, `identity` is None until `set_identity` is called."""
        self.bumps += 1
        if self.identity is not None:
            producer_id, epoch = self.identity
            self.identity = (producer_id, epoch + 1) if epoch < PRODUCER_EPOCH_MAX else None
