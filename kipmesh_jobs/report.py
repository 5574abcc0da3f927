"""The page of a job: one HTML file with tables and charts in it, which opens without a network.

A job names a template of `templates/` and the values that it shows. Templates extend `base.html` and take tables and
tiles from `parts.html`, charts from `charts`. Every value is escaped, so that a topic's name cannot become markup.
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
"""Rows of tables by name."""


def number(value: float) -> str:
    """Whole numbers in full, others with three digits that say something."""
    if isinstance(value, int) or float(value).is_integer():
        return f"{value:,.0f}"
    if not math.isfinite(value):
        return str(value)
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"


def percent(value: float | None) -> str:
    """A share of 1 as percent; a dash for None."""
    return "–" if value is None else f"{number(round(value * 100, 2))} %"


def binary_size(value: float) -> str:
    """Bytes in the unit (of 1,024) that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{number(round(value, 2))} {unit}"
        value /= 1024
    return f"{number(round(value, 2))} TiB"


def utc(time: datetime | float | None, form: str = "%Y-%m-%d %H:%M") -> str:
    """A time, also in ms since 1970, as text; `unknown` for None."""
    if time is None:
        return "unknown"
    return f"{time if isinstance(time, datetime) else datetime.fromtimestamp(time / 1000, UTC):{form}}"


class Stage(NamedTuple):
    """One step of the run and how long it took."""

    name: str
    seconds: float


class Check(NamedTuple):
    """One proof: what was compared, whether it holds, and the figures."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Page:
    """A template's name and the values that it takes."""

    template: str
    values: Mapping[str, Any]


def environment() -> Environment:
    """The templates with their filters and charts."""
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
    """The HTML of a page. `stages` become its last section; `generated` stands at its foot."""
    return environment().get_template(page.template).render(page.values, generated=generated, stages=stages)
