"""Metrics of the metadata quorum, snapshots and loader (630-17)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kipmesh.core.raft import State
from kipmesh.messages import SnapshotId
from kipmesh.node.quorum import pacing
from tests.unit.node.quorum.loaded_quorum import LoadedQuorum
from tests.unit.node.quorum.loader_support import (
    ALWAYS,
    DIRECTORY,
    Member,
    change,
    image_of,
    running,
    sample,
    topic,
    until,
    within_steps,
    write_snapshot,
)

CONTROLLER = "kafka_controller_kafkacontroller_"
RAFT = "kafka_server_raftmetrics_"


def no_replica_lags(registry: CollectorRegistry, replicas: Iterable[int]) -> bool:
    return all(sample(registry, f"{RAFT}replica_lag", replica_id=replica) == 0 for replica in replicas)


async def test_quorum_gauges_match_state_of_each_node(tmp_path: Path) -> None:
    async with LoadedQuorum(tmp_path, 3, 1) as quorum:
        leader = await quorum.active()
        end = quorum.append_and_apply(leader, topic(1))
        await quorum.applied_everywhere(end)
        await until(lambda: sample(quorum.loaded[leader.node_id].registry, f"{RAFT}number_of_observers") == 1)
        for node in quorum.all:
            registry = quorum.loaded[node.node_id].registry
            assert sample(registry, f"{RAFT}current_leader") == leader.node_id
            assert sample(registry, f"{RAFT}current_epoch") == leader.driver.epoch
            assert sample(registry, f"{RAFT}high_watermark") == end
            assert sample(registry, f"{RAFT}log_end_offset") == end
            assert sample(registry, f"{RAFT}log_end_epoch") == leader.driver.epoch
            assert sample(registry, f"{RAFT}number_of_voters") == 3
            assert sample(registry, f"{CONTROLLER}lastcommittedrecordoffset") == end - 1
            assert sample(registry, "kipmesh_metadata_applied_lag") == 0
            states = {state: sample(registry, f"{RAFT}current_state", state=state.value) for state in State}
            assert {state for state, value in states.items() if value} == {node.driver.state}
            others = {2, 3, 1, 101} - {leader.node_id}
            lags = {other: sample(registry, f"{RAFT}replica_lag", replica_id=other) for other in others}
            if node is leader:
                assert sample(registry, f"{RAFT}current_vote") == leader.node_id
                await until(partial(no_replica_lags, registry, others))
            else:
                assert set(lags.values()) == {None}, "only the leader exports the lag"


async def test_leader_exports_lag_of_stopped_replica(tmp_path: Path) -> None:
    async with LoadedQuorum(tmp_path, 3) as quorum:
        leader = await quorum.active()
        away = quorum.followers(leader)[0]
        registry = quorum.loaded[leader.node_id].registry
        await until(lambda: sample(registry, f"{RAFT}replica_lag", replica_id=away.node_id) == 0)
        await quorum.loaded[away.node_id].loader.stop()
        await away.kill()
        end = quorum.append_and_apply(leader, topic(1))
        await quorum.committed(leader, end)
        assert sample(registry, f"{RAFT}replica_lag", replica_id=away.node_id) == 2


async def test_created_and_loaded_snapshots_update_metrics() -> None:
    member = Member(snapshots=ALWAYS)
    assert sample(member.registry, f"{CONTROLLER}gensnapshotlatencyms_count") == 0
    member.append(topic(1))
    async with running(member):
        assert sample(member.registry, f"{CONTROLLER}snapshotlag") == 0
        member.commit()
        await until(lambda: member.posted)
        registry = member.registry
        await until(lambda: sample(registry, f"{CONTROLLER}gensnapshotlatencyms_count") == 1)
        size = member.replica.store.size(SnapshotId(2, 1))
        assert sample(registry, f"{CONTROLLER}snapshotsizebytes") == size
        assert sample(registry, f"{CONTROLLER}snapshotlag") == 0
        assert sample(registry, f"{CONTROLLER}loadsnapshotlatencyms_count") == 0
        wanted = member.install(image_of(topic(5), topic(6), epoch=3, offset=50))
        await member.applied()
        await until(lambda: sample(registry, f"{CONTROLLER}loadsnapshotlatencyms_count") == 1)
        assert sample(registry, f"{CONTROLLER}snapshotsizebytes") == member.replica.store.size(wanted)
        assert sample(registry, "kipmesh_metadata_loaded_records") == 4
        assert sample(registry, "kipmesh_metadata_load_progress") == 1
        assert sample(registry, "kipmesh_metadata_loading") == 0
        assert sample(registry, "kipmesh_metadata_log_start_offset") == 54


async def test_snapshot_lag_counts_committed_records_after_snapshot() -> None:
    member = Member()
    member.append(topic(1))
    async with running(member):
        member.commit()
        await member.applied()
        assert sample(member.registry, f"{CONTROLLER}snapshotlag") == 2
        write_snapshot(member.replica, image_of(topic(1)))
        member.post(member.replica.register_snapshot(SnapshotId(2, 1)))
        for leader in (2, 3, 1):
            member.append(change(1, leader))
        member.commit()
        assert sample(member.registry, f"{CONTROLLER}snapshotlag") == 3


async def test_load_progress_advances_during_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "SLICE_S", 0.0)
    member = Member()
    snapshot_id = write_snapshot(member.replica, image_of(*[topic(number, 100) for number in range(50)]))
    member.replica.install(snapshot_id)
    async with running(member):
        await within_steps(lambda: sample(member.registry, "kipmesh_metadata_loading"))
        progress = set()
        while not member.loader.is_loaded:
            progress.add(sample(member.registry, "kipmesh_metadata_load_progress"))
            assert sample(member.registry, "kipmesh_metadata_applied_lag") == member.high_watermark
            await asyncio.sleep(0)
        assert len(progress) >= 3
        assert max(filter(None, progress)) <= 1
        assert sample(member.registry, "kipmesh_metadata_loaded_records") == 50 * 101


async def test_corrupt_snapshots_are_counted_from_all_sources() -> None:
    member = Member()
    member.append(topic(1))
    write_snapshot(member.replica, image_of(topic(1)))
    fs = member.fs
    member.close()
    (name,) = [name for name in fs.list_dir(DIRECTORY) if name.endswith(".checkpoint")]
    file = fs.open(f"{DIRECTORY}/{name}")
    file.truncate(file.size() - 1)
    file.close()
    restarted = Member(fs)
    async with running(restarted):
        assert sample(restarted.registry, "kipmesh_metadata_corrupt_snapshots_total") == 1
        restarted.corrupt_snapshots = 2  # counted by the driver for fetched snapshots
        restarted.metrics.corrupt_on_load = 4
        assert sample(restarted.registry, "kipmesh_metadata_corrupt_snapshots_total") == 7


async def test_metrics_can_be_scraped_before_loader_starts() -> None:
    member = Member()
    assert b"gensnapshotlatencyms" in generate_latest(member.registry)
    member.close()
