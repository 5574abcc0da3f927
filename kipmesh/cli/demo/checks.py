"""The proofs: each compares what came out with the CSV or with another replica, and is a line PASS or FAIL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from kipmesh.cli.demo.produce import SequenceDigest
from kipmesh.spark.jobs.flights.report import Check, PartitionFacts

_SUMMED = ("dep_delay", "arr_delay", "distance")


def check_topic(found: Sequence[SequenceDigest], expected: Sequence[SequenceDigest]) -> list[Check]:
    """Counts and, partition by partition, order and content of the topic against the CSV."""
    read, wanted = sum(one.records for one in found), sum(one.records for one in expected)
    counts = Check("The topic holds every flight once", read == wanted, f"{read:,} of {wanted:,} records")
    wrong = [
        partition
        for partition, (one, other) in enumerate(zip(found, expected, strict=True))
        if (one.records, one.hexdigest()) != (other.records, other.hexdigest())
    ]
    detail = f"keys and values of all {len(expected)} partitions, in order, equal the CSV's"
    if wrong:
        detail = f"partitions that differ: {', '.join(map(str, wrong))}"
    return [counts, Check("Each partition is in the order of scheduled departure", not wrong, detail)]


def check_totals(totals: Mapping[str, int], year: pd.DataFrame, scale: int) -> list[Check]:
    """Counts and sums of the Parquet that the stream wrote, computed by Spark, against the CSV, summed by pandas."""
    wanted = {
        "records": len(year) * scale,
        "distinct_records": len(year) * scale,
        "malformed": 0,
        "cancelled": int(year["dep_delay"].isna().sum()) * scale,
        **{f"{name}_sum": int(year[name].sum()) * scale for name in _SUMMED},
    }
    wrong = [
        f"{name} is {totals.get(name)} and not {value}" for name, value in wanted.items() if totals.get(name) != value
    ]
    counts = ("records", "distinct_records", "malformed", "cancelled")
    sums = tuple(f"{name}_sum" for name in _SUMMED)
    return [
        _compare("Spark wrote every flight exactly once", counts, totals, wanted, wrong),
        _compare("Sums over the Parquet equal the CSV's", sums, totals, wanted, wrong),
    ]


def _compare(
    title: str, names: Sequence[str], totals: Mapping[str, int], wanted: Mapping[str, int], wrong: Sequence[str]
) -> Check:
    passed = all(totals.get(name) == wanted[name] for name in names)
    figures = [f"{name} {wanted[name]:,}" for name in names] if passed else wrong
    return Check(title, passed, "; ".join(figures))


def check_replicas(partitions: Sequence[PartitionFacts], replication_factor: int) -> Check:
    """The replicas against each other, byte for byte up to the high watermark."""
    size = sum(partition.size_bytes for partition in partitions)
    wrong = [str(p.partition) for p in partitions if not p.identical or len(p.replicas) != replication_factor]
    detail = f"{replication_factor} x {size / 1e6:.1f} MB in {len(partitions)} partitions, CRCs checked"
    if wrong:
        detail = f"partitions that differ: {', '.join(wrong)}"
    return Check("Replicas are identical byte for byte up to the high watermark", not wrong, detail)


def check_read(read: int, expected: int) -> Check:
    """A batch read of the topic by Spark."""
    return Check("A Spark batch read sees the same records", read == expected, f"{read:,} of {expected:,} records")


def check_service(lines: Sequence[str], limit: int) -> Check:
    """What the consumer service answered over HTTP."""
    return Check("The consumer service streams records over HTTP", len(lines) == limit, f"{len(lines)} NDJSON lines")
