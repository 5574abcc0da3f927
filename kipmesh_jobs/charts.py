"""Charts as inline SVG, drawn with matplotlib.

Every chart function returns one `<svg>` element for an HTML page. Functions that take an iterable return the paragraph
"No values." if it is empty. Texts are escaped text elements without mathtext. Colours are variables of
`templates/report.css`, so charts follow the reader's light or dark theme. Equal values give equal bytes.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime
from io import BytesIO
from itertools import groupby
from typing import Any, Final, NamedTuple
from xml.etree import ElementTree

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure

Form = Callable[[float], str]
Points = Iterable[tuple[Any, float | None]]
"""(x, y) from left to right. x is a number, date or time; a y of None is a gap in the line."""

COLOURS: Final = ("#2a6fc9", "#c95f14", "#13866a", "#8a4fb5", "#a8861d", "#b0447f")
"""Replaced by the variables --s1 to --s6. Further lines repeat them, dashed."""
HEAT: Final = ("#eef2f7", "#b9d2ee", "#6ea3de", "#2a6fc8", "#123f80")
BAD: Final = "#c2334a"
_INK, _SOFT, _FAINT, _GRID = "#1d1d1b", "#5f5e59", "#8b8981", "#e4e2da"
_VARIABLES: Final = {
    **{colour: f"var(--s{number})" for number, colour in enumerate(COLOURS, 1)},
    **{colour: f"var(--heat{number})" for number, colour in enumerate(HEAT)},
    BAD: "var(--bad)",
    _INK: "var(--ink)",
    _SOFT: "var(--soft)",
    _FAINT: "var(--faint)",
    _GRID: "var(--line)",
}
_STYLE: Final[Any] = {
    "svg.hashsalt": "kipmesh",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "text.color": _SOFT,
    "axes.labelcolor": _FAINT,
    "axes.edgecolor": _GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.labelcolor": _SOFT,
}
_WIDTH: Final = 7.5
_BAR_HEIGHT: Final = 0.25
_NAME_MAX: Final = 34
_DOTS_MAX: Final = 60
_FONT: Final = re.compile(r"font-family: [^;]*;? ?")
"""Font for measuring texts. The page's own font replaces it."""
_LEAST: Final = 1e-300
"""Smallest drawn value. Computations with smaller ones would underflow to 0."""
_SVG: Final = "http://www.w3.org/2000/svg"
_XLINK: Final = "http://www.w3.org/1999/xlink"
_NOTHING: Final = Markup("<p>No values.</p>")


class Bar(NamedTuple):
    """A horizontal bar. `note` is its tooltip (default: name and value), `group` is the index of its colour in
    `COLOURS`.
    """

    name: str
    value: float
    note: str = ""
    group: int = 0


class Canvas:
    """A figure with `rows` axes, one below the other, and tooltips of its artists. `height` is in inches; `label`
    describes the chart for screen readers.
    """

    def __init__(self, label: str, height: float, rows: int = 1) -> None:
        self._label = label
        self._notes: dict[str, str] = {}
        self._figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        self.axes: list[Axes] = list(self._figure.subplots(rows, 1, squeeze=False)[:, 0])

    def note(self, artist: Any, text: str) -> None:
        """Add a tooltip to an artist, such as a bar or a dot."""
        name = f"note{len(self._notes)}"
        artist.set_gid(name)
        self._notes[name] = text

    def svg(self) -> Markup:
        """Return the SVG element, scaled to the width of its container."""
        drawn = BytesIO()
        self._figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        ElementTree.register_namespace("", _SVG)
        ElementTree.register_namespace("xlink", _XLINK)
        root = ElementTree.fromstring(drawn.getvalue())  # noqa: S314 (drawn above)
        for name in ("width", "height", "version"):
            root.attrib.pop(name, None)
        root.attrib |= {"role": "img", "aria-label": self._label}
        for element in list(root):
            if element.tag == f"{{{_SVG}}}metadata":
                root.remove(element)
        for element in root.iter(f"{{{_SVG}}}g"):
            if element.get("id") in self._notes:
                title = ElementTree.Element(f"{{{_SVG}}}title")
                title.text = self._notes[element.attrib["id"]]
                element.insert(0, title)
        for element in root.iter():
            style = _FONT.sub("", element.get("style", ""))
            for colour, variable in _VARIABLES.items():
                style = style.replace(colour, variable)
            if style:
                element.set("style", style)
        return Markup(ElementTree.tostring(root, encoding="unicode"))  # noqa: S704 (ElementTree has escaped it)


@contextmanager
def canvas(label: str, height: float, rows: int = 1) -> Iterator[Canvas]:
    """Yield a canvas in the style of the pages.

    Warnings about glyphs that the measuring font lacks are suppressed: browsers have other fonts.
    """
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Canvas(label, height, rows)


def line_chart(
    lines: Mapping[str, Points],
    x_label: str,
    y_label: str,
    form: Form | None = None,
    log_x: bool = False,
    log_y: bool = False,
) -> Markup:
    """Draw named lines over a common x axis. Returns "No values." if no point has a y.

    `form` formats y. A logarithmic x axis drops points whose x is 0 or less. A logarithmic y axis shows points whose y
    is 0 or less as gaps.
    """
    drawable = {name: list(_drawable(points, log_x, log_y)) for name, points in lines.items()}
    known = [(x, y) for points in drawable.values() for x, y in points if y is not None]
    if not known:
        return _NOTHING
    with canvas(f"{y_label} by {x_label}", 3.1) as chart:
        axes = chart.axes[0]
        _scale(axes, [x for x, _ in known], [y for _, y in known], log_x, log_y)
        for place, (name, points) in enumerate(drawable.items()):
            _draw_line(chart, place, name, points, form)
        if form is not None:
            axes.yaxis.set_major_formatter(lambda value, _: form(value))
        axes.set_xlabel(x_label)
        axes.set_title(y_label, loc="left", color=_INK, fontsize=10)
        if len(lines) > 1:
            axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=3)
        return chart.svg()


def _drawable(points: Points, log_x: bool, log_y: bool) -> Iterator[tuple[Any, float | None]]:
    """Yield the points with a drawable x. A y that cannot be drawn becomes None, a gap."""
    for x, y in points:
        if isinstance(x, date):
            yield x, _finite(y, log_y)
        elif _finite(x, log_x) is not None:
            yield _finite(x, log_x), _finite(y, log_y)


def _finite(value: float | None, log: bool) -> float | None:
    if value is None or not math.isfinite(value) or (log and value <= 0):
        return None
    return max(value, _LEAST) if log else value


def _scale(axes: Axes, xs: Sequence[Any], ys: Sequence[float], log_x: bool, log_y: bool) -> None:
    """Scale both axes. A linear y axis includes 0; a logarithmic one ranges between powers of ten."""
    if log_x:
        axes.set_xscale("log")
    elif isinstance(xs[0], date):
        locator = AutoDateLocator(minticks=3, maxticks=8)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    if log_y:
        axes.set_yscale("log")
        low, high = 10 ** _power(min(ys)), 10 ** (_power(max(ys)) + 1)
    else:
        low, high = min(0.0, *ys), max(0.0, *ys) * 1.04
        high = high if high - low > _LEAST else low + 1
    axes.set_ylim(low, high)


def _power(value: float) -> int:
    return math.floor(math.log10(max(value, _LEAST)))


def _draw_line(chart: Canvas, place: int, name: str, points: Sequence[tuple[Any, Any]], form: Form | None) -> None:
    axes, colour = chart.axes[0], COLOURS[place % len(COLOURS)]
    style = "-" if place < len(COLOURS) else "--"
    runs = [list(run) for is_gap, run in groupby(points, lambda point: point[1] is None) if not is_gap]
    has_dots = sum(map(len, runs)) <= _DOTS_MAX
    for number, run in enumerate(runs):
        axes.plot(*zip(*run, strict=True), style, color=colour, label="" if number else name, linewidth=1.6)
        for x, y in run if has_dots or len(run) == 1 else ():
            (dot,) = axes.plot([x], [y], marker="o", markersize=4, color=colour)
            at = (
                f"{x:g}" if isinstance(x, float | int) else f"{x:%d %b %Y %H:%M}" if isinstance(x, datetime) else f"{x}"
            )
            chart.note(dot, f"{name}: {form(y) if form else f'{y:g}'} at {at}")


def bar_chart(bars: Iterable[Sequence[Any]], label: str, form: Form = str, log: bool = False) -> Markup:
    """Draw horizontal bars (`Bar`, or tuples of its fields) from top to bottom. Bars start at 0, or at a power of ten
    if `log` is set.

    `form` formats the values. Bars whose value is not finite are left out. Returns "No values." if no bar is left.
    """
    shown = [bar for bar in (Bar(*each) for each in bars) if math.isfinite(bar.value)]
    if not shown:
        return _NOTHING
    with canvas(label, _BAR_HEIGHT * len(shown) + 0.35) as chart:
        axes = chart.axes[0]
        first = 10.0 ** _power(min((bar.value for bar in shown if bar.value > 0), default=1.0)) if log else 0.0
        widths = [max(bar.value - first, 0.0) if log else bar.value for bar in shown]
        colours = [COLOURS[bar.group % len(COLOURS)] for bar in shown]
        drawn = axes.barh(range(len(shown)), widths, left=first, color=colours, height=0.66)
        axes.bar_label(drawn, [form(bar.value) for bar in shown], padding=4, color=_SOFT)
        for patch, bar in zip(drawn, shown, strict=True):
            chart.note(patch, bar.note or f"{bar.name}: {form(bar.value)}")
        _bare(axes, [bar.name for bar in shown], label)
        if log:
            axes.set_xscale("log")
        axes.margins(x=0.12)
        return chart.svg()


def _bare(axes: Axes, names: Sequence[str], title: str) -> None:
    """Label the rows from top to bottom with `names`, shortened to 34 characters. Hide the grid and the x axis."""
    cut = [name if len(name) <= _NAME_MAX else f"{name[: _NAME_MAX - 1]}…" for name in names]
    axes.set_yticks(range(len(names)), cut, color=_SOFT)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.set_title(title, loc="left", color=_INK, fontsize=10)


def day_bars(days: Sequence[Any], values: Sequence[float], notes: Sequence[str], label: str) -> Markup:
    """Draw one bar per day, with a tooltip for values other than 0. Labels the four highest bars, unless they are below
    20.
    """
    with canvas(label, 2.3) as chart:
        axes = chart.axes[0]
        drawn = axes.bar(days, values, width=0.8, color=BAD)
        _scale(axes, days, values, False, False)
        for patch, note, value in zip(drawn, notes, values, strict=True):
            if value:
                chart.note(patch, note)
        for place in sorted(range(len(days)), key=lambda place: -values[place])[:4]:
            if values[place] >= 20:
                text = f"{days[place]:%d %b}: {values[place]:,.0f}"
                axes.annotate(text, (days[place], values[place]), (4, -6), textcoords="offset points", fontsize=8)
        return chart.svg()


def band_chart(days: Sequence[Any], panels: Mapping[str, Mapping[str, Sequence[float | None]]], label: str) -> Markup:
    """Draw a panel for each name: p50 as a line, and bands from p50 to p75 and from p75 to p90. None becomes a gap."""
    with canvas(label, 1.7 * len(panels), rows=len(panels)) as chart:
        for place, (axes, (name, columns)) in enumerate(zip(chart.axes, panels.items(), strict=True)):
            half, most, nearly = (
                [math.nan if value is None else value for value in columns[column]] for column in ("p50", "p75", "p90")
            )
            colour = COLOURS[place % len(COLOURS)]
            _scale(axes, days, [value for value in (*half, *nearly) if math.isfinite(value)] or [0.0], False, False)
            axes.fill_between(days, most, nearly, color=colour, alpha=0.2, linewidth=0)
            axes.fill_between(days, half, most, color=colour, alpha=0.42, linewidth=0)
            axes.plot(days, half, color=colour, linewidth=1.5)
            axes.set_title(name, loc="left", color=_INK, fontsize=10)
        return chart.svg()


def heat_map(cells: Iterable[tuple[int, int, float, str]], rows: Sequence[str], label: str) -> Markup:
    """Draw (row, column, value, tooltip) cells in five colours, each for about a fifth of the cells.

    Rows are indexes of `rows`, columns are numbers that label the x axis. Returns "No values." if there are no cells.
    """
    shown = list(cells)
    if not shown:
        return _NOTHING
    columns = sorted({column for _, column, _, _ in shown})
    ordered = sorted(value for _, _, value, _ in shown)
    bounds = [ordered[math.floor(share * (len(ordered) - 1))] for share in (0.2, 0.4, 0.6, 0.8)]
    with canvas(label, 3.0) as chart:
        axes = chart.axes[0]
        _bare(axes, rows, label)
        axes.xaxis.set_visible(True)
        axes.set_xticks(range(len(columns)), [str(column) for column in columns])
        for row, column, value, note in shown:
            level = sum(value > bound for bound in bounds)
            (cell,) = axes.barh(row, 0.92, left=columns.index(column) - 0.46, height=0.9, color=HEAT[level])
            chart.note(cell, note)
        edges = [ordered[0], *bounds, ordered[-1]]
        for level, colour in enumerate(HEAT):
            axes.bar(0, 0, color=colour, label=f"{edges[level]:.0f} to {edges[level + 1]:.0f}")
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.08), ncols=len(HEAT), columnspacing=1.2, handlelength=1.2)
        return chart.svg()


def span_chart(spans: Iterable[tuple[str, float, float, str]], label: str) -> Markup:
    """Draw (name, begin, end, label) as horizontal bars, such as the steps of a run. Returns "No values." if there are
    no spans.
    """
    shown = list(spans)
    if not shown:
        return _NOTHING
    with canvas(label, _BAR_HEIGHT * len(shown) + 0.35) as chart:
        axes = chart.axes[0]
        names, begins, ends, texts = zip(*shown, strict=True)
        lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        drawn = axes.barh(range(len(shown)), lengths, left=begins, color=COLOURS[0], height=0.6)
        axes.bar_label(drawn, texts, padding=4, color=_SOFT)
        _bare(axes, names, label)
        axes.margins(x=0.12)
        return chart.svg()
