"""Tables and facts to one HTML file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib import resources
from typing import Any, Final

from kipmesh.spark.jobs.flights.report.facts import RunFacts
from kipmesh.spark.jobs.report import style

_QUANTILES: Final = ("p50", "p75", "p90", "p99")
_RAIN_ORDER: Final = ("dry", "rain", "heavy rain")

Row = Mapping[str, Any]
Tables = Mapping[str, Sequence[Row]]


def render(tables: Tables, run: RunFacts | None, *, generated: datetime) -> str:
    """The page. `tables` are those of `aggregates.write_tables`; without `run` the page has no section about it."""
    files = resources.files(__package__)
    read = {name: files.joinpath(name).read_text("utf-8") for name in ("page.html", "charts.js")}
    sections = files.joinpath("sections.js").read_text("utf-8")
    # "</" would end the script element early, wherever it stands in the data.
    data = json.dumps(_data(tables, run, generated), separators=(",", ":"), default=str).replace("</", "<\\/")
    page = read["page.html"].replace("/*STYLE*/", style())
    return page.replace("/*SCRIPT*/", f"{read['charts.js']}\n{sections}").replace("/*DATA*/", data)


def _data(tables: Tables, run: RunFacts | None, generated: datetime) -> dict[str, Any]:
    days = [str(row["date"]) for row in tables["daily_all"]]
    return {
        "generated": generated.strftime("%d %B %Y, %H:%M"),
        "days": days,
        "headline": _headline(tables),
        "daily": {
            str(origin["origin"]): _daily([row for row in tables["daily"] if row["origin"] == origin["origin"]], days)
            for origin in tables["origins"]
        },
        "origins": [_summary(row, str(row["origin"])) for row in tables["origins"]],
        "carriers": [_summary(row, str(row["airline"] or row["carrier"])) for row in tables["carriers"]],
        "clock": [[row["weekday"], row["hour"], _rounded(row["p75"]), row["flights"]] for row in tables["clock"]],
        "weather": {
            "Wind, mph": [
                _summary(row, _bin_label(row["wind_speed"], 5, 30))
                for row in tables["wind"]
                if row["wind_speed"] is not None
            ],
            "Visibility, miles": [
                _summary(row, _bin_label(row["visib"], 2, 10))
                for row in tables["visibility"]
                if row["visib"] is not None
            ],
            "Rain in the hour": sorted(
                (_summary(row, row["rain"]) for row in tables["rain"] if row["rain"]),
                key=lambda row: _RAIN_ORDER.index(row["label"]),
            ),
        },
        "run": None if run is None else _run(run),
    }


def _headline(tables: Tables) -> dict[str, Any]:
    origins, days = tables["origins"], tables["daily_all"]
    flights = sum(row["flights"] for row in origins)
    departures = sum(row["departures"] for row in origins)
    worst = max(days, key=lambda row: (row["p50"] if row["p50"] is not None else -1e9, str(row["date"])))
    grounded = max(days, key=lambda row: (row["cancelled"], str(row["date"])))
    return {
        "flights": flights,
        "departures": departures,
        "cancelled": sum(row["cancelled"] for row in origins),
        "on_time": sum(row["on_time"] for row in origins),
        "mean_delay": _ratio(sum((row["mean_delay"] or 0) * row["departures"] for row in origins), departures),
        "miles": sum(row["miles"] or 0 for row in origins),
        "worst_day": {"date": str(worst["date"]), "median": _rounded(worst["p50"])},
        "grounded_day": {"date": str(grounded["date"]), "cancelled": grounded["cancelled"], "of": grounded["flights"]},
        "from": str(days[0]["date"]),
        "to": str(days[-1]["date"]),
    }


def _daily(rows: Sequence[Row], days: Sequence[str]) -> dict[str, list[Any]]:
    """Columns over all days; None where an airport had no flight."""
    by_day = {str(row["date"]): row for row in rows}
    columns: dict[str, list[Any]] = {}
    for name in (*_QUANTILES, "flights", "cancelled"):
        columns[name] = [_rounded(by_day[day][name]) if day in by_day else None for day in days]
    return columns


def _summary(row: Row, label: str) -> dict[str, Any]:
    return {
        "label": label,
        "code": row.get("carrier"),
        "flights": row["flights"],
        "departures": row["departures"],
        "cancelled_share": _ratio(row["cancelled"], row["flights"]),
        "on_time_share": _ratio(row["on_time"], row["departures"]),
        "mean_delay": _rounded(row["mean_delay"]),
        **{name: _rounded(row[name]) for name in _QUANTILES},
    }


def _bin_label(low: int, width: int, top: int) -> str:
    return f"{low}+" if low >= top else f"{low}–{low + width}"


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(float(value), 1)


def _run(run: RunFacts) -> dict[str, Any]:
    return {
        **asdict(run),
        "stages": [stage._asdict() for stage in run.stages],
        "nodes": [node._asdict() for node in run.nodes],
        "partitions": [partition._asdict() for partition in run.partitions],
        "checks": [check._asdict() for check in run.checks],
        "passed": run.passed,
        "produce_records_per_second": run.produce_records_per_second,
        "produce_mb_per_second": run.produce_mb_per_second,
        "stream_records_per_second": run.stream_records_per_second,
    }
