"""The command `kipmesh job audit`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kipmesh_jobs.frame import Job, JobError, JobRun, Outcome
from kipmesh_jobs.report import Page

if TYPE_CHECKING:
    from kipmesh_jobs.audit.findings import Collected, Tables
    from kipmesh_jobs.audit.inventory import Finding, Inventory


ROWS_MAX: Final = 300
"""Maximum number of rows in the page's tables of logs and pairs."""


@dataclass(frozen=True, slots=True)
class Options:
    """Replicas and topics to audit. `run` raises JobError if there is no replica."""

    replicas: Annotated[
        list[str] | None,
        typer.Option(
            "--replica", metavar="NAME=PATH", help="A replica and its data directory, or a parent; repeatable."
        ),
    ] = None
    mesh: Annotated[
        Path | None, typer.Option("--mesh", metavar="DIR", help="All nodes of a local cluster, from its cluster.json.")
    ] = None
    topics: Annotated[
        list[str] | None, typer.Option("--topic", help="Only this topic; repeatable. Default: all topics.")
    ] = None


TEXT: Final = """Compare the files of all replicas and report the first divergence.

Checks the CRC of every record batch in every segment, and compares it with the other replicas of the partition at its
offset. Metadata snapshots are checked, and compared by id. The audited files are never written. Running replicas can be
audited, but compaction or truncation during the audit may appear as a difference: for a proof, stop them or copy the
files. A log that is deleted during the audit is reported as a warning and left out.

Exit code 1 if there is an error: a damaged batch, missing offsets, or a difference below the committed offsets."""


def run(run: JobRun, options: Options) -> Outcome:
    """Run the audit. The outcome's `passed` is False if there is a finding of severity error.

    Raises JobError for invalid replicas, a replica without a data directory, or a topic without logs. Raises
    JavaMissingError.
    """
    from kipmesh_jobs.audit.inventory import parse_replicas, replicas_of_cluster, take_inventory

    replicas = parse_replicas(options.replicas or ())
    if options.mesh is not None:
        replicas += replicas_of_cluster(options.mesh)
    if not replicas:
        raise JobError("no replicas; add --replica NAME=PATH for each replica, or --mesh DIR")
    topics = options.topics or []
    with run.step("List the files"):
        inventory = take_inventory(replicas, topics)
    if topics and (unknown := sorted(set(topics) - {log.topic for log in inventory.logs})):
        raise JobError(f"--topic {unknown[0]}: no replica has a log of this topic")
    tables = _compute(run, inventory, replicas, topics)
    from kipmesh_jobs.audit.findings import collect, divergence_text, first_divergence

    with run.step("Collect the findings"):
        collected = collect(inventory, tables)
        first = first_divergence(tables)
        _write_findings(run, collected)
        order = ["topic", "partition"]
        logs = tables.ranges.orderBy(*order, "replica").limit(ROWS_MAX).collect()
        agreement = tables.agreement.orderBy("is_violated", *order, ascending=[False, True, True])
        rows = agreement.limit(ROWS_MAX).collect()
        summary = _summary(inventory, tables, collected, first)
    lines = [
        f"{summary['batches']:,} batches in {summary['segments']:,} segments of {summary['logs']:,} logs on "
        f"{len(inventory.replicas)} replicas; {summary['pairs_agreed']:,} of {summary['pairs']:,} pairs agree as "
        "required",
        f"{summary['errors']:,} errors, {summary['warnings']:,} warnings"
        + "".join(f"; {kind}: {count:,}" for kind, count in summary["findings"].items()),
    ]
    if first is not None:
        lines.append(f"first divergence: {divergence_text(first)}")
    page = make_page(summary, collected.findings, logs, rows)
    return Outcome(summary, page, tuple(lines), passed=bool(summary["passed"]))


def make_page(
    summary: Mapping[str, Any], findings: Sequence[Finding], logs: Sequence[Any], agreement: Sequence[Any]
) -> Page:
    """Return the page `audit.html`. `logs` and `agreement` are rows of those tables, at most `ROWS_MAX` each."""
    from kipmesh_jobs.audit.findings import divergence_text
    from kipmesh_jobs.audit.inventory import ERROR, KINDS

    first = summary["first_divergence"]
    sizes: Counter[str] = Counter()
    for row in logs:
        sizes[row["replica"]] += row["bytes"]
    values = {
        "summary": summary,
        "divergence": "" if first is None else divergence_text(first),
        "findings": findings,
        "kinds": [
            (KINDS[kind][1], count, "", 0 if KINDS[kind][0] == ERROR else 1)
            for kind, count in summary["findings"].items()
        ],
        "agreement": agreement,
        "logs": logs,
        "sizes": [(name, size, "", 2) for name, size in sorted(sizes.items())],
    }
    return Page("audit.html", values)


def _compute(run: JobRun, inventory: Inventory, replicas: list[tuple[str, str]], topics: list[str]) -> Tables:
    """Read all files once in Spark, and write and return the tables."""
    from kipmesh_jobs.audit import compare
    from kipmesh_jobs.audit.findings import Tables
    from kipmesh_jobs.audit.inventory import drop_deleted
    from kipmesh_jobs.audit.source import NAME, SegmentsDataSource, plan_tasks

    spark = run.spark
    spark.dataSource.register(SegmentsDataSource)
    common = {"replicas": json.dumps([f"{name}={path}" for name, path in replicas]), "topics": ",".join(topics)}
    segments = {**common, "content": "segments", "records": "compacted"}
    parquet = run.parquet
    with run.spark_step("Read and check the segments", len(plan_tasks(segments))):
        spark.read.format(NAME).options(**segments).load().write.parquet(str(parquet / "batches"))
    snapshots = {**common, "content": "snapshots"}
    with run.spark_step("Read and check the snapshots", len(plan_tasks(snapshots))):
        found = spark.read.format(NAME).options(**snapshots).load()
        found.write.parquet(str(parquet / "snapshots"))
    with run.step("Compare"):
        drop_deleted(inventory)
        batches = spark.read.parquet(str(parquet / "batches"))
        logs = compare.logs_frame(spark, inventory.logs)
        frames = {"logs": compare.ranges_frame(batches, logs), "gaps": compare.gaps_frame(batches, logs)}
        for name, frame in frames.items():
            frame.write.parquet(str(parquet / name))
        ranges = spark.read.parquet(str(parquet / "logs"))
        compare.agreement_frame(batches, ranges).write.parquet(str(parquet / "agreement"))
    read = {name: spark.read.parquet(str(parquet / name)) for name in ("gaps", "agreement", "snapshots")}
    return Tables(batches, ranges, read["gaps"], read["agreement"], read["snapshots"])


def _write_findings(run: JobRun, collected: Collected) -> None:
    from kipmesh_jobs.audit.inventory import SCHEMA

    names = [column.split()[0] for column in SCHEMA.split(",")]
    rows = [tuple(one.row()[name] for name in names) for one in collected.findings]
    run.spark.createDataFrame(rows, SCHEMA).coalesce(1).write.parquet(str(run.parquet / "findings"))


def _summary(
    inventory: Inventory, tables: Tables, collected: Collected, first: dict[str, Any] | None
) -> dict[str, Any]:
    from pyspark.sql import functions as f

    from kipmesh_jobs.audit.inventory import ERROR, KINDS

    totals = tables.ranges.agg(f.sum("batches"), f.sum("bytes")).first()
    pairs = tables.agreement.agg(f.count("*"), f.count(f.when(~f.col("is_violated"), 1))).first()
    errors = sum(count for kind, count in collected.counts.items() if KINDS[kind][0] == ERROR)
    return {
        "passed": errors == 0,
        "replicas": inventory.replicas,
        "logs": len(inventory.logs),
        "partitions": len({(log.topic, log.partition) for log in inventory.logs}),
        "segments": sum(len(log.segments) for log in inventory.logs),
        "batches": int(totals[0] or 0) if totals else 0,
        "bytes": int(totals[1] or 0) if totals else 0,
        "snapshots": tables.snapshots.count(),
        "pairs": int(pairs[0]) if pairs else 0,
        "pairs_agreed": int(pairs[1]) if pairs else 0,
        "errors": errors,
        "warnings": sum(collected.counts.values()) - errors,
        "findings": collected.counts,
        "first_divergence": first,
        "first_findings": [one.row() for one in collected.findings[:20]],
    }


JOB: Final = Job(
    name="audit",
    summary="Compare the files of all replicas and report the first divergence.",
    text=TEXT,
    examples="""
    kipmesh job audit --mesh kipmesh-local
    kipmesh job audit --replica a=/mnt/broker-1/data --replica b=/mnt/broker-2/data --replica c=/mnt/broker-3/data
    kipmesh job audit --mesh kipmesh-local --topic flights --out build/audit --json
    """,
    options=Options,
    run=run,
)
