"""Sequences of an idempotent producer: by case, and over a network that loses, duplicates and reorders."""

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


def test_batches_wait_for_producer_id() -> None:
    shared = ProducerSequences()
    partition = PartitionSequences(shared)
    assert not partition.may_send(None, LEADER, 0)
    with pytest.raises(RuntimeError):
        partition.number(1)
    shared.set_identity(7, 0)
    assert partition.may_send(None, LEADER, 0)


def test_batches_are_pipelined_only_to_leader_with_producer_state() -> None:
    _, partition = producer()
    first = send(partition, 3)
    assert not partition.may_send(None, LEADER, 0)
    ack(partition, first)
    stamps = [send(partition, 2).stamp for _ in range(5)]
    assert stamps == [(7, 0, 3), (7, 0, 5), (7, 0, 7), (7, 0, 9), (7, 0, 11)]
    assert not partition.may_send(None, LEADER, 0), "at most five batches in flight"
    partition.acked(partition.unresolved[0], LEADER, 0)
    partition.request_done()
    assert partition.may_send(None, LEADER, 59)
    assert not partition.may_send(None, LEADER, 61), "the leader may have expired the producer"
    assert not partition.may_send(None, LEADER + 1, 0), "another leader may not have its state"


def test_oldest_batch_is_retried_first_with_its_sequence() -> None:
    _, partition = producer()
    ack(partition, send(partition))
    first, second = send(partition), send(partition)
    for numbers in (second, first):
        assert partition.refused(numbers, LOST) is Verdict.RETRY
        partition.request_done()
    assert not partition.may_send(second, LEADER, 0)
    assert not partition.may_send(None, LEADER, 0)
    assert partition.may_send(first, LEADER + 1, 0)
    assert (first.stamp, second.stamp) == ((7, 0, 1), (7, 0, 2))
    partition.sent(first)
    ack(partition, first)
    assert partition.may_send(second, LEADER, 0)


def test_sequence_gap_before_oldest_batch_bumps_epoch() -> None:
    shared, partition = producer()
    ack(partition, send(partition))
    first, second = send(partition, 2), send(partition, 2)
    assert partition.refused(second, GAP) is Verdict.RETRY
    partition.request_done()
    assert shared.identity == (7, 0)
    assert partition.refused(first, GAP) is Verdict.RETRY
    assert shared.identity == (7, 1)
    assert not partition.may_send(first, LEADER, 0), "its request is in flight"
    partition.request_done()
    assert (first.stamp, second.stamp) == ((7, 1, 0), (7, 1, 2))
    assert partition.may_send(first, LEADER, 0)


def test_batches_after_refused_batch_restart_in_new_epoch() -> None:
    shared, partition = producer()
    ack(partition, send(partition))
    first, second = send(partition), send(partition)
    assert partition.refused(first, KafkaError(ErrorCode.INVALID_RECORD)) is Verdict.FAILED
    partition.abandoned(first, is_certain=True)
    partition.request_done()
    assert second.stamp == (7, 0, 2)
    assert partition.refused(second, GAP) is Verdict.RETRY
    partition.request_done()
    assert second.stamp == (7, 0, 2), "the gap may be the previous batch, which was in flight"
    partition.sent(second)
    assert partition.refused(second, GAP) is Verdict.RETRY
    partition.request_done()
    assert second.stamp == (7, 1, 0)
    assert shared.bumps == 1


def test_expired_batch_blocks_new_batches_until_others_complete() -> None:
    shared, partition = producer()
    ack(partition, send(partition))
    first, second = send(partition), send(partition)
    partition.abandoned(first, is_certain=False)
    assert not partition.may_send(None, LEADER, 0)
    partition.request_done()
    ack(partition, second)
    assert partition.may_send(None, LEADER, 0), "the next batch was written, so the expired batch was written"
    assert shared.bumps == 0
    last = send(partition)
    partition.abandoned(last, is_certain=False)
    assert shared.bumps == 0
    partition.request_done()
    assert shared.identity == (7, 1)
    assert partition.number(1).stamp == (7, 1, 0)


def test_possibly_delayed_batch_after_expired_one_is_dropped() -> None:
    _, partition = producer()
    ack(partition, send(partition))
    first, second, third = send(partition), send(partition), send(partition)
    partition.refused(second, LOST)
    assert partition.request_done() == []
    partition.abandoned(first, is_certain=False)
    assert partition.request_done() == []
    partition.sent(second)
    partition.refused(second, GAP)
    assert partition.request_done() == []
    partition.refused(third, GAP)
    assert partition.request_done() == [second], "its delayed requests may arrive after the expired batch"
    assert third.stamp == (7, 1, 0)


def test_other_partitions_switch_epoch_when_drained() -> None:
    shared, _ = producer()
    other = PartitionSequences(shared)
    ack(other, send(other))
    waiting = send(other)
    shared.bump()
    assert not other.may_send(None, LEADER, 0)
    assert other.refused(waiting, LOST) is Verdict.RETRY
    other.request_done()
    assert other.may_send(waiting, LEADER, 0), "retries keep the old epoch"
    other.sent(waiting)
    ack(other, waiting)
    assert send(other).stamp == (7, 1, 0)


def test_epoch_overflow_requires_new_producer_id() -> None:
    shared = ProducerSequences()
    shared.set_identity(7, 2**15 - 1)
    partition = PartitionSequences(shared)
    first = send(partition)
    partition.refused(first, GAP)
    partition.request_done()
    assert shared.identity is None
    assert not partition.may_send(first, LEADER, 0)
    shared.set_identity(8, 0)
    partition.renumber_if_due()
    assert first.stamp == (8, 0, 0)
    assert partition.may_send(first, LEADER, 0)


def test_split_batch_keeps_its_sequences() -> None:
    _, partition = producer()
    ack(partition, send(partition))
    first, second = send(partition, 5), send(partition)
    parts = partition.split(first, [2, 3])
    assert [part.stamp for part in parts] == [(7, 0, 1), (7, 0, 3)]
    assert partition.unresolved == [*parts, second]


def test_batch_sequence_wraps_after_int32_maximum() -> None:
    _, partition = producer()
    partition._identity, partition._next = (7, 0), MAX_INT32
    ack(partition, send(partition, 2))
    assert partition.may_send(None, LEADER, 0)
    numbers = partition.number(1)
    assert numbers.stamp == (7, 0, 1)


def test_duplicate_sequence_error_of_older_broker_means_written() -> None:
    _, partition = producer()
    assert partition.refused(send(partition), KafkaError(ErrorCode.DUPLICATE_SEQUENCE_NUMBER)) is Verdict.WRITTEN


def test_send_waits_while_unacknowledged_batch_could_leave_broker_history() -> None:
    _, partition = producer()
    ack(partition, send(partition))
    slow, *others = [send(partition) for _ in range(5)]
    for numbers in others:
        ack(partition, numbers)
    assert not partition.may_send(None, LEADER, 0), "it may be written, and the broker must detect its retry"
    ack(partition, slow)
    assert partition.may_send(None, LEADER, 0)


class FaultyExchange:
    """A producer of batches 0, 1, 2, ... to one partition, over a faulty network."""

    def __init__(self, seed: int, counts: list[int]) -> None:
        self.random = random.Random(seed)
        self.shared, self.partition = producer()
        self.counts = counts
        self.numbers: dict[int, BatchSequence] = {}
        self.queue = list(range(len(counts)))
        self.outcome: dict[int, str] = {}
        self.requests: list[
            tuple[int, tuple[int, int, int], bool]
        ] = []  # batch, stamp, the producer waits for the response
        self.responses: list[tuple[int, KafkaError | None]] = []
        self.states = ProducerStates()
        self.log: list[int] = []
        self.sizes = 0
        self.poison: set[int] = set()

    def step(self, calm: bool) -> None:
        choices = [self.send] * 3 + [self.deliver] * 3 + [self.deliver_response] * 3
        if not calm:
            choices += [self.lose, self.time_out, self.lose_response, self.expire]
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
        """Deliver any request, even a duplicate or one that the producer has given up."""
        if not self.requests:
            return
        at = self.random.randrange(len(self.requests))
        batch, stamp, waited = self.requests[at]
        error = self.append(batch, stamp)
        if waited and error is None:  # Written. A duplicate follows.
            self.requests[at] = (batch, stamp, False)
        else:
            del self.requests[at]
        if waited:
            self.responses.append((batch, error))

    def deliver_response(self) -> None:
        if self.responses:
            self.complete(*self.responses.pop(self.random.randrange(len(self.responses))))

    def lose_response(self) -> None:
        if self.responses:
            self.complete(self.responses.pop(self.random.randrange(len(self.responses)))[0], LOST)

    def lose(self) -> None:
        waited = [request for request in self.requests if request[2]]
        if waited:
            request = self.random.choice(waited)
            self.requests.remove(request)
            self.complete(request[0], LOST)

    def time_out(self) -> None:
        """Time out a request that is still in flight."""
        waited = [at for at, request in enumerate(self.requests) if request[2]]
        if waited:
            at = self.random.choice(waited)
            batch, stamp, _ = self.requests[at]
            self.requests[at] = (batch, stamp, False)
            self.complete(batch, LOST)

    def expire(self) -> None:
        left = [batch for batch in self.numbers if batch not in self.outcome]
        if left and self.random.random() < 0.2:
            batch = left[0]
            self.outcome[batch] = "unknown"
            self.partition.abandoned(self.numbers[batch], is_certain=False)
            if batch in self.queue:
                self.queue.remove(batch)
                self.drop(self.partition.renumber_if_due())

    def complete(self, batch: int, error: KafkaError | None) -> None:
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
    faulty_steps=st.integers(0, 400),
    poison=st.sets(st.integers(0, 25), max_size=3),
)
def test_batches_are_written_once_and_in_order_over_faulty_network(
    seed: int, counts: list[int], faulty_steps: int, poison: set[int]
) -> None:
    exchange = FaultyExchange(seed, counts)
    exchange.poison = poison
    for _ in range(faulty_steps):
        exchange.step(calm=False)
    for _ in range(40_000):
        if len(exchange.outcome) == len(counts):
            break
        exchange.step(calm=True)
    assert len(exchange.outcome) == len(counts), "the producer finishes"
    while exchange.requests:  # Delayed requests arrive.
        exchange.deliver()
    assert exchange.log == sorted(set(exchange.log)), "each batch once, in order"
    for batch, outcome in exchange.outcome.items():
        if outcome != "unknown":
            assert (batch in exchange.log) == (outcome == "written"), (batch, outcome)
