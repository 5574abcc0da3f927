"""The active controller fails in every way: another takes over, nothing that was acknowledged is lost or doubled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

import pytest

from bench.creations import Creations
from bench.failover import suffer
from bench.faults import FAULTS
from bench.quorum_cluster import QuorumCluster, QuorumNode, wait_for
from kipmesh.core.errors import KafkaError
from tests.e2e.quorum_of_tests import (
    CONTROLLER,
    RAFT,
    SMALL_SNAPSHOTS,
    acknowledged,
    check_brokers,
    check_disks,
    create,
    lines_of,
    log_end,
    metrics,
    sizes,
    snapshots,
    state_of,
    topics_at,
    wait_metric,
)

pytestmark = pytest.mark.slow

GAP_S_MAX = 20.0
"""Not a measurement (that is bench.failover): a machine that does much else must pass, one that waits for a time-out
of a client must not."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuorumCluster]:
    """Three controllers, two brokers; snapshots are made, and the log is kept."""
    folder = tmp_path_factory.mktemp("quorum")
    with QuorumCluster(folder, controllers=3, brokers=2, config=SMALL_SNAPSHOTS) as it:
        yield it


@pytest.fixture(scope="module")
def done() -> list[Creations]:
    """What the tests of this module were told of so far: it must be there at the end of each."""
    return []


def has_followed(node: QuorumNode, offset: int, epoch: int) -> bool:
    """Whether a node's log says, after `offset`, that it followed somebody in an epoch after this one."""
    said = [json.loads(line) for line in lines_of(node, offset) if line.startswith("{")]
    return any(
        one["event"] == "quorum state changed" and one["state"] == "follower" and one["epoch"] > epoch for one in said
    )


@pytest.mark.parametrize("kind", list(FAULTS))
def test_another_controller_takes_over(mesh: QuorumCluster, done: list[Creations], kind: str) -> None:
    epoch = mesh.wait_caught_up().leader_epoch
    offsets = {node.name: log_end(node) for node in mesh.controllers}
    found = suffer(mesh, kind, (20, 30, 20))
    done.append(found.creations)
    print(f"{kind}: gap {found.gap_s:.2f} s, {len(found.creations.times)} topics, {found.creations.unknown}")
    assert found.gap_s < GAP_S_MAX
    assert not found.creations.unknown, "a client was told of a failure that it could not repeat away"
    former = mesh.nodes[found.before]
    wait_for(lambda: has_followed(former, offsets[former.name], epoch), f"{former.name} that follows")
    assert mesh.wait_caught_up().leader_epoch > epoch
    wait_for(lambda: metrics(former)[f"{RAFT}current_leader"] == mesh.describe().leader_id, "its knowing who leads")
    check_brokers(mesh, acknowledged(done))
    check_disks(mesh, acknowledged(done))


def test_metrics_follow_what_happens(mesh: QuorumCluster) -> None:
    mesh.wait_caught_up()
    held = mesh.followers()[0]
    before = {node.name: metrics(node) for node in mesh.nodes.values()}
    lag = f"{RAFT}replica_lag{{replica_id={held.node_id}}}"

    def has_no_lag() -> bool:
        active = mesh.active()
        return active is held or metrics(active).get(lag) == 0  # it leads when the others stood still for long

    wait_for(has_no_lag, "follower without a lag")
    mesh.pause(held.name)
    create(mesh, [f"metrics-{number}" for number in range(30)])
    wait_for(lambda: metrics(mesh.active()).get(lag, 0) > 0, "lag of a follower that is held")
    mesh.resume(held.name)
    mesh.wait_caught_up()
    wait_for(has_no_lag, "follower that caught up")
    for node in mesh.nodes.values():
        check_progress(node, before[node.name])
    wait_for(lambda: metrics(mesh.active())[f"{RAFT}number_of_observers"] == 2, "two observers")

    active = mesh.active()
    epoch = metrics(active)[f"{RAFT}current_epoch"]
    mesh.kill(active.name)
    wait_for(lambda: mesh.describe().leader_id not in (-1, active.node_id), "another leader")
    for node in (*mesh.followers(), *mesh.brokers):
        wait_for(
            partial(follows_active, mesh, node),
            f"{node.name} that follows",
        )
        assert metrics(node)[f"{RAFT}current_epoch"] > epoch
    wait_for(lambda: state_of(mesh.active()) == "leader", "state of the leader")
    wait_for(lambda: metrics(mesh.active())[f"{RAFT}current_vote"] == mesh.active().node_id, "vote of the leader")
    assert metrics(mesh.active())[f"{RAFT}current_epoch"] > epoch
    mesh.start(active.name)
    mesh.wait_caught_up()
    assert metrics(active)[f"{CONTROLLER}loadsnapshotlatencyms_count"] >= 1
    assert metrics(active)["kipmesh_metadata_load_progress"] == 1


def follows_active(mesh: QuorumCluster, node: QuorumNode) -> bool:
    return metrics(node)[f"{RAFT}current_leader"] == mesh.active().node_id


def has_reached(node: QuorumNode, name: str, value: float) -> bool:
    return metrics(node)[name] >= value


def check_progress(node: QuorumNode, old: dict[str, float]) -> None:
    """What 30 topics, a record for each and one for its partition, do to a node's metrics."""
    # What is committed a follower hears a moment after the leader has counted it as caught up.
    for name in (f"{RAFT}high_watermark", f"{RAFT}log_end_offset", f"{CONTROLLER}lastcommittedrecordoffset"):
        wait_for(partial(has_reached, node, name, old[name] + 60), f"60 more: {name} of {node.name}")
    for name in (f"{CONTROLLER}gensnapshotlatencyms_count", f"{CONTROLLER}gensnapshotlatencyms_sum"):
        wait_metric(node, name, old[name])
    wait_for(lambda: metrics(node)[f"{CONTROLLER}snapshotlag"] < 60, f"snapshot of {node.name}")
    size = f"{CONTROLLER}snapshotsizebytes"
    wait_for(lambda: metrics(node)[size] in sizes(snapshots(node)).values(), "size of a snapshot")
    assert metrics(node)[f"{RAFT}number_of_voters"] == 3


def test_a_corrupt_snapshot_is_set_aside_and_an_older_one_is_loaded(mesh: QuorumCluster, done: list[Creations]) -> None:
    mesh.wait_caught_up()
    node, held = mesh.followers()
    mesh.pause(held.name)  # it will need the log, so that no snapshot is deleted
    had = snapshots(node)
    create(mesh, [f"older-{number}" for number in range(60)])
    wait_for(lambda: len(set(snapshots(node)) - set(had)) >= 2, "two more snapshots")
    mesh.kill(node.name)
    mesh.resume(held.name)
    older, newest = snapshots(node)[-2:]
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    newest.write_bytes(data)
    offset = log_end(node)
    mesh.start(node.name)
    mesh.wait_caught_up()
    told = [line for line in lines_of(node, offset) if newest.name in line]
    assert len(told) == 1
    assert "set aside" in told[0]
    assert '"level": "error"' in told[0]
    assert newest.with_name(f"{newest.name}.corrupt").read_bytes() == data
    assert older.exists()
    assert metrics(node)["kipmesh_metadata_corrupt_snapshots_total"] == 1
    check_disks(mesh, acknowledged(done))


def test_acknowledged_topics_survive_the_death_of_all_nodes(mesh: QuorumCluster, done: list[Creations]) -> None:
    with Creations(mesh.portal, [broker.grpc for broker in mesh.brokers], "all") as creations:
        creations.more(20)
        for name in mesh.nodes:
            mesh.kill(name)
        mesh.start(*mesh.nodes)
        creations.more(10)
    done.append(creations)
    check_brokers(mesh, acknowledged(done))
    check_disks(mesh, acknowledged(done))


def test_five_controllers_survive_two(tmp_path_factory: pytest.TempPathFactory) -> None:
    with QuorumCluster(tmp_path_factory.mktemp("five"), controllers=5, brokers=1, config=SMALL_SNAPSHOTS) as mesh:
        with Creations(mesh.portal, [mesh.brokers[0].grpc], "five") as creations:
            creations.more(20)
            first = mesh.active().name
            mesh.kill(first)
            creations.more(20)
            second = mesh.active().name
            mesh.pause(second)
            creations.more(20)
            third = mesh.active().name
        assert len({first, second, third}) == 3
        assert not creations.unknown
        check_brokers(mesh, creations.acknowledged)  # the broker has heard of all from the one that is killed now
        mesh.kill(third)  # two of five are left: nothing may be decided
        with pytest.raises(KafkaError):
            create(mesh, ["without-a-majority"], **{"default.api.timeout.ms": 2500, "request.timeout.ms": 2000})
        assert mesh.describe(timeout_s=3).leader_id == -1
        assert set(topics_at(mesh, mesh.brokers[0])) >= set(creations.acknowledged)
        mesh.resume(second)
        mesh.start(first, third)
        check_brokers(mesh, creations.acknowledged)
        check_disks(mesh, creations.acknowledged)
