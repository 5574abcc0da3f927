"""The sequences of an idempotent producer: case by case, and over a network that loses, repeats and reorders."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.producer.sequences import (
    BatchSequence,
    PartitionSequences,
    ProducerSequences,
    ProducerStates,
    Verdict,
)
from kipmesh.core.record_batch import BatchHeader
from kipmesh.messages.schema import MAX_INT32

LEADER = 1
GAP = KafkaError(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
LOST = KafkaError(ErrorCode.NETWORK_EXCEPTION)


def producer() -> tuple[ProducerSequences, PartitionSequences]:
    shared = ProducerSequences()
    shared.set_identity(7, 0)
    return shared, PartitionSequences(shared)


def send(partition: PartitionSequences, records: int = 1) -> BatchSequence:
    assert partition.may_send(None, LEADER, 0)
    numbers = partition.number(records)
    partition.sent(numbers)
    return numbers


def ack(partition: PartitionSequences, numbers: BatchSequence) -> None:
    partition.acked(numbers, LEADER, 0)
    partition.request_done()


def test_without_a_producer_id_nothing_goes() -> None:
    shared = ProducerSequences()
    partition = PartitionSequences(shared)
    assert not partition.may_send(None, LEADER, 0)
    with pytest.raises(RuntimeError):
        partition.number(1)
    shared.set_identity(7, 0)
    assert partition.may_send(None, LEADER, 0)


def test_batches_go_side_by_side_only_to_a_leader_that_knows_the_producer() -> None:
    _, partition = producer()
    first = send(partition, 3)
    assert not partition.may_send(None, LEADER, 0)
    ack(partition, first)
    stamps = [send(partition, 2).stamp for _ in range(5)]
    assert stamps == [(7, 0, 3), (7, 0, 5), (7, 0, 7), (7, 0, 9), (7, 0, 11)]
    assert not partition.may_send(None, LEADER, 0), "no more than five"
    partition.acked(partition.unresolved[0], LEADER, 0)
    partition.request_done()
    assert partition.may_send(None, LEADER, 59)
    assert not partition.may_send(None, LEADER, 61), "the leader may have forgotten it"
    assert not partition.may_send(None, LEADER + 1, 0), "another leader may not know it"


def test_what_is_sent_again_is_the_oldest_and_keeps_its_sequence() -> None:
    _, partition = producer()
    ack(partition, send(partition))
    one, two = send(partition), send(partition)
    for numbers in (two, one):
        assert partition.refused(numbers, LOST) is Verdict.RETRY
        partition.request_done()
    assert not partition.may_send(two, LEADER, 0)
    assert not partition.may_send(None, LEADER, 0)
    assert partition.may_send(one, LEADER + 1, 0)
    assert (one.stamp, two.stamp) == ((7, 0, 1), (7, 0, 2))
    partition.sent(one)
    ack(partition, one)
    assert partition.may_send(two, LEADER, 0)


def test_a_gap_before_the_oldest_bumps_the_epoch_and_one_before_a_later_does_not() -> None:
    shared, partition = producer()
    ack(partition, send(partition))
    one, two = send(partition, 2), send(partition, 2)
    assert partition.refused(two, GAP) is Verdict.RETRY
    partition.request_done()
    assert shared.identity == (7, 0)
    assert partition.refused(one, GAP) is Verdict.RETRY
    assert shared.identity == (7, 1)
    assert not partition.may_send(one, LEADER, 0), "its request is not settled"
    partition.request_done()
    assert (one.stamp, two.stamp) == ((7, 1, 0), (7, 1, 2))
    assert partition.may_send(one, LEADER, 0)


def test_a_batch_that_is_refused_for_good_lets_those_after_it_begin_anew() -> None:
    shared, partition = producer()
    ack(partition, send(partition))
    one, two = send(partition), send(partition)
    assert partition.refused(one, KafkaError(ErrorCode.INVALID_RECORD)) is Verdict.FAILED
    partition.abandoned(one, is_certain=True)
    partition.request_done()
    assert two.stamp == (7, 0, 2)
    assert partition.refused(two, GAP) is Verdict.RETRY
    partition.request_done()
    assert two.stamp == (7, 0, 2), "the gap may be the one before, which was not settled yet"
    partition.sent(two)
    assert partition.refused(two, GAP) is Verdict.RETRY
    partition.request_done()
    assert two.stamp == (7, 1, 0)
    assert shared.bumps == 1


def test_after_a_batch_without_an_answer_the_others_are_settled_first() -> None:
    shared, partition = producer()
    ack(partition, send(partition))
    one, two = send(partition), send(partition)
    partition.abandoned(one, is_certain=False)
    assert not partition.may_send(None, LEADER, 0)
    partition.request_done()
    ack(partition, two)
    assert partition.may_send(None, LEADER, 0), "the next one was written, so it was, too"
    assert shared.bumps == 0
    last = send(partition)
    partition.abandoned(last, is_certain=False)
    assert shared.bumps == 0
    partition.request_done()
    assert shared.identity == (7, 1)
    assert partition.number(1).stamp == (7, 1, 0)


def test_what_may_still_be_on_its_way_behind_an_expired_batch_is_not_written_a_second_time() -> None:
    _, partition = producer()
    ack(partition, send(partition))
    one, two, three = send(partition), send(partition), send(partition)
    partition.refused(two, LOST)
    assert partition.request_done() == []
    partition.abandoned(one, is_certain=False)
    assert partition.request_done() == []
    partition.sent(two)
    partition.refused(two, GAP)
    assert partition.request_done() == []
    partition.refused(three, GAP)
    assert partition.request_done() == [two], "both requests with it may come yet, when the expired one has come"
    assert three.stamp == (7, 1, 0)


def test_other_partitions_go_over_to_the_new_epoch_when_they_are_drained() -> None:
    shared, _ = producer()
    other = PartitionSequences(shared)
    ack(other, send(other))
    waiting = send(other)
    shared.bump()
    assert not other.may_send(None, LEADER, 0)
    assert other.refused(waiting, LOST) is Verdict.RETRY
    other.request_done()
    assert other.may_send(waiting, LEADER, 0), "in its old epoch"
    other.sent(waiting)
    ack(other, waiting)
    assert send(other).stamp == (7, 1, 0)


def test_after_the_last_epoch_another_producer_id_is_needed() -> None:
    shared = ProducerSequences()
    shared.set_identity(7, 2**15 - 1)
    partition = PartitionSequences(shared)
    one = send(partition)
    partition.refused(one, GAP)
    partition.request_done()
    assert shared.identity is None
    assert not partition.may_send(one, LEADER, 0)
    shared.set_identity(8, 0)
    partition.renumber_if_due()
    assert one.stamp == (8, 0, 0)
    assert partition.may_send(one, LEADER, 0)


def test_a_batch_in_parts_has_the_same_sequences() -> None:
    _, partition = producer()
    ack(partition, send(partition))
    one, two = send(partition, 5), send(partition)
    parts = partition.split(one, [2, 3])
    assert [part.stamp for part in parts] == [(7, 0, 1), (7, 0, 3)]
    assert partition.unresolved == [*parts, two]


def test_sequences_wrap() -> None:
    _, partition = producer()
    partition._identity, partition._next = (7, 0), MAX_INT32
    ack(partition, send(partition, 2))
    assert partition.may_send(None, LEADER, 0)
    numbers = partition.number(1)
    assert numbers.stamp == (7, 0, 1)


def test_duplicates_of_older_brokers_are_written() -> None:
    _, partition = producer()
    assert partition.refused(send(partition), KafkaError(ErrorCode.DUPLICATE_SEQUENCE_NUMBER)) is Verdict.WRITTEN


def test_nothing_goes_that_would_push_an_unanswered_batch_out_of_what_a_broker_remembers() -> None:
    _, partition = producer()
    ack(partition, send(partition))
    slow, *others = [send(partition) for _ in range(5)]
    for numbers in others:
        ack(partition, numbers)
    assert not partition.may_send(None, LEADER, 0), "it may be written, and is known if it is sent again"
    ack(partition, slow)
    assert partition.may_send(None, LEADER, 0)


class Mesh:
    """A producer of batches 0, 1, 2, ... to one partition, over a network that does as it likes."""

    def __init__(self, seed: int, counts: list[int]) -> None:
        self.random = random.Random(seed)
        self.shared, self.partition = producer()
        self.counts = counts
        self.numbers: dict[int, BatchSequence] = {}
        self.queue = list(range(len(counts)))
        self.outcome: dict[int, str] = {}
        self.requests: list[tuple[int, tuple[int, int, int], bool]] = []  # batch, stamp, somebody waits for the answer
        self.answers: list[tuple[int, KafkaError | None]] = []
        self.states = ProducerStates()
        self.log: list[int] = []
        self.sizes = 0
        self.poison: set[int] = set()

    def step(self, calm: bool) -> None:
        choices = [self.send] * 3 + [self.deliver] * 3 + [self.answer] * 3
        if not calm:
            choices += [self.lose, self.time_out, self.lose_answer, self.expire]
        self.random.choice(choices)()

    def send(self) -> None:
        if not self.queue:
            return
        batch = self.queue[0]
        numbers = self.numbers.get(batch)
        if not self.partition.may_send(numbers, LEADER, 0):
            return
        if numbers is None:
            numbers = self.numbers[batch] = self.partition.number(self.counts[batch])
        self.queue.pop(0)
        self.partition.sent(numbers)
        self.requests.append((batch, numbers.stamp, True))

    def append(self, batch: int, stamp: tuple[int, int, int]) -> KafkaError | None:
        records = self.counts[batch]
        if batch in self.poison:
            return KafkaError(ErrorCode.INVALID_RECORD)
        header = BatchHeader(0, 49, 0, 2, 0, 0, records - 1, 0, 0, *stamp, records)
        try:
            if self.states.check(header) is None:
                self.states.append(header, self.sizes, 0)
                self.sizes += records
                self.log.append(batch)
        except KafkaError as error:
            return error
        return None

    def deliver(self) -> None:
        """Any request, also one that came before; the client waits for the answer, or does not any more."""
        if not self.requests:
            return
        at = self.random.randrange(len(self.requests))
        batch, stamp, waited = self.requests[at]
        error = self.append(batch, stamp)
        if waited and error is None:  # written; and it comes once more
            self.requests[at] = (batch, stamp, False)
        else:
            del self.requests[at]
        if waited:
            self.answers.append((batch, error))

    def answer(self) -> None:
        if self.answers:
            self.settle(*self.answers.pop(self.random.randrange(len(self.answers))))

    def lose_answer(self) -> None:
        if self.answers:
            self.settle(self.answers.pop(self.random.randrange(len(self.answers)))[0], LOST)

    def lose(self) -> None:
        waited = [each for each in self.requests if each[2]]
        if waited:
            request = self.random.choice(waited)
            self.requests.remove(request)
            self.settle(request[0], LOST)

    def time_out(self) -> None:
        """No answer, but the request is still on its way."""
        waited = [at for at, each in enumerate(self.requests) if each[2]]
        if waited:
            at = self.random.choice(waited)
            batch, stamp, _ = self.requests[at]
            self.requests[at] = (batch, stamp, False)
            self.settle(batch, LOST)

    def expire(self) -> None:
        left = [batch for batch in self.numbers if batch not in self.outcome]
        if left and self.random.random() < 0.2:
            batch = left[0]
            self.outcome[batch] = "unknown"
            self.partition.abandoned(self.numbers[batch], is_certain=False)
            if batch in self.queue:
                self.queue.remove(batch)
                self.drop(self.partition.renumber_if_due())

    def settle(self, batch: int, error: KafkaError | None) -> None:
        numbers = self.numbers[batch]
        if error is None:
            self.partition.acked(numbers, LEADER, 0)
            self.outcome.setdefault(batch, "written")
        elif batch not in self.outcome:
            verdict = self.partition.refused(numbers, error)
            if verdict is Verdict.RETRY:
                self.queue = sorted([*self.queue, batch])
            else:
                assert error.code == ErrorCode.INVALID_RECORD, error
                self.partition.abandoned(numbers, is_certain=True)
                self.outcome[batch] = "refused"
        self.drop(self.partition.request_done())

    def drop(self, dropped: list[BatchSequence]) -> None:
        for batch in [batch for batch in self.queue if self.numbers.get(batch) in dropped]:
            self.queue.remove(batch)
            self.outcome[batch] = "unknown"


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=25),
    wild=st.integers(0, 400),
    poison=st.sets(st.integers(0, 25), max_size=3),
)
def test_each_batch_is_written_once_and_in_order(seed: int, counts: list[int], wild: int, poison: set[int]) -> None:
    mesh = Mesh(seed, counts)
    mesh.poison = poison
    for _ in range(wild):
        mesh.step(calm=False)
    for _ in range(40_000):
        if len(mesh.outcome) == len(counts):
            break
        mesh.step(calm=True)
    assert len(mesh.outcome) == len(counts), "it ends"
    while mesh.requests:  # what was on its way for long comes at last
        mesh.deliver()
    assert mesh.log == sorted(set(mesh.log)), "once each, in order"
    for batch, outcome in mesh.outcome.items():
        if outcome != "unknown":
            assert (batch in mesh.log) == (outcome == "written"), (batch, outcome)
