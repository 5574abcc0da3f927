"""Charts of figures as SVG, drawn by matplotlib. The same values give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import StringIO
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

mpl.rcParams.update({"svg.hashsalt": "kipmesh", "svg.fonttype": "none", "font.size": 9, "text.parse_math": False})

COLOURS = ("#0072b2", "#e69f00", "#009e73")
"""Colours that are distinct with any colour vision."""
_INCH = 100
"""Pixels per inch."""


class Line(NamedTuple):
    """A line through positive (x, y) points, from left to right."""

    name: str
    is_dashed: bool
    points: Sequence[tuple[float, float]]


Panel = tuple[str, Callable[[float], str], Sequence[Line]]
"""Title, format of a value on the axis, and lines."""


class Series(NamedTuple):
    """A panel of columns: one count for each time window."""

    title: str
    counts: Sequence[int]


class Bars(NamedTuple):
    """A panel with a horizontal bar for each name. `is_log` selects a logarithmic axis."""

    title: str
    names: Sequence[str]
    values: Sequence[float]
    is_log: bool = False


class Span(NamedTuple):
    """A median and its range, all positive."""

    label: str
    least: float
    median: float
    most: float


class Ratios(NamedTuple):
    """A row in the chart of `ratios`: spans, each in its own colour, and the target."""

    name: str
    spans: Sequence[Span]
    target: float | None


def _axes(rows: int, columns: int, width: int, height: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width / _INCH, height / _INCH), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(color="#dddddd")
        each.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure) -> str:
    drawn = StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    return drawn.getvalue()


def lines(panels: Sequence[Panel], below: str) -> str:
    """Return an SVG with panels of lines side by side, on logarithmic axes. All panels share the legend of the first;
    `below` labels the x axes.
    """
    figure, axes = _axes(1, len(panels), 380 * len(panels), 400)
    for each, (title, unit, shown) in zip(axes, panels, strict=True):
        for place, line in enumerate(shown):
            style = "o--" if line.is_dashed else "o-"
            each.loglog(*zip(*line.points, strict=True), style, color=COLOURS[place % len(COLOURS)], label=line.name)
        each.set_title(title)
        each.set_xlabel(below)
        each.set_xticks(sorted({x for line in shown for x, _ in line.points}))
        each.xaxis.set_minor_locator(NullLocator())
        each.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        each.yaxis.set_major_formatter(FuncFormatter(lambda value, _, unit=unit: unit(value)))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return _svg(figure)


def columns(panels: Sequence[Series], hours: int) -> str:
    """Draw counts over `hours` as SVG columns in stacked panels. The first and second panel share a scale, then the
    third and fourth, and so on.
    """
    figure, axes = _axes(len(panels), 1, 820, 150 * len(panels))
    for place, (each, series) in enumerate(zip(axes, panels, strict=True)):
        pair = panels[place // 2 * 2 : place // 2 * 2 + 2]
        times = [hours * window / max(len(series.counts) - 1, 1) for window in range(len(series.counts))]
        each.vlines(times, 0, series.counts, colors=COLOURS[place % 2], linewidth=0.7)
        each.set_ylim(0, max(max(one.counts, default=0) for one in pair) or 1)
        each.set_xticks(range(hours + 1), [f"{hour} h" for hour in range(hours + 1)])
        each.set_title(series.title, loc="left")
    return _svg(figure)


def bars(panels: Sequence[Bars]) -> str:
    """Return an SVG with bars and their values in stacked panels, each with its own scale."""
    figure, axes = _axes(len(panels), 1, 820, 60 * len(panels) + 22 * sum(len(panel.names) for panel in panels))
    for each, panel in zip(axes, panels, strict=True):
        colours = [COLOURS[place % len(COLOURS)] for place in range(len(panel.names))]
        drawn = each.barh(range(len(panel.names)), panel.values, color=colours, log=panel.is_log)
        shown = [f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in panel.values]
        each.bar_label(drawn, shown, padding=4)
        each.set_yticks(range(len(panel.names)), panel.names)
        each.invert_yaxis()
        each.margins(x=0.15)
        each.set_title(panel.title + (" (logarithmic)" if panel.is_log else ""), loc="left")
    return _svg(figure)


def ratios(title: str, rows: Sequence[Ratios]) -> str:
    """Return an SVG with a row per `Ratios`: medians as dots on their ranges, on one logarithmic axis, with a green bar
    at the target.
    """
    figure, (axes,) = _axes(1, 1, 860, 110 + 30 * len(rows))
    for place, row in enumerate(rows):
        if row.target is not None:
            axes.vlines(row.target, place - 0.4, place + 0.4, colors=COLOURS[2], linewidth=3)
        for number, span in enumerate(row.spans):
            at = place + 0.3 * number - 0.15
            axes.hlines(at, span.least, span.most, colors=COLOURS[number], linewidth=2)
            axes.plot([span.median], [at], "o", color=COLOURS[number], label=span.label)
        if row.spans:
            shown = f"{row.spans[0].median:.2f}"
            axes.annotate(shown, (1.01, place), xycoords=("axes fraction", "data"), va="center")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.axvline(1, color="#333333", linewidth=1)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_title(title, loc="left")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False)
    return _svg(figure)
