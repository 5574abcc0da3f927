"""What a partition says to the batches of idempotent producers, case by case and against a simple model."""

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
    """A log that is nothing but its producers' state."""

    def __init__(self) -> None:
        self.states = ProducerStates()
        self.end = 0

    def produce(self, sequence: int, records: int = 1, **more: int) -> int:
        """The first offset, as a leader answers."""
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


def test_batches_in_sequence_are_taken_and_repeated_ones_answered_with_their_first_place() -> None:
    partition = Partition()
    assert [partition.produce(0, 3), partition.produce(3, 2), partition.produce(5)] == [0, 3, 5]
    assert [partition.produce(0, 3), partition.produce(3, 2), partition.produce(5)] == [0, 3, 5]
    assert partition.end == 6


def test_a_gap_and_a_batch_of_another_size_are_out_of_order() -> None:
    partition = Partition()
    partition.produce(0, 3)
    assert partition.refused(4) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert partition.refused(0, 2) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert partition.produce(3) == 3


def test_only_the_last_five_batches_are_known() -> None:
    partition = Partition()
    for sequence in range(BATCHES_KEPT + 1):
        partition.produce(sequence)
    assert [partition.produce(sequence) for sequence in range(1, 6)] == [1, 2, 3, 4, 5]
    assert partition.refused(0) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_producers_do_not_see_each_other() -> None:
    partition = Partition()
    assert [partition.produce(0, pid=1), partition.produce(0, pid=2), partition.produce(1, pid=1)] == [0, 1, 2]


def test_a_newer_epoch_begins_at_0_and_ends_the_older_one() -> None:
    partition = Partition()
    partition.produce(0, 3)
    assert partition.refused(3, epoch=1) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert partition.produce(0, epoch=1) == 3
    assert partition.refused(3, epoch=0) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert partition.produce(0, epoch=1) == 3
    assert partition.refused(0, 3, epoch=0) == ErrorCode.INVALID_PRODUCER_EPOCH, "not even a repeated batch"


def test_an_unknown_producer_may_go_on_where_it_is() -> None:
    partition = Partition()
    assert partition.produce(500) == 0
    assert partition.refused(502) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_sequences_wrap() -> None:
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
def test_half_an_identity_and_transactions_are_refused(bad: BatchHeader) -> None:
    with pytest.raises(KafkaError) as caught:
        ProducerStates().check(bad)
    assert caught.value.code == ErrorCode.INVALID_RECORD


def test_a_control_batch_has_no_sequence() -> None:
    states = ProducerStates()
    states.append(header(0), 0, 0)
    states.append(header(-1, attributes=CONTROL), 1, 0)
    assert states.check(header(1)) is None
    states.append(header(-1, epoch=1, attributes=CONTROL), 2, 0)
    assert states.check(header(0, epoch=1)) is None
    with pytest.raises(KafkaError):
        states.check(header(1, epoch=0))


def test_who_is_not_seen_is_forgotten() -> None:
    states = ProducerStates()
    states.append(header(0, pid=1), 0, 100)
    states.append(header(0, pid=2), 1, 200)
    assert states.expire(200) == 1
    assert [entry.producer_id for entry in states.entries()] == [2]
    assert states.check(header(9, pid=1)) is None, "and may go on as if new"


def test_a_snapshot_has_the_last_batch_and_recalling_brings_the_others() -> None:
    partition = Partition()
    headers = []
    for sequence in range(0, 14, 2):
        headers.append(header(sequence, 2, offset=partition.end))
        partition.produce(sequence, 2)
    entries = list(partition.states.entries())
    assert entries == [ProducerEntry(7, 0, 13, 13, 1, 1000)]
    again = ProducerStates()
    again.load(entries)
    known = again.check(header(12, 2))
    assert known is not None
    assert known.first_offset == 12
    with pytest.raises(KafkaError):
        again.check(header(10, 2))
    again.add_history([header(0, offset=1, pid=99), *headers])
    for sequence in range(4, 14, 2):
        known = again.check(header(sequence, 2))
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
def test_what_is_left_after_a_cut_is_what_the_batches_left_make(steps: list[tuple[int, int, str]], cut: float) -> None:
    partition, log = Partition(), []
    epochs, nexts = dict.fromkeys(range(1, 4), 0), dict.fromkeys(range(1, 4), 0)
    for pid, records, what in steps:
        if what == "bump":
            epochs[pid] += 1
            nexts[pid] = 0
        start = partition.end
        assert partition.produce(nexts[pid], records, pid=pid, epoch=epochs[pid]) == start
        log.append(header(nexts[pid], records, pid=pid, epoch=epochs[pid], offset=start))
        if what == "repeat":
            assert partition.produce(nexts[pid], records, pid=pid, epoch=epochs[pid]) == start
        nexts[pid] += records
    ends = [0, *[each.next_offset for each in log]]
    end = ends[int(cut * (len(ends) - 1))]
    rebuilt = ProducerStates()
    for each in log:
        if each.base_offset < end:
            rebuilt.append(each, each.base_offset, 0)
    before = sorted(partition.states.entries())
    if partition.states.truncate(end):
        partition.states.add_history(each for each in log if each.base_offset < end)
        assert sorted(partition.states.entries()) == sorted(rebuilt.entries())
        for each in log:
            if each.base_offset < end:
                assert _verdict(partition.states, each) == _verdict(rebuilt, each)
    else:
        assert sorted(partition.states.entries()) == before, "nothing changed"


def _verdict(states: ProducerStates, batch: BatchHeader) -> object:
    try:
        return states.check(batch)
    except KafkaError as error:
        return error.code
