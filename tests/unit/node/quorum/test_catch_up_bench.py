"""`bench.catch_up`: steps and tables from the log of a broker."""

from __future__ import annotations

import json

import pytest

from bench.catch_up import STEPS, Joined, as_table, steps_of
from bench.quorum_cluster import QuorumError


def line(event: str, second: int) -> str:
    return json.dumps({"event": event, "timestamp": f"2026-01-01T00:00:{second:02}.500000Z"})


def test_steps_come_from_log_events() -> None:
    log = [line(step, number) for number, step in enumerate(STEPS)]
    steps = steps_of("\n".join(["not a log event", line("started", 0), *log]))
    assert [second - steps[0] for second in steps] == [0, 1, 2, 3]


def test_restarted_transfer_counts_from_first_start() -> None:
    log = [line(STEPS[0], 1), line(STEPS[0], 5), *(line(step, 10) for step in STEPS[1:])]
    steps = steps_of("\n".join(log))
    assert steps[1] - steps[0] == 9


def test_log_without_fetched_snapshot_is_refused() -> None:
    with pytest.raises(QuorumError, match=STEPS[1]):
        steps_of("\n".join(line(step, 1) for step in STEPS if step != STEPS[1]))


def test_table_has_medians() -> None:
    table = as_table([Joined(1, seconds, 1, 1, 1, 127_000_000, 1, 1 << 20) for seconds in (1.0, 2.0, 4.0)])
    assert "| the same | 63.50 MB/s | 31.75 .. 127.00 |" in table
    assert "| sent by the controller | 127.00 MB | 127.00 .. 127.00 |" in table
