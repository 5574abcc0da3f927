"""The command `kipmesh job kip-report`, its figures and its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kipmesh_jobs.frame import Job, JobError, JobRun, Outcome, spark_errors_as_job_errors
from kipmesh_jobs.report import Page, Row, Tables, binary_size, number, percent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TRACE_TOPIC: Final = "__mesh_trace"
ROWS_MAX: Final = 10_000
"""Maximum number of rows per table for the page."""
CLIENTS_MAX: Final = 20
"""Number of clients in a chart, those with the largest values."""
EVENTS: Final = ("made", "fetched", "loaded")
RELATIONS: Final = ("same", "cross", "unknown")
"""Relation of a consumer's rack to the broker's."""
_ORDERS: Final = {"by_time": "time", "by_client": "entries", "snapshots": "at", "status": "started"}
"""Column whose greatest values select the rows of a table for the page, if it has too many."""


class Interval(Enum):
    """Length of the time intervals in the tables."""

    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the job. Raises typer.BadParameter without `bootstrap`."""

    bootstrap: Annotated[
        str | None, typer.Option("--bootstrap", envvar="KIPMESH_BOOTSTRAP", help="Brokers, host:port,host:port.")
    ] = None
    topic: Annotated[str, typer.Option("--topic", help="Topic of the brokers' trace.")] = TRACE_TOPIC
    interval: Annotated[Interval, typer.Option("--interval", help="Interval of the tables by time.")] = Interval.HOUR
    since_ms: Annotated[
        int | None, typer.Option("--since-ms", min=0, help="Only entries from this time on, in ms since 1970.")
    ] = None

    def __post_init__(self) -> None:
        """Raise typer.BadParameter if `bootstrap` is missing or empty."""
        if not self.bootstrap:
            raise typer.BadParameter("is required, as host:port,host:port", param_hint="--bootstrap")


def run(run: JobRun, options: Options) -> Outcome:
    """Read the trace, write the tables and create the page. Raises JobError if the topic has no trace entries or cannot
    be read. Raises JavaMissingError.
    """
    from kipmesh_jobs.kip_report import tables

    spark = run.spark
    with run.step("Read the trace"), spark_errors_as_job_errors():
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
            if name != "by_time_and_client":  # as large as the trace, so only in the Parquet
                found[name], is_cut = tables.collected(spark.read.parquet(target), _ORDERS.get(name), ROWS_MAX)
                cut += [name] * is_cut
            done(count)
        dead = spark.read.parquet(str(run.parquet / "dead_letters"))
        found["dead_letters"], _ = tables.collected(dead.groupBy("reason").count(), None, ROWS_MAX)
    entries.unpersist()
    found["snapshots"].sort(key=lambda row: (row["at"], row["broker"]))
    totals = figures(found, cut)
    if not totals["entries"]:
        raise JobError(
            f"topic {options.topic} has no trace entries; set mesh.trace.sample on the brokers"
            if not found["dead_letters"]
            else f"topic {options.topic} has no trace entries, only {totals['dead_letters']} other values"
        )
    made = make(found, totals, topic=options.topic, interval=options.interval.value, since_ms=options.since_ms)
    return Outcome(totals, made, lines(totals))


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


def figures(tables: Tables, cut: Sequence[str] = ()) -> dict[str, Any]:
    """Return the contents of summary.json: totals, derived figures, and the completeness of the trace.

    Shares and means are None if there is nothing to divide by. `cut` has the names of incomplete tables.
    """
    totals = tables["totals"][0] if tables["totals"] else {}
    found: dict[str, Any] = {name: int(value or 0) for name, value in totals.items()}
    status = tables["status"]
    found["entries"] = sum(row["entries"] for row in status)
    samples = [row[name] for row in status for name in ("sample_min", "sample_max") if row[name] is not None]
    found["sample_min"], found["sample_max"] = (min(samples), max(samples)) if samples else (None, None)
    found["sampled_entries"] = sum(row["sampled"] for row in status)
    found["dropped_entries"] = sum(
        row[name] for row in status for name in ("dropped_rate", "dropped_queue", "dropped_write")
    )
    found["dead_letters"] = sum(row["count"] for row in tables["dead_letters"])
    found["saved_by_sessions_bytes"] = _session_bytes(found)
    for relation in RELATIONS:
        found[f"{relation}_rack_bytes"] = rack_bytes(found, relation)
    found["session_saved_share"] = saved_share(found)
    saved = found.get("saved_cross_rack_bytes", 0)
    found["cross_rack_saved_share"] = ratio(saved, saved + found["cross_rack_bytes"])
    found["metadata_bytes_per_record"] = ratio(found.get("metadata_bytes", 0), found.get("produced_records", 0))
    found["tables_cut"] = list(cut)
    found["snapshots"] = {event: snapshot_figures(tables["snapshots"], event) for event in EVENTS}
    return found


def rack_bytes(row: Row, relation: str) -> int:
    """Return the bytes of records that consumers read from leaders and followers. `relation` says how the consumer's
    rack relates to the broker's: `same`, `cross` or `unknown`.
    """
    return int(row.get(f"{relation}_rack_leader_bytes") or 0) + int(row.get(f"{relation}_rack_follower_bytes") or 0)


def saved_share(row: Row) -> float | None:
    """Return the share of fetch bytes, without records, that sessions saved: a fraction of the bytes that fetches
    without sessions would have sent. None if those are 0 bytes.
    """
    saved = _session_bytes(row)
    sent = (row.get("fetch_request_bytes") or 0) + (row.get("fetch_response_bytes") or 0)
    return ratio(saved, saved + sent - (row.get("fetched_record_bytes") or 0))


def _session_bytes(row: Row) -> int:
    return int(row.get("followers_saved_bytes") or 0) + int(row.get("consumers_saved_bytes") or 0)


def snapshot_figures(rows: Sequence[Row], event: str) -> dict[str, Any]:
    """Return counts and sums over the snapshots with this event.

    `compared_bytes` and `replay_bytes` cover only snapshots for which both are known.
    """
    mine = [row for row in rows if row["event"] == event]
    both = [row for row in mine if row["bytes"] is not None and row["replay_bytes"] is not None]
    with_records = [row for row in mine if row["records"] is not None]
    return {
        "count": len(mine),
        "bytes": sum(row["bytes"] or 0 for row in mine),
        "took_ms": sum(row["took_ms"] or 0 for row in mine),
        "compared": len(both),
        "compared_bytes": sum(row["bytes"] for row in both),
        "replay_bytes": sum(row["replay_bytes"] for row in both),
        "replay_bytes_estimated": sum(not row["replay_bytes_exact"] for row in both),
        "compared_records": sum(row["records"] for row in with_records),
        "replay_records": sum(row["replay_records"] for row in with_records),
    }


def lines(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the lines of the terminal output, one per KIP and one about sampling."""
    metadata = found["metadata_bytes_per_record"]
    return (
        f"KIP-227: sessions saved {binary_size(found['saved_by_sessions_bytes'])} in {found['fetches']:,} fetches",
        f"KIP-392: {binary_size(found['saved_cross_rack_bytes'])} read within racks instead of across them,"
        f" {binary_size(found['cross_rack_bytes'])} across racks",
        f"KIP-526: {'–' if metadata is None else f'{number(metadata)} B'} of metadata per record,"
        f" {number(found['metadata_requests'])} requests",
        "KIP-630: snapshots " + ", ".join(f"{found['snapshots'][event]['count']} {event}" for event in EVENTS),
        sampling(found),
        *filter(None, [cut_text(found["tables_cut"])]),
    )


def cut_text(tables_cut: Sequence[str]) -> str:
    """Return a note that names the incomplete tables, or an empty string if there are none."""
    if not tables_cut:
        return ""
    return (
        f"The page, and figures of single rows, use only {ROWS_MAX:,} rows of {', '.join(tables_cut)}: the newest, or"
        " those of the clients with the most entries. The Parquet has all rows."
    )


def sampling(found: Mapping[str, Any]) -> str:
    """Return a sentence about the share of exchanges that the figures cover, and the number of dropped entries."""
    least, most = found["sample_min"], found["sample_max"]
    if least is None:
        return "This trace has no exchanges, only snapshots."
    if least == 1:
        text = "Every exchange was sampled: figures are exact"
    else:
        shares = percent(least) if least == most else f"{percent(least)} to {percent(most)}"
        text = f"{shares} of the exchanges were sampled, and figures are scaled up to all of them"
    dropped = found["dropped_entries"]
    return text + (f". Limits dropped {number(dropped)} entries, which the figures lack." if dropped else ".")


def make(tables: Tables, found: Mapping[str, Any], *, topic: str, interval: str, since_ms: int | None = None) -> Page:
    """Return the page `kip_report.html`. `found` is the result of `figures`."""
    times = sorted(map(_derived, tables["by_time"]), key=lambda row: row["time"])
    clients = [_derived(row) for row in tables["by_client"]]

    def largest(*columns: str) -> Sequence[Row]:
        ordered = sorted(clients, key=lambda row: (-sum(row[name] for name in columns), row["client"] or ""))
        return ordered[:CLIENTS_MAX]

    compared = []
    for place, event in enumerate(EVENTS):
        one = found["snapshots"][event]
        if one["compared"]:
            compared.append((f"{event}: snapshots", one["compared_bytes"], "", 2 * place))
            compared.append((f"{event}: replayed log", one["replay_bytes"], "", 2 * place + 1))
    values = {
        "found": found,
        "sampling": sampling(found),
        "cut": cut_text(found["tables_cut"]),
        "topic": topic,
        "interval": f"{interval}, UTC",
        "since_ms": since_ms,
        "largest": largest,
        "over_time": lambda columns: {
            name: [(row["time"], row[column]) for row in times] for name, column in columns.items()
        },
        "of_clients": lambda column: [
            (row["client"] or "(no name)", row[column]) for row in largest(column) if row[column]
        ],
        "compared": compared,
        "snapshots": tables["snapshots"],
        "status": sorted(tables["status"], key=lambda row: (row["broker"], row["started"] or 0)),
        "dead_letters": tables["dead_letters"],
    }
    return Page("kip_report.html", values)


def _derived(row: Row) -> dict[str, Any]:
    """Return a row as a dict, with added bytes by rack relation, saved bytes and share, and metadata per record."""
    racks = {f"{relation}_bytes": rack_bytes(row, relation) for relation in RELATIONS}
    return {
        **row,
        **racks,
        "rack_bytes": sum(racks.values()),
        "saved_bytes": _session_bytes(row),
        "saved_share": saved_share(row),
        "metadata_per_record": ratio(row["metadata_bytes"], row["produced_records"]),
    }


def ratio(part: float, whole: float) -> float | None:
    """Return part / whole, or None if `whole` is 0 or negative."""
    return part / whole if whole > 0 else None


JOB: Final = Job(
    name="kip-report",
    summary="Measure what each KIP saves, from the trace of the brokers.",
    text=(
        "Show the benefit of each KIP from the trace that brokers write to __mesh_trace (mesh.trace.sample): bytes"
        " saved by fetch sessions (227), bytes read within the rack (392), metadata per record (526), snapshots"
        " compared with replay (630), over time and by client. Sampled figures are scaled up."
    ),
    examples="""
    kipmesh job kip-report --bootstrap 127.0.0.1:9092
    kipmesh job kip-report --bootstrap 127.0.0.1:9092 --interval minute --out reports/trace --json
    """,
    options=Options,
    run=run,
)
