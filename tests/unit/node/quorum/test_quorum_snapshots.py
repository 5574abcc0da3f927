"""FetchSnapshot over gRPC: complete, broken, corrupt and cancelled transfers (630-08 to 630-12)."""

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
"""A snapshot of three full FetchSnapshot responses and a partial one."""

Handler = Callable[[FetchSnapshotRequest], Awaitable[FetchSnapshotResponse]]


def make_snapshot(node: Node) -> SnapshotId:
    """Create a snapshot at the high watermark and start the log there."""
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


async def leader_and_stale_voter(quorum: Quorum) -> tuple[Node, Node, SnapshotId]:
    """Return the leader, a stopped voter, and the snapshot that the voter needs."""
    leader = await quorum.leader()
    down = quorum.followers(leader)[0]
    await down.kill()
    await quorum.append(leader, b"a", b"b")
    snapshot_id = make_snapshot(leader)
    await quorum.append(leader, b"c")
    return leader, down, snapshot_id


def parts(node: Node) -> list[str]:
    return [path.name for path in Path(node.directory).rglob("*.part")]


def requested_position(request: FetchSnapshotRequest) -> int:
    return request.topics[0].partitions[0].position


async def boot_with_hanging_transfer(leader: Node, stale: Node) -> None:
    """Boot the stale voter; return when the leader hangs within the snapshot transfer."""
    serve: Handler = leader.service.serve_snapshot
    is_hanging = asyncio.Event()

    async def hang(request: FetchSnapshotRequest) -> FetchSnapshotResponse:
        if requested_position(request):
            is_hanging.set()
            await asyncio.sleep(60)
        return await serve(request)

    leader.service.serve_snapshot = hang  # type: ignore[method-assign]
    await stale.boot()
    await is_hanging.wait()


async def test_replica_below_log_start_installs_snapshot(tmp_path: Path) -> None:
    quorum = Quorum(tmp_path, 3, 1)
    observer = quorum.observers[101]
    async with quorum:
        await observer.kill()
        leader, voter, snapshot_id = await leader_and_stale_voter(quorum)
        end = leader.driver.high_watermark
        for stale in (voter, observer):
            await stale.boot()
            await quorum.committed(stale, end)
            assert stale.listener.of("installed") == [snapshot_id]
            assert stale.replica.latest_snapshot == snapshot_id
            assert stale.replica.log.log_start_offset == snapshot_id.end_offset
            assert stale.log_values == [b"c"]
            events = [kind for kind, _ in stale.listener.events if kind != "state"]
            assert events[0] == "installed", "the snapshot is installed before any commit event"
            whole = leader.replica.store.read(snapshot_id, 0, 1 << 30)
            assert stale.replica.store.read(snapshot_id, 0, 1 << 30) == whole
            assert parts(stale) == []
            assert not stale.failures
        # The voter keeps the snapshot and the log across a restart.
        await voter.kill()
        await voter.boot()
        assert voter.driver.high_watermark == snapshot_id.end_offset
        assert voter.log_values == [b"c"]


async def test_broken_transfer_resumes_at_last_position(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3, request_timeout_ms=500) as quorum:
        leader, stale, snapshot_id = await leader_and_stale_voter(quorum)
        serve: Handler = leader.service.serve_snapshot
        positions: list[int] = []
        broken: set[int] = set()

        async def time_out_once(request: FetchSnapshotRequest) -> FetchSnapshotResponse:
            position = requested_position(request)
            positions.append(position)
            if position in (FETCH_BYTES, 2 * FETCH_BYTES) and position not in broken:
                broken.add(position)
                await asyncio.sleep(60)  # longer than the request timeout
            return await serve(request)

        leader.service.serve_snapshot = time_out_once  # type: ignore[method-assign]
        await stale.boot()
        await until(lambda: stale.listener.of("installed") == [snapshot_id])
        # A slow machine may break more requests.
        assert positions == sorted(positions)
        assert set(positions) == {0, FETCH_BYTES, 2 * FETCH_BYTES, 3 * FETCH_BYTES}
        assert min(positions.count(FETCH_BYTES), positions.count(2 * FETCH_BYTES)) > 1
        assert stale.driver.corrupt_snapshots == 0


async def test_corrupt_transfer_is_deleted_counted_and_repeated(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3) as quorum:
        leader, stale, snapshot_id = await leader_and_stale_voter(quorum)
        serve: Handler = leader.service.serve_snapshot
        corrupted = 0

        async def corrupt(request: FetchSnapshotRequest) -> FetchSnapshotResponse:
            nonlocal corrupted
            response = await serve(request)
            if corrupted < 2 and requested_position(request) == FETCH_BYTES:
                corrupted += 1
                topic = response.topics[0]
                partition = topic.partitions[0]
                data = bytearray(partition.unaligned_records)
                data[1000] ^= 1
                bad = topic._replace(partitions=(partition._replace(unaligned_records=bytes(data)),))
                response = response._replace(topics=(bad,))
            return response

        leader.service.serve_snapshot = corrupt  # type: ignore[method-assign]
        await stale.boot()
        await until(lambda: stale.listener.of("installed") == [snapshot_id])
        assert stale.driver.corrupt_snapshots == 2
        assert parts(stale) == []
        await until(lambda: stale.log_values == [b"c"])
        assert not stale.failures


async def test_leader_change_cancels_transfer(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3) as quorum:
        leader, stale, _ = await leader_and_stale_voter(quorum)
        await boot_with_hanging_transfer(leader, stale)
        assert len(parts(stale)) == 1
        await leader.kill()
        successor = await quorum.leader()
        assert successor is not stale, "its log is too short"
        await until(lambda: stale.log_values == [b"a", b"b", b"c"])
        await until(lambda: not parts(stale))
        assert stale.listener.of("installed") == []
        assert not stale.failures


async def test_slow_snapshot_check_causes_no_election(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """During the check, the replica renews its fetch timeout and the check-quorum timeout of the leader."""
    assert snapshot_fetcher.KEEPALIVES_PER_TIMEOUT >= 3, "one or two keepalives may be lost"
    monkeypatch.setattr(
        snapshot_fetcher, "KEEPALIVES_PER_TIMEOUT", 20_000
    )  # every 30 ms at a fetch timeout of ten minutes
    started, checked = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    complete = ReceivedSnapshot.complete

    def complete_slowly(received: ReceivedSnapshot) -> SnapshotSummary:
        loop.call_soon_threadsafe(started.set)
        checked.wait(30)
        return complete(received)

    monkeypatch.setattr(ReceivedSnapshot, "complete", complete_slowly)
    async with Quorum(tmp_path, 3) as quorum:
        leader, stale, snapshot_id = await leader_and_stale_voter(quorum)
        third = next(node for node in quorum.followers(leader) if node is not stale)
        await stale.boot()
        await started.wait()
        await third.kill()
        epoch = leader.driver.epoch
        follower_deadlines, leader_deadlines = set(), set()

        def both_are_renewed() -> bool:
            leadership = leader.driver.machine.leadership
            follower_deadlines.add(stale.driver.machine.deadline_ms)
            leader_deadlines.add(leadership and leadership.check_quorum_deadline_ms)
            return len(follower_deadlines) > 4 and len(leader_deadlines) > 4

        await until(both_are_renewed)
        checked.set()
        await until(lambda: stale.listener.of("installed"))
        await until(lambda: stale.log_values == [b"c"])
        assert stale.listener.of("installed") == [snapshot_id]
        assert (leader.driver.is_leader, leader.driver.epoch, stale.driver.epoch) == (True, epoch, epoch)
        await quorum.append(leader, b"d")


async def test_snapshot_completed_after_leader_change_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, checked = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    complete = ReceivedSnapshot.complete

    def complete_slowly(received: ReceivedSnapshot) -> SnapshotSummary:
        summary = complete(received)
        loop.call_soon_threadsafe(started.set)
        checked.wait(30)
        return summary

    monkeypatch.setattr(ReceivedSnapshot, "complete", complete_slowly)
    async with Quorum(tmp_path, 3) as quorum:
        leader, stale, snapshot_id = await leader_and_stale_voter(quorum)
        await stale.boot()
        await started.wait()
        assert stale.replica.store.snapshot_ids() == [snapshot_id]
        await asyncio.to_thread(stale.replica.clean)
        assert stale.replica.latest_snapshot is None
        await leader.kill()
        await quorum.leader()
        await until(lambda: stale.log_values == [b"a", b"b", b"c"])
        await asyncio.to_thread(stale.replica.clean)
        assert stale.replica.latest_snapshot is None
        checked.set()
        await until(lambda: not stale.replica.store.snapshot_ids())
        assert stale.replica.latest_snapshot is None
        assert stale.listener.of("installed") == []
        assert not stale.failures


async def test_stop_during_transfer_deletes_partial_snapshot(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3) as quorum:
        leader, stale, _ = await leader_and_stale_voter(quorum)
        await boot_with_hanging_transfer(leader, stale)
        await stale.stop()
        assert parts(stale) == []


async def test_invalid_fetch_snapshot_requests_are_refused(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 1) as quorum:
        leader = await quorum.leader()
        await quorum.append(leader, b"a")
        snapshot_id = make_snapshot(leader)
        connection = leader.pool.get(quorum.voters[0].address)

        async def fetch_snapshot(
            requested: PartitionSnapshot, cluster_id: str | None = CLUSTER_ID, count: int = 1
        ) -> tuple[int, int]:
            topics = (TopicSnapshot(CLUSTER_METADATA_TOPIC, (requested,) * count),)
            request = FetchSnapshotRequest(cluster_id, 7, 1 << 20, topics)
            response = await connection.call("Quorum", "FetchSnapshot", request, 10)
            return response.error_code, response.topics[0].partitions[0].error_code if response.topics else 0

        epoch = leader.driver.epoch
        requested = PartitionSnapshot(0, epoch, snapshot_id, 0)
        assert await fetch_snapshot(requested) == (0, 0)
        assert await fetch_snapshot(requested, None) == (0, 0)
        assert await fetch_snapshot(requested, "other") == (ErrorCode.INCONSISTENT_CLUSTER_ID, 0)
        assert await fetch_snapshot(requested, count=101) == (ErrorCode.INVALID_REQUEST, 0)
        for wrong, code in (
            (requested._replace(partition=1), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
            (requested._replace(current_leader_epoch=epoch - 1), ErrorCode.FENCED_LEADER_EPOCH),
            (requested._replace(current_leader_epoch=epoch + 1), ErrorCode.UNKNOWN_LEADER_EPOCH),
            (requested._replace(snapshot_id=SnapshotId(1, 0)), ErrorCode.SNAPSHOT_NOT_FOUND),
            (requested._replace(snapshot_id=SnapshotId(-1, -1)), ErrorCode.SNAPSHOT_NOT_FOUND),
            (requested._replace(snapshot_id=None), ErrorCode.SNAPSHOT_NOT_FOUND),
            (requested._replace(position=-1), ErrorCode.POSITION_OUT_OF_RANGE),
            (requested._replace(position=1 << 40), ErrorCode.POSITION_OUT_OF_RANGE),
        ):
            assert await fetch_snapshot(wrong) == (0, code)
        leader.replica.store.delete([snapshot_id])
        assert await fetch_snapshot(requested) == (0, ErrorCode.SNAPSHOT_NOT_FOUND)
