"""Checks of the demo: output against the CSV, and replicas against each other.

The expected topic follows from the CSV, not from the producer: the carrier determines the partition (Kafka's murmur2),
the scheduled departure the order in it.

Replicas are compared by their files. Segment boundaries do not matter: the batches up to the high watermark are hashed
as one sequence of bytes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pandas as pd

from kipmesh.client.producer.accumulator import partition_of_key
from kipmesh.client.records import decode_columns
from kipmesh.client.sync import Consumer
from kipmesh.client.types import TopicPartition
from kipmesh.core import record_batch
from kipmesh.core.errors import CorruptRecordError
from kipmesh_jobs.flights.dataset import Flight
from kipmesh_jobs.flights.results import SUMMED
from kipmesh_jobs.frame import JobError
from kipmesh_jobs.report import Check

_READ_TIMEOUT_MS: Final = 30_000
_RETRY_SECONDS: Final = 0.2


class PartitionFacts(NamedTuple):
    """State of one partition at the end of the run, and the names of the brokers with a replica. `identical` says
    whether all replicas have equal bytes up to the high watermark; the digest is that of the first replica.
    """

    partition: int
    records: int
    size_bytes: int
    high_watermark: int
    replicas: tuple[str, ...]
    identical: bool
    sha256: str


class SequenceDigest:
    """Number of records of one partition, bytes of their keys and values, and a SHA-256 of the keys and values in
    order.
    """

    def __init__(self) -> None:
        self.records = self.payload_bytes = 0
        self._hash = hashlib.sha256()

    def add(self, key: bytes, value: bytes) -> None:
        """Append a record. Keys and values contain no zero bytes or line feeds, so their lengths are not hashed."""
        self._hash.update(b"%b\0%b\n" % (key, value))
        self.records += 1
        self.payload_bytes += len(key) + len(value)

    def digest(self) -> tuple[int, str]:
        """Return the number of records and their SHA-256 in hexadecimal."""
        return self.records, self._hash.hexdigest()


def expecting(flights: Iterable[Flight], expected: Sequence[SequenceDigest]) -> Iterator[Flight]:
    """Yield the flights unchanged. Add each flight to the digest in `expected` for the partition that its key
    determines.
    """
    for flight in flights:
        expected[partition_of_key(flight.key, len(expected))].add(*flight)
        yield flight


def read_topic(bootstrap: str, topic: str, partitions: int) -> list[SequenceDigest]:
    """Read the whole topic, up to its current end, with a consumer; return a digest per partition.

    Raises JobError after 30 s without records, and KafkaError.
    """
    found = [SequenceDigest() for _ in range(partitions)]
    wanted = [(topic, partition) for partition in range(partitions)]
    with Consumer(bootstrap, auto_offset_reset="earliest", max_partition_fetch_bytes=4 << 20) as consumer:
        ends = consumer.end_offsets(wanted)
        consumer.assign(wanted)
        left = {where.partition for where, end in ends.items() if end > 0}
        while left:
            batches = consumer.fetch_batches(timeout_ms=_READ_TIMEOUT_MS)
            if not batches:
                raise JobError(f"no records of {topic}-{min(left)} within {_READ_TIMEOUT_MS / 1000:g} s")
            for each in batches:
                columns = decode_columns(each.records)
                for key, value in zip(columns.keys, columns.values, strict=True):
                    found[each.partition].add(key or b"", value or b"")
                if each.next_position >= ends[TopicPartition(topic, each.partition)]:
                    left.discard(each.partition)
    return found


def check_topic(found: Sequence[SequenceDigest], expected: Sequence[SequenceDigest]) -> list[Check]:
    """Return two checks of a topic's content against the CSV: the number of records, and the content and order of each
    partition.
    """
    read, wanted = sum(one.records for one in found), sum(one.records for one in expected)
    counts = Check("The topic has every flight once", read == wanted, f"{read:,} of {wanted:,} records")
    wrong = [
        partition
        for partition, (one, other) in enumerate(zip(found, expected, strict=True))
        if one.digest() != other.digest()
    ]
    detail = f"keys and values of all {len(expected)} partitions, in order, equal the CSV's"
    if wrong:
        detail = f"partitions that differ: {', '.join(map(str, wrong))}"
    return [counts, Check("Each partition is in the order of scheduled departure", not wrong, detail)]


def check_totals(totals: Mapping[str, int], year: pd.DataFrame, scale: int) -> list[Check]:
    """Return two checks that compare the counts and sums that Spark computed from the Parquet files with those that
    pandas computed from the CSV. `totals` is the result of `results.flight_counts`.
    """
    counts = {
        "flights": len(year) * scale,
        "distinct_flights": len(year) * scale,
        "dead_letters": 0,
        "cancelled": int(year["dep_delay"].isna().sum()) * scale,
    }
    sums = {f"{name}_sum": int(year[name].sum()) * scale for name in SUMMED}
    return [
        _compare("Spark wrote every flight exactly once", totals, counts),
        _compare("Sums over the Parquet equal the CSV's", totals, sums),
    ]


def _compare(title: str, totals: Mapping[str, int], wanted: Mapping[str, int]) -> Check:
    wrong = [f"{name} must be {value}, got {totals[name]}" for name, value in wanted.items() if totals[name] != value]
    return Check(title, not wrong, "; ".join(wrong or [f"{name} {value:,}" for name, value in wanted.items()]))


def check_replicas(partitions: Sequence[PartitionFacts], replication_factor: int) -> Check:
    """Return a check that each partition has `replication_factor` replicas with equal bytes up to the high
    watermark.
    """
    size = sum(partition.size_bytes for partition in partitions)
    wrong = [str(p.partition) for p in partitions if not p.identical or len(p.replicas) != replication_factor]
    detail = f"{replication_factor} x {size / 1e6:.1f} MB in {len(partitions)} partitions, CRCs checked"
    if wrong:
        detail = f"partitions that differ: {', '.join(wrong)}"
    return Check("Replicas are identical byte for byte up to the high watermark", not wrong, detail)


class ReplicaDigest(NamedTuple):
    """Digest of a replica's whole batches below an offset. `next_offset` is the end offset of the last batch, or 0 if
    there is none.
    """

    next_offset: int
    records: int
    size_bytes: int
    sha256: str


def digest_replica(log_dir: Path, high_watermark: int) -> ReplicaDigest:
    """Digest the batches of a log directory that end at or below `high_watermark`. Stops at an incomplete batch.

    Raises CorruptRecordError for a wrong CRC, and OSError.
    """
    digest = hashlib.sha256()
    next_offset = records = size_bytes = 0
    for segment in sorted(log_dir.glob("*.log")):
        data = segment.read_bytes()
        end = 0
        for position, header in record_batch.iterate(data, allow_partial=True):
            if header.last_offset >= high_watermark:
                break
            record_batch.check_crc(data, position, header)
            end = position + header.size_bytes
            next_offset, records = header.next_offset, records + header.record_count
        digest.update(memoryview(data)[:end])
        size_bytes += end
    return ReplicaDigest(next_offset, records, size_bytes, digest.hexdigest())


def existing_log_dirs(log_dirs: Mapping[str, Path], count: int, timeout_seconds: float) -> dict[str, Path]:
    """Return the log directories that exist, by broker. Waits up to `timeout_seconds` for `count` of them; may return
    fewer.

    A restarted broker creates its directory late.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        existing = {name: log_dir for name, log_dir in log_dirs.items() if log_dir.is_dir()}
        if len(existing) >= count or time.monotonic() > deadline:
            return existing
        time.sleep(_RETRY_SECONDS)


def digest_until_equal(log_dirs: Sequence[Path], high_watermark: int, timeout_seconds: float) -> list[ReplicaDigest]:
    """Return the digest of each replica, in the order of `log_dirs`. Waits until all are equal and complete; after
    `timeout_seconds` they may differ.

    Followers that were restarted catch up meanwhile. If a log still cannot be read at the timeout, raises
    CorruptRecordError or OSError.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            digests = [digest_replica(log_dir, high_watermark) for log_dir in log_dirs]
        except (CorruptRecordError, OSError):
            if time.monotonic() > deadline:
                raise
        else:
            whole = all(digest.next_offset == high_watermark for digest in digests)
            if (whole and len(set(digests)) == 1) or time.monotonic() > deadline:
                return digests
        time.sleep(_RETRY_SECONDS)
