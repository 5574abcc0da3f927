"""Apache Kafka's DumpLogSegments reads segments and indexes of kipmesh without warnings."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kipmesh.core import record_batch
from kipmesh.core.config import TopicConfig
from kipmesh.storage import Log, LogManager, RealFileSystem
from kipmesh.testing import produced_batch

pytestmark = [pytest.mark.kafka_tools, pytest.mark.timeout(600)]

NOW = 1_700_000_000_000
CONFIG = TopicConfig.parse({"segment.bytes": 20_000, "index.interval.bytes": 1000, "max.message.bytes": 20_000})
OFFSET = re.compile(r"^\| offset: (\d+) ", re.MULTILINE)


def manager_of(path: Path, now_ms: int = NOW) -> LogManager:
    manager = LogManager(RealFileSystem(), [str(path)], cluster_id="cluster", node_id=1, defaults=CONFIG)
    manager.load(now_ms)
    return manager


def fill(log: Log, batches: int, *, epoch: int = 0, start_ms: int = NOW) -> None:
    """Append batches of all compressions with various sizes and unordered timestamps."""
    for number in range(batches):
        values = [f"value {number} {record} ".encode() * (1 + number % 40) for record in range(1 + number % 7)]
        batch = produced_batch(
            values,
            timestamp_ms=start_ms + number * 100 - (350 if number % 5 == 0 else 0),
            compression=number % 5,
            key=b"key" if number % 2 else None,
            headers=[("trace", b"1"), ("none", None)] if number % 3 else (),
        )
        log.append_as_leader(batch, epoch + number // 100, NOW)


def check(dump: Callable[..., str], log_dir: str, expected_offsets: list[int]) -> str:
    files = sorted(path for path in Path(log_dir).iterdir() if path.suffix in (".log", ".index", ".timeindex"))
    logs = [path for path in files if path.suffix == ".log"]
    assert all(path.with_suffix(".index").exists() for path in logs)
    before = {path: path.read_bytes() for path in files}
    output = dump(files, "--deep-iteration", "--print-data-log")
    assert [int(offset) for offset in OFFSET.findall(output)] == expected_offsets
    dump(files, "--verify-index-only")
    sanity = dump([path for path in files if path.suffix != ".log"], "--index-sanity-check")
    assert sanity.count("passed sanity check") + sanity.count("is empty") == len(files) - len(logs)
    assert {path: path.read_bytes() for path in files} == before
    return output


def test_kafka_reads_rolled_segments_of_all_compressions(tmp_path: Path, kafka_dump: Callable[..., str]) -> None:
    manager = manager_of(tmp_path)
    log = manager.create("golden", 0, b"i" * 16, CONFIG, NOW)
    fill(log, 300)
    assert len(log.segment_base_offsets) > 3
    manager.close(7)
    output = check(kafka_dump, log.dir, list(range(log.log_end_offset)))
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        assert f"compresscodec: {codec}" in output
    assert "key: key payload: value 1 0" in output
    assert "partitionLeaderEpoch: 2" in output
    assert sum(path.stat().st_size for path in Path(log.dir).glob("*.index")) > 8 * 20


def test_kafka_reads_a_log_recovered_from_a_torn_tail(tmp_path: Path, kafka_dump: Callable[..., str]) -> None:
    manager = manager_of(tmp_path)
    log = manager.create("golden", 0, b"i" * 16, CONFIG, NOW)
    fill(log, 120)
    end = log.log_end_offset
    manager.abandon()
    last = sorted(Path(log.dir).glob("*.log"))[-1]
    with last.open("ab") as file:
        file.write(last.read_bytes()[:150])
    manager = manager_of(tmp_path)
    log = manager.logs["golden", 0]
    assert log.log_end_offset == end
    fill(log, 30, epoch=5, start_ms=NOW + 50_000)
    manager.close(7)
    check(kafka_dump, log.dir, list(range(log.log_end_offset)))


def test_kafka_reads_a_log_after_truncation_and_another_epoch(tmp_path: Path, kafka_dump: Callable[..., str]) -> None:
    manager = manager_of(tmp_path)
    log = manager.create("golden", 0, b"i" * 16, CONFIG, NOW)
    fill(log, 250)
    log.truncate_to(log.segment_base_offsets[-2] + 40)
    fill(log, 100, epoch=9, start_ms=NOW + 10_000)
    follower = manager.create("golden", 1, b"i" * 16, CONFIG, NOW)
    while follower.log_end_offset < log.log_end_offset:
        follower.append_as_follower(log.read(follower.log_end_offset, 20_000, 1 << 60, True), NOW)
    follower.truncate_fully_and_start_at(500)
    header_end = 500
    data = record_batch.assign(produced_batch([b"after"] * 3), header_end, 10)
    follower.append_as_follower(data, NOW)
    manager.close(7)
    check(kafka_dump, log.dir, list(range(log.log_end_offset)))
    check(kafka_dump, follower.dir, [500, 501, 502])


def test_kafka_reads_log_append_time_of_an_open_log(tmp_path: Path, kafka_dump: Callable[..., str]) -> None:
    config = CONFIG.model_copy(update={"message_timestamp_type": "LogAppendTime"})
    manager = manager_of(tmp_path)
    log = manager.create("golden", 0, b"i" * 16, config, NOW)
    for number in range(200):
        log.append_as_leader(produced_batch([b"v" * 300] * 4, compression=number % 5), 0, NOW + number)
    rolled = sorted(Path(log.dir).glob("*.timeindex"))
    assert rolled
    output = kafka_dump([*rolled, *Path(log.dir).glob("*.log")], "--deep-iteration")
    assert "LogAppendTime: 1700000000199" in output
    manager.close(7)
    check(kafka_dump, log.dir, list(range(800)))


def test_kafka_reads_control_records_of_the_metadata_log(tmp_path: Path, kafka_dump: Callable[..., str]) -> None:
    manager = manager_of(tmp_path)
    log = manager.create("__cluster_metadata", 0, b"", CONFIG, NOW)
    leader_change = record_batch.build(
        [(b"\0\0\0\2", bytes.fromhex("000000000001010102000000010101000000010100"))],
        base_offset=0,
        leader_epoch=1,
        timestamp_ms=NOW,
        is_control=True,
    )
    log.append_as_leader(leader_change, 1, NOW)
    manager.close(-1)
    output = kafka_dump([f"{log.dir}/{0:020d}.log"])
    assert "isControl: true" in output
    assert "isvalid: true" in output
