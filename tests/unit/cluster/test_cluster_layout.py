from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kipmesh.cluster import ClusterError, certificates, ports, processes, settings
from kipmesh.cluster.layout import (
    DEFAULT_COUNTS,
    LOCAL_UP_COUNTS,
    ClusterState,
    Counts,
    Role,
    has_majority,
    plan,
    properties,
    read_state,
)
from kipmesh.cluster.process_cluster import ProcessCluster
from kipmesh.cluster.processes import ProcessState
from kipmesh.core.errors import InvalidConfigError

FOLDER = Path("/mesh")


def test_names_ids_and_racks() -> None:
    nodes = plan((), Counts(1, 1, 3, 1), FOLDER)
    assert [(node.name, node.node_id, node.rack) for node in nodes] == [
        ("controller-1", 1001, "rack-a"),
        ("leader-1", 1, "rack-a"),
        ("follower-1", 2, "rack-b"),
        ("follower-2", 3, "rack-c"),
        ("follower-3", 4, "rack-a"),
        ("consumer-1", None, "rack-a"),
    ]
    assert nodes[1].log == "/mesh/leader-1/node.log"


def test_a_later_up_adds_nodes_and_keeps_ids() -> None:
    first = plan((), Counts(1, 1, 2, 0), FOLDER)
    second = plan(first, Counts(None, 2, None, 1), FOLDER)
    assert [(node.name, node.node_id) for node in second] == [
        ("controller-1", 1001),
        ("leader-1", 1),
        ("leader-2", 4),
        ("follower-1", 2),
        ("follower-2", 3),
        ("consumer-1", None),
    ]
    assert plan(second, Counts(), FOLDER) == second


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (Counts(followers=1), r"/mesh has 2 follower\(s\), not 1"),
        (Counts(controllers=3), r"/mesh has 1 controller\(s\), not 3"),
        (Counts(followers=100), "at most 64 nodes"),
        (Counts(followers=10**12), "at most 64 nodes"),
    ],
)
def test_what_a_cluster_cannot_become(counts: Counts, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        plan(plan((), Counts(), FOLDER), counts, FOLDER)


def test_controllers() -> None:
    nodes = plan((), Counts(3, 1, 0, 0), FOLDER)
    assert [(node.name, node.node_id, node.rack) for node in nodes[:3]] == [
        ("controller-1", 1001, "rack-a"),
        ("controller-2", 1002, "rack-b"),
        ("controller-3", 1003, "rack-c"),
    ]
    placed = [replace(node, grpc=f"127.0.0.1:{number}") for number, node in enumerate(nodes, 1)]
    found = properties(ClusterState("c", {}, tuple(placed)), placed[0], {})["controller.quorum.voters"]
    assert found == "1001@127.0.0.1:1,1002@127.0.0.1:2,1003@127.0.0.1:3"
    assert [has_majority(nodes, running) for running in (1, 2, 3)] == [False, True, True]
    # A cluster in a test is light, one of `local up` survives its controllers, and known ones stay as they are.
    for defaults, count in ((DEFAULT_COUNTS, 1), (LOCAL_UP_COUNTS, 3)):
        made = plan((), Counts(), FOLDER, defaults)
        assert sum(node.role is Role.CONTROLLER for node in made) == count
        assert plan(made, Counts(), FOLDER, LOCAL_UP_COUNTS) == made
    for number in (2, 4, 6):
        with pytest.raises(ClusterError, match=f"a cluster must have 1, 3 or 5 controllers, got {number}"):
            plan((), Counts(number, 1, 2, 0), FOLDER)


def test_a_cluster_needs_brokers() -> None:
    with pytest.raises(ClusterError, match="needs at least one controller and one broker"):
        plan((), Counts(1, 0, 0, 1), FOLDER)


def state_of_two() -> ClusterState:
    nodes = plan((), Counts(1, 1, 0, 1), FOLDER)
    placed = tuple(
        replace(node, grpc=None if node.role is Role.CONSUMER else f"127.0.0.1:{i}", http=f"127.0.0.1:{100 + i}")
        for i, node in enumerate(nodes, 1)
    )
    return ClusterState("the-id", {"log.segment.bytes": "100", "log.level": "debug"}, placed)


def test_the_file_is_what_the_contract_says(tmp_path: Path) -> None:
    state = state_of_two()
    state.write(tmp_path)
    document = json.loads((tmp_path / "cluster.json").read_text())
    assert document["bootstrap"] == "127.0.0.1:2"
    assert document["kafka_bootstrap"] is None
    state.with_node(replace(state.node("leader-1"), kafka="127.0.0.1:9092")).write(tmp_path)
    assert json.loads((tmp_path / "cluster.json").read_text())["kafka_bootstrap"] == "127.0.0.1:9092"
    state.write(tmp_path)
    wanted = {"name", "role", "node_id", "rack", "pid", "grpc", "kafka", "http", "dir", "log"}
    assert all(wanted <= set(node) for node in document["nodes"])
    assert [node["role"] for node in document["nodes"]] == ["controller", "leader", "consumer"]
    assert read_state(tmp_path) == state


def test_nodes_that_run_keep_their_configuration() -> None:
    state = ClusterState("id", {"log.segment.bytes": "1000", "log.level": "debug"}, ())
    state.check_unchanged({})
    state.check_unchanged({"log.level": "debug"})
    told = r"another fetch.max.bytes \(not set\), log.level \(debug\): run `kipmesh local down`"
    with pytest.raises(ClusterError, match=told):
        state.check_unchanged({"log.level": "info", "fetch.max.bytes": "1", "log.segment.bytes": "1000"})


def test_a_broken_file_is_a_clear_error(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    (tmp_path / "cluster.json").write_text('{"nodes": [')
    with pytest.raises(ClusterError, match=r"cluster\.json is not JSON"):
        read_state(tmp_path)


def test_settings_go_to_the_nodes_that_know_them() -> None:
    state = state_of_two()
    controller, leader, consumer = state.nodes
    assert settings.for_role(state.config, Role.CONTROLLER) == {"log.level": "debug"}
    assert settings.for_role(state.config, Role.LEADER) == {"log.segment.bytes": "100", "log.level": "debug"}
    assert properties(state, leader, {})["controller.quorum.voters"] == "1001@127.0.0.1:1"
    assert properties(state, consumer, {})["bootstrap.servers"] == "127.0.0.1:2"
    for node in (controller, leader, consumer):
        settings.parsed(state, node)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("log.segmant.bytes", r"unknown configuration key 'log.segmant.bytes' \(did you mean 'log.segment.bytes'\?\)"),
        ("node.id", "is set by the local cluster: remove it"),
    ],
)
def test_settings_that_are_refused(key: str, message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        settings.check_keys({key: "1"})


def test_ports_are_free_and_different() -> None:
    chosen = ports.choose(20)
    assert len(set(chosen)) == 20
    with socket.create_server((ports.HOST, chosen[0])):
        assert not ports.is_free(chosen[0])
    assert ports.is_free(chosen[0])


@pytest.mark.skipif(not ports.CAN_RESERVE, reason="no server could listen on a port that is held")
def test_who_holds_a_port_has_it_for_its_servers_only() -> None:
    with (
        closing(ports.PortReservation()) as mine,
        closing(ports.PortReservation()) as theirs,
        pytest.MonkeyPatch.context() as patch,
    ):
        (port,) = mine.choose(1)
        patch.setattr(ports, "FIRST", port)
        patch.setattr(ports, "_last_port", lambda: port)
        for others in (ports.choose, theirs.choose):
            with pytest.raises(ClusterError, match="found only 0 of 1 free ports"):
                others(1)
        with closing(socket.socket()) as client:
            assert client.connect_ex((ports.HOST, port)) == errno.ECONNREFUSED
        assert ports.is_free(port)  # to servers
        for _ in range(2):  # a node and, beside the end of one of its connections, the same node again
            with socket.create_server((ports.HOST, port)) as server, socket.create_connection((ports.HOST, port)):
                server.accept()[0].close()


def test_a_process_is_more_than_its_pid() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        identity = processes.identity(child.pid)
        assert identity is not None
        assert processes.state_of(child.pid, identity) is ProcessState.RUNNING
        assert processes.state_of(child.pid, "another boot:1") is ProcessState.GONE
        assert not processes.send(child.pid, "another boot:1", signal.SIGKILL)
        assert processes.send(child.pid, identity, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert processes.state_of(child.pid, identity) is ProcessState.PAUSED
        assert processes.send(child.pid, identity, signal.SIGKILL)
        assert processes.wait_gone([(child.pid, identity)], 60)  # a zombie is gone
        assert processes.state_of(child.pid, identity) is ProcessState.GONE
    finally:
        child.kill()
        child.wait()
    assert not processes.send(child.pid, identity, signal.SIGKILL)


def test_probes_of_what_does_not_answer() -> None:
    assert processes.probe(f"{ports.HOST}:{ports.choose(1)[0]}", "/readyz") is None


def test_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    log.write_text("old\n" + "".join(f"line {number}\n" for number in range(30)))
    assert processes.log_tail(log, 4, lines=2) == ["line 28", "line 29"]
    assert processes.log_tail(log, log.stat().st_size, lines=2) == []
    assert processes.log_tail(tmp_path / "missing", 0, lines=2) == []


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").mkdir()
    with pytest.raises(ClusterError, match=r"cannot write .*cluster\.json: "):
        state_of_two().write(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["cluster.json"]


def test_the_file_for_clients_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """A node that is started writes it again; clients may be reading it."""
    nodes = [node.at(tmp_path, has_tls=True) for node in plan((), Counts(1, 1, 0, 0), tmp_path)]
    certificates.ensure(tmp_path, nodes)
    file, opened = tmp_path / certificates.CLIENT_PROPERTIES, tmp_path / "opened"
    opened.hardlink_to(file)
    certificates.ensure(tmp_path, nodes)
    assert not file.samefile(opened)
    assert file.read_text() == opened.read_text()
    assert "security.protocol=SSL\n" in file.read_text()


@pytest.mark.parametrize("command", ["down", "stop"])
def test_nodes_stop_on_a_disk_that_takes_nothing(tmp_path: Path, command: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        node = replace(plan((), Counts(1, 1, 0, 0), tmp_path)[0], pid=child.pid, process=processes.identity(child.pid))
        ClusterState("c", {}, (node,)).write(tmp_path)
        (tmp_path / "cluster.json.tmp").mkdir()
        cluster = ProcessCluster(tmp_path)
        cluster.down() if command == "down" else cluster.stop(node.name)
        assert child.wait(60) == -signal.SIGTERM
        assert [one.state for one in cluster.status()] == ["stopped"]
        assert cluster.down() is False
    finally:
        child.kill()
        child.wait()
