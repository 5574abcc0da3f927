"""Longest gap of acknowledgements during a leader failover, as `bench.compare` measures it."""

from __future__ import annotations

from bench.compare_clients import Acknowledgements


def acknowledgements_of(*partitions: tuple[list[float], list[float]]) -> Acknowledgements:
    """Return acknowledgements from the send and acknowledgement times of each partition."""
    acknowledgements = Acknowledgements(len(partitions))
    acknowledgements.sent, acknowledgements.came = [sent for sent, _ in partitions], [came for _, came in partitions]
    return acknowledgements


def test_longest_gap_is_of_one_partition_and_ends_after_the_kill() -> None:
    before, after = [1.0, 2.0, 9.0], [9.5, 11.0, 11.5]
    acknowledgements = acknowledgements_of(([], [*before, *after]), ([], [8.75, 9.75, 10.25, 12.25]))
    assert acknowledgements.longest_gap(10.0) == 2.0
    assert acknowledgements.longest_gap(9.2) == 2.0
    assert acknowledgements.longest_gap(8.0) == 7.0
    assert acknowledgements_of(([], [1.0, 20.0]), ([], [])).longest_gap(10.0) == 19.0


def test_partition_recovers_with_acknowledgement_of_later_record() -> None:
    acknowledgements = acknowledgements_of(([1.0, 2.0, 3.0, 4.0], [1.1]), ([1.0], []))
    assert not acknowledgements.has_recovered(0, 2.5)
    assert not acknowledgements.has_recovered(1, 0.5)
    acknowledgements.came[0] += [2.6, 2.7]  # the first was in flight when the leader died
    assert acknowledgements.has_recovered(0, 2.5)
    assert not acknowledgements.has_recovered(0, 3.5)


def test_warm_up_requires_all_partitions() -> None:
    many = [float(number) for number in range(51)]
    assert acknowledgements_of((many, many), (many, many)).is_warm()
    assert not acknowledgements_of((many, many), (many, many[:50])).is_warm()
