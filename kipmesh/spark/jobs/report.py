"""The page of a job: one HTML file with tables and charts in it, which opens without a network and runs no script.

A job makes a `Page` of sections, and a section of parts: `Table`, `LineChart`, `BarChart`, `Checks`, `Note`. Charts are
SVG, drawn here. Texts and values are escaped here, so that a topic's name cannot become markup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from importlib import resources
from typing import Final, NamedTuple

Cell = str | int | float | bool | None
"""A value of a table: None is a dash, numbers get thousands separators, a bool is yes or no in colours."""
Point = tuple[float, float | None]
"""x and y; None is a gap in the line."""

COLOURS: Final = ("--s1", "--s2", "--s3", "--s4", "--s5", "--s6")
"""Variables of the style; lines beyond that many repeat them, dashed."""
_WIDTH: Final = 720
_HEIGHT: Final = 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 12, 44
_BAR: Final = 24
_BAR_LABEL: Final = 220
_BAR_VALUE: Final = 120
_LEAST: Final = 1e-300
"""Less than that is as good as nothing: what is computed from it would be 0."""
_TICKS: Final = 5
_POWERS_MAX: Final = 8
_CSS: Final = "report.css"

_HEAD: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}
</style>
</head>
"""


def number(value: float) -> str:
    """Whole numbers in full, others with three digits that say something."""
    if isinstance(value, int) or float(value).is_integer():
        return f"{value:,.0f}"
    if not math.isfinite(value):
        return str(value)
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"


def percent(value: float) -> str:
    """A share of 1 as percent."""
    return f"{number(round(value * 100, 2))} %"


def binary_size(value: float) -> str:
    """Bytes in the unit (of 1,024) that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{number(round(value, 2))} {unit}"
        value /= 1024
    return f"{number(round(value, 2))} TiB"


class Stage(NamedTuple):
    """One step of the run and how long it took."""

    name: str
    seconds: float


class Check(NamedTuple):
    """One proof: what was compared, whether it holds, and the figures."""

    name: str
    passed: bool
    detail: str


class Tile(NamedTuple):
    """A figure at the head of the page; `good` colours it."""

    name: str
    value: str
    note: str = ""
    good: bool | None = None


class Line(NamedTuple):
    """A line of a chart, from left to right."""

    name: str
    points: Sequence[Point]


class Bar(NamedTuple):
    """A bar; `note` is said when the pointer rests on it, `group` chooses its colour."""

    name: str
    value: float
    note: str = ""
    group: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under titles. The first column and those of texts are set left, numbers right."""

    titles: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    rows_max: int = 500

    def html(self) -> str:
        """What is left out beyond `rows_max` is said under the table."""
        if not self.rows:
            return "<p>None.</p>"
        texts = [isinstance(value, str) for value in self.rows[0]]
        head = "".join(
            f'<th scope="col"{" class=text" if is_text else ""}>{escape(title)}</th>'
            for title, is_text in zip(self.titles, texts, strict=True)
        )
        body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in self.rows[: self.rows_max])
        left_out = len(self.rows) - self.rows_max
        more = f"<p>and {left_out:,} more, in the Parquet</p>" if left_out > 0 else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f'<div class="scroll">{table}</div>{more}'


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines over a common axis; a logarithmic axis leaves out what is not above 0."""

    lines: Sequence[Line]
    x_label: str
    y_label: str
    x_form: Callable[[float], str] = number
    y_form: Callable[[float], str] = number
    log_x: bool = False
    log_y: bool = False

    def html(self) -> str:
        """A legend and the drawing; a sentence when there is nothing to draw."""
        lines = [Line(line.name, self._drawable(line.points)) for line in self.lines]
        xs = [x for line in lines for x, y in line.points if y is not None]
        ys = [y for line in lines for _, y in line.points if y is not None]
        if not xs:
            return "<p>No values.</p>"
        x_axis = _Axis.over(xs, self.log_x, _LEFT, _WIDTH - _RIGHT)
        y_axis = _Axis.over(ys, self.log_y, _HEIGHT - _BOTTOM, _TOP, with_zero=True)
        parts = [
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
            f'aria-label="{escape(self.y_label)} by {escape(self.x_label)}">'
        ]
        for tick in y_axis.ticks():
            y = y_axis.place(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_text(_LEFT - 8, y + 4, self.y_form(tick), "end"))
        told = {self.x_form(tick): tick for tick in reversed(x_axis.ticks())}  # ticks closer than the form tells: one
        parts += [_text(x_axis.place(tick), _HEIGHT - _BOTTOM + 18, text) for text, tick in reversed(told.items())]
        parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, self.x_label))
        for place, line in enumerate(lines):
            parts += self._line(line, place, x_axis, y_axis)
        return _legend(self.lines, self.y_label) + "".join(parts) + "</svg>"

    def _drawable(self, points: Sequence[Point]) -> list[Point]:
        """Finite values only; what a logarithmic axis cannot show is a gap."""
        found: list[Point] = []
        for x, y in points:
            if not math.isfinite(x) or (self.log_x and x <= 0):
                continue
            shown = y is not None and math.isfinite(y) and not (self.log_y and y <= 0)
            found.append((x, y if shown else None))
        return found

    def _line(self, line: Line, place: int, x_axis: _Axis, y_axis: _Axis) -> list[str]:
        style = _stroke(place)
        parts = []
        runs: list[list[tuple[float, float]]] = [[]]
        for x, y in line.points:
            if y is None:
                runs.append([])
            else:
                runs[-1].append((x, y))
        dots = sum(map(len, runs)) <= 60
        for run in runs:
            way = " ".join(f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}" for x, y in run)
            if len(run) > 1:
                parts.append(f'<polyline points="{way}" fill="none" {style} stroke-width="2"/>')
            for x, y in run if dots or len(run) == 1 else ():
                told = escape(f"{line.name}: {self.y_form(y)} at {self.x_form(x)}")
                parts.append(
                    f'<circle cx="{x_axis.place(x):.1f}" cy="{y_axis.place(y):.1f}" r="3" fill="var({_colour(place)})">'
                    f"<title>{told}</title></circle>"
                )
        return parts


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars from left to right, one under the other, all from 0; with `log`, from the power of ten below the least."""

    bars: Sequence[Bar]
    label: str
    form: Callable[[float], str] = number
    log: bool = False

    def html(self) -> str:
        """The drawing; a sentence when there is nothing to draw."""
        bars = [bar for bar in self.bars if math.isfinite(bar.value)]
        if not bars:
            return "<p>No values.</p>"
        height = _BAR * len(bars) + 4
        values = [bar.value for bar in bars if not self.log or bar.value > 0] or [1.0]
        axis = _Axis.over(values, self.log, _BAR_LABEL, _WIDTH - _BAR_VALUE, with_zero=True)
        parts = [
            _legend((), self.label)
            + f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(self.label)}">'
        ]
        for place, bar in enumerate(bars):
            top = place * _BAR
            end = axis.place(bar.value) if not self.log or bar.value > 0 else float(_BAR_LABEL)
            begin = _BAR_LABEL if self.log else axis.place(0.0)
            title = escape(bar.note or f"{bar.name}: {self.form(bar.value)}")
            parts.append(_text(0, top + 15, _short(bar.name), "start", "soft"))
            parts.append(
                f'<rect x="{min(begin, end):.1f}" y="{top + 3}" width="{max(abs(end - begin), 1):.1f}" '
                f'height="{_BAR - 8}" rx="3" fill="var({_colour(bar.group)})"><title>{title}</title></rect>'
            )
            parts.append(_text(max(begin, end) + 6, top + 15, self.form(bar.value), "start", "soft"))
        return "".join(parts) + "</svg>"


@dataclass(frozen=True, slots=True)
class Checks:
    """Proofs, each with a mark."""

    checks: Sequence[Check]

    def html(self) -> str:
        """A list."""
        lines = (
            f'<li><span class="{"good" if check.passed else "bad"}">{"✓" if check.passed else "✗"}</span>'
            f'<span>{escape(check.name)}</span><span class="detail">{escape(check.detail)}</span></li>'
            for check in self.checks
        )
        return f'<ul class="checks">{"".join(lines)}</ul>'


@dataclass(frozen=True, slots=True)
class Note:
    """A paragraph."""

    text: str

    def html(self) -> str:
        """As it is."""
        return f"<p>{escape(self.text)}</p>"


Part = Table | LineChart | BarChart | Checks | Note


@dataclass(frozen=True, slots=True)
class Section:
    """A card with a heading, a sentence and parts one under the other."""

    title: str
    text: str
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Page:
    """A report. `job` is the small line above the title, `lede` the sentence under it."""

    job: str
    title: str
    lede: str
    sections: Sequence[Section]
    tiles: Sequence[Tile] = field(default_factory=tuple)
    footer: str = ""


def render(page: Page, *, generated: datetime, stages: Sequence[Stage] = ()) -> str:
    """The HTML of a page. `stages` become its last section; `generated` stands at its foot."""
    sections = list(page.sections)
    if stages:
        bars = [Bar(stage.name, round(stage.seconds, 1)) for stage in stages]
        sections.append(Section("The run", "Where the time went.", [BarChart(bars, "seconds")]))
    tiles = "".join(map(_tile, page.tiles))
    cards = "".join(
        f'<section class="card"><div class="head"><div><h2>{escape(section.title)}</h2><p>{escape(section.text)}</p>'
        f"</div></div>{''.join(part.html() for part in section.parts)}</section>"
        for section in sections
    )
    made = f"Made by kipmesh on {generated:%d %B %Y, %H:%M}. {page.footer}".strip()
    return (
        _HEAD.format(title=escape(page.title), style=style())
        + f'<body>\n<header><div class="eyebrow">kipmesh · {escape(page.job)}</div><h1>{escape(page.title)}</h1>'
        + f'<p class="lede">{escape(page.lede)}</p></header>\n<main>'
        + (f'<section class="tiles">{tiles}</section>' if tiles else "")
        + f"{cards}</main>\n<footer>{escape(made)}</footer>\n</body>\n</html>\n"
    )


def style() -> str:
    """The style that all pages share."""
    return resources.files(__package__).joinpath(_CSS).read_text("utf-8")


def _tile(tile: Tile) -> str:
    mood = "" if tile.good is None else " good" if tile.good else " bad"
    return (
        f'<div class="tile"><div class="name">{escape(tile.name)}</div><div class="value{mood}">{escape(tile.value)}'
        f'</div><div class="note">{escape(tile.note)}</div></div>'
    )


def _cell(value: Cell) -> str:
    match value:
        case None:
            return "<td>–</td>"
        case bool():
            return f'<td class="{"good" if value else "bad"}">{"yes" if value else "no"}</td>'
        case int() | float():
            return f"<td>{number(value)}</td>"
        case _:
            return f'<td class="text">{escape(value)}</td>'


def _text(x: float, y: float, text: str, anchor: str = "middle", style: str = "") -> str:
    mood = f' class="{style}"' if style else ""
    return f'<text{mood} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _short(text: str, most: int = 34) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _stroke(place: int) -> str:
    dashes = ' stroke-dasharray="6 4"' if place >= len(COLOURS) else ""
    return f'stroke="var({_colour(place)})"{dashes}'


def _legend(lines: Sequence[Line], label: str) -> str:
    keys = "".join(
        f'<span><svg class="key" viewBox="0 0 24 8"><line x1="0" x2="24" y1="4" y2="4" {_stroke(place)} '
        f'stroke-width="3"/></svg>{escape(line.name)}</span>'
        for place, line in enumerate(lines)
    )
    return f'<div class="legend"><b>{escape(label)}</b>{keys}</div>'


@dataclass(frozen=True, slots=True)
class _Axis:
    """Values between `least` and `most` to places between `begin` and `end`; on a logarithmic one both are powers."""

    least: float
    most: float
    is_log: bool
    begin: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], is_log: bool, begin: float, end: float, *, with_zero: bool = False) -> _Axis:
        """An axis that has all values on it; with `with_zero` from 0, or from one power of ten to another."""
        least, most = min(values), max(values)
        if is_log:
            least, most = _log10(least), _log10(most)
            if with_zero:
                least, most = math.floor(least), math.ceil(most)
        elif with_zero:
            least, most = min(least, 0.0), max(most, 0.0)
        return cls(least, most if most - least > _LEAST else least + 1, is_log, begin, end)

    def place(self, value: float) -> float:
        at = _log10(value) if self.is_log else value
        return self.begin + (at - self.least) / (self.most - self.least) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Round values on the axis."""
        if not self.is_log:
            return _round_values(self.least, self.most, _round_step((self.most - self.least) / _TICKS))
        powers = _round_values(self.least, self.most, max(1.0, math.ceil((self.most - self.least) / _POWERS_MAX)))
        return [10.0**power for power in (powers if len(powers) > 1 else (self.least, self.most))]


def _log10(value: float) -> float:
    return math.log10(max(value, _LEAST))


def _round_values(least: float, most: float, step: float) -> list[float]:
    first = math.ceil(least / step - 1e-9)
    return [place * step for place in range(first, math.floor(most / step + 1e-9) + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * one for one in (1, 2, 5, 10) if power * one >= rough * (1 - 1e-9))
