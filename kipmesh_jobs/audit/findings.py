"""Findings of an audit: classification, counts and the first divergence.

Errors must never occur: damage within a log, and differences between replicas where they must be equal. Warnings may
follow from an unclean stop or a lagging replica; the node repairs them when it starts or catches up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kipmesh_jobs.audit.inventory import KINDS, METADATA_TOPIC, Finding, Inventory, ReplicaLog
from kipmesh_jobs.audit.scan import UNREADABLE, VANISHED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

FINDINGS_MAX: Final = 1_000
"""Maximum number of listed findings per kind. All are counted, and the tables have all."""


class Tables(NamedTuple):
    """Tables of an audit. `ranges` has a row per log; see `compare` for the others."""

    batches: DataFrame
    ranges: DataFrame
    gaps: DataFrame
    agreement: DataFrame
    snapshots: DataFrame


class Collected(NamedTuple):
    """Findings to list, at most `FINDINGS_MAX` from each source, and the number of all findings by kind."""

    findings: list[Finding]
    counts: dict[str, int]


def collect(inventory: Inventory, tables: Tables) -> Collected:
    """Return the findings, in the order of `KINDS` (errors first), then by topic, partition and offset."""
    found = list(inventory.problems)
    found += _of_snapshots(inventory, tables.snapshots.collect())
    counts = Counter(one.kind for one in found)
    others = _other_topics(inventory.logs)
    counts["other_topic"] += len(others)
    found += others[:FINDINGS_MAX]
    gaps, agreement = tables.gaps, tables.agreement
    place = ("topic", "partition", "replica")
    pair = ("topic", "partition", "first_difference", "a", "b")
    damage = tables.batches.where("damage is not null")
    damages = [row["damage"] for row in damage.select("damage").distinct().collect()]
    sources: list[tuple[DataFrame, tuple[str, ...], Callable[[Row], Finding]]] = [
        *((damage.where(damage.damage == one), (*place, "file", "position"), _of_damage) for one in sorted(damages)),
        *((gaps.where(gaps.kind == kind), (*place, "expected"), _of_gap) for kind in ("gap", "overlap")),
        (tables.ranges.where("end < high_watermark"), place, _of_short),
        (agreement.where("is_violated"), pair, _of_difference),
        (agreement.where("differences > 0 and not is_violated"), pair, _of_difference),
    ]
    for frame, order, finding_of in sources:
        listed = [finding_of(row) for row in frame.orderBy(*order).limit(FINDINGS_MAX).collect()]
        if listed:
            counts[listed[0].kind] += frame.count() if len(listed) == FINDINGS_MAX else len(listed)
            found += listed
    order_of = list(KINDS).index
    found.sort(key=lambda one: (order_of(one.kind), one.topic or "", one.partition or 0, one.offset or 0, one.replica))
    return Collected(found, {kind: counts[kind] for kind in KINDS if counts[kind]})


def first_divergence(tables: Tables) -> dict[str, Any] | None:
    """Return the first violation in order of topic, partition and offset, or None if there is none.

    The result has `topic`, `partition`, `offset` and `replicas`: each replica's batch at that offset. The fields of a
    batch are None if the replica covers the offset but has no batch there.
    """
    violated = tables.agreement.where("is_violated")
    first = violated.orderBy("topic", "partition", "first_difference", "a", "b").first()
    if first is None:
        return None
    topic, partition, offset = first["topic"], first["partition"], first["first_difference"]
    where = f"partition = {partition} and base_offset <= {offset} and last_offset >= {offset}"
    here = tables.batches.where(tables.batches.topic == topic).where(where).orderBy("replica").collect()
    covering = tables.ranges.where(tables.ranges.topic == topic).where(f"partition = {partition}")
    lacking = {row["replica"] for row in covering.where(f"start <= {offset} and end > {offset}").collect()}
    fields = ("replica", "file", "position", "base_offset", "leader_epoch", "size_bytes", "crc_ok")
    replicas = [{**{name: row[name] for name in fields}, "digest": bytes(row["digest"]).hex()} for row in here]
    lacking -= {row["replica"] for row in here}
    replicas += [{"replica": name, "file": None, "position": None, "digest": None} for name in sorted(lacking)]
    return {"topic": topic, "partition": partition, "offset": offset, "replicas": replicas}


def divergence_text(first: dict[str, Any]) -> str:
    """Return one line that describes the result of `first_divergence`: its place, and the digest and position of each
    replica's batch.
    """
    there = "; ".join(
        f"{one['replica']} has {one['digest'][:12]} at {one['file']}:{one['position']}"
        + ("" if one["crc_ok"] else " (wrong CRC)")
        if one["digest"]
        else f"{one['replica']} has no batch"
        for one in first["replicas"]
    )
    return f"{first['topic']}-{first['partition']} at offset {first['offset']}: {there}"


def _of_damage(row: Row) -> Finding:
    place = (row["replica"], row["topic"], row["partition"], row["base_offset"], row["file"])
    return Finding(row["damage"], *place, row["text"], row["position"])


def _of_gap(row: Row) -> Finding:
    place = (row["replica"], row["topic"], row["partition"], row["expected"], row["file"])
    text = f"expected offset {row['expected']}, got {row['offset']}"
    return Finding(row["kind"], *place, text, row["position"])


def _of_short(row: Row) -> Finding:
    text = f"the log ends at {row['end']}, below its high watermark {row['high_watermark']}"
    return Finding("short_log", row["replica"], row["topic"], row["partition"], row["end"], "", text)


def _of_difference(row: Row) -> Finding:
    kind = "divergence" if row["is_violated"] else "uncommitted"
    there = "a" if row["file_a"] else "b"
    place = (row["a"], row["topic"], row["partition"], row["first_difference"], row[f"file_{there}"])
    text = f"{_side(row, 'a')}; {_side(row, 'b')}; {row['differences']} differences, must agree up to "
    return Finding(kind, *place, f"{text}{row['must_agree_to']}", row[f"position_{there}"], row["b"])


def _side(row: Row, side: str) -> str:
    if not row[f"file_{side}"]:
        return f"{row[side]}: no batch"
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
            found.append(Finding("other_topic", first.replica, topic, partition, None, first.directory, text))
    return found


def _of_snapshots(inventory: Inventory, rows: Sequence[Row]) -> list[Finding]:
    found = []
    by_id: dict[tuple[int, int], list[Row]] = {}
    for row in sorted(rows, key=lambda one: (one["end_offset"], one["epoch"], one["replica"])):
        if row["damage"] is None:
            by_id.setdefault((row["end_offset"], row["epoch"]), []).append(row)
            continue
        kind = row["damage"] if row["damage"] in (UNREADABLE, VANISHED) else "snapshot_corrupt"
        place = (row["replica"], row["topic"], row["partition"], row["end_offset"], row["file"])
        found.append(Finding(kind, *place, row["text"]))
    for (end_offset, epoch), same in by_id.items():
        for other in same[1:]:
            if bytes(other["digest"]) != bytes(same[0]["digest"]) or other["records"] != same[0]["records"]:
                text = (
                    f"snapshot {end_offset}-{epoch}: {same[0]['replica']} has {same[0]['records']} records"
                    f" ({same[0]['file']}), {other['replica']} has {other['records']} different ones"
                )
                place = (same[0]["replica"], same[0]["topic"], same[0]["partition"], end_offset, other["file"])
                found.append(Finding("snapshot_differs", *place, text, other=other["replica"]))
    valid = {(row["replica"], row["end_offset"]) for row in rows if row["damage"] is None}
    for log in inventory.logs:
        start = log.segments[0].base_offset if log.topic == METADATA_TOPIC and log.segments else 0
        if start > 0 and not any(replica == log.replica and end >= start for replica, end in valid):
            text = f"the log begins at {start}, but no valid snapshot ends there or later"
            found.append(Finding("snapshot_missing", log.replica, log.topic, log.partition, start, log.directory, text))
    return found
