"""The page of a job: one self-contained HTML file with tables and charts.

A job names a template of `templates/` and its values. Templates extend `base.html` and use tables and tiles of
`parts.html` and charts of `charts`. All values are escaped, so a topic name cannot inject markup.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jinja2 import Environment

Row = Mapping[str, Any]
Tables = Mapping[str, Sequence[Row]]
"""Rows of tables, by table name."""


def number(value: float) -> str:
    """Format a number with thousands separators: integers in full, others with three significant digits and at most six
    decimals. Numbers that are not finite become `inf`, `-inf` or `nan`.
    """
    if isinstance(value, int) or float(value).is_integer():
        return f"{value:,.0f}"
    if not math.isfinite(value):
        return str(value)
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"


def percent(value: float | None) -> str:
    """Format a share (1 is 100 %) as a percentage, None as a dash."""
    return "–" if value is None else f"{number(round(value * 100, 2))} %"


def binary_size(value: float) -> str:
    """Format a number of bytes with a unit of B to TiB (powers of 1,024)."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{number(round(value, 2))} {units[0]}"


def utc(time: datetime | float | None, form: str = "%Y-%m-%d %H:%M") -> str:
    """Format a datetime as it is, or ms since 1970 in UTC. Returns `unknown` for None."""
    if time is None:
        return "unknown"
    return f"{time if isinstance(time, datetime) else datetime.fromtimestamp(time / 1000, UTC):{form}}"


class Stage(NamedTuple):
    """A completed step of a run: name and duration in seconds."""

    name: str
    seconds: float


class Check(NamedTuple):
    """A check of a run's results: name, whether it passed, and the compared values as text."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Page:
    """A page to render: file name of its template in `templates/`, and the template's variables."""

    template: str
    values: Mapping[str, Any]


def environment() -> Environment:
    """Return the Jinja environment with formatting filters and the functions of `charts`. Undefined variables raise
    UndefinedError.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from kipmesh_jobs import charts

    made = Environment(
        loader=PackageLoader("kipmesh_jobs"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    forms = {"number": number, "percent": percent, "size": binary_size, "seconds": "{:.1f}".format}
    made.filters |= {**forms, "utc": utc, "day": lambda date: f"{date:%d %b %Y}"}
    made.globals |= {**forms, "charts": charts}
    return made


def render(page: Page, *, generated: datetime, stages: Sequence[Stage] = ()) -> str:
    """Return the page as HTML. `stages` become its last section, `generated` goes into the footer."""
    return environment().get_template(page.template).render(page.values, generated=generated, stages=stages)
