"""What a partition knows of its idempotent producers, and what it says to their batches. Sans-IO.

Rules (Apache Kafka's, 4.x). A producer id has one epoch at a time and, of that epoch, its last five batches. A batch
that is one of them is a duplicate, answered with its first place. Otherwise it must follow the last one
(OUT_OF_ORDER_SEQUENCE_NUMBER), begin at 0 in a newer epoch (the same error), and may not be of an older one
(INVALID_PRODUCER_EPOCH). Of a producer id that is not known, or not known any more, any sequence is taken: Kafka's
brokers answer UNKNOWN_PRODUCER_ID no more. What a leader took, a follower takes as it is.

Invariants: the state follows from the log's batches in their order, so leader and followers have the same, but for
producers that one of them has forgotten; batches of a producer are of its present epoch, oldest first, and the last
one is the last in the log. A check or an append costs the same however many producers there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.record_batch import BatchHeader
from kipmesh.core.sequences import NO_SEQUENCE, UNRESOLVED_MAX, follows, sequence_before

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


class _Producer:
    """One producer id."""

    __slots__ = ("batches", "began_at", "epoch", "seen_ms")

    def __init__(self, epoch: int, began_at: int, seen_ms: int) -> None:
        self.epoch = epoch
        self.batches: list[WrittenBatch] = []
        self.began_at = began_at
        """Offset of its first batch; -1 where that is not known."""
        self.seen_ms = seen_ms

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE


class ProducerStates:
    """The producers of one partition."""

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

    def clear(self) -> None:
        """The log is empty."""
        self._producers.clear()

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
        """Begin with what a snapshot says."""
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
