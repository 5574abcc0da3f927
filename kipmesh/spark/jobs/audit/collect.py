"""Tables of an audit to findings, exact counts, and the first divergence by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kipmesh.spark.jobs.audit.findings import KINDS, Finding
from kipmesh.spark.jobs.audit.folders import METADATA_TOPIC, Inventory, Problem, ReplicaLog
from kipmesh.spark.jobs.audit.source import UNREADABLE, VANISHED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

FINDINGS_MAX: Final = 1_000
"""Of each kind that are listed; all are counted, and the tables have all."""


class Tables(NamedTuple):
    """What was computed."""

    batches: DataFrame
    ranges: DataFrame
    gaps: DataFrame
    agreement: DataFrame
    snapshots: DataFrame


class Collected(NamedTuple):
    """Findings that are listed, and how many of each kind there are."""

    findings: list[Finding]
    counts: dict[str, int]


def collect(inventory: Inventory, tables: Tables) -> Collected:
    """All findings; errors first, then by partition and offset."""
    found: list[Finding] = []
    counts: dict[str, int] = {}

    def take(kind: str, count: int, findings: Iterable[Finding]) -> None:
        if count:
            counts[kind] = counts.get(kind, 0) + count
            found.extend(findings)

    for problem in inventory.problems:
        take(problem.kind, 1, [_of_problem(problem)])
    damage = tables.batches.where("damage is not null")
    for kind, count in sorted((row[0], row[1]) for row in damage.groupBy("damage").count().collect()):
        some = damage.where(damage.damage == kind).orderBy("topic", "partition", "replica", "file", "position")
        take(kind, count, [_of_damage(row) for row in some.limit(FINDINGS_MAX).collect()])
    for kind in ("gap", "overlap"):
        some = tables.gaps.where(tables.gaps.kind == kind)
        listed = some.orderBy("topic", "partition", "replica", "expected").limit(FINDINGS_MAX).collect()
        take(kind, some.count() if len(listed) == FINDINGS_MAX else len(listed), map(_of_gap, listed))
    short = tables.ranges.where("end < high_watermark").orderBy("topic", "partition", "replica")
    listed = short.limit(FINDINGS_MAX).collect()
    take("short_log", short.count() if len(listed) == FINDINGS_MAX else len(listed), map(_of_short, listed))
    for kind, condition in (("divergence", "is_violated"), ("uncommitted", "differences > 0 and not is_violated")):
        some = tables.agreement.where(condition)
        listed = some.orderBy("topic", "partition", "first_difference", "a", "b").limit(FINDINGS_MAX).collect()
        count = some.count() if len(listed) == FINDINGS_MAX else len(listed)
        take(kind, count, [_of_difference(kind, row) for row in listed])
    others = _other_topics(inventory.logs)
    take("other_topic", len(others), others[:FINDINGS_MAX])
    for finding in _of_snapshots(inventory, tables.snapshots.collect()):
        take(finding.kind, 1, [finding])
    order = list(KINDS)
    found.sort(
        key=lambda one: (order.index(one.kind), one.topic or "", one.partition or 0, one.offset or 0, one.replica)
    )
    return Collected(found, {kind: counts[kind] for kind in KINDS if kind in counts})


def first_divergence(tables: Tables) -> dict[str, Any] | None:
    """The first by topic, partition and offset: what every replica that covers the offset has there. None of none."""
    violated = tables.agreement.where("is_violated")
    first = violated.orderBy("topic", "partition", "first_difference", "a", "b").first()
    if first is None:
        return None
    topic, partition, offset = first["topic"], first["partition"], first["first_difference"]
    where = f"partition = {partition} and base_offset <= {offset} and last_offset >= {offset}"
    here = tables.batches.where(tables.batches.topic == topic).where(where).orderBy("replica").collect()
    covering = tables.ranges.where(tables.ranges.topic == topic).where(f"partition = {partition}")
    lacking = {row["replica"] for row in covering.where(f"start <= {offset} and end > {offset}").collect()}
    replicas = [
        {
            "replica": row["replica"],
            "file": row["file"],
            "position": row["position"],
            "base_offset": row["base_offset"],
            "leader_epoch": row["leader_epoch"],
            "size_bytes": row["size_bytes"],
            "crc_ok": row["crc_ok"],
            "digest": bytes(row["digest"]).hex(),
        }
        for row in here
    ]
    lacking -= {row["replica"] for row in here}
    replicas += [{"replica": name, "file": None, "position": None, "digest": None} for name in sorted(lacking)]
    return {"topic": topic, "partition": partition, "offset": offset, "replicas": replicas}


def divergence_text(first: dict[str, Any]) -> str:
    """One line for people."""
    there = "; ".join(
        f"{one['replica']} has {one['digest'][:12]} at {one['file']}:{one['position']}"
        + ("" if one["crc_ok"] else " (wrong CRC)")
        if one["digest"]
        else f"{one['replica']} has nothing"
        for one in first["replicas"]
    )
    return f"{first['topic']}-{first['partition']} at offset {first['offset']}: {there}"


def _of_problem(problem: Problem) -> Finding:
    return Finding(*problem)


def _of_damage(row: Row) -> Finding:
    kind = {UNREADABLE: "unreadable", VANISHED: "vanished"}.get(row["damage"], row["damage"])
    return Finding(
        kind,
        row["replica"],
        row["topic"],
        row["partition"],
        row["base_offset"],
        row["file"],
        row["text"],
        row["position"],
    )


def _of_gap(row: Row) -> Finding:
    text = f"offset {row['expected']} is expected and {row['offset']} follows"
    return Finding(
        row["kind"], row["replica"], row["topic"], row["partition"], row["expected"], row["file"], text, row["position"]
    )


def _of_short(row: Row) -> Finding:
    text = f"it ends at {row['end']}, its high watermark was {row['high_watermark']}"
    return Finding("short_log", row["replica"], row["topic"], row["partition"], row["end"], "", text)


def _of_difference(kind: str, row: Row) -> Finding:
    there = "a" if row["file_a"] else "b"
    text = f"{_side(row, 'a')}; {_side(row, 'b')}; {row['differences']} differences, must agree up to "
    return Finding(
        kind,
        row["a"],
        row["topic"],
        row["partition"],
        row["first_difference"],
        row[f"file_{there}"],
        f"{text}{row['must_agree_to']}",
        row[f"position_{there}"],
        row["b"],
    )


def _side(row: Row, side: str) -> str:
    if not row[f"file_{side}"]:
        return f"{row[side]}: nothing"
    return f"{row[side]}: {row[f'file_{side}']}:{row[f'position_{side}']}, epoch {row[f'epoch_{side}']}"


def _other_topics(logs: Sequence[ReplicaLog]) -> list[Finding]:
    ids: dict[tuple[str, int], dict[str, ReplicaLog]] = {}
    for log in logs:
        if log.topic_id:
            ids.setdefault((log.topic, log.partition), {}).setdefault(log.topic_id, log)
    found = []
    for (topic, partition), by_id in sorted(ids.items()):
        if len(by_id) > 1:
            first = next(iter(by_id.values()))
            text = ", ".join(f"{one.replica}: {name}" for name, one in sorted(by_id.items()))
            found.append(Finding("other_topic", first.replica, topic, partition, None, first.folder, text))
    return found


def _of_snapshots(inventory: Inventory, rows: Sequence[Row]) -> list[Finding]:
    found = []
    by_id: dict[tuple[int, int], list[Row]] = {}
    for row in sorted(rows, key=lambda one: (one["end_offset"], one["epoch"], one["replica"])):
        if row["damage"] is None:
            by_id.setdefault((row["end_offset"], row["epoch"]), []).append(row)
            continue
        kind = {UNREADABLE: "unreadable", VANISHED: "vanished"}.get(row["damage"], "snapshot_corrupt")
        place = (row["replica"], row["topic"], row["partition"], row["end_offset"], row["file"])
        found.append(Finding(kind, *place, row["text"]))
    for (end_offset, epoch), same in by_id.items():
        for other in same[1:]:
            if bytes(other["digest"]) != bytes(same[0]["digest"]) or other["records"] != same[0]["records"]:
                text = (
                    f"snapshot {end_offset}-{epoch}: {same[0]['replica']} has {same[0]['records']} records"
                    f" ({same[0]['file']}), {other['replica']} has {other['records']} others"
                )
                place = (same[0]["replica"], same[0]["topic"], same[0]["partition"], end_offset, other["file"])
                found.append(Finding("snapshot_differs", *place, text, other=other["replica"]))
    valid = {(row["replica"], row["end_offset"]) for row in rows if row["damage"] is None}
    for log in inventory.logs:
        start = log.segments[0].base_offset if log.topic == METADATA_TOPIC and log.segments else 0
        if start > 0 and not any(replica == log.replica and end >= start for replica, end in valid):
            text = f"its log begins at {start} and it has no valid snapshot from there on"
            found.append(Finding("snapshot_missing", log.replica, log.topic, log.partition, start, log.folder, text))
    return found
