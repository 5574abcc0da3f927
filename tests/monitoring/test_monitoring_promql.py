"""Transformations of PromQL expressions for the live test."""

from __future__ import annotations

import pytest

from tests.monitoring.promql_of_tests import in_grafana, panels, rules, selectors, unfiltered, with_short_windows


def test_unfiltered_comparisons_return_all_series() -> None:
    assert unfiltered('up{job=~"a",x!="b > c"} == 0') == 'up{job=~"a",x!="b > c"} == bool 0'
    assert unfiltered("a > 0\n  and b >= -1 and c - d <= 5") == "a > bool 0\n  and b >= bool -1 and c - d <= bool 5"


def test_windows_and_offsets_are_scaled() -> None:
    assert with_short_windows("rate(a[5m]) + increase(b{c='[5m]'}[3h])").startswith("rate(a[7500ms])")
    assert with_short_windows("a offset 30m > 2 * (b[10s])") == "a offset 45000ms > 2 * (b[250ms])"


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (
            'sum by (cluster, le) (rate(a_total{x="1"}[5m])) / on (cluster) group_right () b:c',
            ['a_total{x="1"}', "b:c"],
        ),
        ('a and b == 1 or 0 * count by (cluster) (up{job=~"k-.*"})', ["a", "b", 'up{job=~"k-.*"}']),
        ("time() - start > 10800 and x > 2 * (x offset 30m)", ["start", "x"]),
        ('count(ALERTS{a="by (x)"}) or vector(0)', ['ALERTS{a="by (x)"}']),
    ],
)
def test_selectors_returns_the_series_of_an_expression(expr: str, expected: list[str]) -> None:
    assert selectors(expr) == expected


def test_every_committed_expression_has_selectors() -> None:
    for rule in rules():
        assert selectors(rule.expr), rule
    for panel in panels():
        assert selectors(in_grafana(panel.expr, "1m")), panel
