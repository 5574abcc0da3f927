"""Snapshots between drivers: FetchSnapshot over gRPC, broken, corrupt and given up transfers (630-08 to 630-12)."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC
from kipmesh.messages import (
    FetchSnapshotRequest,
    FetchSnapshotResponse,
    PartitionSnapshot,
    SnapshotId,
    TopicSnapshot,
)
from kipmesh.node import wall_ms
from kipmesh.node.quorum import snapshot_fetcher
from kipmesh.node.quorum.snapshot_fetcher import FETCH_BYTES
from kipmesh.storage.quorum.snapshot_file import SnapshotSummary
from kipmesh.storage.quorum.snapshots import ReceivedSnapshot
from tests.unit.node.quorum.quorum_support import CLUSTER_ID, Node, Quorum, until

VALUES = [random.Random(number).randbytes(200_000) for number in range(18)]
"""Several requests' worth of a snapshot, and a part of one."""

Handler = Callable[[FetchSnapshotRequest], Awaitable[FetchSnapshotResponse]]


def make_snapshot(node: Node) -> SnapshotId:
    """A snapshot at the high watermark, and a log that starts there."""
    replica, end = node.replica, node.driver.high_watermark
    snapshot_id = SnapshotId(end, node.driver.epoch)
    writer = replica.store.create(snapshot_id, last_contained_log_timestamp=wall_ms(), now_ms=wall_ms())
    for _ in writer.write(VALUES):
        pass
    writer.freeze()
    node.driver.post(replica.register_snapshot(snapshot_id))
    replica.raise_log_start(end)
    replica.clean()
    return snapshot_id


async def left_behind(quorum: Quorum) -> tuple[Node, Node, SnapshotId]:
    """The leader, a voter that is down, and the snapshot that it needs."""
    leader = await quorum.leader()
    down = quorum.followers(leader)[0]
    await down.kill()
    await quorum.append(leader, b"a", b"b")
    snapshot_id = make_snapshot(leader)
    await quorum.append(leader, b"c")
    return leader, down, snapshot_id


def parts(node: Node) -> list[str]:
    return [path.name for path in Path(node.folder).rglob("*.part")]


def asked_position(request: FetchSnapshotRequest) -> int:
    return request.topics[0].partitions[0].position


async def test_a_replica_below_the_log_start_gets_the_snapshot(tmp_path: Path) -> None:
    quorum = Quorum(tmp_path, 3, 1)
    observer = quorum.observers[101]
    async with quorum:
        await observer.kill()
        leader, voter, snapshot_id = await left_behind(quorum)
        end = leader.driver.high_watermark
        for behind in (voter, observer):
            await behind.boot()
            await quorum.committed(behind, end)
            assert behind.listener.of("installed") == [snapshot_id]
            assert behind.replica.latest_snapshot == snapshot_id
            assert behind.replica.log.log_start_offset == snapshot_id.end_offset
            assert behind.log_values == [b"c"]
            told = [kind for kind, _ in behind.listener.told if kind != "state"]
            assert told[0] == "installed", "before anything is called committed"
            whole = leader.replica.store.read(snapshot_id, 0, 1 << 30)
            assert behind.replica.store.read(snapshot_id, 0, 1 << 30) == whole
            assert parts(behind) == []
            assert not behind.failures
        # What it has now it keeps over a restart, and votes with.
        await voter.kill()
        await voter.boot()
        assert voter.driver.high_watermark == snapshot_id.end_offset
        assert voter.log_values == [b"c"]


async def test_a_broken_transfer_goes_on_where_it_broke(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3, request_timeout_ms=500) as quorum:
        leader, behind, snapshot_id = await left_behind(quorum)
        serve: Handler = leader.service.serve_snapshot
        positions: list[int] = []
        broken: set[int] = set()

        async def breaks(request: FetchSnapshotRequest) -> FetchSnapshotResponse:
            position = asked_position(request)
            positions.append(position)
            if position in (FETCH_BYTES, 2 * FETCH_BYTES) and position not in broken:
                broken.add(position)
                await asyncio.sleep(60)  # longer than anybody waits
            return await serve(request)

        leader.service.serve_snapshot = breaks  # type: ignore[method-assign]
        await behind.boot()
        await until(lambda: behind.listener.of("installed") == [snapshot_id])
        # A machine that stands still breaks more of them.
        assert positions == sorted(positions)
        assert set(positions) == {0, FETCH_BYTES, 2 * FETCH_BYTES, 3 * FETCH_BYTES}
        assert min(positions.count(FETCH_BYTES), positions.count(2 * FETCH_BYTES)) > 1
        assert behind.driver.corrupt_snapshots == 0


async def test_a_corrupt_transfer_is_deleted_counted_and_repeated(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3) as quorum:
        leader, behind, snapshot_id = await left_behind(quorum)
        serve: Handler = leader.service.serve_snapshot
        spoiled = 0

        async def spoils(request: FetchSnapshotRequest) -> FetchSnapshotResponse:
            nonlocal spoiled
            response = await serve(request)
            if spoiled < 2 and asked_position(request) == FETCH_BYTES:
                spoiled += 1
                topic = response.topics[0]
                answer = topic.partitions[0]
                data = bytearray(answer.unaligned_records)
                data[1000] ^= 1
                bad = topic._replace(partitions=(answer._replace(unaligned_records=bytes(data)),))
                response = response._replace(topics=(bad,))
            return response

        leader.service.serve_snapshot = spoils  # type: ignore[method-assign]
        await behind.boot()
        await until(lambda: behind.listener.of("installed") == [snapshot_id])
        assert behind.driver.corrupt_snapshots == 2
        assert parts(behind) == []
        await until(lambda: behind.log_values == [b"c"])
        assert not behind.failures


async def test_a_transfer_ends_with_the_leader_that_it_came_from(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3) as quorum:
        leader, behind, _ = await left_behind(quorum)
        serve: Handler = leader.service.serve_snapshot
        stuck = asyncio.Event()

        async def sticks(request: FetchSnapshotRequest) -> FetchSnapshotResponse:
            if asked_position(request):
                stuck.set()
                await asyncio.sleep(60)
            return await serve(request)

        leader.service.serve_snapshot = sticks  # type: ignore[method-assign]
        await behind.boot()
        await stuck.wait()
        assert len(parts(behind)) == 1
        await leader.kill()
        successor = await quorum.leader()
        assert successor is not behind, "its log is too short"
        await until(lambda: behind.log_values == [b"a", b"b", b"c"])
        await until(lambda: not parts(behind))
        assert behind.listener.of("installed") == []
        assert not behind.failures


async def test_a_check_that_takes_long_deposes_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does the replica take its leader for dead, nor the leader its quorum for gone: both times begin anew."""
    assert snapshot_fetcher.KEEPALIVES_PER_TIMEOUT >= 3, "one or two may be lost"
    monkeypatch.setattr(snapshot_fetcher, "KEEPALIVES_PER_TIMEOUT", 20_000)  # of the ten minutes of these tests: 30 ms
    begun, checked = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    complete = ReceivedSnapshot.complete

    def slow(received: ReceivedSnapshot) -> SnapshotSummary:
        loop.call_soon_threadsafe(begun.set)
        checked.wait(30)
        return complete(received)

    monkeypatch.setattr(ReceivedSnapshot, "complete", slow)
    async with Quorum(tmp_path, 3) as quorum:
        leader, behind, snapshot_id = await left_behind(quorum)
        third = next(node for node in quorum.followers(leader) if node is not behind)
        await behind.boot()
        await begun.wait()
        await third.kill()
        epoch = leader.driver.epoch
        follower_ends, leader_ends = set(), set()

        def both_last() -> bool:
            leadership = leader.driver.machine.leadership
            follower_ends.add(behind.driver.machine.deadline_ms)
            leader_ends.add(leadership and leadership.check_quorum_deadline_ms)
            return len(follower_ends) > 4 and len(leader_ends) > 4

        await until(both_last)
        checked.set()
        await until(lambda: behind.listener.of("installed"))
        await until(lambda: behind.log_values == [b"c"])
        assert behind.listener.of("installed") == [snapshot_id]
        assert (leader.driver.is_leader, leader.driver.epoch, behind.driver.epoch) == (True, epoch, epoch)
        await quorum.append(leader, b"d")


async def test_a_whole_snapshot_that_nobody_wants_any_more_is_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, checked = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    complete = ReceivedSnapshot.complete

    def slow(received: ReceivedSnapshot) -> SnapshotSummary:
        summary = complete(received)
        loop.call_soon_threadsafe(begun.set)
        checked.wait(30)
        return summary

    monkeypatch.setattr(ReceivedSnapshot, "complete", slow)
    async with Quorum(tmp_path, 3) as quorum:
        leader, behind, snapshot_id = await left_behind(quorum)
        await behind.boot()
        await begun.wait()
        assert behind.replica.store.snapshot_ids() == [snapshot_id]
        await asyncio.to_thread(behind.replica.clean)
        assert behind.replica.latest_snapshot is None
        await leader.kill()
        await quorum.leader()
        await until(lambda: behind.log_values == [b"a", b"b", b"c"])
        await asyncio.to_thread(behind.replica.clean)
        assert behind.replica.latest_snapshot is None
        checked.set()
        await until(lambda: not behind.replica.store.snapshot_ids())
        assert behind.replica.latest_snapshot is None
        assert behind.listener.of("installed") == []
        assert not behind.failures


async def test_a_stop_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3) as quorum:
        leader, behind, _ = await left_behind(quorum)
        serve: Handler = leader.service.serve_snapshot
        stuck = asyncio.Event()

        async def sticks(request: FetchSnapshotRequest) -> FetchSnapshotResponse:
            if asked_position(request):
                stuck.set()
                await asyncio.sleep(60)
            return await serve(request)

        leader.service.serve_snapshot = sticks  # type: ignore[method-assign]
        await behind.boot()
        await stuck.wait()
        await behind.stop()
        assert parts(behind) == []


async def test_what_a_request_for_a_snapshot_is_refused_with(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 1) as quorum:
        leader = await quorum.leader()
        await quorum.append(leader, b"a")
        snapshot_id = make_snapshot(leader)
        connection = leader.pool.get(quorum.voters[0].address)

        async def ask(asked: PartitionSnapshot, cluster_id: str | None = CLUSTER_ID, count: int = 1) -> tuple[int, int]:
            topics = (TopicSnapshot(CLUSTER_METADATA_TOPIC, (asked,) * count),)
            request = FetchSnapshotRequest(cluster_id, 7, 1 << 20, topics)
            response = await connection.call("Quorum", "FetchSnapshot", request, 10)
            return response.error_code, response.topics[0].partitions[0].error_code if response.topics else 0

        epoch = leader.driver.epoch
        asked = PartitionSnapshot(0, epoch, snapshot_id, 0)
        assert await ask(asked) == (0, 0)
        assert await ask(asked, None) == (0, 0)
        assert await ask(asked, "other") == (ErrorCode.INCONSISTENT_CLUSTER_ID, 0)
        assert await ask(asked, count=101) == (ErrorCode.INVALID_REQUEST, 0)
        for wrong, code in (
            (asked._replace(partition=1), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
            (asked._replace(current_leader_epoch=epoch - 1), ErrorCode.FENCED_LEADER_EPOCH),
            (asked._replace(current_leader_epoch=epoch + 1), ErrorCode.UNKNOWN_LEADER_EPOCH),
            (asked._replace(snapshot_id=SnapshotId(1, 0)), ErrorCode.SNAPSHOT_NOT_FOUND),
            (asked._replace(snapshot_id=SnapshotId(-1, -1)), ErrorCode.SNAPSHOT_NOT_FOUND),
            (asked._replace(snapshot_id=None), ErrorCode.SNAPSHOT_NOT_FOUND),
            (asked._replace(position=-1), ErrorCode.POSITION_OUT_OF_RANGE),
            (asked._replace(position=1 << 40), ErrorCode.POSITION_OUT_OF_RANGE),
        ):
            assert await ask(wrong) == (0, code)
        leader.replica.store.delete([snapshot_id])
        assert await ask(asked) == (0, ErrorCode.SNAPSHOT_NOT_FOUND)
