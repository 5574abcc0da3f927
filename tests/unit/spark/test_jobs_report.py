"""Pages of jobs: what is in them is escaped and in place, and axes have all values on them."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kipmesh.spark.jobs.report import (
    Bar,
    BarChart,
    Check,
    Checks,
    Line,
    LineChart,
    Note,
    Page,
    Section,
    Stage,
    Table,
    Tile,
    binary_size,
    number,
    percent,
    render,
)

NOW = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)


def drawing(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html[html.rindex("<svg") :])


def test_a_page_has_all_its_parts_and_escapes_them() -> None:
    parts = [
        Table(["topic", "ok", "n"], [["<u>", True, 1234567], [None, False, 0.25]]),
        Checks([Check("A & B", False, "<i>")]),
        Note("a < b"),
    ]
    page = Page("audit", "T<t>", "lede", [Section("S", "text", parts)], [Tile("n", "1", good=False)])
    html = render(page, generated=NOW, stages=[Stage("Read", 1.5)])
    assert "<u>" not in html
    for text in (
        "&lt;u&gt;",
        "1,234,567",
        "<td>–</td>",
        "A &amp; B",
        "a &lt; b",
        "T&lt;t&gt;",
        "Read",
        "02 January 2026",
    ):
        assert text in html
    assert '<td class="good">yes</td>' in html
    assert "script" not in html
    assert "default-src 'none'" in html


def test_a_long_table_says_what_it_leaves_out() -> None:
    html = Table(["n"], [[i] for i in range(12)], rows_max=10).html()
    assert "<td>9</td>" in html
    assert "<td>10</td>" not in html
    assert "and 2 more" in html


def test_lines_are_drawn_in_order_and_broken_at_gaps() -> None:
    svg = drawing(LineChart([Line("a", [(0, 0), (1, 1), (2, None), (3, 4), (4, 2)])], "x", "y").html())
    lines = [one.attrib["points"].split() for one in svg.iter("polyline")]
    assert [len(line) for line in lines] == [2, 2]
    (x0, y0), (x1, y1) = (tuple(map(float, one.split(","))) for one in lines[0])
    assert x0 < x1
    assert y0 > y1


@example([(0.0, 5e-324)], False, True)
@example([(0.0, 5e-324)], False, False)
@given(
    st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9)), min_size=1, max_size=20),
    st.booleans(),
    st.booleans(),
)
def test_every_point_is_within_the_drawing(points: list[tuple[float, float]], log_x: bool, log_y: bool) -> None:
    html = LineChart([Line("a", points)], "x", "y", log_x=log_x, log_y=log_y).html()
    if "<svg" not in html:
        assert all((log_x and x <= 0) or (log_y and y <= 0) for x, y in points)
        return
    svg = drawing(html)
    for dot in svg.iter("circle"):
        assert 75 <= float(dot.attrib["cx"]) <= 705
        assert 11 <= float(dot.attrib["cy"]) <= 237


def test_a_logarithmic_axis_leaves_out_zero() -> None:
    svg = drawing(LineChart([Line("a", [(1, 10), (10, 0), (100, 1000)])], "x", "y", log_x=True, log_y=True).html())
    assert len(list(svg.iter("circle"))) == 2


def test_bars_are_as_long_as_their_values() -> None:
    svg = drawing(BarChart([Bar("a", 1), Bar("b", 2), Bar("none", 0)], "n").html())
    widths = [float(one.attrib["width"]) for one in svg.iter("rect")]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)
    assert widths[2] == 1
    powers = drawing(BarChart([Bar("z", 1), Bar("a", 10), Bar("b", 100), Bar("c", 1000)], "n", log=True).html())
    widths = [float(one.attrib["width"]) for one in powers.iter("rect")]
    assert widths[3] - widths[2] == pytest.approx(widths[2] - widths[1], abs=0.2)


def test_nothing_to_draw_is_said() -> None:
    assert "No values" in LineChart([], "x", "y").html()
    assert "No values" in LineChart([Line("a", [(1, 0)])], "x", "y", log_y=True).html()
    assert "No values" in BarChart([Bar("a", math.nan)], "n").html()


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (number(1234567), "1,234,567"),
        (number(0.7708), "0.771"),
        (number(113.29), "113"),
        (number(0), "0"),
        (percent(0.25), "25 %"),
        (binary_size(1_200_000), "1.14 MiB"),
        (binary_size(792), "792 B"),
    ],
)
def test_numbers_are_for_people(told: str, expected: str) -> None:
    assert told == expected


def test_places_that_read_the_same_are_told_once() -> None:
    chart = LineChart([Line("all", [(3600.0, 1.0)])], "hour", "v", x_form=lambda second: f"hour {second // 3600:.0f}")
    texts = [text.text for text in drawing(chart.html()).iter("text")]
    assert texts.count("hour 1") == 1
