"""Tables and chart of `bench.compare`."""

from __future__ import annotations

import pytest

from bench import compare
from bench.compare_figures import SHAPES

ROUNDS = [
    {"ours": {"ready_s": 2.0, "memory_mib": 300.0}, "kafka": {"ready_s": 10.0}, "ours3": {"ready_s": 3.0}},
    {"ours": {"ready_s": 4.0}, "kafka": {"ready_s": 10.0}, "tuned": {"ready_s": 8.0}},
    {"ours": {"ready_s": 3.0}},
]


def test_ratios_compare_clusters_of_one_round() -> None:
    ready, memory = compare.rows_of(ROUNDS)
    assert ready.ratios["ours", "kafka"] == pytest.approx((0.3, 0.2, 0.4, 2))
    assert ready.ratios["ours3", "kafka"].rounds == 1
    assert ready.ratios["ours", "tuned"].median == 0.5
    assert memory.ratios == {}


def test_table_and_chart_show_measured_figures_only() -> None:
    rows = compare.rows_of(ROUNDS)
    table = compare.as_markdown(rows, SHAPES)
    assert (
        "| from nothing to ready | 0.30 (0.20 .. 0.40) | 0.30 (0.30 .. 0.30) | 0.50 (0.50 .. 0.50) | <= 0.35: met | 2 |"
        in table
    )
    assert "memory (PSS) of all processes, idle" in table
    chart = compare.chart(rows)
    assert "<svg " in chart
    assert "from nothing to ready" in chart
    assert "memory" not in chart
    assert compare.chart([]).endswith("</svg>\n")
