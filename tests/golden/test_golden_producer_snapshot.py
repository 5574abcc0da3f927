"""Apache Kafka's DumpLogSegments reads producer snapshots of kipmesh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kipmesh.core.config import TopicConfig
from kipmesh.storage import LogManager, RealFileSystem
from kipmesh.testing import produced_batch

pytestmark = [pytest.mark.kafka_tools, pytest.mark.timeout(600)]

NOW = 1_700_000_000_000
CONFIG = TopicConfig.parse({"segment.bytes": 2000})


def test_kafka_reads_producer_snapshots_of_rolled_and_closed_logs(
    tmp_path: Path, kafka_dump: Callable[..., str]
) -> None:
    manager = LogManager(RealFileSystem(), [str(tmp_path)], cluster_id="cluster", node_id=1, defaults=CONFIG)
    manager.load(NOW)
    log = manager.create("golden", 0, b"i" * 16, CONFIG, NOW)
    for number in range(20):
        for pid, epoch in ((1001, 0), (2_000_000_000_007, 3)):
            batch = produced_batch([b"v" * 50] * 2, timestamp_ms=NOW + number, producer=(pid, epoch, 2 * number))
            log.append_as_leader(batch, 4, NOW)
    manager.close(7)
    files = sorted(Path(log.dir).glob("*.snapshot"))
    assert len(files) > 2
    assert int(files[-1].stem) == log.log_end_offset == 80
    for file in files:
        assert "producerId: 1001 producerEpoch: 0" in kafka_dump([file])
    output = kafka_dump([files[-1]])
    for pid, epoch, last in ((1001, 0, 77), (2_000_000_000_007, 3, 79)):
        (line,) = [line for line in output.splitlines() if f"producerId: {pid} " in line]
        assert f"producerEpoch: {epoch} coordinatorEpoch: -1 " in line, line
        assert f"lastTimestamp: {NOW + 20}" in line, line
        assert "firstSequence: 38 lastSequence: 39" in line, line
        assert f"lastOffset: {last} offsetDelta: 1" in line, line
    logs = sorted(Path(log.dir).glob("*.log"))
    dumped = kafka_dump(logs, "--deep-iteration")
    assert "producerId: 2000000000007 producerEpoch: 3" in dumped
