"""The page of the job: delays, rotations, what was late or no flight, and the proofs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql import functions as F  # noqa: N812 (the name that everybody uses)

from kipmesh.spark.jobs.flights.results import LEGS_MAX
from kipmesh.spark.jobs.flights.streams import read
from kipmesh.spark.jobs.report import (
    Bar,
    BarChart,
    Check,
    Checks,
    Line,
    LineChart,
    Page,
    Section,
    Table,
    Tile,
    number,
    percent,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kipmesh.spark.jobs.flights.job import Options

Row = Mapping[str, Any]
Tables = Mapping[str, Sequence[Row]]

SAMPLES: Final = 40
"""Rows of the tables that name single records; all are in the Parquet."""
DESTINATIONS: Final = 15
VALUE_MAX: Final = 80
_RAIN: Final = ("dry", "rain", "heavy rain")


class Samples(NamedTuple):
    """Single rows for the page."""

    dead: Sequence[Row]
    dead_reasons: Sequence[Row]
    late: Sequence[Row]
    rotations: Sequence[Row]


def samples(spark: SparkSession, parquet: Path) -> Samples:
    """Some dead letters, late flights and long rotations, and the dead letters by reason."""
    dead = spark.read.parquet(str(parquet / "dead_letters"))
    late = spark.read.parquet(str(parquet / "late"))
    rotations = read(spark, parquet, "rotations").select(
        "tailnum",
        "begin",
        "departures",
        F.array_join(F.transform("legs", lambda leg: F.concat(leg["origin"], F.lit("→"), leg["dest"])), ", ").alias(
            "way"
        ),
        F.array_join(
            F.transform("legs", lambda leg: F.coalesce(leg["dep_delay"].cast("string"), F.lit("–"))), ", "
        ).alias("delays"),
    )

    def rows(frame: Any) -> list[dict[str, Any]]:
        return [row.asDict() for row in frame.collect()]

    return Samples(
        rows(dead.orderBy("partition", "offset").limit(SAMPLES)),
        rows(dead.groupBy("reason").count().orderBy(F.desc("count"), "reason")),
        rows(late.orderBy("partition", "offset", "stream").limit(SAMPLES)),
        rows(rotations.orderBy(F.desc("departures"), "begin", "tailnum").limit(SAMPLES)),
    )


def lines(counts: Mapping[str, int], proofs: Sequence[Check]) -> tuple[str, ...]:
    """For the terminal."""
    proven = [f"{'PASS' if one.passed else 'FAIL'}  {one.name}: {one.detail}" for one in proofs]
    return (
        *proven,
        f"{counts['flights']:,} flights in {counts['windows']:,} windows and {counts['rotations']:,} rotations;"
        f" late: {counts['late_windows']:,} for their window, {counts['late_rotations']:,} for their rotation;"
        f" {counts['dead_letters']:,} dead letters",
    )


def make(tables: Tables, counts: Mapping[str, int], proofs: Sequence[Check], shown: Samples, options: Options) -> Page:
    """The page."""
    departures = sum(row["departures"] for row in tables["origins"])
    delay = sum((row["mean_delay"] or 0) * row["departures"] for row in tables["origins"])
    failed = [one for one in proofs if not one.passed]
    tiles = [
        Tile("flights", number(counts["flights"]), f"{number(counts['cancelled'])} cancelled"),
        Tile("mean delay", f"{number(round(delay / departures, 1))} min" if departures else "–", "of departures"),
        Tile("rotations", number(counts["rotations"]), f"within {options.gap}"),
        Tile("late", number(counts["late_windows"]), f"after {options.watermark}"),
        Tile("dead letters", number(counts["dead_letters"]), "values that are no flight"),
        Tile("proofs", f"{len(proofs) - len(failed)} of {len(proofs)}", good=not failed),
    ]
    origin = options.bootstrap or "a mesh of the job's own"
    sections = [
        _windows(tables, options),
        _clock(tables),
        _rotations(tables, shown, options),
        _weather(tables),
        _aircraft(tables),
        _late(counts, shown, options),
        _dead(counts, shown),
        Section("Proofs", "What was streamed, against plain sums.", [Checks(proofs)]),
    ]
    return Page(
        "flights",
        "Flights, windows and rotations",
        f"{number(counts['flights'])} flights of topic {options.topic} of {origin}, streamed by event time.",
        sections,
        tiles,
    )


def _windows(tables: Tables, options: Options) -> Section:
    def mean(row: Row) -> float | None:
        return row["delay_sum"] / row["departures"] if row["departures"] else None

    rows = tables["windows_daily"]
    origins = sorted({str(row["origin"]) for row in rows})
    delays = [Line(one, [(_day(row["day"]), mean(row)) for row in rows if row["origin"] == one]) for one in origins]
    cancelled = [
        Line(one, [(_day(row["day"]), row["cancelled"]) for row in rows if row["origin"] == one]) for one in origins
    ]
    return Section(
        "Delays by window",
        f"Windows of {options.window} of the scheduled departure, closed {options.watermark} after the latest flight;"
        " here added up by day, UTC.",
        [
            LineChart(delays, "day", "mean delay of departures, min", _day_text, number),
            LineChart(cancelled, "day", "cancelled", _day_text, number),
        ],
    )


def _clock(tables: Tables) -> Section:
    by_hour: dict[int, list[Row]] = {}
    for row in tables["clock"]:
        if row["hour"] is not None:
            by_hour.setdefault(row["hour"], []).append(row)

    def weighted(name: str) -> list[tuple[float, float | None]]:
        points: list[tuple[float, float | None]] = []
        for hour, rows in sorted(by_hour.items()):
            known = [row for row in rows if row[name] is not None]
            flights = sum(row["departures"] for row in known)
            points.append((hour, sum(row[name] * row["departures"] for row in known) / flights if flights else None))
        return points

    shown = [
        Line(label, weighted(name))
        for label, name in (("half", "p50"), ("three in four", "p75"), ("nine in ten", "p90"))
    ]
    return Section(
        "Delays by hour",
        "By scheduled hour in New York: so many flights leave within so many minutes (quantiles of each weekday,"
        " weighted by its flights).",
        [LineChart(shown, "hour of day", "delay, min")],
    )


def _rotations(tables: Tables, shown: Samples, options: Options) -> Section:
    legs = tables["legs"]
    sizes = [Bar(_size(row["departures"]), row["rotations"]) for row in tables["rotation_sizes"]]
    rows = [
        [row["tailnum"], f"{row['begin']:%Y-%m-%d %H:%M}", row["departures"], row["way"], row["delays"]]
        for row in shown.rotations
    ]
    return Section(
        "Rotations of aircraft",
        f"Departures of one aircraft from New York's airports, each at most {options.gap} after the one before; what"
        " it brings along from flights in between is part of the delay.",
        [
            LineChart(
                [
                    Line("mean delay", [(row["leg"], row["mean_delay"]) for row in legs]),
                    Line("more than the leg before", [(row["leg"], row["gained"]) for row in legs]),
                ],
                "departure within the rotation",
                "min",
            ),
            BarChart(sizes, "rotations by their departures"),
            Table(["aircraft", "begin, UTC", "departures", "way", "delays, min"], rows),
        ],
    )


def _size(departures: int) -> str:
    if departures == LEGS_MAX:
        return f"{departures} departures or more"
    return f"{departures} departure{'s' if departures > 1 else ''}"


def _weather(tables: Tables) -> Section:
    wind = [(f"{row['wind_speed']}+ mph", row) for row in tables["wind"] if row["wind_speed"] is not None]
    sight = [(f"{row['visib']}+ miles", row) for row in tables["visibility"] if row["visib"] is not None]
    rain = sorted(
        ((str(row["rain"]), row) for row in tables["rain"] if row["rain"]), key=lambda found: _RAIN.index(found[0])
    )
    return Section(
        "Weather",
        "Delay within which nine in ten flights leave, by the weather of the scheduled hour at the airport.",
        [
            _quantiles(wind, "by wind, min"),
            _quantiles(sight, "by visibility, min"),
            _quantiles(rain, "by rain in the hour, min"),
        ],
    )


def _aircraft(tables: Tables) -> Section:
    ages = [(f"{row['age']}+ years", row) for row in tables["plane_age"] if row["age"] is not None]
    carriers = [(str(row["airline"] or row["carrier"]), row) for row in tables["carriers"]]
    busiest = sorted(tables["destinations"], key=lambda row: -row["flights"])[:DESTINATIONS]
    rows = [
        [
            row["dest"],
            row["dest_name"],
            row["flights"],
            percent(row["cancelled"] / row["flights"]),
            None if row["mean_delay"] is None else round(row["mean_delay"], 1),
            row["p90"],
        ]
        for row in busiest
    ]
    return Section(
        "Airlines, aircraft, destinations",
        "Aircraft by their age, from the register that the tail number is in.",
        [
            _quantiles(carriers, "nine in ten leave within, by airline, min"),
            _quantiles(ages, "by age of the aircraft, min"),
            Table(["to", "airport", "flights", "cancelled", "mean delay", "nine in ten within"], rows),
        ],
    )


def _quantiles(rows: Sequence[tuple[str, Row]], label: str) -> BarChart:
    return BarChart(
        [Bar(name, row["p90"], f"{name}: {row['flights']:,} flights") for name, row in rows if row["p90"] is not None],
        label,
    )


def _late(counts: Mapping[str, int], shown: Samples, options: Options) -> Section:
    rows = [
        [
            row["stream"],
            _place(row),
            f"{row['carrier']} {row['flight']}",
            f"{row['event_time']:%Y-%m-%d %H:%M}",
            f"{row['watermark']:%Y-%m-%d %H:%M}",
            str(timedelta(milliseconds=row["late_by_ms"])),
        ]
        for row in shown.late
    ]
    return Section(
        "Late flights",
        f"{counts['late_windows']:,} flights came when their window was closed, {counts['late_rotations']:,} when their"
        f" rotation was ({options.watermark} after the latest flight). They are in no window and no rotation, but in"
        " the Parquet of all flights, and each is named in that of the late ones.",
        [
            BarChart(
                [Bar("windows", counts["late_windows"]), Bar("rotations", counts["late_rotations"])], "late flights"
            ),
            Table(["stream", "record", "flight", "scheduled, UTC", "watermark, UTC", "late by"], rows),
        ],
    )


def _dead(counts: Mapping[str, int], shown: Samples) -> Section:
    rows = [[_place(row), row["reason"], _text(row["key"]), _text(row["value"])] for row in shown.dead]
    return Section(
        "Dead letters",
        f"{counts['dead_letters']:,} values are no flights. Each is in the Parquet of dead letters, as it is.",
        [
            BarChart([Bar(row["reason"], row["count"]) for row in shown.dead_reasons], "values by reason"),
            Table(["record", "reason", "key", "value"], rows),
        ],
    )


def _place(row: Row) -> str:
    return f"{row['topic']}-{row['partition']} @ {row['offset']}"


def _text(value: bytes | bytearray | None) -> str | None:
    if value is None:
        return None
    text = bytes(value).decode(errors="replace")
    return text if len(text) <= VALUE_MAX else text[: VALUE_MAX - 1] + "…"


def _day(value: date) -> float:
    return datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp()


def _day_text(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%d %b %Y}"
