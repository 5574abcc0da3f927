"""Nothing acknowledged is lost and replicas are byte for byte the same, whichever process dies."""

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
from tests.e2e.mesh_of_tests import Mesh, wait_for
from tests.e2e.writer_of_tests import Writer, check_nothing_lost, read_all

pytestmark = pytest.mark.slow

TOPIC = "events"
BROKERS = ["leader-1", "follower-1", "follower-2"]


def start(mesh: Mesh, *options: str, partitions: int = 2) -> None:
    mesh.local("up", *options)
    mesh.run("topic", "create", TOPIC, "--partitions", str(partitions), "--replication-factor", "3")


def leaders(mesh: Mesh) -> set[int]:
    return {one["leader_id"] for one in mesh.describe(TOPIC)["partitions"]}


async def in_thread(mesh: Mesh, command: str, *arguments: str) -> str:
    return await asyncio.to_thread(mesh.local, command, *arguments)


async def test_a_follower_dies_and_catches_up(mesh: Mesh) -> None:
    start(mesh)
    async with Writer(mesh.bootstrap, TOPIC) as writer:
        await writer.until(2000)
        await in_thread(mesh, "kill", "follower-2")
        await writer.until(2000)
        await in_thread(mesh, "start", "follower-2")
        await writer.until(2000)
    await asyncio.to_thread(mesh.wait_isr, TOPIC, 3)
    check_nothing_lost(writer.acknowledged, await read_all(mesh.bootstrap, TOPIC))
    for partition in range(2):
        data = mesh.wait_identical(f"{TOPIC}-{partition}", BROKERS)
        assert sum(header.record_count for _, header in record_batch.iterate(data)) > 1000


async def test_the_leader_dies_and_comes_back(mesh: Mesh) -> None:
    start(mesh)
    async with Writer(mesh.bootstrap, TOPIC) as writer:
        await writer.until(2000)
        await in_thread(mesh, "kill", "leader-1")
        await writer.until(2000)
        await asyncio.to_thread(wait_for, lambda: 1 not in leaders(mesh), "a broker that has heard of other leaders")
        await in_thread(mesh, "start", "leader-1")
        await writer.until(2000)
    await asyncio.to_thread(mesh.wait_isr, TOPIC, 3)
    check_nothing_lost(writer.acknowledged, await read_all(mesh.bootstrap, TOPIC))
    for partition in range(2):
        mesh.wait_identical(f"{TOPIC}-{partition}", BROKERS)


async def test_everything_dies_and_comes_back(mesh: Mesh) -> None:
    start(mesh)
    await asyncio.to_thread(mesh.wait_isr, TOPIC, 3)
    async with Writer(mesh.bootstrap, TOPIC) as writer:
        await writer.until(2000)
        for node in mesh.description["nodes"]:
            os.kill(node["pid"], signal.SIGKILL)
        assert "ready in" in await in_thread(mesh, "up")
        await writer.until(2000)
    await asyncio.to_thread(mesh.wait_isr, TOPIC, 3)
    check_nothing_lost(writer.acknowledged, await read_all(mesh.bootstrap, TOPIC))
    for partition in range(2):
        mesh.wait_identical(f"{TOPIC}-{partition}", BROKERS)


def test_a_clean_stop_needs_no_recovery(mesh: Mesh) -> None:
    start(mesh, partitions=1)
    mesh.run("produce", TOPIC, stdin="".join(f"{number}\n" for number in range(1000)))
    mesh.local("down", "--timeout", "60")
    for name in BROKERS:
        assert (Path(mesh.node(name)["dir"]) / "data" / ".kafka_cleanshutdown").exists()
    mesh.local("up")
    assert mesh.consume(TOPIC, 1000) == [str(number) for number in range(1000)]


def test_a_follower_with_records_of_its_own_truncates_them(mesh: Mesh) -> None:
    """The follower's log gets a batch that the leader never had, under an epoch that ended: it has to go."""
    start(mesh, partitions=1)
    mesh.run("produce", TOPIC, stdin="before\n" * 100)
    mesh.wait_isr(TOPIC, 3)
    mesh.wait_identical(f"{TOPIC}-0", BROKERS)
    mesh.local("kill", "follower-1")
    size, bytes_before = append_foreign_batch(mesh, "follower-1")
    mesh.run("produce", TOPIC, stdin="after\n" * 100)
    mesh.local("start", "follower-1")
    mesh.wait_isr(TOPIC, 3)
    data = mesh.wait_identical(f"{TOPIC}-0", BROKERS, at_least_bytes=size)
    assert data.startswith(bytes_before)
    assert b"the leader never had this" not in data
    assert sorted(set(mesh.consume(TOPIC, 200))) == ["after", "before"]
    lines = Path(mesh.node("follower-1")["log"]).read_text().splitlines()
    assert any("truncat" in json.loads(line)["event"] for line in lines if line.startswith("{"))


def append_foreign_batch(mesh: Mesh, name: str) -> tuple[int, bytes]:
    """With the follower's own storage code; returns the log's size and bytes from before."""
    before = mesh.log_bytes(name, f"{TOPIC}-0")
    manager = LogManager(
        RealFileSystem(),
        [str(Path(mesh.node(name)["dir"]) / "data")],
        cluster_id=mesh.description["cluster_id"],
        node_id=mesh.node(name)["node_id"],
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
    assert len(mesh.log_bytes(name, f"{TOPIC}-0")) > len(before)
    return len(before), before


def test_batches_can_be_dumped(mesh: Mesh) -> None:
    start(mesh, partitions=1)
    mesh.run("produce", TOPIC, "--key-separator", ":", stdin="a:1\nb:2\n")
    mesh.wait_isr(TOPIC, 3)
    file = Path(mesh.node("leader-1")["dir"]) / "data" / f"{TOPIC}-0" / f"{0:020}.log"
    lines = dump(mesh, file, "--print-records")
    assert lines[0]["base_offset"] == 0
    assert [(line["key"], line["value"]) for line in lines if "offset" in line] == [("a", "1"), ("b", "2")]
    metadata = Path(mesh.node("controller-1")["dir"]) / "data" / "__cluster_metadata-0" / f"{0:020}.log"
    types = [line["payload"]["type"] for line in dump(mesh, metadata, "--print-records") if "payload" in line]
    assert {"RegisterBrokerRecord", "TopicRecord", "PartitionRecord"} <= set(types)
    wait_for(lambda: file.stat().st_size > 0, "batch")
    broken = mesh.folder / "broken.log"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    broken.write_bytes(bytes(data) + b"garbage" * 20)
    lines = dump(mesh, broken, code=1)
    first, *_ = wrong = [str(line["error"]) for line in lines if "error" in line]  # of the last batch, and behind it
    assert "wrong CRC" in first
    assert len(wrong) == 2
    assert "error" in lines[-1]


def dump(mesh: Mesh, file: Path, *options: str, code: int = 0) -> list[dict[str, Any]]:
    done = run_command("log", "dump", file, "--json", *options)
    assert done.returncode == code, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
