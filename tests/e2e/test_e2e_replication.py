"""Replication under failures: no acknowledged record is lost, and replicas are byte-identical."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kipmesh.core import record_batch
from kipmesh.core.config import TopicConfig
from kipmesh.storage.fs import RealFileSystem
from kipmesh.storage.log_manager import LogManager
from tests.command import run_command
from tests.e2e.cli_of_tests import ClusterCli, wait_for
from tests.e2e.writer_of_tests import Writer, check_nothing_lost, read_all

pytestmark = pytest.mark.slow

TOPIC = "events"
BROKERS = ["leader-1", "follower-1", "follower-2"]


def start(cluster: ClusterCli, *options: str, partitions: int = 2) -> None:
    cluster.local("up", *options)
    cluster.run("topic", "create", TOPIC, "--partitions", str(partitions), "--replication-factor", "3")


def leaders(cluster: ClusterCli) -> set[int]:
    return {partition["leader_id"] for partition in cluster.describe(TOPIC)["partitions"]}


async def in_thread(cluster: ClusterCli, command: str, *arguments: str) -> str:
    return await asyncio.to_thread(cluster.local, command, *arguments)


async def test_killed_follower_catches_up_after_restart(cluster: ClusterCli) -> None:
    start(cluster)
    async with Writer(cluster.bootstrap, TOPIC) as writer:
        await writer.until(2000)
        await in_thread(cluster, "kill", "follower-2")
        await writer.until(2000)
        await in_thread(cluster, "start", "follower-2")
        await writer.until(2000)
    await asyncio.to_thread(cluster.wait_isr, TOPIC, 3)
    check_nothing_lost(writer.acknowledged, await read_all(cluster.bootstrap, TOPIC))
    for partition in range(2):
        data = cluster.wait_identical(f"{TOPIC}-{partition}", BROKERS)
        assert sum(header.record_count for _, header in record_batch.iterate(data)) > 1000


async def test_no_acknowledged_record_is_lost_when_the_leader_is_killed(cluster: ClusterCli) -> None:
    start(cluster)
    async with Writer(cluster.bootstrap, TOPIC) as writer:
        await writer.until(2000)
        await in_thread(cluster, "kill", "leader-1")
        await writer.until(2000)
        await asyncio.to_thread(wait_for, lambda: 1 not in leaders(cluster), "new leaders in the metadata")
        await in_thread(cluster, "start", "leader-1")
        await writer.until(2000)
    await asyncio.to_thread(cluster.wait_isr, TOPIC, 3)
    check_nothing_lost(writer.acknowledged, await read_all(cluster.bootstrap, TOPIC))
    for partition in range(2):
        cluster.wait_identical(f"{TOPIC}-{partition}", BROKERS)


async def test_no_acknowledged_record_is_lost_when_all_nodes_are_killed(cluster: ClusterCli) -> None:
    start(cluster)
    await asyncio.to_thread(cluster.wait_isr, TOPIC, 3)
    async with Writer(cluster.bootstrap, TOPIC) as writer:
        await writer.until(2000)
        for node in cluster.description["nodes"]:
            os.kill(node["pid"], signal.SIGKILL)
        assert "ready in" in await in_thread(cluster, "up")
        await writer.until(2000)
    await asyncio.to_thread(cluster.wait_isr, TOPIC, 3)
    check_nothing_lost(writer.acknowledged, await read_all(cluster.bootstrap, TOPIC))
    for partition in range(2):
        cluster.wait_identical(f"{TOPIC}-{partition}", BROKERS)


def test_clean_shutdown_writes_the_marker_file_and_keeps_records(cluster: ClusterCli) -> None:
    start(cluster, partitions=1)
    cluster.run("produce", TOPIC, stdin="".join(f"{number}\n" for number in range(1000)))
    cluster.local("down", "--timeout", "60")
    for name in BROKERS:
        assert (Path(cluster.node(name)["dir"]) / "data" / ".kafka_cleanshutdown").exists()
    cluster.local("up")
    assert cluster.consume(TOPIC, 1000) == [str(number) for number in range(1000)]


def test_follower_truncates_a_batch_that_the_leader_does_not_have(cluster: ClusterCli) -> None:
    """The test appends a batch of an earlier epoch to the stopped follower's log."""
    start(cluster, partitions=1)
    cluster.run("produce", TOPIC, stdin="before\n" * 100)
    cluster.wait_isr(TOPIC, 3)
    cluster.wait_identical(f"{TOPIC}-0", BROKERS)
    cluster.local("kill", "follower-1")
    size, bytes_before = append_foreign_batch(cluster, "follower-1")
    cluster.run("produce", TOPIC, stdin="after\n" * 100)
    cluster.local("start", "follower-1")
    cluster.wait_isr(TOPIC, 3)
    data = cluster.wait_identical(f"{TOPIC}-0", BROKERS, at_least_bytes=size)
    assert data.startswith(bytes_before)
    assert b"the leader never had this" not in data
    assert sorted(set(cluster.consume(TOPIC, 200))) == ["after", "before"]
    lines = Path(cluster.node("follower-1")["log"]).read_text().splitlines()
    assert any("truncat" in json.loads(line)["event"] for line in lines if line.startswith("{"))


def append_foreign_batch(cluster: ClusterCli, name: str) -> tuple[int, bytes]:
    """Append a batch with the storage code; return the previous size and bytes of the log."""
    before = cluster.log_bytes(name, f"{TOPIC}-0")
    manager = LogManager(
        RealFileSystem(),
        [str(Path(cluster.node(name)["dir"]) / "data")],
        cluster_id=cluster.description["cluster_id"],
        node_id=cluster.node(name)["node_id"],
        defaults=TopicConfig(),
        open_files_max=64,
    )
    manager.load(0)
    log = manager.get(TOPIC, 0)
    assert log is not None
    epoch = log.latest_epoch
    records = [(None, b"the leader never had this")] * 300
    log.append_as_follower(
        record_batch.build(records, base_offset=log.log_end_offset, leader_epoch=epoch, timestamp_ms=0), 0
    )
    log.flush()
    manager.abandon()
    assert len(cluster.log_bytes(name, f"{TOPIC}-0")) > len(before)
    return len(before), before


def test_log_dump_prints_records_and_reports_corrupt_batches(cluster: ClusterCli) -> None:
    start(cluster, partitions=1)
    cluster.run("produce", TOPIC, "--key-separator", ":", stdin="a:1\nb:2\n")
    cluster.wait_isr(TOPIC, 3)
    file = Path(cluster.node("leader-1")["dir"]) / "data" / f"{TOPIC}-0" / f"{0:020}.log"
    lines = dump(cluster, file, "--print-records")
    assert lines[0]["base_offset"] == 0
    assert [(line["key"], line["value"]) for line in lines if "offset" in line] == [("a", "1"), ("b", "2")]
    metadata = Path(cluster.node("controller-1")["dir"]) / "data" / "__cluster_metadata-0" / f"{0:020}.log"
    types = [line["payload"]["type"] for line in dump(cluster, metadata, "--print-records") if "payload" in line]
    assert {"RegisterBrokerRecord", "TopicRecord", "PartitionRecord"} <= set(types)
    wait_for(lambda: file.stat().st_size > 0, "batch")
    broken = cluster.directory / "broken.log"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    broken.write_bytes(bytes(data) + b"garbage" * 20)
    lines = dump(cluster, broken, code=1)
    first, *_ = wrong = [
        str(line["error"]) for line in lines if "error" in line
    ]  # for the last batch and for the bytes after it
    assert "wrong CRC" in first
    assert len(wrong) == 2
    assert "error" in lines[-1]


def dump(cluster: ClusterCli, file: Path, *options: str, code: int = 0) -> list[dict[str, Any]]:
    done = run_command("log", "dump", file, "--json", *options)
    assert done.returncode == code, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
