"""The result table of `bench.wakeup`."""

from __future__ import annotations

from math import nan

from bench.wakeup import Pair, Round, as_table

NO_RECORDS = (nan, nan)


def measured(fetches_s: float, p50_ms: float) -> Round:
    return Round(fetches_s, 10.0, (p50_ms, 2 * p50_ms), (5.0, 5.0))


def test_wakeup_table_computes_ratios_per_pair() -> None:
    pairs = [
        Pair(measured(40, 5), measured(20, 500)),
        Pair(measured(80, 6), measured(20, 300)),
        Pair(measured(60, 4), measured(60, 100)),
    ]
    row = as_table({10.0: pairs}).splitlines()[-1]
    assert row.startswith("| 10 | 60.0, 20.0: 2.00 (1.00 .. 4.00) |")
    assert "| 5.0, 300.0: 0.02 (0.01 .. 0.04) |" in row


def test_wakeup_table_omits_delay_without_records() -> None:
    idle = Round(4.0, 0.0, NO_RECORDS, NO_RECORDS)
    assert as_table({0.0: [Pair(idle, idle)]}).splitlines()[-1] == (
        "| 0 | 4.0, 4.0: 1.00 (1.00 .. 1.00) | - | - | - | - | - |"
    )
