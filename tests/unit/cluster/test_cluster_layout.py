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

DIRECTORY = Path("/mesh")


def test_plan_assigns_names_ids_and_racks() -> None:
    nodes = plan((), Counts(1, 1, 3, 1), DIRECTORY)
    assert [(node.name, node.node_id, node.rack) for node in nodes] == [
        ("controller-1", 1001, "rack-a"),
        ("leader-1", 1, "rack-a"),
        ("follower-1", 2, "rack-b"),
        ("follower-2", 3, "rack-c"),
        ("follower-3", 4, "rack-a"),
        ("consumer-1", None, "rack-a"),
    ]
    assert nodes[1].log == "/mesh/leader-1/node.log"


def test_plan_adds_nodes_and_keeps_ids() -> None:
    first = plan((), Counts(1, 1, 2, 0), DIRECTORY)
    second = plan(first, Counts(None, 2, None, 1), DIRECTORY)
    assert [(node.name, node.node_id) for node in second] == [
        ("controller-1", 1001),
        ("leader-1", 1),
        ("leader-2", 4),
        ("follower-1", 2),
        ("follower-2", 3),
        ("consumer-1", None),
    ]
    assert plan(second, Counts(), DIRECTORY) == second


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (Counts(followers=1), r"/mesh has 2 follower\(s\), not 1"),
        (Counts(controllers=3), r"/mesh has 1 controller\(s\), not 3"),
        (Counts(followers=100), "at most 64 nodes"),
        (Counts(followers=10**12), "at most 64 nodes"),
    ],
)
def test_plan_rejects_impossible_changes(counts: Counts, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        plan(plan((), Counts(), DIRECTORY), counts, DIRECTORY)


def test_plan_of_controllers_sets_quorum_voters_and_odd_counts() -> None:
    nodes = plan((), Counts(3, 1, 0, 0), DIRECTORY)
    assert [(node.name, node.node_id, node.rack) for node in nodes[:3]] == [
        ("controller-1", 1001, "rack-a"),
        ("controller-2", 1002, "rack-b"),
        ("controller-3", 1003, "rack-c"),
    ]
    placed = [replace(node, grpc=f"127.0.0.1:{number}") for number, node in enumerate(nodes, 1)]
    voters = properties(ClusterState("c", {}, tuple(placed)), placed[0], {})["controller.quorum.voters"]
    assert voters == "1001@127.0.0.1:1,1002@127.0.0.1:2,1003@127.0.0.1:3"
    assert [has_majority(nodes, running) for running in (1, 2, 3)] == [False, True, True]
    # Tests have one controller, `local up` has three. Existing controllers are kept.
    for defaults, count in ((DEFAULT_COUNTS, 1), (LOCAL_UP_COUNTS, 3)):
        layout = plan((), Counts(), DIRECTORY, defaults)
        assert sum(node.role is Role.CONTROLLER for node in layout) == count
        assert plan(layout, Counts(), DIRECTORY, LOCAL_UP_COUNTS) == layout
    for number in (2, 4, 6):
        with pytest.raises(ClusterError, match=f"a cluster must have 1, 3 or 5 controllers, got {number}"):
            plan((), Counts(number, 1, 2, 0), DIRECTORY)


def test_plan_requires_brokers() -> None:
    with pytest.raises(ClusterError, match="needs at least one controller and one broker"):
        plan((), Counts(1, 0, 0, 1), DIRECTORY)


def state_of_two() -> ClusterState:
    nodes = plan((), Counts(1, 1, 0, 1), DIRECTORY)
    placed = tuple(
        replace(node, grpc=None if node.role is Role.CONSUMER else f"127.0.0.1:{i}", http=f"127.0.0.1:{100 + i}")
        for i, node in enumerate(nodes, 1)
    )
    return ClusterState("the-id", {"log.segment.bytes": "100", "log.level": "debug"}, placed)


def test_cluster_file_has_documented_fields(tmp_path: Path) -> None:
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


def test_running_nodes_keep_their_configuration() -> None:
    state = ClusterState("id", {"log.segment.bytes": "1000", "log.level": "debug"}, ())
    state.check_unchanged({})
    state.check_unchanged({"log.level": "debug"})
    error = r"another fetch.max.bytes \(not set\), log.level \(debug\): run `kipmesh local down`"
    with pytest.raises(ClusterError, match=error):
        state.check_unchanged({"log.level": "info", "fetch.max.bytes": "1", "log.segment.bytes": "1000"})


def test_malformed_cluster_file_raises_cluster_error(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    (tmp_path / "cluster.json").write_text('{"nodes": [')
    with pytest.raises(ClusterError, match=r"cluster\.json is not JSON"):
        read_state(tmp_path)


def test_settings_reach_only_roles_that_define_them() -> None:
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
def test_unknown_and_reserved_settings_are_rejected(key: str, message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        settings.check_keys({key: "1"})


def test_chosen_ports_are_free_and_distinct() -> None:
    chosen = ports.choose(20)
    assert len(set(chosen)) == 20
    with socket.create_server((ports.HOST, chosen[0])):
        assert not ports.is_free(chosen[0])
    assert ports.is_free(chosen[0])


@pytest.mark.skipif(not ports.CAN_RESERVE, reason="servers cannot listen on a reserved port here")
def test_reserved_port_is_usable_only_by_servers_of_its_holder() -> None:
    with (
        closing(ports.PortReservation()) as first_reservation,
        closing(ports.PortReservation()) as second_reservation,
        pytest.MonkeyPatch.context() as patch,
    ):
        (port,) = first_reservation.choose(1)
        patch.setattr(ports, "FIRST", port)
        patch.setattr(ports, "_last_port", lambda: port)
        for others in (ports.choose, second_reservation.choose):
            with pytest.raises(ClusterError, match="found only 0 of 1 free ports"):
                others(1)
        with closing(socket.socket()) as client:
            assert client.connect_ex((ports.HOST, port)) == errno.ECONNREFUSED
        assert ports.is_free(port)  # for servers
        for _ in range(2):  # a node, then its restart while an old connection closes
            with socket.create_server((ports.HOST, port)) as server, socket.create_connection((ports.HOST, port)):
                server.accept()[0].close()


def test_process_is_identified_by_more_than_its_pid() -> None:
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
        assert processes.wait_gone([(child.pid, identity)], 60)  # a zombie counts as gone
        assert processes.state_of(child.pid, identity) is ProcessState.GONE
    finally:
        child.kill()
        child.wait()
    assert not processes.send(child.pid, identity, signal.SIGKILL)


def test_probe_of_closed_port_returns_none() -> None:
    assert processes.probe(f"{ports.HOST}:{ports.choose(1)[0]}", "/readyz") is None


def test_log_tail_returns_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    log.write_text("old\n" + "".join(f"line {number}\n" for number in range(30)))
    assert processes.log_tail(log, 4, lines=2) == ["line 28", "line 29"]
    assert processes.log_tail(log, log.stat().st_size, lines=2) == []
    assert processes.log_tail(tmp_path / "missing", 0, lines=2) == []


def test_failed_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").mkdir()
    with pytest.raises(ClusterError, match=r"cannot write .*cluster\.json: "):
        state_of_two().write(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["cluster.json"]


def test_client_properties_are_replaced_atomically(tmp_path: Path) -> None:
    """A starting node writes the file again while clients may read it."""
    nodes = [node.at(tmp_path, has_tls=True) for node in plan((), Counts(1, 1, 0, 0), tmp_path)]
    certificates.ensure(tmp_path, nodes)
    file, opened = tmp_path / certificates.CLIENT_PROPERTIES, tmp_path / "opened"
    opened.hardlink_to(file)
    certificates.ensure(tmp_path, nodes)
    assert not file.samefile(opened)
    assert file.read_text() == opened.read_text()
    assert "security.protocol=SSL\n" in file.read_text()


@pytest.mark.parametrize("command", ["down", "stop"])
def test_nodes_stop_when_cluster_file_cannot_be_written(tmp_path: Path, command: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        node = replace(plan((), Counts(1, 1, 0, 0), tmp_path)[0], pid=child.pid, process=processes.identity(child.pid))
        ClusterState("c", {}, (node,)).write(tmp_path)
        (tmp_path / "cluster.json.tmp").mkdir()
        cluster = ProcessCluster(tmp_path)
        cluster.down() if command == "down" else cluster.stop(node.name)
        assert child.wait(60) == -signal.SIGTERM
        assert [status.state for status in cluster.status()] == ["stopped"]
        assert cluster.down() is False
    finally:
        child.kill()
        child.wait()
