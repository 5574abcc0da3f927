"""What bench.compare takes for the longest gap around the end of a leader."""

from __future__ import annotations

from bench.compare_clients import Acknowledgements


def seen(*partitions: tuple[list[float], list[float]]) -> Acknowledgements:
    """Each partition's times of sending and of acknowledgement."""
    it = Acknowledgements(len(partitions))
    it.sent, it.came = [sent for sent, _ in partitions], [came for _, came in partitions]
    return it


def test_the_longest_gap_is_of_one_partition_and_ends_after_the_kill() -> None:
    before, after = [1.0, 2.0, 9.0], [9.5, 11.0, 11.5]
    it = seen(([], [*before, *after]), ([], [8.75, 9.75, 10.25, 12.25]))
    assert it.longest_gap(10.0) == 2.0
    assert it.longest_gap(9.2) == 2.0
    assert it.longest_gap(8.0) == 7.0
    assert seen(([], [1.0, 20.0]), ([], [])).longest_gap(10.0) == 19.0


def test_only_a_record_that_was_sent_later_says_that_another_broker_leads() -> None:
    it = seen(([1.0, 2.0, 3.0, 4.0], [1.1]), ([1.0], []))
    assert not it.has_recovered(0, 2.5)
    assert not it.has_recovered(1, 0.5)
    it.came[0] += [2.6, 2.7]  # one was under way when the leader died, and one is the new leader's
    assert it.has_recovered(0, 2.5)
    assert not it.has_recovered(0, 3.5)


def test_warm_up_needs_every_partition() -> None:
    many = [float(number) for number in range(51)]
    assert seen((many, many), (many, many)).is_warm()
    assert not seen((many, many), (many, many[:50])).is_warm()
