"""What `bench.catch_up` makes of a broker's log."""

from __future__ import annotations

import json

import pytest

from bench.catch_up import STEPS, Joined, as_table, steps_of
from bench.quorum_cluster import QuorumError


def line(event: str, second: int) -> str:
    return json.dumps({"event": event, "timestamp": f"2026-01-01T00:00:{second:02}.500000Z"})


def test_steps_are_those_of_the_log() -> None:
    log = [line(step, number) for number, step in enumerate(STEPS)]
    found = steps_of("\n".join(["not of the node", line("started", 0), *log]))
    assert [second - found[0] for second in found] == [0, 1, 2, 3]


def test_a_transfer_that_began_again_counts_from_the_first() -> None:
    log = [line(STEPS[0], 1), line(STEPS[0], 5), *(line(step, 10) for step in STEPS[1:])]
    found = steps_of("\n".join(log))
    assert found[1] - found[0] == 9


def test_a_broker_that_fetched_no_snapshot_is_refused() -> None:
    with pytest.raises(QuorumError, match=STEPS[1]):
        steps_of("\n".join(line(step, 1) for step in STEPS if step != STEPS[1]))


def test_the_table_has_medians() -> None:
    table = as_table([Joined(1, each, 1, 1, 1, 127_000_000, 1, 1 << 20) for each in (1.0, 2.0, 4.0)])
    assert "| the same | 63.50 MB/s | 31.75 .. 127.00 |" in table
    assert "| sent by the controller | 127.00 MB | 127.00 .. 127.00 |" in table
