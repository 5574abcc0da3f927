"""Offsets by timestamp: reads and decompression of a search."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from crc32c import crc32c

from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import CorruptRecordError
from kipmesh.storage import Log, open_log
from kipmesh.storage.compression import decompress
from kipmesh.testing import produced_batch
from simulation.faulty_fs import Fault, FaultyFileSystem

NOW = 1_700_000_000_000
DIRECTORY = "/data/t-0"
CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


class CountingFileSystem(FaultyFileSystem):
    """Counts reads of log files."""

    log_reads = 0

    def check(self, operation: str, path: str) -> Fault | None:
        if operation == "read" and path.endswith(".log"):
            self.log_reads += 1
        return super().check(operation, path)


def make_log(fs: FaultyFileSystem, **config: object) -> Log:
    fs.make_dirs("/data")
    return open_log(fs, DIRECTORY, "t", 0, TopicConfig.parse(config), NOW, topic_id=b"i" * 16)


def append(log: Log, values: list[bytes], compression: int = 0, timestamp_ms: int = NOW) -> None:
    log.append_as_leader(produced_batch(values, compression=compression, timestamp_ms=timestamp_ms), 0, NOW)


@pytest.mark.parametrize("codec", CODECS)
def test_timestamp_search_finds_record_in_compressed_batch(codec: str) -> None:
    log = make_log(FaultyFileSystem())
    append(log, [b"v" * 100] * 50, CODECS[codec])
    assert log.offset_for_timestamp(NOW + 20, 99) == (NOW + 20, 20, 0)
    assert log.max_timestamp_offset(99) == (NOW + 49, 49, 0)
    assert log.max_timestamp_offset(30) == (NOW + 29, 29, 0)


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "none"])
def test_batch_exceeding_decompression_limit_counts_as_one_record(codec: str) -> None:
    log = make_log(FaultyFileSystem(), **{"max.message.bytes": 10 << 20})
    append(log, [b"v"])
    append(log, [bytes(1 << 20)] * 64, CODECS[codec], NOW + 1000)
    tracemalloc.start()
    try:
        assert log.offset_for_timestamp(NOW + 1010, 99) == (NOW + 1063, 1, 0)
        assert log.max_timestamp_offset(99) == (NOW + 1063, 1, 0)
        assert tracemalloc.get_traced_memory()[1] < 60 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", CODECS.values())
def test_decompression_of_invalid_data_raises_corrupt_record_error(codec: int) -> None:
    if codec:
        with pytest.raises(CorruptRecordError):
            decompress(b"\x82SNAPPY\x00" + bytes(9) + b"\xff" * 20, codec, 100)
    with pytest.raises(CorruptRecordError, match="must be 0 to 4"):
        decompress(b"", 5, 100)


def test_decompression_limit_applies_to_framed_snappy() -> None:
    batch = produced_batch([b"v" * 1000], compression=2)
    records = batch[61:]
    assert records.startswith(b"\x82SNAPPY")
    size = len(decompress(records, 2, 2000))
    assert size > 1000
    assert len(decompress(records + records[16:], 2, 2 * size)) == 2 * size
    with pytest.raises(CorruptRecordError):
        decompress(records + records[16:], 2, 2 * size - 1)


def test_search_returns_records_of_incomplete_batch() -> None:
    log = make_log(FaultyFileSystem())
    batch = bytearray(produced_batch([b"v"] * 3, timestamp_ms=NOW))
    struct.pack_into(">i", batch, 23, 9)
    struct.pack_into(">i", batch, 57, 10)
    struct.pack_into(">I", batch, 17, crc32c(bytes(batch[21:])))
    log.append_as_leader(bytes(batch), 0, NOW)
    assert log.offset_for_timestamp(NOW + 1, 99) == (NOW + 1, 1, 0)


@pytest.mark.parametrize("largest_first", [False, True])
def test_largest_timestamp_after_log_start_is_found_with_index(largest_first: bool) -> None:
    fs = CountingFileSystem()
    log = make_log(fs, **{"index.interval.bytes": 1000})
    for number in range(2000):
        append(log, [b"v" * 400], timestamp_ms=NOW - number if largest_first else NOW + number)
    log.increment_log_start_offset(1900)
    fs.log_reads = 0
    assert log.max_timestamp_offset(1990) == ((NOW - 1900, 1900, 0) if largest_first else (NOW + 1989, 1989, 0))
    assert fs.log_reads < 10
