"""Templates and charts of jobs: escaping, table limits, formats and positions of values."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kipmesh_jobs import charts
from kipmesh_jobs.report import Check, Stage, binary_size, environment, number, percent

NOW = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
SVG = "{http://www.w3.org/2000/svg}"
PAGE = """
{% extends "base.html" %}
{% import "parts.html" as parts %}
{% block job %}audit{% endblock %}
{% block title %}{{ title }}{% endblock %}
{% block lede %}lede{% endblock %}
{% block tiles %}{{ parts.tile("n", "1", good=false) }}{% endblock %}
{% block sections %}
{% call parts.card("S", note) %}
{% call(row) parts.table(["topic", "ok", "n"], rows, rows_max=10) %}{{ parts.cells(*row) }}{% endcall %}
{{ parts.proofs(checks) }}
{% endcall %}
{% endblock %}
"""


def page(rows: Sequence[Sequence[Any]] = (), stages: Sequence[Stage] = ()) -> str:
    checks = [Check("A & B", False, "<i>")]
    template = environment().from_string(PAGE)
    return template.render(title="T<t>", note="a < b", rows=rows, checks=checks, generated=NOW, stages=stages)


def artists(svg: str, notes: str = "") -> list[list[tuple[float, float]]]:
    """Return outlines of the artists whose title contains `notes`, in document order."""
    found = []
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        title = group.find(f"{SVG}title")
        if title is not None and notes in str(title.text):
            path, use = group.find(f"{SVG}path"), group.find(f".//{SVG}use")
            if path is not None:
                numbers = re.findall(r"-?[\d.]+(?:e-?\d+)?", path.attrib["d"])
                found.append([(float(x), float(y)) for x, y in zip(numbers[::2], numbers[1::2], strict=True)])
            elif use is not None:
                found.append([(float(use.attrib["x"]), float(use.attrib["y"]))])
    return found


def widths(svg: str) -> list[float]:
    return [max(x for x, _ in outline) - min(x for x, _ in outline) for outline in artists(svg)]


def test_page_has_all_parts_and_escapes_values() -> None:
    html = page([["<u>", True, 1234567], [None, False, 0.25]], [Stage("Read", 1.5)])
    assert "<u>" not in html
    for text in (
        "&lt;u&gt;",
        "1,234,567",
        "<td>–</td>",
        "<td>0.250</td>",
        "A &amp; B",
        "&lt;i&gt;",
        "a &lt; b",
        "T&lt;t&gt;",
        "Read",
        "02 January 2026",
        '<td class="good">yes</td>',
        '<td class="bad">no</td>',
        '<div class="value bad">1</div>',
        "default-src 'none'",
    ):
        assert text in html
    assert "script" not in html


def test_long_table_states_number_of_omitted_rows() -> None:
    html = page([["t", True, i] for i in range(12)])
    assert "<td>9</td>" in html
    assert "<td>10</td>" not in html
    assert "and 2 more" in html


def test_empty_table_shows_none() -> None:
    assert "<p>None.</p>" in page()


def test_chart_text_is_escaped_and_not_parsed_as_formula() -> None:
    hostile = "<script>$\\frac{1}{0}$&"
    svgs = [
        charts.line_chart({hostile: [(1, 2)], "b": [(1, 3)]}, hostile, hostile),
        charts.bar_chart([(hostile, 1), ("b", 2)], hostile),
        charts.span_chart([(hostile, 0, 1, hostile)], hostile),
        charts.heat_map([(0, 1, 2.0, hostile)], [hostile], hostile),
    ]
    for svg in svgs:
        assert "<script" not in svg
        texts = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
        assert hostile in texts


def test_equal_values_give_identical_charts() -> None:
    first, second = (charts.bar_chart([("a", 1), ("b", 2)], "n") for _ in range(2))
    assert first == second


def test_chart_colours_are_css_variables() -> None:
    svg = charts.line_chart({str(n): [(0, n), (1, n)] for n in range(8)}, "x", "y")
    assert all(f"var(--s{n})" in svg for n in range(1, 7))
    assert "#" not in re.sub(r"url\(#\w+\)|href=\"#\w+\"", "", svg)


def test_line_chart_draws_points_in_order_with_gaps() -> None:
    svg = charts.line_chart({"a": [(0, 0), (1, 1), (2, None), (3, 4), (4, 2)]}, "x", "y")
    dots = [outline[0] for outline in artists(svg, "a: ")]
    assert len(dots) == 4
    assert [x for x, _ in dots] == sorted(x for x, _ in dots)
    assert dots[0][1] > dots[1][1] > dots[2][1]
    line = 'style="fill: none; stroke: var(--s1); stroke-width: 1.6'
    assert svg.count(line) == 2


@example([(0.0, 5e-324)], False, True)
@example([(0.0, 5e-324)], False, False)
@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9)), min_size=1, max_size=20),
    st.booleans(),
    st.booleans(),
)
def test_line_chart_keeps_all_points_inside(points: list[tuple[float, float]], log_x: bool, log_y: bool) -> None:
    svg = charts.line_chart({"a": points}, "x", "y", log_x=log_x, log_y=log_y)
    drawable = [(x, y) for x, y in points if not (log_x and x <= 0) and not (log_y and y <= 0)]
    if "<svg" not in svg:
        assert not drawable
        return
    width, height = map(float, ElementTree.fromstring(svg).attrib["viewBox"].split()[2:])
    dots = artists(svg, "a: ")
    assert len(dots) == len(drawable)
    for ((x, y),) in dots:
        assert 0 <= x <= width
        assert 0 <= y <= height


def test_logarithmic_axis_omits_zero() -> None:
    svg = charts.line_chart({"a": [(1, 10), (10, 0), (100, 1000)]}, "x", "y", log_x=True, log_y=True)
    assert len(artists(svg, "a: ")) == 2


def test_bar_length_is_proportional_to_value() -> None:
    single, double, zero = widths(charts.bar_chart([("a", 1), ("b", 2), ("none", 0)], "n"))
    assert double == pytest.approx(2 * single, abs=0.2)
    assert zero == pytest.approx(0, abs=0.2)
    powers = widths(charts.bar_chart([("z", 2), ("a", 10), ("b", 100), ("c", 1000)], "n", log=True))
    assert powers[3] - powers[2] == pytest.approx(powers[2] - powers[1], abs=0.2)
    assert 0 < powers[0] < powers[1]


def test_day_bars_have_proportional_height_and_label_the_highest() -> None:
    days = [date(2013, 1, 1) + timedelta(days=n) for n in range(5)]
    svg = charts.day_bars(days, [0, 10, 40, 0, 20], [f"note {n}" for n in range(5)], "n")
    heights = [max(y for _, y in outline) - min(y for _, y in outline) for outline in artists(svg, "note")]
    assert heights == pytest.approx([heights[0], 4 * heights[0], 2 * heights[0]], abs=0.2)
    assert "03 Jan: 40" in svg
    assert "02 Jan: 10" not in svg


def test_charts_without_values_show_a_message() -> None:
    assert "No values" in charts.line_chart({}, "x", "y")
    assert "No values" in charts.line_chart({"a": [(1, 0)]}, "x", "y", log_y=True)
    assert "No values" in charts.bar_chart([("a", math.nan)], "n")
    assert "No values" in charts.heat_map([], ["a"], "n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number(1234567), "1,234,567"),
        (number(0.7708), "0.771"),
        (number(113.29), "113"),
        (number(0), "0"),
        (percent(0.25), "25 %"),
        (percent(None), "–"),
        (binary_size(1_200_000), "1.14 MiB"),
        (binary_size(792), "792 B"),
    ],
)
def test_numbers_are_formatted_for_readers(text: str, expected: str) -> None:
    assert text == expected


def test_ticks_of_time_axis_are_distinct() -> None:
    svg = charts.line_chart({"all": [(NOW, 1.0)]}, "hour", "v", lambda value: f"{value:.3f}")
    texts = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert len(texts) > 4
    assert len(set(texts)) == len(texts)
