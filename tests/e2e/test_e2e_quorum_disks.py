"""A metadata log that starts above 0, and nodes whose metadata folder is not as they left it (630-14)."""

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
    """Three controllers and a broker, whose metadata logs all start above 0."""
    with QuorumCluster(tmp_path_factory.mktemp("disks"), controllers=3, brokers=1, config=CLEANED_AT_ONCE) as it:
        create(it, [f"topic-{number}" for number in range(100)])
        for node in it.nodes.values():
            wait_metric(node, LOG_START, 0)
        yield it


@pytest.fixture
def mesh(shared: QuorumCluster) -> Iterator[QuorumCluster]:
    """The same, in which each test finds and leaves everything caught up and every topic where it belongs."""
    shared.wait_caught_up()
    before = topics_at(shared, shared.brokers[0])
    yield shared
    check_brokers(shared, before)
    check_disks(shared, before)


def killed_follower(mesh: QuorumCluster) -> QuorumNode:
    """A controller that does not lead, and does not run any more."""
    node = mesh.followers()[0]
    mesh.kill(node.name)
    return node


def end_of(snapshot: Path) -> int:
    """The end offset in its name."""
    return int(snapshot.name.partition("-")[0])


def flip(file: Path) -> None:
    """Change the byte in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)


def content(folder: Path) -> dict[str, bytes]:
    """All that a folder has, but for the lock and the manager's own small files."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def refusal(mesh: QuorumCluster, node: QuorumNode) -> str:
    """Start a node that refuses: its exit code is 1, its last words one line."""
    offset = log_end(node)
    mesh.start(node.name, wait=False)
    assert mesh.wait_exit(node.name) == 1
    said = [line for line in lines_of(node, offset) if not line.startswith("{")]
    assert len(said) == 1, said
    assert said[0].startswith("kipmesh_metadata_controller: cannot start: ")
    return said[0]


def complaints(node: QuorumNode, offset: int) -> list[str]:
    """The text of what a node logged as a warning or an error after `offset`."""
    logged = [json.loads(line) for line in lines_of(node, offset) if line.startswith("{")]
    return [line["event"] for line in logged if line["level"] in ("warning", "error")]


def wipe_and_start(mesh: QuorumCluster, node: QuorumNode) -> None:
    """What the refusals tell a person to do."""
    shutil.rmtree(node.data)
    mesh.start(node.name)
    mesh.wait_caught_up()
    assert metrics(node)[f"{CONTROLLER}loadsnapshotlatencyms_count"] >= 1
    assert metrics(node)[LOG_START] > 0
    # Not a leader yet, but for an election because another stood still: either is a voter again.
    wait_for(lambda: state_of(node) in ("follower", "leader"), f"{node.name} as a voter")


def test_a_wiped_controller_comes_back_by_snapshot(mesh: QuorumCluster) -> None:
    node = killed_follower(mesh)
    create(mesh, [f"while-wiped-{number}" for number in range(5)])
    offset = log_end(node)
    wipe_and_start(mesh, node)
    assert snapshots(node)
    events = [json.loads(line)["event"] for line in lines_of(node, offset) if line.startswith("{")]
    assert "fetching a metadata snapshot" in events
    assert "metadata snapshot installed" in events
    mesh.kill(mesh.active().name)  # it is as good as any other: with it there is still a majority
    create(mesh, ["after-the-wipe"])
    mesh.start(*[other.name for other in mesh.controllers if not mesh.is_running(other.name)])


def test_a_new_broker_loads_a_snapshot_and_serves(mesh: QuorumCluster) -> None:
    new = mesh.add_broker()
    mesh.start(new.name)
    mesh.wait_caught_up()
    wait_for(lambda: topics_at(mesh, new) == topics_at(mesh, mesh.brokers[0]), "agreement of the new broker")
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

    assert mesh.run(serve()) == [b"%d" % number for number in range(10)]


@pytest.mark.parametrize("how", ["corrupt", "missing"])
def test_a_voter_without_a_valid_snapshot_refuses_to_start(mesh: QuorumCluster, how: str) -> None:
    node = killed_follower(mesh)
    lost = snapshots(node)
    start = min(int(file.stem) for file in segments(node))
    assert start > 0
    for file in lost:
        flip(file) if how == "corrupt" else file.unlink()
    log = {file.name: file.read_bytes() for file in segments(node)}
    for _ in range(2):  # the second time there is no corrupt one left to be found, and nothing else has changed
        line = refusal(mesh, node)
        assert re.search(r"the metadata log starts at offset \d+ and no valid snapshot ends there or later", line)
        assert "move its metadata directory away and restart it" in line
        assert {file.name: file.read_bytes() for file in segments(node)} == log
    if how == "corrupt":
        assert sorted(file.name for file in node.metadata.glob("*.corrupt")) == [f"{one.name}.corrupt" for one in lost]
    wipe_and_start(mesh, node)


@pytest.mark.parametrize("how", ["corrupt", "missing"])
def test_a_broker_without_a_valid_snapshot_fetches_anew(mesh: QuorumCluster, how: str) -> None:
    broker = mesh.brokers[0]
    mesh.kill(broker.name)
    lost = snapshots(broker)
    for file in lost:
        flip(file) if how == "corrupt" else file.unlink()
    corrupt = len(lost) if how == "corrupt" else 0
    offset = log_end(broker)
    mesh.start(broker.name)
    mesh.wait_caught_up()
    said = complaints(broker, offset)
    assert sum("no valid snapshot, emptying the log" in text for text in said) == 1, said
    assert sum("set aside" in text for text in said) == corrupt, said
    found = metrics(broker)
    assert found["kipmesh_metadata_corrupt_snapshots_total"] == corrupt
    assert found[LOG_START] > 0


def test_a_torn_log_is_cut_and_caught_up(mesh: QuorumCluster) -> None:
    node = killed_follower(mesh)
    last = [file for file in segments(node) if file.stat().st_size][-1]  # one that was just begun may be empty
    create(mesh, ["while-torn"])
    last.write_bytes(last.read_bytes()[:-30])
    offset = log_end(node)
    mesh.start(node.name)
    mesh.wait_caught_up()
    assert any("truncat" in text or "cut" in text for text in complaints(node, offset)), complaints(node, offset)


@pytest.mark.parametrize("how", ["flipped", "short"])
def test_a_voter_whose_log_was_damaged_while_it_was_stopped_refuses_to_start(mesh: QuorumCluster, how: str) -> None:
    node = mesh.followers()[0]
    create(mesh, [f"before-{how}"])
    mesh.wait_caught_up()
    assert mesh.stop(node.name) == 0
    file = [file for file in segments(node) if file.stat().st_size][-1]
    if how == "flipped":
        flip(file)
    else:
        file.write_bytes(file.read_bytes()[:-30])
    before = content(node.metadata)
    for _ in range(2):
        line = refusal(mesh, node)
        assert f"{file} is corrupt at offset " in line
        assert "move its metadata directory away and restart it" in line
        assert content(node.metadata) == before
    wipe_and_start(mesh, node)


def test_a_broker_whose_log_was_damaged_fetches_anew(mesh: QuorumCluster) -> None:
    broker = mesh.brokers[0]
    create(mesh, ["before-the-broker"])
    mesh.wait_caught_up()
    assert mesh.stop(broker.name) == 0
    flip([file for file in segments(broker) if file.stat().st_size][-1])
    offset = log_end(broker)
    mesh.start(broker.name)
    mesh.wait_caught_up()
    assert sum("fetching all metadata from the leader" in text for text in complaints(broker, offset)) == 1


def test_a_log_that_ends_before_the_snapshot_gives_way_to_it(mesh: QuorumCluster) -> None:
    node = mesh.followers()[0]

    def ends_before_it() -> bool:
        """Or else the log, emptied, would end where the snapshot does."""
        return end_of(snapshots(node)[-1]) > int(segments(node)[-1].stem)

    for count in range(100):
        if ends_before_it():
            mesh.kill(node.name)
            if ends_before_it():  # still, after what it did until then
                break
            mesh.start(node.name)
        create(mesh, [f"longer-{count}-{number}" for number in range(10)])
    else:
        raise AssertionError("its log never ended before its snapshot")
    newest = snapshots(node)[-1]
    for file in segments(node):
        file.write_bytes(b"")
    offset = log_end(node)
    mesh.start(node.name)
    mesh.wait_caught_up()
    said = complaints(node, offset)
    # Which of the two says so depends on whether the log starts at the newest snapshot or before it.
    assert any("replaces the log" in text or "is before log start" in text for text in said), said
    assert metrics(node)[LOG_START] >= end_of(newest)


def test_a_stale_part_is_dropped(mesh: QuorumCluster) -> None:
    node = killed_follower(mesh)
    newest = snapshots(node)[-1]
    parts = [node.metadata / f"{10**9:020}-0000000001.checkpoint.part", newest.with_suffix(".checkpoint.part")]
    deleted = node.metadata / f"{1:020}-0000000001.checkpoint.deleted"
    for file in (*parts, deleted):
        file.write_bytes(b"half of a snapshot")
    mesh.start(node.name)
    assert not any(file.exists() for file in (*parts, deleted))


OTHERS_STATE = (
    '{"clusterId":"another","leaderId":-1,"leaderEpoch":7,"votedId":-1,"appliedOffset":0,"currentVoters":[],'
    '"data_version":0}'
)


@pytest.mark.parametrize(
    ("text", "why"),
    [(OTHERS_STATE, "quorum-state belongs to cluster another, but cluster.id is "), ("{}", "quorum-state: it is not Kafka's JSON")],
)
def test_a_quorum_state_that_is_not_ours_is_refused(mesh: QuorumCluster, text: str, why: str) -> None:
    node = killed_follower(mesh)
    file = node.metadata / "quorum-state"
    ours = file.read_text()
    file.write_text(text)
    before = content(node.metadata)
    assert why in refusal(mesh, node)
    assert content(node.metadata) == before
    file.write_text(ours)
    mesh.start(node.name)


def has_snapshot(node: QuorumNode) -> bool:
    return bool(snapshots(node))


def test_the_log_goes_on_being_cleaned(mesh: QuorumCluster) -> None:
    before = {node.name: metrics(node)[LOG_START] for node in mesh.nodes.values()}
    create(mesh, [f"cleaned-{number}" for number in range(100)])
    for node in mesh.nodes.values():
        wait_metric(node, LOG_START, before[node.name])
        wait_metric(node, f"{CONTROLLER}gensnapshotlatencyms_count", 0)
        start = metrics(node)[LOG_START]
        wait_for(partial(has_snapshot, node), f"snapshot of {node.name}")
        assert any(end_of(file) >= start for file in snapshots(node))
