"""The command `kipmesh job flights`, and its page."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kipmesh_jobs.frame import Job, JobError, JobRun, Outcome, spark_errors_as_job_errors
from kipmesh_jobs.report import Check, Page, Row, Tables

if TYPE_CHECKING:
    from kipmesh_jobs.flights.results import Expected, Samples
    from kipmesh_jobs.flights.streams import StreamSettings

_INTERVAL: Final = re.compile(r"([1-9][0-9]{0,5}) (second|minute|hour|day)s?")
RAIN: Final = (None, "dry", "rain", "heavy rain")
DESTINATIONS: Final = 15
_UNIT_MS: Final = {"second": 1000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000}


def interval_ms(text: str, option: str) -> int:
    """Return an interval such as `2 hours` in ms. Raises typer.BadParameter naming `option` if it is not a whole number
    of seconds, minutes, hours or days.
    """
    found = _INTERVAL.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(
            f"must be a number of seconds, minutes, hours or days, such as '2 hours', got {text!r}", param_hint=option
        )
    return int(found[1]) * _UNIT_MS[found[2]]


@dataclass(frozen=True, slots=True)
class Options:
    """Source of the flights, and settings of the streaming queries."""

    bootstrap: Annotated[
        str | None,
        typer.Option(
            "--bootstrap", help="A running cluster with the topic. Default: a temporary cluster, which is filled."
        ),
    ] = None
    topic: Annotated[str, typer.Option("--topic", help="Topic of flights as JSON objects.")] = "flights"
    fill: Annotated[bool, typer.Option("--fill", help="Create and fill the topic in the cluster of --bootstrap.")] = (
        False
    )
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first flights of a year.")] = None
    scale: Annotated[int, typer.Option("--scale", min=1, max=100, help="Number of copies of the year.")] = 1
    late: Annotated[int, typer.Option("--late", min=0, help="Number of late flights to write per year.")] = 500
    broken: Annotated[int, typer.Option("--broken", min=0, help="Number of invalid values to write per year.")] = 60
    window: Annotated[str, typer.Option("--window", help="Length of a window of scheduled departures.")] = "1 hour"
    watermark: Annotated[str, typer.Option("--watermark", help="Maximum delay of a flight behind the latest one.")] = (
        "7 days"
    )
    gap: Annotated[str, typer.Option("--gap", help="Longest time between departures of a rotation.")] = "12 hours"
    max_offsets: Annotated[
        int, typer.Option("--max-offsets-per-trigger", min=1, help="Records per micro-batch (Spark 4.2).")
    ] = 40_000

    def __post_init__(self) -> None:
        """Raise typer.BadParameter for an invalid interval, an empty topic or mutually exclusive options."""
        for name in ("window", "watermark", "gap"):
            interval_ms(getattr(self, name), f"--{name}")
        if not self.topic:
            raise typer.BadParameter("must not be empty", param_hint="--topic")
        if self.fill and self.bootstrap is None:
            raise typer.BadParameter("needs --bootstrap; a temporary cluster is always filled", param_hint="--fill")
        if self.bootstrap is not None and self.limit is not None and not self.fill:
            raise typer.BadParameter("needs --fill if --bootstrap is set", param_hint="--limit")


def run(run: JobRun, options: Options) -> Outcome:
    """Run the streaming queries and check their results. Without `bootstrap`, starts and fills a temporary cluster.
    With `fill`, fills the cluster that `bootstrap` names.

    The outcome's `passed` is False if a check fails. Raises JobError (also if the topic has no flights), KafkaError,
    ClusterError and JavaMissingError.
    """
    with _cluster(run, options) as (bootstrap, expected):
        return _run(run, options, bootstrap, expected)


@contextmanager
def _cluster(run: JobRun, options: Options) -> Iterator[tuple[str, Expected | None]]:
    if options.bootstrap is not None and not options.fill:
        yield options.bootstrap, None
        return
    from kipmesh_jobs.flights import dataset, feed

    source = dataset.find_directory()
    _ = run.spark  # Starting Spark forks, so it must precede the producer's threads.
    year = dataset.load_flights(source, limit=options.limit)
    total = (len(year) + min(options.broken, len(year))) * options.scale
    records = feed.encoded(year, options.late, options.broken, scale=options.scale)
    expected = feed.expected(year, options.broken, options.scale)
    if options.bootstrap is not None:
        with run.step(f"Fill topic {options.topic}", total) as done:
            feed.produce(options.bootstrap, options.topic, records, done, run.client)
        yield options.bootstrap, expected
        return
    directory = run.directory.root / "cluster"
    feed.remove_cluster(directory)
    try:
        with feed.local_cluster(directory, feed.COUNTS) as cluster:
            bootstrap = cluster.state().bootstrap
            with run.step("Fill a temporary cluster", total) as done:
                feed.produce(bootstrap, options.topic, records, done, {})
            yield bootstrap, expected
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _run(run: JobRun, options: Options, bootstrap: str, expected: Expected | None) -> Outcome:
    from kipmesh_jobs.flights import dataset, results, streams, values

    spark = run.spark
    client = {} if options.bootstrap is None else run.client  # the temporary cluster is plaintext
    begins, ends = streams.offsets(bootstrap, client, options.topic)
    records = sum(ends.values()) - sum(begins.values())
    if not records:
        raise JobError(f"topic {options.topic} has no records")
    settings = streams.StreamSettings(
        bootstrap=bootstrap,
        client=client,
        topic=options.topic,
        ends=ends,
        parquet=run.parquet,
        checkpoints=run.directory.work / "checkpoints",
        max_offsets_per_trigger=options.max_offsets,
        watermark=options.watermark,
        window=options.window,
        gap=options.gap,
    )
    references = values.load_references(spark, dataset.find_directory(), options.scale)
    with spark_errors_as_job_errors():
        with run.step("Flights and dead letters", records) as done:
            streams.run_flights(spark, settings, references, done)
        if not streams.read(spark, run.parquet, "flights").head(1):
            raise JobError(f"topic {options.topic} has no flights among its {records:,} records")
        with run.step("Windows of delays", records) as done:
            streams.run_windows(spark, settings, done)
        with run.step("Rotations of aircraft", records) as done:
            streams.run_rotations(spark, settings, done)
    with run.step("Late flights"):
        _write_late(run, settings, options)
    with run.step("Tables"):
        tables = results.write_tables(spark, run.parquet) | results.write_stream_tables(spark, run.parquet)
    with run.step("Check the results"):
        counts = results.counts(spark, run.parquet)
        differing = results.differing_windows(spark, run.parquet, interval_ms(options.window, "--window"))
        proofs = results.check(counts, records, differing, expected)
    shown = results.samples(spark, run.parquet)
    passed = all(one.passed for one in proofs)
    summary = {
        "passed": passed,
        "records": records,
        **counts,
        "dead_letters_by_reason": {row["reason"]: row["count"] for row in shown.dead_reasons},
        "options": asdict(options),
        "checks": [one._asdict() for one in proofs],
    }
    line = (
        f"{counts['flights']:,} flights in {counts['windows']:,} windows and {counts['rotations']:,} rotations;"
        f" late: {counts['late_windows']:,} for their window, {counts['late_rotations']:,} for their rotation;"
        f" {counts['dead_letters']:,} dead letters"
    )
    page = make_page(tables, counts, proofs, shown, options)
    return Outcome(summary, page, (line,), tuple(proofs), passed)


def _write_late(run: JobRun, settings: StreamSettings, options: Options) -> None:
    from kipmesh_jobs.flights import results, streams

    def spans(name: str) -> list[results.Span]:
        return results.spans(results.read_batches(settings.checkpoints / name, settings.topic))

    flights = streams.read(run.spark, run.parquet, "flights")
    window_end = results.window_end_ms(interval_ms(options.window, "--window"))
    session_end = results.session_end_ms(interval_ms(options.gap, "--gap"))
    late = results.late(flights, spans("windows"), window_end, "windows").unionByName(
        results.late(flights.where("tailnum IS NOT NULL"), spans("rotations"), session_end, "rotations")
    )
    late.coalesce(1).write.parquet(str(run.parquet / "late"))


def make_page(
    tables: Tables, counts: Mapping[str, int], proofs: Sequence[Check], shown: Samples, options: Options
) -> Page:
    """Return the page `flights.html` with the tables, counts, checks and sample rows of a run."""
    departures = sum(row["departures"] for row in tables["origins"])
    delay = sum((row["mean_delay"] or 0) * row["departures"] for row in tables["origins"])
    legs, daily = tables["legs"], tables["windows_daily"]
    values = {
        "counts": counts,
        "checks": proofs,
        "shown": shown,
        "options": options,
        "mean_delay": round(delay / departures, 1) if departures else None,
        "delays": _by_origin(daily, lambda row: row["delay_sum"] / row["departures"] if row["departures"] else None),
        "cancelled": _by_origin(daily, lambda row: row["cancelled"]),
        "by_hour": {
            label: _by_hour(tables["clock"], name)
            for label, name in (("median", "p50"), ("75th percentile", "p75"), ("90th percentile", "p90"))
        },
        "legs": {
            "mean delay": [(row["leg"], row["mean_delay"]) for row in legs],
            "increase over the previous leg": [(row["leg"], row["gained"]) for row in legs],
        },
        "sizes": [(_size(row["departures"]), row["rotations"]) for row in tables["rotation_sizes"]],
        "wind": quantiles(tables["wind"], "wind_speed", "{}+ mph"),
        "visibility": quantiles(tables["visibility"], "visib", "{}+ miles"),
        "rain": quantiles(sorted(tables["rain"], key=lambda row: RAIN.index(row["rain"])), "rain", "{}"),
        "carriers": quantiles(
            [{**row, "name": row["airline"] or row["carrier"]} for row in tables["carriers"]], "name", "{}"
        ),
        "ages": quantiles(tables["plane_age"], "age", "{}+ years"),
        "destinations": sorted(tables["destinations"], key=lambda row: -row["flights"])[:DESTINATIONS],
        "reasons": [(row["reason"], row["count"]) for row in shown.dead_reasons],
    }
    return Page("flights.html", values)


def _by_origin(daily: Sequence[Row], value: Callable[[Row], float | None]) -> dict[str, list[tuple[Any, float | None]]]:
    lines = defaultdict(list)
    for row in sorted(daily, key=lambda row: (row["origin"], row["day"])):
        lines[str(row["origin"])].append((row["day"], value(row)))
    return lines


def _by_hour(clock: Sequence[Row], name: str) -> list[tuple[int, float | None]]:
    """Return (hour, mean of a delay quantile over weekdays, weighted by departures), in order of hours."""
    known: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for row in clock:
        if row["hour"] is not None and row[name] is not None:
            known[row["hour"]].append((row[name], row["departures"]))
    return [
        (hour, sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs))
        for hour, pairs in sorted(known.items())
    ]


def _size(departures: int) -> str:
    from kipmesh_jobs.flights.results import LEGS_MAX

    return f"{departures} departure{'s' if departures > 1 else ''}{' or more' if departures == LEGS_MAX else ''}"


def quantiles(rows: Sequence[Row], column: str, name: str) -> list[tuple[str, float, str]]:
    """Return a bar (name, 90th percentile of the delay, tooltip) per group. Groups whose `column` or percentile is None
    are left out. `name` is a format string for the column's value.
    """
    return [
        (name.format(row[column]), row["p90"], f"{name.format(row[column])}: {row['flights']:,} flights")
        for row in rows
        if row[column] is not None and row["p90"] is not None
    ]


JOB: Final = Job(
    name="flights",
    summary="A year of flights: delays by window, late data, rotations, weather.",
    text=(
        "Stream flights from a topic into windows of delays and rotations of aircraft, joined with weather, airlines,"
        " aircraft and airports. Lists every late flight and every invalid value, and checks the results against"
        " batch sums. Without --bootstrap it starts a temporary cluster, fills it with the flights that left New York"
        " in 2013, and removes it at the end."
    ),
    examples="""
    kipmesh job flights
    kipmesh job flights --limit 20000 --window '6 hours' --out reports/flights --json
    kipmesh job flights --bootstrap 127.0.0.1:9092 --fill
    kipmesh job flights --bootstrap 127.0.0.1:9092 --topic flights --master 'local[4]'
    kipmesh job flights --bootstrap 127.0.0.1:9092 --master spark://127.0.0.1:7077
    """,
    options=Options,
    run=run,
)
