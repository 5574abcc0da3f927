"""Nodes start with missing, corrupt or stale files in the metadata directory, on a cleaned metadata log (630-14)."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bench.quorum_cluster import QuorumCluster, QuorumNode, wait_for
from kipmesh.client import AdminClient, Consumer, Producer
from kipmesh.client.types import NewTopic
from tests.e2e.quorum_of_tests import (
    CLEANED_AT_ONCE,
    CONTROLLER,
    LOG_START,
    check_brokers,
    check_disks,
    create,
    lines_of,
    log_end,
    metrics,
    segments,
    snapshots,
    state_of,
    topics_at,
    wait_metric,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuorumCluster]:
    """Three controllers and a broker whose metadata logs start above 0."""
    with QuorumCluster(tmp_path_factory.mktemp("disks"), controllers=3, brokers=1, config=CLEANED_AT_ONCE) as running:
        create(running, [f"topic-{number}" for number in range(100)])
        for node in running.nodes.values():
            wait_metric(node, LOG_START, 0)
        yield running


@pytest.fixture
def cluster(shared: QuorumCluster) -> Iterator[QuorumCluster]:
    """The shared cluster, caught up. Asserts after each test that no topic is lost."""
    shared.wait_caught_up()
    before = topics_at(shared, shared.brokers[0])
    yield shared
    check_brokers(shared, before)
    check_disks(shared, before)


def killed_follower(cluster: QuorumCluster) -> QuorumNode:
    """Kill a follower controller and return it."""
    node = cluster.followers()[0]
    cluster.kill(node.name)
    return node


def end_of(snapshot: Path) -> int:
    """Return the end offset in the snapshot's file name."""
    return int(snapshot.name.partition("-")[0])


def flip(file: Path) -> None:
    """Flip the bits of the byte in the middle of the file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)


def content(directory: Path) -> dict[str, bytes]:
    """Return file name -> content of the directory."""
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def refusal(cluster: QuorumCluster, node: QuorumNode) -> str:
    """Start a node that must fail with exit code 1 and return its one-line error."""
    offset = log_end(node)
    cluster.start(node.name, wait=False)
    assert cluster.wait_exit(node.name) == 1
    errors = [line for line in lines_of(node, offset) if not line.startswith("{")]
    assert len(errors) == 1, errors
    assert errors[0].startswith("kipmesh_metadata_controller: cannot start: ")
    return errors[0]


def warnings(node: QuorumNode, offset: int) -> list[str]:
    """Return the events that the node logged as warnings or errors after `offset`."""
    logged = [json.loads(line) for line in lines_of(node, offset) if line.startswith("{")]
    return [line["event"] for line in logged if line["level"] in ("warning", "error")]


def wipe_and_start(cluster: QuorumCluster, node: QuorumNode) -> None:
    """Delete the data directory and start the node, as its error message advises."""
    shutil.rmtree(node.data)
    cluster.start(node.name)
    cluster.wait_caught_up()
    assert metrics(node)[f"{CONTROLLER}loadsnapshotlatencyms_count"] >= 1
    assert metrics(node)[LOG_START] > 0
    # It may also be elected leader if other controllers pause.
    wait_for(lambda: state_of(node) in ("follower", "leader"), f"{node.name} as a voter")


def test_wiped_controller_recovers_from_a_snapshot(cluster: QuorumCluster) -> None:
    node = killed_follower(cluster)
    create(cluster, [f"while-wiped-{number}" for number in range(5)])
    offset = log_end(node)
    wipe_and_start(cluster, node)
    assert snapshots(node)
    events = [json.loads(line)["event"] for line in lines_of(node, offset) if line.startswith("{")]
    assert "fetching a metadata snapshot" in events
    assert "metadata snapshot installed" in events
    cluster.kill(cluster.active().name)  # the wiped controller is needed for a majority
    create(cluster, ["after-the-wipe"])
    cluster.start(*[other.name for other in cluster.controllers if not cluster.is_running(other.name)])


def test_new_broker_loads_a_snapshot_and_serves_records(cluster: QuorumCluster) -> None:
    new = cluster.add_broker()
    cluster.start(new.name)
    cluster.wait_caught_up()
    wait_for(lambda: topics_at(cluster, new) == topics_at(cluster, cluster.brokers[0]), "agreement of the new broker")
    found = metrics(new)
    assert found[f"{CONTROLLER}loadsnapshotlatencyms_count"] >= 1
    assert found[f"{CONTROLLER}snapshotsizebytes"] > 0
    assert found[LOG_START] > 0
    assert snapshots(new)
    assert min(int(file.stem) for file in segments(new)) > 0

    async def serve() -> list[bytes | None]:
        async with AdminClient(new.grpc) as admin:
            await admin.create_topics([NewTopic("served", -1, -1, assignments={0: [new.node_id]})])
        async with Producer(new.grpc) as producer:
            for number in range(10):
                await (await producer.send("served", b"%d" % number))
        async with Consumer(new.grpc, **{"auto.offset.reset": "earliest"}) as consumer:
            consumer.assign([("served", 0)])
            values: list[bytes | None] = []
            while len(values) < 10 and (records := await consumer.poll(timeout_ms=30_000)):
                values += [record.value for record in records]
        return values

    assert cluster.run(serve()) == [b"%d" % number for number in range(10)]


@pytest.mark.parametrize("damage", ["corrupt", "missing"])
def test_voter_without_a_valid_snapshot_refuses_to_start(cluster: QuorumCluster, damage: str) -> None:
    node = killed_follower(cluster)
    lost = snapshots(node)
    start = min(int(file.stem) for file in segments(node))
    assert start > 0
    for file in lost:
        flip(file) if damage == "corrupt" else file.unlink()
    log = {file.name: file.read_bytes() for file in segments(node)}
    for _ in range(2):  # corrupt snapshots are set aside only at the first start
        line = refusal(cluster, node)
        assert re.search(r"the metadata log starts at offset \d+ and no valid snapshot ends there or later", line)
        assert "move its metadata directory away and restart it" in line
        assert {file.name: file.read_bytes() for file in segments(node)} == log
    if damage == "corrupt":
        assert sorted(file.name for file in node.metadata.glob("*.corrupt")) == [
            f"{file.name}.corrupt" for file in lost
        ]
    wipe_and_start(cluster, node)


@pytest.mark.parametrize("damage", ["corrupt", "missing"])
def test_broker_without_a_valid_snapshot_fetches_metadata_from_the_leader(cluster: QuorumCluster, damage: str) -> None:
    broker = cluster.brokers[0]
    cluster.kill(broker.name)
    lost = snapshots(broker)
    for file in lost:
        flip(file) if damage == "corrupt" else file.unlink()
    corrupt = len(lost) if damage == "corrupt" else 0
    offset = log_end(broker)
    cluster.start(broker.name)
    cluster.wait_caught_up()
    logged = warnings(broker, offset)
    assert sum("no valid snapshot, emptying the log" in event for event in logged) == 1, logged
    assert sum("set aside" in event for event in logged) == corrupt, logged
    found = metrics(broker)
    assert found["kipmesh_metadata_corrupt_snapshots_total"] == corrupt
    assert found[LOG_START] > 0


def test_controller_truncates_a_torn_log_tail_and_catches_up(cluster: QuorumCluster) -> None:
    node = killed_follower(cluster)
    last = [file for file in segments(node) if file.stat().st_size][-1]  # the active segment may be empty
    create(cluster, ["while-torn"])
    last.write_bytes(last.read_bytes()[:-30])
    offset = log_end(node)
    cluster.start(node.name)
    cluster.wait_caught_up()
    logged = warnings(node, offset)
    assert any("truncat" in event or "cut" in event for event in logged), logged


@pytest.mark.parametrize("damage", ["flipped", "short"])
def test_voter_with_a_corrupt_log_refuses_to_start(cluster: QuorumCluster, damage: str) -> None:
    node = cluster.followers()[0]
    create(cluster, [f"before-{damage}"])
    cluster.wait_caught_up()
    assert cluster.stop(node.name) == 0
    file = [file for file in segments(node) if file.stat().st_size][-1]
    if damage == "flipped":
        flip(file)
    else:
        file.write_bytes(file.read_bytes()[:-30])
    before = content(node.metadata)
    for _ in range(2):
        line = refusal(cluster, node)
        assert f"{file} is corrupt at offset " in line
        assert "move its metadata directory away and restart it" in line
        assert content(node.metadata) == before
    wipe_and_start(cluster, node)


def test_broker_with_a_corrupt_log_fetches_all_metadata_from_the_leader(cluster: QuorumCluster) -> None:
    broker = cluster.brokers[0]
    create(cluster, ["before-the-broker"])
    cluster.wait_caught_up()
    assert cluster.stop(broker.name) == 0
    flip([file for file in segments(broker) if file.stat().st_size][-1])
    offset = log_end(broker)
    cluster.start(broker.name)
    cluster.wait_caught_up()
    assert sum("fetching all metadata from the leader" in event for event in warnings(broker, offset)) == 1


def test_snapshot_replaces_a_log_that_ends_before_it(cluster: QuorumCluster) -> None:
    node = cluster.followers()[0]

    def ends_before_snapshot() -> bool:
        """Return whether the active segment starts before the newest snapshot ends."""
        return end_of(snapshots(node)[-1]) > int(segments(node)[-1].stem)

    for count in range(100):
        if ends_before_snapshot():
            cluster.kill(node.name)
            if ends_before_snapshot():  # the node wrote until it was killed
                break
            cluster.start(node.name)
        create(cluster, [f"longer-{count}-{number}" for number in range(10)])
    else:
        raise AssertionError("the log never ended before the snapshot")
    newest = snapshots(node)[-1]
    for file in segments(node):
        file.write_bytes(b"")
    offset = log_end(node)
    cluster.start(node.name)
    cluster.wait_caught_up()
    logged = warnings(node, offset)
    # The event depends on whether the log starts at the newest snapshot or before it.
    assert any("replaces the log" in event or "is before log start" in event for event in logged), logged
    assert metrics(node)[LOG_START] >= end_of(newest)


def test_controller_deletes_stale_snapshot_parts_at_start(cluster: QuorumCluster) -> None:
    node = killed_follower(cluster)
    newest = snapshots(node)[-1]
    parts = [node.metadata / f"{10**9:020}-0000000001.checkpoint.part", newest.with_suffix(".checkpoint.part")]
    deleted = node.metadata / f"{1:020}-0000000001.checkpoint.deleted"
    for file in (*parts, deleted):
        file.write_bytes(b"half of a snapshot")
    cluster.start(node.name)
    assert not any(file.exists() for file in (*parts, deleted))


FOREIGN_STATE = (
    '{"clusterId":"another","leaderId":-1,"leaderEpoch":7,"votedId":-1,"appliedOffset":0,"currentVoters":[],'
    '"data_version":0}'
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (FOREIGN_STATE, "quorum-state belongs to cluster another, but cluster.id is "),
        ("{}", "quorum-state: it is not Kafka's JSON"),
    ],
)
def test_controller_refuses_a_foreign_or_invalid_quorum_state(cluster: QuorumCluster, text: str, reason: str) -> None:
    node = killed_follower(cluster)
    file = node.metadata / "quorum-state"
    original = file.read_text()
    file.write_text(text)
    before = content(node.metadata)
    assert reason in refusal(cluster, node)
    assert content(node.metadata) == before
    file.write_text(original)
    cluster.start(node.name)


def has_snapshot(node: QuorumNode) -> bool:
    return bool(snapshots(node))


def test_log_cleaning_advances_the_log_start_offset_on_every_node(cluster: QuorumCluster) -> None:
    before = {node.name: metrics(node)[LOG_START] for node in cluster.nodes.values()}
    create(cluster, [f"cleaned-{number}" for number in range(100)])
    for node in cluster.nodes.values():
        wait_metric(node, LOG_START, before[node.name])
        wait_metric(node, f"{CONTROLLER}gensnapshotlatencyms_count", 0)
        start = metrics(node)[LOG_START]
        wait_for(partial(has_snapshot, node), f"snapshot of {node.name}")
        assert any(end_of(file) >= start for file in snapshots(node))
