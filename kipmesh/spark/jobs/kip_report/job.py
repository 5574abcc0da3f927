"""What ``kipmesh job kip-report`` takes, does and tells."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kipmesh.spark.jobs.frame import Job, JobError, JobRun, Outcome
from kipmesh.spark.jobs.source_errors import told_in_one_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TRACE_TOPIC: Final = "__mesh_trace"
_ORDERS: Final = {"by_time": "time", "by_client": "entries", "snapshots": "at", "status": "started"}
"""Of which tables the page has the rows with the greatest values, where it cannot have all."""


class Interval(Enum):
    """How long a point of the charts is."""

    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"


@dataclass(frozen=True, slots=True)
class Options:
    """Which trace is read; without --bootstrap there is none."""

    bootstrap: Annotated[
        str | None, typer.Option("--bootstrap", envvar="KIPMESH_BOOTSTRAP", help="Brokers, host:port,host:port.")
    ] = None
    topic: Annotated[str, typer.Option("--topic", help="Where the brokers write their trace.")] = TRACE_TOPIC
    interval: Annotated[Interval, typer.Option("--interval", help="Of the tables by time.")] = Interval.HOUR
    since_ms: Annotated[
        int | None, typer.Option("--since-ms", min=0, help="Only entries written since then, in ms since 1970.")
    ] = None

    def __post_init__(self) -> None:
        """Raise typer.BadParameter for what cannot be."""
        if not self.bootstrap:
            raise typer.BadParameter("say where the mesh is", param_hint="--bootstrap")


def run(run: JobRun, options: Options) -> Outcome:
    """Read the trace, write the tables, make the page."""
    from kipmesh.spark.jobs.kip_report import page, tables

    spark = run.spark
    with run.step("Read the trace"), told_in_one_line():
        tables.write_entries(_records(spark, options), run.parquet)
        entries = tables.with_time(spark.read.parquet(str(run.parquet / "entries")), options.interval.value).cache()
    found: dict[str, list[dict[str, Any]]] = {}
    frames = {
        "totals": tables.measure(entries),
        "by_time": tables.measure(entries, "time"),
        "by_client": tables.measure(entries, "client"),
        "by_time_and_client": tables.measure(entries, "time", "client"),
        "snapshots": tables.snapshots(entries),
        "status": tables.status(entries, options.since_ms),
    }
    cut: list[str] = []
    with run.step("Add it up", len(frames)) as done:
        for count, (name, frame) in enumerate(frames.items(), 1):
            target = str(run.parquet / name)
            frame.coalesce(1).write.parquet(target)
            if name != "by_time_and_client":  # as long as the trace: for the Parquet alone
                found[name], is_cut = tables.collected(spark.read.parquet(target), _ORDERS.get(name))
                cut += [name] * is_cut
            done(count)
        dead = spark.read.parquet(str(run.parquet / "dead_letters"))
        found["dead_letters"], _ = tables.collected(dead.groupBy("reason").count())
    entries.unpersist()
    found["snapshots"].sort(key=lambda row: (row["at"], row["broker"]))
    figures = page.figures(found, cut)
    if not figures["entries"]:
        raise JobError(
            f"topic {options.topic} has no entries of a trace: set mesh.trace.sample on the brokers"
            if not found["dead_letters"]
            else f"topic {options.topic} has no entries of a trace, only {figures['dead_letters']} other values"
        )
    made = page.make(found, figures, topic=options.topic, interval=options.interval.value, since_ms=options.since_ms)
    return Outcome(figures, made, page.lines(figures))


def _records(spark: SparkSession, options: Options) -> DataFrame:
    reader = (
        spark.read.format("kipmesh")
        .option("kafka.bootstrap.servers", options.bootstrap)
        .option("subscribe", options.topic)
    )
    if options.since_ms is not None:
        reader = reader.option("startingTimestamp", options.since_ms).option(
            "startingOffsetsByTimestampStrategy", "latest"
        )
    return reader.load()


JOB: Final = Job(
    name="kip-report",
    summary="What the KIPs save, from the brokers' trace.",
    text=(
        "Turn the trace that brokers write to __mesh_trace (mesh.trace.sample) into the evidence of each KIP:"
        " bytes saved by fetch sessions (227), bytes kept in the rack (392), metadata per record (526), snapshots"
        " against replay (630), by time and by client. What was sampled is scaled up."
    ),
    examples="""
    kipmesh job kip-report --bootstrap 127.0.0.1:9092
    kipmesh job kip-report --bootstrap 127.0.0.1:9092 --interval minute --out reports/trace --json
    """,
    options=Options,
    run=run,
)
