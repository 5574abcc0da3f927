"""Sequence numbers of idempotent producers: 0 to INT_MAX, after which comes 0 again, one a record.

A batch has the sequence of its first record in its header; the others follow from the count. A producer id and an
epoch have sequences of their own in every partition.
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
NO_PRODUCER_ID = -1
NO_PRODUCER_EPOCH = -1
PRODUCER_EPOCH_MAX = 2**15 - 1
UNRESOLVED_MAX = 5
"""Batches of a producer and a partition that may be under way; a broker knows as many."""

_COUNT = MAX_INT32 + 1


def sequence_after(sequence: int, records: int) -> int:
    """The sequence that comes `records` after `sequence`."""
    return (sequence + records) % _COUNT


def sequence_before(sequence: int, records: int) -> int:
    """The sequence that comes `records` before `sequence`."""
    return (sequence - records) % _COUNT


def follows(last_sequence: int, next_sequence: int) -> bool:
    """Whether nothing is missing between the two; after NO_SEQUENCE comes 0."""
    return next_sequence == (last_sequence + 1) % _COUNT


# -- the broker's side

BATCHES_KEPT = UNRESOLVED_MAX
"""Of each producer: as many as it has in flight at most."""


class WrittenBatch(NamedTuple):
    """A batch in the log."""

    last_sequence: int
    last_offset: int
    offset_delta: int
    """Records but one."""
    timestamp: int
    """The largest of its records."""

    @property
    def first_sequence(self) -> int:
        """Of its first record."""
        return sequence_before(self.last_sequence, self.offset_delta)

    @property
    def first_offset(self) -> int:
        """Of its first record."""
        return self.last_offset - self.offset_delta


class ProducerEntry(NamedTuple):
    """A producer as a snapshot has it: Kafka's fields, in Kafka's order."""

    producer_id: int
    epoch: int
    last_sequence: int
    """-1 when it has written nothing in this epoch."""
    last_offset: int
    offset_delta: int
    timestamp: int
    coordinator_epoch: int = -1
    current_txn_first_offset: int = -1


@dataclass(slots=True)
class _Producer:
    """One producer id."""

    epoch: int
    began_at: int
    """Offset of its first batch; -1 where that is not known."""
    seen_ms: int
    batches: list[WrittenBatch] = field(default_factory=list)

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE


class ProducerStates:
    """What a partition knows of its idempotent producers, and how it responds to their batches.

    Rules (Apache Kafka's, 4.x). A producer id has one epoch at a time and, of that epoch, its last five batches. A
    batch that is one of them is a duplicate, answered with its first place. Otherwise it must follow the last one
    (OUT_OF_ORDER_SEQUENCE_NUMBER), begin at 0 in a newer epoch (the same error), and may not be of an older one
    (INVALID_PRODUCER_EPOCH). Of a producer id that is not known, or not known any more, any sequence is taken: Kafka's
    brokers answer UNKNOWN_PRODUCER_ID no more. What a leader took, a follower takes as it is.

    Invariants: the state follows from the log's batches in their order, so leader and followers have the same, but for
    producers that one of them has forgotten; batches of a producer are of its present epoch, oldest first, and the last
    one is the last in the log. A check or an append costs the same however many producers there are.
    """

    __slots__ = ("_producers",)

    def __init__(self) -> None:
        self._producers: dict[int, _Producer] = {}

    def __len__(self) -> int:
        return len(self._producers)

    def check(self, header: BatchHeader) -> WrittenBatch | None:
        """The batch that this one repeats, None for one that may be appended; KafkaError for all others."""
        producer = self._producers.get(header.producer_id)
        if header.base_sequence < 0 or header.producer_epoch < 0 or header.is_transactional:
            raise KafkaError(
                ErrorCode.INVALID_RECORD,
                f"producer {header.producer_id} with epoch {header.producer_epoch} and sequence {header.base_sequence}"
                + (": transactions are not supported" if header.is_transactional else ""),
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
                f"epoch {header.producer_epoch} of producer {header.producer_id}, which has {producer.epoch}",
            )
        raise KafkaError(
            ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
            f"sequence {header.base_sequence} in epoch {header.producer_epoch} of producer {header.producer_id}, whose "
            f"last is {producer.last_sequence} in epoch {producer.epoch}",
        )

    def append(self, header: BatchHeader, base_offset: int, seen_ms: int) -> None:
        """A batch of a producer is in the log at `base_offset`; `seen_ms` is when, for `expire`.

        Control batches count as a sign of life, and for the epoch.
        """
        producer = self._producers.get(header.producer_id)
        if producer is None:
            producer = _Producer(header.producer_epoch, base_offset, seen_ms)
            self._producers[header.producer_id] = producer
        elif header.producer_epoch < producer.epoch:
            return  # a leader took it that did not know the newer epoch: nothing of it is to be continued
        elif header.producer_epoch > producer.epoch:
            producer.epoch = header.producer_epoch
            producer.batches.clear()
        producer.seen_ms = seen_ms
        if header.is_control:
            return
        delta = header.last_offset_delta
        last_sequence = (header.base_sequence + delta) & 0x7FFF_FFFF
        batches = producer.batches
        batches.append(WrittenBatch(last_sequence, base_offset + delta, delta, header.max_timestamp))
        if len(batches) > BATCHES_KEPT:
            del batches[0]

    def truncate(self, end_offset: int) -> bool:
        """The log was cut: forget batches from `end_offset` on. False when what was before them is not known.

        Then nothing changed, and the state must be built anew.
        """
        touched = []
        for producer_id, producer in self._producers.items():
            kept = [batch for batch in producer.batches if batch.last_offset < end_offset]
            if len(kept) == len(producer.batches):
                continue
            if not kept and not 0 <= end_offset <= producer.began_at:
                return False
            touched.append((producer_id, producer, kept))
        for producer_id, producer, kept in touched:
            producer.batches = kept
            if not kept:
                del self._producers[producer_id]
        return True

    def expire(self, seen_before_ms: int) -> int:
        """Forget the producers that were not seen since then; gives how many."""
        gone = [producer_id for producer_id, each in self._producers.items() if each.seen_ms < seen_before_ms]
        for producer_id in gone:
            del self._producers[producer_id]
        return len(gone)

    # -- snapshots

    def entries(self) -> Iterator[ProducerEntry]:
        """What a snapshot says: of each producer the last batch."""
        for producer_id, producer in self._producers.items():
            if producer.batches:
                last = producer.batches[-1]
                yield ProducerEntry(
                    producer_id, producer.epoch, last.last_sequence, last.last_offset, last.offset_delta, last.timestamp
                )
            else:
                yield ProducerEntry(producer_id, producer.epoch, NO_SEQUENCE, -1, 0, producer.seen_ms)

    def load(self, entries: Iterable[ProducerEntry]) -> None:
        """Begin with what a snapshot says; with nothing for an empty log."""
        self._producers.clear()
        for entry in entries:
            producer = self._producers[entry.producer_id] = _Producer(entry.epoch, -1, entry.timestamp)
            if entry.last_sequence != NO_SEQUENCE:
                producer.batches.append(
                    WrittenBatch(entry.last_sequence, entry.last_offset, entry.offset_delta, entry.timestamp)
                )

    def recall(self, headers: Iterable[BatchHeader]) -> None:
        """Remember more than the snapshot that was loaded says: batches before its offset, in the log's order.

        A snapshot has one batch of a producer. One that had several in flight when the broker stopped repeats them
        all, and the older ones are duplicates, too.
        """
        found: dict[int, list[WrittenBatch]] = {}
        for header in headers:
            producer = self._producers.get(header.producer_id)
            if producer is None or header.producer_epoch != producer.epoch or header.is_control:
                continue
            delta = header.last_offset_delta
            last_sequence = (header.base_sequence + delta) & 0x7FFF_FFFF
            batch = WrittenBatch(last_sequence, header.last_offset, delta, header.max_timestamp)
            found.setdefault(header.producer_id, []).append(batch)
        for producer_id, batches in found.items():
            producer = self._producers[producer_id]
            if producer.batches and batches[-1].last_offset == producer.batches[-1].last_offset:
                producer.batches = batches[-BATCHES_KEPT:]


# -- the producer's side

SIDE_BY_SIDE_S = 60.0
"""For so long after an acknowledgement a leader is taken to know the producer."""

Identity = tuple[int, int]
"""Producer id and epoch."""


class Verdict(Enum):
    """What becomes of a batch that a broker refused."""

    AGAIN = "again"
    """To be sent again, perhaps under other numbers."""
    WRITTEN = "written"
    """It is in the log, nobody knows where."""
    FAILED = "failed"
    """It is not in the log, and will not be."""


@dataclass(slots=True, eq=False)
class Numbers:
    """What a batch carries in its header from when it is first sent; replaced when it begins anew."""

    records: int
    identity: Identity
    base_sequence: int
    ordinal: int
    """Of the batch among all of the partition, in the order of their first sending."""
    is_open: bool = False
    """Whether a request with it ended without saying that it was not written."""
    was_oldest: bool = False
    """When it was last sent: then only can a gap be none that an earlier one fills."""

    @property
    def last_sequence(self) -> int:
        """Of the last record."""
        return sequence_after(self.base_sequence, self.records - 1)

    @property
    def stamp(self) -> tuple[int, int, int]:
        """Producer id, epoch and base sequence, as the header has them."""
        return (*self.identity, self.base_sequence)


@dataclass(slots=True, eq=False)
class PartitionSequences:
    """The sequences of an idempotent producer in one partition: which batch may go when, and what becomes of it.

    A batch gets its sequence when it is first sent, and keeps it when it is sent again, so that the broker knows it
    (`ProducerStates`). The rules are those of Kafka's TransactionManager for idempotent producers:

    - No batch goes that is the sixth from the oldest unresolved one on: a broker knows the last five. What is sent
      again is the oldest of them, alone until it is settled; new ones follow after those.
    - OUT_OF_ORDER_SEQUENCE_NUMBER of the oldest unresolved batch is a gap in the log: the epoch is bumped, and what is
      unresolved begins at 0 in the new one. Of a later batch it means that an earlier one is missing: it is sent again.
    - A batch that was refused for good leaves a gap: the same. One that ended without an answer (expired) may be
      written or not: no new batch goes until the others are settled, and if its sequence was not reached by then, the
      epoch is bumped.
    - An epoch is bumped here, nobody is asked; after the last one a new producer id is needed. Other partitions go over
      to it when nothing of theirs is unresolved.

    Three rules are ours. Requests over one connection may overtake each other here, and a broker takes any sequence of
    a producer that it does not know: so batches go side by side only to a leader that has acknowledged one in this
    epoch within the last minute, and sequences are given anew only while no request of the partition is under way. And
    where a batch expired, a request of its that comes late may close the gap, and let those after it in: a batch of
    which a request has no answer is then failed, where Kafka's producer writes it again in the new epoch, perhaps for a
    second time.

    Invariants: the sequences of a partition in one epoch have no gap and none is given twice; unresolved batches are in
    the order of their records; nothing is sent in an older epoch than was sent before.
    """

    _producer: ProducerSequences
    _identity: Identity | None = None
    _next: int = 0
    _last_acked: int = NO_SEQUENCE
    _acked_by: int = -1
    _acked_s: float = 0.0
    _under_way: int = 0
    _ordinal: int = 0
    _begins_anew: bool = False
    _is_doubtful: bool = False
    unresolved: list[Numbers] = field(default_factory=list)

    # -- sending

    def may_send(self, numbers: Numbers | None, leader_id: int, now_s: float) -> bool:
        """Whether the oldest batch that waits may go to that leader now; `numbers` is None before its first time."""
        if self._begins_anew or self._producer.identity is None:
            return False
        if numbers is not None:
            return bool(self.unresolved) and self.unresolved[0] is numbers
        if self._is_doubtful:
            return False
        if not self.unresolved:
            return not self._under_way
        return (
            self._identity == self._producer.identity
            and self._ordinal - self.unresolved[0].ordinal < UNRESOLVED_MAX
            and leader_id == self._acked_by
            and now_s - self._acked_s < SIDE_BY_SIDE_S
            and self._under_way == len(self.unresolved)
        )

    def number(self, records: int) -> Numbers:
        """The sequences of a batch that is sent for the first time; `may_send` has allowed it."""
        identity = self._producer.identity
        if identity is None:
            raise RuntimeError("there is no producer id yet")
        if self._identity != identity:
            self._begin(identity)
        numbers = Numbers(records, identity, self._next, self._ordinal)
        self._ordinal += 1
        self._next = sequence_after(self._next, records)
        self.unresolved.append(numbers)
        return numbers

    def sent(self, numbers: Numbers) -> None:
        """The batch is under way; `settled` follows in any case."""
        self._under_way += 1
        numbers.was_oldest = self.unresolved[0] is numbers

    def _begin(self, identity: Identity) -> None:
        self._identity = identity
        self._next, self._last_acked, self._acked_by = 0, NO_SEQUENCE, -1
        self._begins_anew = self._is_doubtful = False

    # -- outcomes

    def acked(self, numbers: Numbers, leader_id: int, now_s: float) -> None:
        """It is written; also for one that was given up before."""
        if numbers in self.unresolved:
            self.unresolved.remove(numbers)
        if numbers.identity != self._identity:
            return
        ahead = sequence_after(self._next, -1 - numbers.last_sequence)  # records from there to the end, less one
        if ahead <= sequence_after(self._next, -1 - self._last_acked) or self._last_acked == NO_SEQUENCE:
            self._last_acked = numbers.last_sequence
        self._acked_by, self._acked_s = leader_id, now_s

    def refused(self, numbers: Numbers, error: KafkaError) -> Verdict:
        """A broker's error, or that there was no answer; `gave_up` follows when the batch is not sent again."""
        code = error.code
        if code is ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
            return Verdict.WRITTEN
        if code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
            if numbers.was_oldest:
                self._bump()
            return Verdict.AGAIN
        if code is ErrorCode.UNKNOWN_PRODUCER_ID:  # of brokers before Kafka 2.4
            self._bump()
            return Verdict.AGAIN
        if not error.retriable:
            return Verdict.FAILED
        numbers.is_open = True
        return Verdict.AGAIN

    def gave_up(self, numbers: Numbers, *, is_certain: bool) -> None:
        """The batch is not sent again; `is_certain` says that it is not in the log."""
        if numbers not in self.unresolved:
            return
        self.unresolved.remove(numbers)
        if not is_certain:
            self._is_doubtful = True
        elif not self.unresolved:
            self._bump()  # otherwise what comes after it meets the gap; what came before keeps its sequence

    def split(self, numbers: Numbers, records: list[int]) -> list[Numbers]:
        """Several batches in place of one that was refused as too large; together they have its records."""
        parts: list[Numbers] = []
        sequence = numbers.base_sequence
        for count in records:
            parts.append(Numbers(count, numbers.identity, sequence, numbers.ordinal + len(parts)))
            sequence = sequence_after(sequence, count)
        place = self.unresolved.index(numbers)
        for later in self.unresolved[place + 1 :]:
            later.ordinal += len(parts) - 1
        self._ordinal += len(parts) - 1
        self.unresolved[place : place + 1] = parts
        return parts

    def settled(self) -> list[Numbers]:
        """End a request whose outcome was reported before. Returns what `renumber_if_due` does."""
        self._under_way -= 1
        return self.renumber_if_due()

    def renumber_if_due(self) -> list[Numbers]:
        """Begin anew if that is due and possible: after `settled`, `gave_up`, and when a producer id came.

        Gives what must not be sent again, since it may be written or still be on its way: it is given up already.
        """
        if self._is_doubtful and not self.unresolved and not self._under_way:
            self._is_doubtful = False
            if not follows(self._last_acked, self._next):
                self._bump()
        identity = self._producer.identity
        if not self._begins_anew or self._under_way or identity is None:
            return []
        dropped = [numbers for numbers in self.unresolved if self._is_doubtful and numbers.is_open]
        self.unresolved = [numbers for numbers in self.unresolved if numbers not in dropped]
        self._begin(identity)
        for numbers in self.unresolved:
            numbers.identity, numbers.base_sequence = identity, self._next
            self._next = sequence_after(self._next, numbers.records)
        return dropped

    def _bump(self) -> None:
        """This epoch goes on no more in this partition."""
        if not self._begins_anew:
            self._begins_anew = True
            if self._identity == self._producer.identity:
                self._producer.bump()


class ProducerSequences:
    """All partitions' identity."""

    __slots__ = ("_partitions", "bumps", "identity")

    def __init__(self) -> None:
        self._partitions: dict[tuple[str, int], PartitionSequences] = {}
        self.identity: Identity | None = None
        """None while a producer id is to be asked for."""
        self.bumps = 0

    def of(self, topic: str, partition: int) -> PartitionSequences:
        """A partition's; kept as long as the producer lives, for the brokers remember, too."""
        key = (topic, partition)
        found = self._partitions.get(key)
        if found is None:
            found = self._partitions[key] = PartitionSequences(self)
        return found

    def identified(self, producer_id: int, epoch: int) -> None:
        """A broker gave a producer id; then `renumber_if_due` follows for the partitions that wait."""
        self.identity = (producer_id, epoch)

    def bump(self) -> None:
        """Go on in the next epoch; without one, a new producer id is needed."""
        self.bumps += 1
        if self.identity is not None:
            producer_id, epoch = self.identity
            self.identity = (producer_id, epoch + 1) if epoch < PRODUCER_EPOCH_MAX else None
