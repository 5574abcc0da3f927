"""`kipmesh local` with real processes: up, down, status, start, kill, pause, resume."""

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
from tests.e2e.cli_of_tests import ClusterCli, wait_for

SMALL = ("--controllers", "1", "--followers", "0")


def test_up_starts_all_nodes_and_down_leaves_none(cluster: ClusterCli) -> None:
    began = time.monotonic()
    out = cluster.local("up", "--consumers", "1")
    print(f"up took {time.monotonic() - began:.1f} s")
    assert re.search(r"7 nodes in .*: ready in", out)
    nodes = cluster.description["nodes"]
    assert [(node["name"], node["role"], node["rack"]) for node in nodes] == [
        ("controller-1", "controller", "rack-a"),
        ("controller-2", "controller", "rack-b"),
        ("controller-3", "controller", "rack-c"),
        ("leader-1", "leader", "rack-a"),
        ("follower-1", "follower", "rack-b"),
        ("follower-2", "follower", "rack-c"),
        ("consumer-1", "consumer", "rack-a"),
    ]
    assert cluster.bootstrap == ",".join(node["grpc"] for node in nodes[3:6])
    assert f"bootstrap: {cluster.bootstrap}" in out
    for node in nodes:
        files = {file.name for file in Path(node["dir"]).iterdir()}
        assert files == {"node.log", "node.properties"} | ({"data"} if node["role"] != "consumer" else set())
        with urllib.request.urlopen(f"http://{node['http']}/metrics", timeout=60) as response:
            assert b"kipmesh_runtime_event_loop_lag_seconds" in response.read()

    assert "runs already" in cluster.local("up")
    assert [node["pid"] for node in cluster.description["nodes"]] == [node["pid"] for node in nodes]

    def states() -> set[str]:
        done = cluster.run("local", "status", "--json", check=False)
        return {json.loads(line)["state"] for line in done.stdout.splitlines()}

    wait_for(lambda: states() == {"ready"}, "ready state of all nodes")

    assert "stopped" in cluster.local("down", "--timeout", "60")
    assert cluster.running_nodes() == []
    for node in nodes:
        assert processes.identity(node["pid"]) != node["process"]
        last = json.loads(Path(node["log"]).read_text().splitlines()[-1])
        assert last["event"] == "stopped", last
    assert "nothing ran" in cluster.local("down")
    done = cluster.run("local", "status", check=False)
    assert done.returncode == 1
    assert done.stdout.count("stopped") == 7


def test_second_up_restarts_the_same_cluster_and_may_add_nodes(cluster: ClusterCli) -> None:
    cluster.local("up", *SMALL)
    first = cluster.description
    cluster.local("down")
    cluster.local("up", "--followers", "1")
    second = cluster.description
    assert second["cluster_id"] == first["cluster_id"]
    assert second["nodes"][1]["grpc"] == first["nodes"][1]["grpc"]
    assert [node["node_id"] for node in second["nodes"]] == [1001, 1, 2]
    refused = cluster.run("local", "up", *SMALL, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith("kipmesh: ")
    assert "has 1 follower(s), not 0" in refused.stderr
    refused = cluster.run("local", "up", "--followers", "2", "--config", "log.level=debug", check=False)
    assert refused.returncode == 1
    assert refused.stderr == (
        "kipmesh: running nodes use another log.level (not set): run `kipmesh local down`, then up with --config\n"
    )
    assert cluster.description == second


def test_kill_start_pause_and_resume_act_on_one_node(cluster: ClusterCli) -> None:
    cluster.local("up", *SMALL, "--config", "broker.session.timeout.ms=1500")
    pid = cluster.node("leader-1")["pid"]
    cluster.local("kill", "leader-1")
    assert cluster.running_nodes() == ["controller-1"]
    assert cluster.run("local", "kill", "leader-1", check=False).stderr == "kipmesh: leader-1 is not running\n"
    cluster.local("start", "leader-1")
    assert cluster.node("leader-1")["pid"] != pid
    again = cluster.run("local", "start", "leader-1", check=False)
    assert again.returncode == 1
    assert "already running" in again.stderr
    cluster.local("pause", "leader-1")
    assert "paused" in cluster.run("local", "status", check=False).stdout
    cluster.local("resume", "leader-1")
    again = cluster.run("local", "resume", "leader-1", check=False)
    assert (again.returncode, again.stderr) == (1, "kipmesh: leader-1 is not paused\n")
    wait_for(lambda: cluster.run("local", "status", check=False).returncode == 0, "resumed node", interval_s=0.2)
    wrong = cluster.run("local", "kill", "leader-9", check=False)
    assert wrong.stderr == "kipmesh: unknown node 'leader-9'; the nodes are controller-1, leader-1\n"


def test_controllers_can_be_paused_killed_stopped_and_started(cluster: ClusterCli) -> None:
    def active() -> str:
        return f"controller-{json.loads(cluster.run('quorum', 'describe', '--json').stdout)['leader_id'] - 1000}"

    cluster.local("up", "--controllers", "3", "--followers", "0")
    first = active()
    cluster.local("pause", first)
    cluster.run("topic", "create", "one")
    second = active()
    assert second != first
    cluster.local("resume", first)
    cluster.local("kill", second)
    cluster.run("topic", "create", "two")
    cluster.local("start", second)
    cluster.local("stop", active())
    cluster.run("topic", "create", "three")
    for name in ("controller-1", "controller-2", "controller-3"):
        cluster.run("local", "kill", name, check=False)
    for arguments, stdout, stderr in (
        (["quorum", "describe", "--bootstrap", cluster.bootstrap], "metadata quorum: no leader", ""),
        (["topic", "create", "four"], "", "kipmesh: REQUEST_TIMED_OUT: no metadata controller is active"),
        (["config", "describe", "topic", "one"], "", "kipmesh: REQUEST_TIMED_OUT: no metadata controller is active"),
    ):
        began = time.monotonic()
        done = cluster.run(*arguments, "--timeout", "2", check=False)
        assert done.returncode == 1
        assert (done.stdout[: len(stdout or "x")], done.stderr[: len(stderr or "x")]) == (stdout, stderr)
        assert time.monotonic() - began < 45, "--timeout is not kept"
    cluster.local("kill", "leader-1")
    assert cluster.running_nodes() == []
    assert (
        cluster.run("quorum", "describe", "--timeout", "0.5", check=False).stderr.count("no controller responded") == 1
    )
    assert "waits for more controllers" in cluster.local("start", "controller-3")
    done = cluster.run("quorum", "describe", "--timeout", "3", check=False)
    assert (done.returncode, done.stdout[:26]) == (1, "metadata quorum: no leader")
    assert "ready in" in cluster.local("start", "controller-1")
    assert json.loads(cluster.run("quorum", "describe", "--json").stdout)["state"] == "led"  # no broker is running
    cluster.local("up")
    assert cluster.run("topic", "list").stdout.split() == ["one", "three", "two"]
    cluster.local("down", "--timeout", "60")
    for node in cluster.description["nodes"]:
        last = json.loads(Path(node["log"]).read_text().splitlines()[-1])
        assert last["event"] == "stopped", f"{node['name']} did not stop cleanly: {last}"


def node_pids(directory: Path) -> list[int]:
    """Pids of all node processes of the directory, also those that cluster.json does not name (Linux)."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if f"{directory}/".encode() in file.read_bytes() and b"--config-file" in file.read_bytes():
                found.append(int(file.parent.name))
    return found


def _reset_signals() -> None:
    """Restore default handlers in the child, because the parent of pytest may ignore some signals."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


PAUSING = """
import os, signal, sys
place, spawned = sys.argv.pop(1), []
def pause(event, arguments):
    global place
    if event == "subprocess.Popen":
        spawned.append(" ".join(map(str, arguments[1])))
    if event == "subprocess.Popen" and place in spawned[-1] or event == place and spawned:
        place = "passed"
        os.kill(os.getpid(), signal.SIGSTOP)
sys.addaudithook(pause)
from kipmesh.cli.main import main
main()
"""
"""`python -c PAUSING PLACE ARGUMENTS`: the command stops itself (SIGSTOP) before it starts the process whose command
line contains PLACE, or at the first audit event PLACE after it started a process."""
FIRST_READINESS_CHECK = "socket.connect"
"""Audit event of the first readiness check of a node."""


def _interrupt(cluster: ClusterCli, place: str, number: signal.Signals, *arguments: str) -> subprocess.Popen[str]:
    """Start a command, pause it at `place`, and send it a signal there."""
    command = [sys.executable, "-c", PAUSING, place, *arguments, "--dir", str(cluster.directory)]
    starting = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=_reset_signals)
    identity = processes.identity(starting.pid)
    wait_for(lambda: processes.state_of(starting.pid, identity) is not ProcessState.RUNNING, f"pause at {place}")
    starting.send_signal(number)
    starting.send_signal(signal.SIGCONT)
    return starting


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("place", ["kipmesh_leader", FIRST_READINESS_CHECK])
def test_interrupted_up_prints_one_line_and_leaves_no_process(
    cluster: ClusterCli, number: signal.Signals, code: int, place: str
) -> None:
    starting = _interrupt(cluster, place, number, "local", "up", *SMALL)
    _, errors = starting.communicate(timeout=100)
    assert starting.returncode == code, errors
    assert errors == "kipmesh: interrupted; the nodes that this command had started are stopped\n"
    assert cluster.running_nodes() == []
    assert node_pids(cluster.directory) == []


@pytest.mark.parametrize("when", ["controller-1/node.log", "leader-1/node.log", "cluster.json"])
def test_down_stops_all_nodes_of_a_killed_up(cluster: ClusterCli, when: str) -> None:
    command = [sys.executable, "-m", "kipmesh.cli.main", "local", "up", *SMALL, "--dir", str(cluster.directory)]
    starting = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_for((cluster.directory / when).exists, "starting nodes", interval_s=0.0005)
    starting.kill()
    starting.wait()
    if (cluster.directory / "cluster.json").exists():
        cluster.local("down")
    # Nodes that cluster.json does not name exit at their start gate.
    wait_for(lambda: node_pids(cluster.directory) == [], "end of all nodes")
    cluster.local("up", *SMALL)


def test_interrupted_start_stops_only_its_node(cluster: ClusterCli) -> None:
    cluster.local("up", *SMALL)
    cluster.local("stop", "leader-1")
    starting = _interrupt(cluster, FIRST_READINESS_CHECK, signal.SIGTERM, "local", "start", "leader-1")
    _, errors = starting.communicate(timeout=100)
    assert starting.returncode == 143, errors
    assert cluster.running_nodes() == ["controller-1"]
    assert node_pids(cluster.directory) == [cluster.node("controller-1")["pid"]]


def test_concurrent_ups_start_one_cluster(cluster: ClusterCli) -> None:
    command = [sys.executable, "-m", "kipmesh.cli.main", "local", "up", *SMALL, "--dir", str(cluster.directory)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = sorted(process.communicate(timeout=100)[0].splitlines()[0].rpartition(": ")[2] for process in both)
    assert outputs[0].startswith("ready in")
    assert outputs[1] == "runs already"


def test_up_replaces_a_port_in_use(cluster: ClusterCli) -> None:
    cluster.local("up", *SMALL)
    cluster.local("down")
    before = cluster.node("leader-1")["grpc"]
    with socket.create_server(("127.0.0.1", int(before.rpartition(":")[2]))):
        cluster.local("up")
        assert cluster.node("leader-1")["grpc"] != before


def test_up_reports_a_node_that_cannot_start_and_stops_all_nodes(cluster: ClusterCli) -> None:
    done = cluster.run("local", "up", "--config", "log.level=loud", check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("kipmesh: INVALID_CONFIG: log.level must be 'debug',")
    assert done.stderr.count("\n") == 1
    assert (
        "unknown configuration key 'no.key'" in cluster.run("local", "up", "--config", "no.key=1", check=False).stderr
    )

    cluster.local("up", *SMALL)
    cluster.local("down")
    file = cluster.directory / "leader-1" / "data" / "meta.properties"
    text = file.read_text()
    file.write_text(re.sub("cluster.id=.*", "cluster.id=another-cluster", text))
    done = cluster.run("local", "up", check=False)
    assert done.returncode == 1
    assert "leader-1 exited during its start" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "kipmesh_leader: cannot start:" in last
    assert "another-cluster" in last
    assert cluster.running_nodes() == []
    file.write_text(text)
    cluster.local("up")


def test_configuration_from_the_environment_reaches_the_nodes(cluster: ClusterCli) -> None:
    cluster.run("local", "up", *SMALL, env={"KIPMESH_CONFIG_LOG_SEGMENT_BYTES": "1000000"})
    assert "log.segment.bytes=1000000" in (cluster.directory / "leader-1" / "node.properties").read_text()
    assert "log.segment.bytes" not in (cluster.directory / "controller-1" / "node.properties").read_text()


def test_node_reports_a_port_in_use_in_one_line(cluster: ClusterCli) -> None:
    cluster.local("up", *SMALL)
    file = cluster.directory / "leader-1" / "node.properties"
    other = cluster.directory / "other"
    command = [sys.executable, "-m", "kipmesh_leader", "--config-file", str(file)]
    command += ["--config", "http.listener=127.0.0.1:0"]
    address = cluster.node("leader-1")["grpc"]
    for options, line in (
        (["--config", f"log.dirs={other}"], f"kipmesh_leader: cannot start: cannot listen on {address}"),
        ([], "kipmesh_leader: cannot start: "),  # the data directory is in use, too
    ):
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(line)
        assert "Traceback" not in done.stderr


def test_context_manager_removes_its_nodes_and_its_directory(tmp_path: Path) -> None:
    with LocalCluster(followers=1, config={"log.level": "warning"}) as cluster:
        directory = cluster.dir
        cli = ClusterCli(directory)
        assert len(cli.running_nodes()) == 3
        assert cluster.bootstrap == cli.bootstrap
        cluster.kill("follower-1")
        assert cli.running_nodes() == ["controller-1", "leader-1"]
        cluster.start("follower-1")
        cluster.pause("leader-1")
        assert "paused" in cli.run("local", "status", check=False).stdout
        cluster.resume("leader-1")
        cluster.stop("follower-1")
        with pytest.raises(ClusterError, match="follower-1 is not running"):
            cluster.stop("follower-1")
        pids = [(node.pid, node.process) for node in cluster.nodes]
    assert not directory.exists()
    assert processes.wait_gone(pids, 0)
    with LocalCluster(followers=0, dir=tmp_path / "kept") as cluster:
        first = cluster.cluster_id
    with LocalCluster(followers=0, dir=tmp_path / "kept") as cluster:
        assert cluster.cluster_id == first


def test_nodes_stop_when_their_owner_process_is_killed(tmp_path: Path) -> None:
    script = """
import sys, time
from kipmesh.cluster import LocalCluster
cluster = LocalCluster(followers=0, dir=sys.argv[1]).up()
print("up", flush=True)
time.sleep(600)
"""
    directory = tmp_path / "cluster"
    owner = subprocess.Popen([sys.executable, "-c", script, str(directory)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    cli = ClusterCli(directory)
    assert len(cli.running_nodes()) == 2
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_for(lambda: cli.running_nodes() == [], "end of the nodes")
