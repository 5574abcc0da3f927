"""What ``kipmesh job flights`` takes and does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kipmesh.spark.jobs.frame import Job, JobError, JobRun, Outcome
from kipmesh.spark.jobs.source_errors import told_in_one_line

if TYPE_CHECKING:
    from pathlib import Path

    from kipmesh.spark.jobs.flights.results import Expected
    from kipmesh.spark.jobs.flights.streams import References, StreamSettings

_INTERVAL: Final = re.compile(r"([1-9][0-9]{0,5}) (second|minute|hour|day)s?")
_UNIT_MS: Final = {"second": 1000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000}


def interval_ms(text: str, option: str) -> int:
    """Milliseconds of `2 hours`; typer.BadParameter."""
    found = _INTERVAL.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(
            f"{text!r} is not a number of seconds, minutes, hours or days, as '2 hours'", param_hint=option
        )
    return int(found[1]) * _UNIT_MS[found[2]]


@dataclass(frozen=True, slots=True)
class Options:
    """Where the flights are, and how they are streamed."""

    bootstrap: Annotated[
        str | None,
        typer.Option(
            "--bootstrap", help="A running mesh with the topic. Left out: one of its own, filled and removed."
        ),
    ] = None
    topic: Annotated[str, typer.Option("--topic", help="Of JSON objects, a flight each.")] = "flights"
    fill: Annotated[bool, typer.Option("--fill", help="Make the topic in the mesh of --bootstrap, and fill it.")] = (
        False
    )
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first flights of a year.")] = None
    scale: Annotated[int, typer.Option("--scale", min=1, max=100, help="Years, each the same.")] = 1
    late: Annotated[int, typer.Option("--late", min=0, help="Flights a year that its own mesh gets weeks late.")] = 500
    broken: Annotated[
        int, typer.Option("--broken", min=0, help="Values a year in its own mesh that are no flights.")
    ] = 60
    window: Annotated[str, typer.Option("--window", help="Of delays, by scheduled departure.")] = "1 hour"
    watermark: Annotated[str, typer.Option("--watermark", help="How much later than the latest a flight may come.")] = (
        "7 days"
    )
    gap: Annotated[
        str, typer.Option("--gap", help="Between departures of an aircraft; a longer one ends a rotation.")
    ] = "12 hours"
    max_offsets: Annotated[
        int, typer.Option("--max-offsets-per-trigger", min=1, help="Records of a micro-batch (Spark 4.2).")
    ] = 40_000

    def __post_init__(self) -> None:
        """Raise typer.BadParameter for what cannot be."""
        for name in ("window", "watermark", "gap"):
            interval_ms(getattr(self, name), f"--{name}")
        if not self.topic:
            raise typer.BadParameter("is empty", param_hint="--topic")
        if self.fill and self.bootstrap is None:
            raise typer.BadParameter("is for the mesh of --bootstrap; a mesh of its own is filled", param_hint="--fill")
        if self.bootstrap is not None and self.limit is not None and not self.fill:
            raise typer.BadParameter("is of what this job fills, and --bootstrap has its own", param_hint="--limit")


def run(run: JobRun, options: Options) -> Outcome:
    """Fill a mesh, if none is named; stream, prove, show."""
    with _mesh(run, options) as (bootstrap, expected):
        return _run(run, options, bootstrap, expected)


@contextmanager
def _mesh(run: JobRun, options: Options) -> Iterator[tuple[str, Expected | None]]:
    if options.bootstrap is not None and not options.fill:
        yield options.bootstrap, None
        return
    from kipmesh.spark.jobs.flights import dataset, feed

    folder = _data(dataset)
    _ = run.spark  # Its start forks: before the producer has threads.
    named = options.bootstrap
    with nullcontext(named) if named is not None else feed.own_mesh(run.folder.root / "cluster") as bootstrap:
        year = dataset.load_flights(folder, limit=options.limit)
        total = (len(year) + min(options.broken, len(year))) * options.scale
        records = feed.encoded(year, options.late, options.broken, scale=options.scale)
        with run.step("Fill a mesh of its own" if named is None else f"Fill topic {options.topic}", total) as done:
            feed.produce(bootstrap, options.topic, records, done, _client(run, options))
        yield bootstrap, feed.expected(year, options.broken, options.scale)


def _client(run: JobRun, options: Options) -> Mapping[str, str]:
    """What clients need beside the addresses: a mesh of its own is in plaintext."""
    return {} if options.bootstrap is None else run.client


def _data(dataset: Any) -> Path:
    try:
        folder: Path = dataset.find_folder()
    except dataset.DatasetError as error:
        raise JobError(str(error)) from None
    return folder


def _run(run: JobRun, options: Options, bootstrap: str, expected: Expected | None) -> Outcome:
    from kipmesh.spark.jobs.flights import job_page, results, streams

    spark = run.spark
    client = _client(run, options)
    begins, ends = _offsets(bootstrap, client, options.topic)
    records = sum(ends.values()) - sum(begins.values())
    if not records:
        raise JobError(f"topic {options.topic} has no records")
    settings = streams.StreamSettings(
        bootstrap=bootstrap,
        client=client,
        topic=options.topic,
        ends=ends,
        parquet=run.parquet,
        checkpoints=run.folder.work / "checkpoints",
        max_offsets_per_trigger=options.max_offsets,
        watermark=options.watermark,
        window=options.window,
        gap=options.gap,
    )
    references = _references(run, options)
    with told_in_one_line():
        with run.step("Flights and dead letters", records) as done:
            streams.run_flights(spark, settings, references, done)
        if not streams.read(spark, run.parquet, "flights").head(1):
            raise JobError(f"topic {options.topic} has no flights: none of its {records:,} values is one")
        with run.step("Windows of delays", records) as done:
            streams.run_windows(spark, settings, done)
        with run.step("Rotations of aircraft", records) as done:
            streams.run_rotations(spark, settings, done)
    with run.step("Late flights"):
        _write_late(run, settings, options)
    with run.step("Tables"):
        tables = results.write_tables(spark, run.parquet)
    with run.step("Prove it"):
        counts = results.counts(spark, run.parquet)
        differing = results.differing_windows(spark, run.parquet, interval_ms(options.window, "--window"))
        proofs = results.check(counts, records, differing, expected)
    shown = job_page.samples(spark, run.parquet)
    passed = all(one.passed for one in proofs)
    summary = {
        "passed": passed,
        "records": records,
        **counts,
        "dead_letters_by_reason": {row["reason"]: row["count"] for row in shown.dead_reasons},
        "options": asdict(options),
        "checks": [one._asdict() for one in proofs],
    }
    page = job_page.make(tables, counts, proofs, shown, options)
    return Outcome(summary, page, job_page.lines(counts, proofs), passed)


def _offsets(bootstrap: str, client: Mapping[str, str], topic: str) -> tuple[dict[int, int], dict[int, int]]:
    """Where each partition begins and ends now. JobError for a topic or a mesh that is not there."""
    from kipmesh.client.sync import Consumer
    from kipmesh.core.errors import KafkaError

    try:
        with Consumer(bootstrap, **client) as consumer:
            found = [(topic, partition) for partition in consumer.partitions_for(topic).partitions]
            begins, ends = consumer.beginning_offsets(found), consumer.end_offsets(found)
    except KafkaError as error:
        raise JobError(f"topic {topic} at {bootstrap}: {error}") from None
    return {one.partition: at for one, at in begins.items()}, {one.partition: at for one, at in ends.items()}


def _references(run: JobRun, options: Options) -> References:
    """The tables that are joined, from the data set."""
    import pandas as pd
    import pyarrow as pa

    from kipmesh.spark.jobs.flights import dataset
    from kipmesh.spark.jobs.flights.streams import References

    folder = _data(dataset)

    def frame(table: pd.DataFrame) -> Any:
        return run.spark.createDataFrame(pa.Table.from_pandas(table, preserve_index=False))

    return References(
        weather=frame(dataset.load_weather(folder, scale=options.scale)),
        airlines=frame(dataset.load_airlines(folder)),
        planes=frame(dataset.load_planes(folder)),
        airports=frame(dataset.load_airports(folder)),
    )


def _write_late(run: JobRun, settings: StreamSettings, options: Options) -> None:
    from kipmesh.spark.jobs.flights import lateness, results, streams

    def spans(name: str) -> list[lateness.Span]:
        return lateness.spans(lateness.read_batches(settings.checkpoints / name, settings.topic))

    flights = streams.read(run.spark, run.parquet, "flights")
    window_end = results.window_end_ms(interval_ms(options.window, "--window"))
    session_end = results.session_end_ms(interval_ms(options.gap, "--gap"))
    late = results.late(flights, spans("windows"), window_end, "windows").unionByName(
        results.late(flights.where("tailnum IS NOT NULL"), spans("rotations"), session_end, "rotations")
    )
    late.coalesce(1).write.parquet(str(run.parquet / "late"))


JOB: Final = Job(
    name="flights",
    summary="A year of flights: delays by window, late data, rotations, weather.",
    text=(
        "Stream flights from a topic into windows of delays and rotations of aircraft, joined with weather, airlines,"
        " aircraft and airports. Flights that come after the watermark and values that are no flights are counted and"
        " named, one by one. The results are proven against plain sums. Without --bootstrap it starts a mesh, fills it"
        " with the flights that left New York in 2013, and removes it at the end."
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
