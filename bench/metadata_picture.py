"""Counts by window of time as columns, and figures of few things as bars, one panel below the other, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape


class Series(NamedTuple):
    """One panel: counts from the first window to the last."""

    title: str
    counts: Sequence[int]


WIDTH, PANEL = 820, 130
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 26, 22
COLOURS = ("#0072b2", "#e69f00")
"""In turn; that people with any colour vision tell apart."""
INK, GRID = "#333333", "#dddddd"


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="11">{escape(text)}</text>'


def _panel(top: float, series: Series, most: int, colour: str, hours: int) -> list[str]:
    """A column a pixel is as high as the highest of its windows."""
    inner, height = WIDTH - LEFT - RIGHT, PANEL - TOP - BOTTOM
    bottom = top + PANEL - BOTTOM
    parts = [_text(LEFT, top + 16, series.title, "start")]
    for share in (0, 0.5, 1):
        y = bottom - share * height
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{most * share:,.0f}", "end"))
    parts += [_text(LEFT + inner * hour / hours, bottom + 15, f"{hour} h") for hour in range(hours + 1)]
    columns = [0] * (inner + 1)
    for place, count in enumerate(series.counts):
        column = place * inner // max(len(series.counts) - 1, 1)
        columns[column] = max(columns[column], count)
    ways = [
        f"M{LEFT + place}.5 {bottom:.1f}V{bottom - count / most * height:.1f}"
        for place, count in enumerate(columns)
        if count
    ]
    return [*parts, f'<path d="{"".join(ways)}" stroke="{colour}" fill="none"/>']


def picture(panels: Sequence[Series], hours: int) -> str:
    """The panels; each two of them have one scale."""
    height = PANEL * len(panels) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for place, series in enumerate(panels):
        pair = panels[place // 2 * 2 : place // 2 * 2 + 2]
        most = max(max(each.counts, default=0) for each in pair) or 1
        parts += _panel(place * PANEL, series, most, COLOURS[place % 2], hours)
    return "\n".join([*parts, "</svg>", ""])


class Bars(NamedTuple):
    """One panel: a bar for each name. A logarithmic axis begins at a hundredth of the largest power of ten or below."""

    title: str
    names: Sequence[str]
    values: Sequence[float]
    is_log: bool = False


BAR, NAMES, FIGURES = 18, 190, 90
BAR_COLOURS = ("#0072b2", "#e69f00", "#009e73")


def _share(panel: Bars, value: float) -> float:
    """Of the width that there is for bars; 0 to 1."""
    if not panel.is_log:
        return value / max(panel.values) if value else 0.0
    logs = [math.log10(max(each, 1)) for each in panel.values]
    most, least = math.ceil(max(logs)), math.floor(min(logs)) - 1
    return (math.log10(max(value, 1)) - least) / (most - least)


def bars(panels: Sequence[Bars]) -> str:
    """The panels, each with a scale of its own."""
    parts: list[str] = []
    top = 0
    inner = WIDTH - NAMES - FIGURES
    for panel in panels:
        title = panel.title + (" (logarithmic)" if panel.is_log else "")
        parts.append(_text(10, top + 20, title, "start"))
        top += 30
        for place, (name, value) in enumerate(zip(panel.names, panel.values, strict=True)):
            width = inner * _share(panel, value)
            colour = BAR_COLOURS[place % len(BAR_COLOURS)]
            parts.append(_text(NAMES - 6, top + 13, name, "end"))
            parts.append(f'<rect x="{NAMES}" y="{top}" width="{width:.1f}" height="{BAR - 4}" fill="{colour}"/>')
            parts.append(
                _text(NAMES + width + 5, top + 13, f"{value:,.0f}" if value >= 100 else f"{value:.1f}", "start")
            )
            top += BAR
        top += 8
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}" '
        f'font-family="sans-serif" fill="{INK}">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{top}" fill="#ffffff"/>', *parts, "</svg>", ""])
