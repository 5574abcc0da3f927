"""Counts by window of time as columns, one panel below the other, as SVG of plain text."""

from __future__ import annotations

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
