"""Whether the replicas of a partition are the same bytes, from their files.

A log is its segments in order. Where one replica rolled its segments does not matter: the batches up to the high
watermark are hashed as one sequence of bytes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kipmesh.core import record_batch
from kipmesh.core.errors import CorruptRecordError

_RETRY_SECONDS: Final = 0.2


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
