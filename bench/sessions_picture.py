"""Panels of lines over logarithmic axes, as SVG of plain text: no library draws it, and it is the same every time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape


class Line(NamedTuple):
    """Points from left to right, all above 0."""

    name: str
    is_dashed: bool
    points: Sequence[tuple[float, float]]


Panel = tuple[str, Callable[[float], str], Sequence[Line]]
"""Title, how a value is written, lines."""

WIDTH, HEIGHT = 380, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 28, 36, 44
LEGEND = 20
COLOURS = ("#0072b2", "#e69f00", "#009e73")
"""That people with any colour vision tell apart; dashes tell the rest."""
INK, GRID = "#333333", "#dddddd"


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _path(points: Sequence[tuple[float, float]], colour: str, is_dashed: bool) -> str:
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="6 4"' if is_dashed else ""
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
    return f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>{dots}'


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _panel(left: float, panel: Panel, below: str) -> list[str]:
    """Axes go from a power of ten to a power of ten."""
    title, unit, lines = panel
    across = [x for line in lines for x, _ in line.points]
    upwards = [y for line in lines for _, y in line.points]
    least, most = math.floor(math.log10(min(upwards))), math.ceil(math.log10(max(upwards)))
    most = max(most, least + 1)
    first, last = math.log10(min(across)), math.log10(max(across))

    def x_of(value: float) -> float:
        share = (math.log10(value) - first) / (last - first) if last > first else 0.5
        return left + LEFT + share * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(value) - least) / (most - least) * (HEIGHT - TOP - BOTTOM)

    parts = [_text(left + LEFT + (WIDTH - LEFT - RIGHT) / 2, TOP - 16, title, size=13)]
    for power in range(least, most + 1):
        y = y_of(10**power)
        parts.append(
            f'<line x1="{left + LEFT}" y1="{y:.1f}" x2="{left + WIDTH - RIGHT}" y2="{y:.1f}" stroke="{GRID}"/>'
        )
        parts.append(_text(left + LEFT - 6, y + 4, unit(10.0**power), "end"))
    parts += [_text(x_of(value), HEIGHT - BOTTOM + 18, f"{value:,.0f}") for value in sorted(set(across))]
    parts.append(_text(left + LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 8, below))
    for place, line in enumerate(lines):
        parts.append(_path([(x_of(x), y_of(y)) for x, y in line.points], _colour(place), line.is_dashed))
    return parts


def picture(panels: Sequence[Panel], below: str) -> str:
    """The panels beside each other, and what the lines are under them; lines are the same in each."""
    lines = panels[0][2]
    rows = (len(lines) + 1) // 2
    width, height = WIDTH * len(panels), HEIGHT + LEGEND * rows + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" fill="{INK}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for place, panel in enumerate(panels):
        parts += _panel(place * WIDTH, panel, below)
    for place, line in enumerate(lines):
        x, y = LEFT + place // rows * width / 2, HEIGHT + 14 + LEGEND * (place % rows)
        parts.append(_path([(x, y), (x + 36, y)], _colour(place), line.is_dashed))
        parts.append(_text(x + 46, y + 4, line.name, "start"))
    return "\n".join([*parts, "</svg>", ""])
