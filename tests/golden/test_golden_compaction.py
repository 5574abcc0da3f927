"""Apache Kafka's DumpLogSegments reads all records of compacted segments without warnings."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kipmesh.core import record_batch
from kipmesh.core.config import TopicConfig
from kipmesh.storage import LogManager, RealFileSystem
from kipmesh.storage.log.compaction import compact_now
from kipmesh.testing import produced_batch

pytestmark = [pytest.mark.kafka_tools, pytest.mark.timeout(600)]

NOW = 1_700_000_000_000
CONFIG = TopicConfig.parse({"cleanup.policy": "compact", "segment.bytes": 20_000, "index.interval.bytes": 500})
RECORD = re.compile(r"^\| offset: (\d+) CreateTime: (\d+) .*? key: (\S+)(?: payload: (.*))?$", re.MULTILINE)


def test_kafka_reads_compacted_segments(tmp_path: Path, kafka_dump: Callable[..., str]) -> None:
    manager = LogManager(RealFileSystem(), [str(tmp_path)], cluster_id="cluster", node_id=1, defaults=CONFIG)
    manager.load(NOW)
    log = manager.create("golden", 0, b"i" * 16, CONFIG, NOW)
    expected: dict[str, tuple[int, int, str | None]] = {}
    for number in range(600):
        key = f"key-{number * number % 97}"
        values = [f"value {number} {record} ".encode() * 8 for record in range(1 + number % 3)]
        last = None if number % 29 == 0 else values[-1]
        producer = (number % 7, 0, 1000 + number) if number % 10 == 0 else (-1, -1, -1)
        batch = produced_batch(
            [*values[:-1], last],
            key=key.encode(),
            timestamp_ms=NOW + number * 10,
            compression=number % 5,
            producer=producer if number < 70 else (-1, -1, -1),
        )
        info = log.append_as_leader(batch, number // 200, NOW)
        expected[key] = (info.last_offset, NOW + number * 10 + len(values) - 1, None if last is None else last.decode())
    log.roll(NOW)
    log.flush()
    size = log.size_bytes
    assert compact_now(log, NOW, log.log_end_offset)
    assert log.size_bytes < size / 3
    headers = [
        header
        for base in log.segment_base_offsets[:-1]
        for _, header in record_batch.iterate(log.read(base, 1 << 20, log.log_end_offset, True))
    ]
    assert {header.compression for header in headers if header.record_count} == {0, 1, 2, 3, 4}
    assert any(header.producer_id >= 0 and not header.record_count for header in headers)
    manager.close(7)
    files = sorted(path for path in Path(log.dir).iterdir() if path.suffix in (".log", ".index", ".timeindex"))
    output = kafka_dump(files, "--deep-iteration", "--print-data-log", compacted=True)
    found = {key: (int(at), int(ms), value or None) for at, ms, key, value in RECORD.findall(output)}
    assert found == expected, output
    assert len(RECORD.findall(output)) == len(expected)
    kafka_dump(files, "--verify-index-only")
