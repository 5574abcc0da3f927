"""The proofs of the demo: each compares what came out with the CSV or with another replica, and is PASS or FAIL.

What the topic must hold is built from the CSV and not from what the producer says: a flight's partition follows from
its carrier (Kafka's murmur2), its place there from the order of scheduled departure.

Replicas are compared by their files. A log is its segments in order. Where one replica rolled its segments does not
matter: the batches up to the high watermark are hashed as one sequence of bytes.
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
    """One partition at the end of the run; the digest is that of the log's bytes on every replica."""

    partition: int
    records: int
    size_bytes: int
    high_watermark: int
    replicas: tuple[str, ...]
    identical: bool
    sha256: str


class SequenceDigest:
    """Records of one partition in their order: their number, their bytes and a SHA-256 over keys and values."""

    def __init__(self) -> None:
        self.records = self.payload_bytes = 0
        self._hash = hashlib.sha256()

    def add(self, key: bytes, value: bytes) -> None:
        """Append a record. Lengths are not hashed: neither keys nor values contain a zero byte or a line feed."""
        self._hash.update(b"%b\0%b\n" % (key, value))
        self.records += 1
        self.payload_bytes += len(key) + len(value)

    def digest(self) -> tuple[int, str]:
        """The number of records, and the digest so far."""
        return self.records, self._hash.hexdigest()


def expecting(flights: Iterable[Flight], expected: Sequence[SequenceDigest]) -> Iterator[Flight]:
    """The same flights, each added to what its partition must hold."""
    for flight in flights:
        expected[partition_of_key(flight.key, len(expected))].add(*flight)
        yield flight


def read_topic(bootstrap: str, topic: str, partitions: int) -> list[SequenceDigest]:
    """What is in the topic now, partition by partition, as a consumer reads it."""
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
    """Counts and, partition by partition, order and content of the topic against the CSV."""
    read, wanted = sum(one.records for one in found), sum(one.records for one in expected)
    counts = Check("The topic holds every flight once", read == wanted, f"{read:,} of {wanted:,} records")
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
    """Counts and sums of the Parquet that the stream wrote, computed by Spark, against the CSV, summed by pandas."""
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
    wrong = [f"{name} is {totals[name]} and not {value}" for name, value in wanted.items() if totals[name] != value]
    return Check(title, not wrong, "; ".join(wrong or [f"{name} {value:,}" for name, value in wanted.items()]))


def check_replicas(partitions: Sequence[PartitionFacts], replication_factor: int) -> Check:
    """The replicas against each other, byte for byte up to the high watermark."""
    size = sum(partition.size_bytes for partition in partitions)
    wrong = [str(p.partition) for p in partitions if not p.identical or len(p.replicas) != replication_factor]
    detail = f"{replication_factor} x {size / 1e6:.1f} MB in {len(partitions)} partitions, CRCs checked"
    if wrong:
        detail = f"partitions that differ: {', '.join(wrong)}"
    return Check("Replicas are identical byte for byte up to the high watermark", not wrong, detail)


class ReplicaDigest(NamedTuple):
    """A replica's batches below an offset."""

    next_offset: int
    records: int
    size_bytes: int
    sha256: str


def digest_replica(folder: Path, high_watermark: int) -> ReplicaDigest:
    """Read the segments in `folder` up to `high_watermark`; a batch that is not whole yet ends the reading."""
    digest = hashlib.sha256()
    next_offset = records = size_bytes = 0
    for segment in sorted(folder.glob("*.log")):
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


def folders_of_replicas(folders: Mapping[str, Path], count: int, timeout_seconds: float) -> dict[str, Path]:
    """Those that are there, when so many are or the time is over: a broker that was away makes its own later."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        there = {name: folder for name, folder in folders.items() if folder.is_dir()}
        if len(there) >= count or time.monotonic() > deadline:
            return there
        time.sleep(_RETRY_SECONDS)


def digest_until_equal(folders: Sequence[Path], high_watermark: int, timeout_seconds: float) -> list[ReplicaDigest]:
    """The digest of each replica, read again until all are equal and complete, or for `timeout_seconds`.

    A follower that was away catches up meanwhile, which is what the waiting is for.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            digests = [digest_replica(folder, high_watermark) for folder in folders]
        except (CorruptRecordError, OSError):
            if time.monotonic() > deadline:
                raise
        else:
            whole = all(digest.next_offset == high_watermark for digest in digests)
            if (whole and len(set(digests)) == 1) or time.monotonic() > deadline:
                return digests
        time.sleep(_RETRY_SECONDS)
