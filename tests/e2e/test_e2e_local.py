"""`kipmesh local`: up, down, status, start, kill, pause, resume, with real processes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from kipmesh.cluster import ClusterError, LocalCluster, processes
from kipmesh.cluster.processes import ProcessState
from tests.e2e.mesh_of_tests import Mesh, wait_for

SMALL = ("--controllers", "1", "--followers", "0")


def test_up_starts_all_nodes_and_down_leaves_none(mesh: Mesh) -> None:
    began = time.monotonic()
    out = mesh.local("up", "--consumers", "1")
    print(f"up took {time.monotonic() - began:.1f} s")
    assert re.search(r"7 nodes in .*: ready in", out)
    nodes = mesh.description["nodes"]
    assert [(node["name"], node["role"], node["rack"]) for node in nodes] == [
        ("controller-1", "controller", "rack-a"),
        ("controller-2", "controller", "rack-b"),
        ("controller-3", "controller", "rack-c"),
        ("leader-1", "leader", "rack-a"),
        ("follower-1", "follower", "rack-b"),
        ("follower-2", "follower", "rack-c"),
        ("consumer-1", "consumer", "rack-a"),
    ]
    assert mesh.bootstrap == ",".join(node["grpc"] for node in nodes[3:6])
    assert f"bootstrap: {mesh.bootstrap}" in out
    for node in nodes:
        files = {file.name for file in Path(node["dir"]).iterdir()}
        assert files == {"node.log", "node.properties"} | ({"data"} if node["role"] != "consumer" else set())
        with urllib.request.urlopen(f"http://{node['http']}/metrics", timeout=60) as answer:
            assert b"kipmesh_runtime_event_loop_lag_seconds" in answer.read()

    assert "runs already" in mesh.local("up")
    assert [node["pid"] for node in mesh.description["nodes"]] == [node["pid"] for node in nodes]

    def states() -> set[str]:
        done = mesh.run("local", "status", "--json", check=False)
        return {json.loads(line)["state"] for line in done.stdout.splitlines()}

    wait_for(lambda: states() == {"ready"}, "all that answer within the second that it gives them")

    assert "stopped" in mesh.local("down", "--timeout", "60")
    assert mesh.alive() == []
    for node in nodes:
        assert processes.identity(node["pid"]) != node["process"]
        last = json.loads(Path(node["log"]).read_text().splitlines()[-1])
        assert last["event"] == "stopped", last
    assert "nothing ran" in mesh.local("down")
    done = mesh.run("local", "status", check=False)
    assert done.returncode == 1
    assert done.stdout.count("stopped") == 7


def test_a_second_up_is_the_same_cluster_and_may_grow(mesh: Mesh) -> None:
    mesh.local("up", *SMALL)
    first = mesh.description
    mesh.local("down")
    mesh.local("up", "--followers", "1")
    second = mesh.description
    assert second["cluster_id"] == first["cluster_id"]
    assert second["nodes"][1]["grpc"] == first["nodes"][1]["grpc"]
    assert [node["node_id"] for node in second["nodes"]] == [1001, 1, 2]
    refused = mesh.run("local", "up", *SMALL, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith("kipmesh: ")
    assert "has 1 follower(s), not 0" in refused.stderr
    refused = mesh.run("local", "up", "--followers", "2", "--config", "log.level=debug", check=False)
    assert refused.returncode == 1
    assert refused.stderr == (
        "kipmesh: running nodes use another log.level (not set): run `kipmesh local down`, then up with --config\n"
    )
    assert mesh.description == second


def test_kill_start_pause_and_resume_act_on_one_node(mesh: Mesh) -> None:
    mesh.local("up", *SMALL, "--config", "broker.session.timeout.ms=1500")
    pid = mesh.node("leader-1")["pid"]
    mesh.local("kill", "leader-1")
    assert mesh.alive() == ["controller-1"]
    assert mesh.run("local", "kill", "leader-1", check=False).stderr == "kipmesh: leader-1 is not running\n"
    mesh.local("start", "leader-1")
    assert mesh.node("leader-1")["pid"] != pid
    again = mesh.run("local", "start", "leader-1", check=False)
    assert again.returncode == 1
    assert "already running" in again.stderr
    mesh.local("pause", "leader-1")
    assert "paused" in mesh.run("local", "status", check=False).stdout
    mesh.local("resume", "leader-1")
    again = mesh.run("local", "resume", "leader-1", check=False)
    assert (again.returncode, again.stderr) == (1, "kipmesh: leader-1 is not paused\n")
    wait_for(lambda: mesh.run("local", "status", check=False).returncode == 0, "resumed node", interval_s=0.2)
    wrong = mesh.run("local", "kill", "leader-9", check=False)
    assert wrong.stderr == "kipmesh: unknown node 'leader-9'; the nodes are controller-1, leader-1\n"


def test_controllers_are_nodes_like_others(mesh: Mesh) -> None:
    def active() -> str:
        return f"controller-{json.loads(mesh.run('quorum', 'describe', '--json').stdout)['leader_id'] - 1000}"

    mesh.local("up", "--controllers", "3", "--followers", "0")
    first = active()
    mesh.local("pause", first)
    mesh.run("topic", "create", "one")
    second = active()
    assert second != first
    mesh.local("resume", first)
    mesh.local("kill", second)
    mesh.run("topic", "create", "two")
    mesh.local("start", second)
    mesh.local("stop", active())
    mesh.run("topic", "create", "three")
    for name in ("controller-1", "controller-2", "controller-3"):
        mesh.run("local", "kill", name, check=False)
    for arguments, stdout, stderr in (
        (["quorum", "describe", "--bootstrap", mesh.bootstrap], "quorum without a leader", ""),
        (["topic", "create", "four"], "", "kipmesh: REQUEST_TIMED_OUT: no metadata controller is active"),
        (["config", "describe", "topic", "one"], "", "kipmesh: REQUEST_TIMED_OUT: no metadata controller is active"),
    ):
        began = time.monotonic()
        done = mesh.run(*arguments, "--timeout", "2", check=False)
        assert done.returncode == 1
        assert (done.stdout[: len(stdout or "x")], done.stderr[: len(stderr or "x")]) == (stdout, stderr)
        assert time.monotonic() - began < 45, "a slow machine's start of the command, but not a minute"
    mesh.local("kill", "leader-1")
    assert mesh.alive() == []
    assert mesh.run("quorum", "describe", "--timeout", "0.5", check=False).stderr.count("no controller answers") == 1
    assert "waits for more controllers" in mesh.local("start", "controller-3")
    done = mesh.run("quorum", "describe", "--timeout", "3", check=False)
    assert (done.returncode, done.stdout[:23]) == (1, "quorum without a leader")
    assert "ready in" in mesh.local("start", "controller-1")
    assert json.loads(mesh.run("quorum", "describe", "--json").stdout)["state"] == "led"  # without any broker
    mesh.local("up")
    assert mesh.run("topic", "list").stdout.split() == ["one", "three", "two"]
    mesh.local("down", "--timeout", "60")
    for node in mesh.description["nodes"]:
        last = json.loads(Path(node["log"]).read_text().splitlines()[-1])
        assert last["event"] == "stopped", f"{node['name']} was killed: {last}"


def nodes_of(folder: Path) -> list[int]:
    """Pids of all processes that are nodes in the folder, whether cluster.json names them or not (Linux)."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if f"{folder}/".encode() in file.read_bytes() and b"--config-file" in file.read_bytes():
                found.append(int(file.parent.name))
    return found


def _listen() -> None:
    """In the command's process: signals as in a terminal, though whoever runs the tests may ignore some."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


HELD = """
import os, signal, sys
place, spawned = sys.argv.pop(1), []
def hold(event, arguments):
    global place
    if event == "subprocess.Popen":
        spawned.append(" ".join(map(str, arguments[1])))
    if event == "subprocess.Popen" and place in spawned[-1] or event == place and spawned:
        place = "nowhere any more"
        os.kill(os.getpid(), signal.SIGSTOP)
sys.addaudithook(hold)
from kipmesh.cli.main import main
main()
"""
"""`python -c HELD PLACE ARGUMENTS`: the command stops itself before it starts the process whose command line has PLACE,
or at the first event PLACE after it started one."""
FIRST_LOOK = "socket.connect"
"""That event is its first look at whether a node is ready."""


def _interrupt(mesh: Mesh, place: str, number: signal.Signals, *arguments: str) -> subprocess.Popen[str]:
    """A command which gets a signal at a place that it cannot have left."""
    command = [sys.executable, "-c", HELD, place, *arguments, "--dir", str(mesh.folder)]
    starting = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=_listen)
    identity = processes.identity(starting.pid)
    wait_for(lambda: processes.state_of(starting.pid, identity) is not ProcessState.RUNNING, f"stop at {place}")
    starting.send_signal(number)
    starting.send_signal(signal.SIGCONT)
    return starting


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("place", ["kipmesh_leader", FIRST_LOOK])
def test_an_interrupted_up_says_so_in_one_line_and_leaves_nothing(
    mesh: Mesh, number: signal.Signals, code: int, place: str
) -> None:
    starting = _interrupt(mesh, place, number, "local", "up", *SMALL)
    _, errors = starting.communicate(timeout=100)
    assert starting.returncode == code, errors
    assert errors == "kipmesh: interrupted; the nodes that this command had started are stopped\n"
    assert mesh.alive() == []
    assert nodes_of(mesh.folder) == []


@pytest.mark.parametrize("when", ["controller-1/node.log", "leader-1/node.log", "cluster.json"])
def test_a_killed_up_leaves_only_what_down_finds(mesh: Mesh, when: str) -> None:
    command = [sys.executable, "-m", "kipmesh.cli.main", "local", "up", *SMALL, "--dir", str(mesh.folder)]
    starting = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_for((mesh.folder / when).exists, "the nodes that start", interval_s=0.0005)
    starting.kill()
    starting.wait()
    if (mesh.folder / "cluster.json").exists():
        mesh.local("down")
    # What was not written down ends by itself at its gate.
    wait_for(lambda: nodes_of(mesh.folder) == [], "no nodes")
    mesh.local("up", *SMALL)


def test_an_interrupted_start_stops_its_node_only(mesh: Mesh) -> None:
    mesh.local("up", *SMALL)
    mesh.local("stop", "leader-1")
    starting = _interrupt(mesh, FIRST_LOOK, signal.SIGTERM, "local", "start", "leader-1")
    _, errors = starting.communicate(timeout=100)
    assert starting.returncode == 143, errors
    assert mesh.alive() == ["controller-1"]
    assert nodes_of(mesh.folder) == [mesh.node("controller-1")["pid"]]


def test_two_ups_at_a_time_start_one_cluster(mesh: Mesh) -> None:
    command = [sys.executable, "-m", "kipmesh.cli.main", "local", "up", *SMALL, "--dir", str(mesh.folder)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = sorted(one.communicate(timeout=100)[0].splitlines()[0].rpartition(": ")[2] for one in both)
    assert outputs[0].startswith("ready in")
    assert outputs[1] == "runs already"


def test_a_taken_port_is_replaced_at_the_next_up(mesh: Mesh) -> None:
    mesh.local("up", *SMALL)
    mesh.local("down")
    before = mesh.node("leader-1")["grpc"]
    with socket.create_server(("127.0.0.1", int(before.rpartition(":")[2]))):
        mesh.local("up")
        assert mesh.node("leader-1")["grpc"] != before


def test_a_node_that_cannot_start_stops_everything_and_says_why(mesh: Mesh) -> None:
    done = mesh.run("local", "up", "--config", "log.level=loud", check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("kipmesh: INVALID_CONFIG: configuration key 'log.level': 'loud': Input should be")
    assert done.stderr.count("\n") == 1
    assert "unknown configuration key 'no.key'" in mesh.run("local", "up", "--config", "no.key=1", check=False).stderr

    mesh.local("up", *SMALL)
    mesh.local("down")
    file = mesh.folder / "leader-1" / "data" / "meta.properties"
    text = file.read_text()
    file.write_text(re.sub("cluster.id=.*", "cluster.id=another-cluster", text))
    done = mesh.run("local", "up", check=False)
    assert done.returncode == 1
    assert "leader-1 exited during its start" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "kipmesh_leader: cannot start:" in last
    assert "another-cluster" in last
    assert mesh.alive() == []
    file.write_text(text)
    mesh.local("up")


def test_configuration_from_the_environment_reaches_the_nodes(mesh: Mesh) -> None:
    mesh.run("local", "up", *SMALL, env={"KIPMESH_CONFIG_LOG_SEGMENT_BYTES": "1000000"})
    assert "log.segment.bytes=1000000" in (mesh.folder / "leader-1" / "node.properties").read_text()
    assert "log.segment.bytes" not in (mesh.folder / "controller-1" / "node.properties").read_text()


def test_a_port_in_use_is_one_line(mesh: Mesh) -> None:
    mesh.local("up", *SMALL)
    file = mesh.folder / "leader-1" / "node.properties"
    other = mesh.folder / "other"
    command = [sys.executable, "-m", "kipmesh_leader", "--config-file", str(file)]
    command += ["--config", "http.listener=127.0.0.1:0"]
    address = mesh.node("leader-1")["grpc"]
    for options, line in (
        (["--config", f"log.dirs={other}"], f"kipmesh_leader: cannot start: cannot listen on {address}"),
        ([], "kipmesh_leader: cannot start: "),  # the data folder is in use, too
    ):
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(line)
        assert "Traceback" not in done.stderr


def test_context_manager_removes_its_nodes_and_its_directory(tmp_path: Path) -> None:
    with LocalCluster(followers=1, config={"log.level": "warning"}) as cluster:
        folder = cluster.dir
        mesh = Mesh(folder)
        assert len(mesh.alive()) == 3
        assert cluster.bootstrap == mesh.bootstrap
        cluster.kill("follower-1")
        assert mesh.alive() == ["controller-1", "leader-1"]
        cluster.start("follower-1")
        cluster.pause("leader-1")
        assert "paused" in mesh.run("local", "status", check=False).stdout
        cluster.resume("leader-1")
        cluster.stop("follower-1")
        with pytest.raises(ClusterError, match="follower-1 is not running"):
            cluster.stop("follower-1")
        pids = [(node.pid, node.process) for node in cluster.nodes]
    assert not folder.exists()
    assert processes.wait_gone(pids, 0)
    with LocalCluster(followers=0, dir=tmp_path / "kept") as cluster:
        first = cluster.cluster_id
    with LocalCluster(followers=0, dir=tmp_path / "kept") as cluster:
        assert cluster.cluster_id == first


def test_nodes_of_a_dead_owner_stop(tmp_path: Path) -> None:
    script = """
import sys, time
from kipmesh.cluster import LocalCluster
cluster = LocalCluster(followers=0, dir=sys.argv[1]).up()
print("up", flush=True)
time.sleep(600)
"""
    folder = tmp_path / "mesh"
    owner = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    mesh = Mesh(folder)
    assert len(mesh.alive()) == 2
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_for(lambda: mesh.alive() == [], "end of the nodes")
