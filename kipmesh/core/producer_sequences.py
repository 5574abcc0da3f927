"""The sequences of an idempotent producer: which batch may go when, and what becomes of it. Sans-IO.

A batch gets its sequence when it is first sent, and keeps it when it is sent again, so that the broker knows it
(`kipmesh.core.producer_state`). The rules are those of Kafka's TransactionManager for idempotent producers:

- No batch goes that is the sixth from the oldest unresolved one on: a broker knows the last five. What is sent again is
  the oldest of them, alone until it is settled; new ones follow after those.
- OUT_OF_ORDER_SEQUENCE_NUMBER of the oldest unresolved batch is a gap in the log: the epoch is bumped, and what is
  unresolved begins at 0 in the new one. Of a later batch it means that an earlier one is missing: it is sent again.
- A batch that was refused for good leaves a gap: the same. One that ended without an answer (expired) may
  be written or not: no new batch goes until the others are settled, and if its sequence was not reached by then, the
  epoch is bumped.
- An epoch is bumped here, nobody is asked; after the last one a new producer id is needed. Other partitions go over to
  it when nothing of theirs is unresolved.

Three rules are ours. Requests over one connection may overtake each other here, and a broker takes any sequence of a
producer that it does not know: so batches go side by side only to a leader that has acknowledged one in this epoch
within the last minute, and sequences are given anew only while no request of the partition is under way. And where a
batch expired, a request of its that comes late may close the gap, and let those after it in: a batch of which a request
has no answer is then failed, where Kafka's producer writes it again in the new epoch, perhaps for a second time.

Invariants: the sequences of a partition in one epoch have no gap and none is given twice; unresolved batches are in the
order of their records; nothing is sent in an older epoch than was sent before.
"""

from __future__ import annotations

from enum import Enum

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.sequences import NO_SEQUENCE, PRODUCER_EPOCH_MAX, UNRESOLVED_MAX, follows, sequence_after

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


class Numbers:
    """What a batch carries in its header from when it is first sent; replaced when it begins anew."""

    __slots__ = ("base_sequence", "identity", "is_open", "ordinal", "records", "was_oldest")

    def __init__(self, records: int, identity: Identity, base_sequence: int, ordinal: int) -> None:
        self.ordinal = ordinal
        """Of the batch among all of the partition, in the order of their first sending."""
        self.records = records
        self.identity = identity
        self.base_sequence = base_sequence
        self.is_open = False
        """Whether a request with it ended without saying that it was not written."""
        self.was_oldest = False
        """When it was last sent: then only can a gap be none that an earlier one fills."""

    @property
    def last_sequence(self) -> int:
        """Of the last record."""
        return sequence_after(self.base_sequence, self.records - 1)

    @property
    def stamp(self) -> tuple[int, int, int]:
        """Producer id, epoch and base sequence, as the header has them."""
        return (*self.identity, self.base_sequence)


class PartitionSequences:
    """One partition's part."""

    __slots__ = (
        "_acked_by",
        "_acked_s",
        "_begins_anew",
        "_identity",
        "_is_doubtful",
        "_last_acked",
        "_next",
        "_ordinal",
        "_producer",
        "_under_way",
        "unresolved",
    )

    def __init__(self, producer: ProducerSequences) -> None:
        self._producer = producer
        self._identity: Identity | None = None
        self._next = 0
        self._last_acked = NO_SEQUENCE
        self._acked_by = -1
        self._acked_s = 0.0
        self._under_way = 0
        self._ordinal = 0
        self._begins_anew = False
        self._is_doubtful = False
        self.unresolved: list[Numbers] = []

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
        """A request that was under way has ended, and what it says of the batch was told before. Gives `look`'s."""
        self._under_way -= 1
        return self.look()

    def look(self) -> list[Numbers]:
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
        """A broker gave a producer id; then `look` at the partitions that wait."""
        self.identity = (producer_id, epoch)

    def bump(self) -> None:
        """Go on in the next epoch; without one, a new producer id is needed."""
        self.bumps += 1
        if self.identity is not None:
            producer_id, epoch = self.identity
            self.identity = (producer_id, epoch + 1) if epoch < PRODUCER_EPOCH_MAX else None
