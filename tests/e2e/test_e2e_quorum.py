"""Controller failover of the metadata quorum: no acknowledged topic is lost or created twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

import pytest

from bench.continuous_load import Creations
from bench.failover import FAULTS, fail_controller
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
"""Not a measurement (see bench.failover): long enough for a busy machine, shorter than a client's timeout."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuorumCluster]:
    """Three controllers and two brokers with frequent snapshots; the metadata log is not cleaned."""
    directory = tmp_path_factory.mktemp("quorum")
    with QuorumCluster(directory, controllers=3, brokers=2, config=SMALL_SNAPSHOTS) as running:
        yield running


@pytest.fixture(scope="module")
def done() -> list[Creations]:
    """Creations of all tests of this module so far. Their topics must exist at the end of each test."""
    return []


def became_follower(node: QuorumNode, offset: int, epoch: int) -> bool:
    """Return whether the node logged, after `offset`, that it became a follower in a later epoch."""
    logged = [json.loads(line) for line in lines_of(node, offset) if line.startswith("{")]
    changes = [entry for entry in logged if entry["event"] == "quorum state changed"]
    return any(change["state"] == "follower" and change["epoch"] > epoch for change in changes)


@pytest.mark.parametrize("kind", list(FAULTS))
def test_standby_controller_takes_over_without_losing_topics(
    cluster: QuorumCluster, done: list[Creations], kind: str
) -> None:
    epoch = cluster.wait_caught_up().leader_epoch
    offsets = {node.name: log_end(node) for node in cluster.controllers}
    found = fail_controller(cluster, kind, (20, 30, 20))
    assert isinstance(found.load, Creations)
    done.append(found.load)
    print(f"{kind}: gap {found.gap_s:.2f} s, {len(found.load.times)} topics, {found.load.unknown}")
    assert found.gap_s < GAP_S_MAX
    assert not found.load.unknown, "a client did not recover from a failure by retries"
    former = cluster.nodes[found.before]
    wait_for(lambda: became_follower(former, offsets[former.name], epoch), f"{former.name} as a follower")
    assert cluster.wait_caught_up().leader_epoch > epoch
    wait_for(
        lambda: metrics(former)[f"{RAFT}current_leader"] == cluster.describe().leader_id,
        "current leader in its metrics",
    )
    check_brokers(cluster, acknowledged(done))
    check_disks(cluster, acknowledged(done))


def test_metrics_follow_lag_snapshots_and_controller_failover(cluster: QuorumCluster) -> None:
    cluster.wait_caught_up()
    held = cluster.followers()[0]
    before = {node.name: metrics(node) for node in cluster.nodes.values()}
    lag = f"{RAFT}replica_lag{{replica_id={held.node_id}}}"

    def has_no_lag() -> bool:
        active = cluster.active()
        return active is held or metrics(active).get(lag) == 0  # it may be elected if other controllers paused for long

    wait_for(has_no_lag, "follower without lag")
    cluster.pause(held.name)
    create(cluster, [f"metrics-{number}" for number in range(30)])
    wait_for(lambda: metrics(cluster.active()).get(lag, 0) > 0, "lag of the paused follower")
    cluster.resume(held.name)
    cluster.wait_caught_up()
    wait_for(has_no_lag, "follower that caught up")
    for node in cluster.nodes.values():
        check_progress(node, before[node.name])
    wait_for(lambda: metrics(cluster.active())[f"{RAFT}number_of_observers"] == 2, "two observers")

    active = cluster.active()
    epoch = metrics(active)[f"{RAFT}current_epoch"]
    cluster.kill(active.name)
    wait_for(lambda: cluster.describe().leader_id not in (-1, active.node_id), "another leader")
    for node in (*cluster.followers(), *cluster.brokers):
        wait_for(partial(follows_active, cluster, node), f"{node.name} as a follower")
        assert metrics(node)[f"{RAFT}current_epoch"] > epoch
    wait_for(lambda: state_of(cluster.active()) == "leader", "state of the leader")
    wait_for(lambda: metrics(cluster.active())[f"{RAFT}current_vote"] == cluster.active().node_id, "vote of the leader")
    assert metrics(cluster.active())[f"{RAFT}current_epoch"] > epoch
    cluster.start(active.name)
    cluster.wait_caught_up()
    assert metrics(active)[f"{CONTROLLER}loadsnapshotlatencyms_count"] >= 1
    assert metrics(active)["kipmesh_metadata_load_progress"] == 1


def follows_active(cluster: QuorumCluster, node: QuorumNode) -> bool:
    return metrics(node)[f"{RAFT}current_leader"] == cluster.active().node_id


def has_reached(node: QuorumNode, name: str, value: float) -> bool:
    return metrics(node)[name] >= value


def check_progress(node: QuorumNode, old: dict[str, float]) -> None:
    """Assert that the metrics reflect 30 topics: 60 records, snapshots, their size and three voters."""
    # A follower receives the high watermark after the leader counts it as caught up.
    for name in (f"{RAFT}high_watermark", f"{RAFT}log_end_offset", f"{CONTROLLER}lastcommittedrecordoffset"):
        wait_for(partial(has_reached, node, name, old[name] + 60), f"60 more: {name} of {node.name}")
    for name in (f"{CONTROLLER}gensnapshotlatencyms_count", f"{CONTROLLER}gensnapshotlatencyms_sum"):
        wait_metric(node, name, old[name])
    wait_for(lambda: metrics(node)[f"{CONTROLLER}snapshotlag"] < 60, f"snapshot of {node.name}")
    size = f"{CONTROLLER}snapshotsizebytes"
    wait_for(lambda: metrics(node)[size] in sizes(snapshots(node)).values(), "size of a snapshot")
    assert metrics(node)[f"{RAFT}number_of_voters"] == 3


def test_controller_sets_a_corrupt_snapshot_aside_and_loads_an_older_snapshot(
    cluster: QuorumCluster, done: list[Creations]
) -> None:
    cluster.wait_caught_up()
    node, held = cluster.followers()
    cluster.pause(held.name)  # it still needs the log, so that no snapshot is deleted
    before = snapshots(node)
    create(cluster, [f"older-{number}" for number in range(60)])
    wait_for(lambda: len(set(snapshots(node)) - set(before)) >= 2, "two more snapshots")
    cluster.kill(node.name)
    cluster.resume(held.name)
    older, newest = snapshots(node)[-2:]
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    newest.write_bytes(data)
    offset = log_end(node)
    cluster.start(node.name)
    cluster.wait_caught_up()
    (logged,) = [line for line in lines_of(node, offset) if newest.name in line]
    assert "set aside" in logged
    assert '"level": "error"' in logged
    assert newest.with_name(f"{newest.name}.corrupt").read_bytes() == data
    assert older.exists()
    assert metrics(node)["kipmesh_metadata_corrupt_snapshots_total"] == 1
    check_disks(cluster, acknowledged(done))


def test_acknowledged_topics_survive_a_kill_of_all_nodes(cluster: QuorumCluster, done: list[Creations]) -> None:
    with Creations(cluster.portal, [broker.grpc for broker in cluster.brokers], "all") as creations:
        creations.more(20)
        for name in cluster.nodes:
            cluster.kill(name)
        cluster.start(*cluster.nodes)
        creations.more(10)
    done.append(creations)
    check_brokers(cluster, acknowledged(done))
    check_disks(cluster, acknowledged(done))


def test_quorum_of_five_survives_two_failed_controllers(tmp_path_factory: pytest.TempPathFactory) -> None:
    with QuorumCluster(tmp_path_factory.mktemp("five"), controllers=5, brokers=1, config=SMALL_SNAPSHOTS) as cluster:
        with Creations(cluster.portal, [cluster.brokers[0].grpc], "five") as creations:
            creations.more(20)
            first = cluster.active().name
            cluster.kill(first)
            creations.more(20)
            second = cluster.active().name
            cluster.pause(second)
            creations.more(20)
            third = cluster.active().name
        assert len({first, second, third}) == 3
        assert not creations.unknown
        check_brokers(cluster, creations.acknowledged)  # before the third controller is killed
        cluster.kill(third)  # two of five are no majority
        with pytest.raises(KafkaError):
            create(cluster, ["without-a-majority"], **{"default.api.timeout.ms": 2500, "request.timeout.ms": 2000})
        assert cluster.describe(timeout_s=3).leader_id == -1
        assert set(topics_at(cluster, cluster.brokers[0])) >= set(creations.acknowledged)
        cluster.resume(second)
        cluster.start(first, third)
        check_brokers(cluster, creations.acknowledged)
        check_disks(cluster, creations.acknowledged)
