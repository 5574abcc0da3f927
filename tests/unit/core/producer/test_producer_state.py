"""Producer state of a partition: checks of idempotent batches, by case and against a model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.producer.sequences import (
    BATCHES_KEPT,
    ProducerEntry,
    ProducerStates,
    follows,
    sequence_after,
    sequence_before,
)
from kipmesh.core.record_batch import BatchHeader
from kipmesh.messages.schema import MAX_INT32

CONTROL, TRANSACTIONAL = 0x20, 0x10


def header(
    sequence: int, records: int = 1, *, pid: int = 7, epoch: int = 0, attributes: int = 0, offset: int = 0
) -> BatchHeader:
    return BatchHeader(offset, 49, 0, 2, 0, attributes, records - 1, 0, 1000, pid, epoch, sequence, records)


class Partition:
    """A partition with producer state and no log."""

    def __init__(self) -> None:
        self.states = ProducerStates()
        self.end = 0

    def produce(self, sequence: int, records: int = 1, **more: int) -> int:
        """Append a batch and return its first offset."""
        batch = header(sequence, records, **more)
        known = self.states.check(batch)
        if known is not None:
            return known.first_offset
        first, self.end = self.end, self.end + records
        self.states.append(batch, first, 0)
        return first

    def refused(self, sequence: int, records: int = 1, **more: int) -> ErrorCode:
        with pytest.raises(KafkaError) as caught:
            self.produce(sequence, records, **more)
        return caught.value.code


def test_duplicate_batch_returns_its_first_offset() -> None:
    partition = Partition()
    assert [partition.produce(0, 3), partition.produce(3, 2), partition.produce(5)] == [0, 3, 5]
    assert [partition.produce(0, 3), partition.produce(3, 2), partition.produce(5)] == [0, 3, 5]
    assert partition.end == 6


def test_sequence_gap_and_duplicate_of_other_size_are_out_of_order() -> None:
    partition = Partition()
    partition.produce(0, 3)
    assert partition.refused(4) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert partition.refused(0, 2) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert partition.produce(3) == 3


def test_last_five_batches_are_detected_as_duplicates() -> None:
    partition = Partition()
    for sequence in range(BATCHES_KEPT + 1):
        partition.produce(sequence)
    assert [partition.produce(sequence) for sequence in range(1, 6)] == [1, 2, 3, 4, 5]
    assert partition.refused(0) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_producers_have_separate_sequences() -> None:
    partition = Partition()
    assert [partition.produce(0, pid=1), partition.produce(0, pid=2), partition.produce(1, pid=1)] == [0, 1, 2]


def test_newer_epoch_starts_at_sequence_0_and_fences_older_one() -> None:
    partition = Partition()
    partition.produce(0, 3)
    assert partition.refused(3, epoch=1) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert partition.produce(0, epoch=1) == 3
    assert partition.refused(3, epoch=0) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert partition.produce(0, epoch=1) == 3
    assert partition.refused(0, 3, epoch=0) == ErrorCode.INVALID_PRODUCER_EPOCH, "not even a duplicate batch"


def test_unknown_producer_may_start_at_any_sequence() -> None:
    partition = Partition()
    assert partition.produce(500) == 0
    assert partition.refused(502) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_state_accepts_sequence_wrap() -> None:
    partition = Partition()
    assert partition.produce(MAX_INT32 - 1, 4) == 0
    assert partition.produce(2) == 4
    assert partition.produce(MAX_INT32 - 1, 4) == 0
    assert partition.refused(4) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert sequence_after(MAX_INT32, 1) == 0
    assert sequence_before(0, 1) == MAX_INT32
    assert follows(MAX_INT32, 0)
    assert follows(-1, 0)
    assert not follows(-1, 1)


@pytest.mark.parametrize("bad", [header(-1), header(0, epoch=-1), header(0, attributes=TRANSACTIONAL)])
def test_incomplete_producer_identity_and_transactions_are_refused(bad: BatchHeader) -> None:
    with pytest.raises(KafkaError) as caught:
        ProducerStates().check(bad)
    assert caught.value.code == ErrorCode.INVALID_RECORD


def test_control_batch_leaves_sequence_unchanged() -> None:
    states = ProducerStates()
    states.append(header(0), 0, 0)
    states.append(header(-1, attributes=CONTROL), 1, 0)
    assert states.check(header(1)) is None
    states.append(header(-1, epoch=1, attributes=CONTROL), 2, 0)
    assert states.check(header(0, epoch=1)) is None
    with pytest.raises(KafkaError):
        states.check(header(1, epoch=0))


def test_inactive_producer_expires() -> None:
    states = ProducerStates()
    states.append(header(0, pid=1), 0, 100)
    states.append(header(0, pid=2), 1, 200)
    assert states.expire(200) == 1
    assert [entry.producer_id for entry in states.entries()] == [2]
    assert states.check(header(9, pid=1)) is None, "an expired producer may restart at any sequence"


def test_producer_snapshot_is_completed_from_batch_history() -> None:
    partition = Partition()
    headers = []
    for sequence in range(0, 14, 2):
        headers.append(header(sequence, 2, offset=partition.end))
        partition.produce(sequence, 2)
    entries = list(partition.states.entries())
    assert entries == [ProducerEntry(7, 0, 13, 13, 1, 1000)]
    restored = ProducerStates()
    restored.load(entries)
    known = restored.check(header(12, 2))
    assert known is not None
    assert known.first_offset == 12
    with pytest.raises(KafkaError):
        restored.check(header(10, 2))
    restored.add_history([header(0, offset=1, pid=99), *headers])
    for sequence in range(4, 14, 2):
        known = restored.check(header(sequence, 2))
        assert known is not None
        assert known.first_offset == sequence


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from(["next", "next", "bump", "repeat"])),
        max_size=40,
    ),
    cut=st.floats(0, 1),
)
def test_truncated_producer_state_equals_state_of_remaining_batches(
    steps: list[tuple[int, int, str]], cut: float
) -> None:
    partition, log = Partition(), []
    epochs, nexts = dict.fromkeys(range(1, 4), 0), dict.fromkeys(range(1, 4), 0)
    for pid, records, event in steps:
        if event == "bump":
            epochs[pid] += 1
            nexts[pid] = 0
        start = partition.end
        assert partition.produce(nexts[pid], records, pid=pid, epoch=epochs[pid]) == start
        log.append(header(nexts[pid], records, pid=pid, epoch=epochs[pid], offset=start))
        if event == "repeat":
            assert partition.produce(nexts[pid], records, pid=pid, epoch=epochs[pid]) == start
        nexts[pid] += records
    ends = [0, *[batch.next_offset for batch in log]]
    end = ends[int(cut * (len(ends) - 1))]
    rebuilt = ProducerStates()
    for batch in log:
        if batch.base_offset < end:
            rebuilt.append(batch, batch.base_offset, 0)
    before = sorted(partition.states.entries())
    if partition.states.truncate(end):
        partition.states.add_history(batch for batch in log if batch.base_offset < end)
        assert sorted(partition.states.entries()) == sorted(rebuilt.entries())
        for batch in log:
            if batch.base_offset < end:
                assert _verdict(partition.states, batch) == _verdict(rebuilt, batch)
    else:
        assert sorted(partition.states.entries()) == before, "the state is unchanged"


def _verdict(states: ProducerStates, batch: BatchHeader) -> object:
    try:
        return states.check(batch)
    except KafkaError as error:
        return error.code
