"""The page of an audit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kipmesh.spark.jobs.audit.collect import divergence_text
from kipmesh.spark.jobs.audit.findings import ERROR, KINDS, Finding
from kipmesh.spark.jobs.report import Bar, BarChart, Note, Page, Part, Section, Table, Tile, binary_size, number

ROWS_MAX = 300


def make_page(
    summary: Mapping[str, Any], findings: Sequence[Finding], logs: Sequence[Any], agreement: Sequence[Any]
) -> Page:
    """`logs` and `agreement` are rows of those tables, at most `ROWS_MAX`, partition by partition."""
    verdict = "Replicas agree" if summary["passed"] else "Replicas do not agree, or are damaged"
    lede = (
        f"{summary['batches']:,} batches ({binary_size(summary['bytes'])}) in {summary['segments']:,} segments of "
        f"{summary['logs']:,} logs on {len(summary['replicas'])} replicas, each CRC checked, compared pair by pair."
    )
    agreed, pairs = summary["pairs_agreed"], summary["pairs"]
    tiles = [
        Tile("Errors", number(summary["errors"]), "must not be", good=not summary["errors"]),
        Tile("Warnings", number(summary["warnings"]), "a start or catching up mends them"),
        Tile("Pairs that agree", f"{agreed:,} of {pairs:,}", "of replicas of a partition", good=agreed == pairs),
        Tile("Batches", number(summary["batches"]), binary_size(summary["bytes"])),
        Tile("Snapshots", number(summary["snapshots"]), "of the cluster's metadata"),
    ]
    first = summary["first_divergence"]
    sections = []
    if first is not None:
        sections.append(Section("The first divergence", divergence_text(first), [_replicas_table(first)]))
    sections += [
        Section(
            "Findings",
            "Errors first. All are counted; of each kind at most 1,000 are listed.",
            _findings(summary, findings),
        ),
        Section(
            "Who agrees with whom, up to where",
            "From the offset that both have up to `agrees to` all batches are the same bytes; `must` is what is "
            "committed, or follows from a later batch of the same leader epoch.",
            [_agreement_table(agreement)],
        ),
        Section("Logs", "Whole batches with the right CRC.", [_bytes_chart(logs), _logs_table(logs)]),
    ]
    return Page("audit", verdict, lede, sections, tiles, "It read the files and changed none.")


def _findings(summary: Mapping[str, Any], findings: Sequence[Finding]) -> list[Part]:
    counts = summary["findings"]
    if not counts:
        return [Note("None.")]
    bars = [Bar(KINDS[kind][1], count, group=0 if KINDS[kind][0] == ERROR else 1) for kind, count in counts.items()]
    rows = [
        (one.severity, one.kind, one.topic, one.partition, one.offset, _both(one), one.file, one.position, one.text)
        for one in findings
    ]
    titles = ("severity", "kind", "topic", "partition", "offset", "replica", "file", "position", "what")
    return [BarChart(bars, "findings by kind"), Table(titles, rows)]


def _both(finding: Finding) -> str:
    return finding.replica if finding.other is None else f"{finding.replica}, {finding.other}"


def _replicas_table(first: Mapping[str, Any]) -> Table:
    rows = [
        (one["replica"], one["digest"], one["file"], one["position"], one.get("leader_epoch"), one.get("crc_ok"))
        for one in first["replicas"]
    ]
    return Table(("replica", "digest of the batch", "file", "position", "leader epoch", "CRC"), rows)


def _agreement_table(rows: Sequence[Any]) -> Table:
    titles = ("topic", "partition", "replicas", "from", "to", "agrees to", "must", "equal", "differences", "as it must")
    return Table(
        titles,
        [
            (
                row["topic"], row["partition"], f"{row['a']}, {row['b']}", row["from"], row["to"], row["agrees_to"],
                row["must_agree_to"], row["equal"], row["differences"], not row["is_violated"],
            )
            for row in rows
        ],
        ROWS_MAX,
    )  # fmt: skip


def _logs_table(rows: Sequence[Any]) -> Table:
    titles = ("topic", "partition", "replica", "start", "end", "high watermark", "compacted to", "batches", "bytes")
    return Table(
        titles,
        [
            (
                row["topic"], row["partition"], row["replica"], row["start"], row["end"], row["high_watermark"],
                row["cleaned_to"], row["batches"], row["bytes"],
            )
            for row in rows
        ],
        ROWS_MAX,
    )  # fmt: skip


def _bytes_chart(rows: Sequence[Any]) -> BarChart:
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row["replica"]] = sizes.get(row["replica"], 0) + row["bytes"]
    bars = [Bar(name, size, group=2) for name, size in sorted(sizes.items())]
    return BarChart(bars, "bytes of the logs below, by replica", form=binary_size)
