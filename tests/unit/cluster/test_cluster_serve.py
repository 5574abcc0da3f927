"""`python -m kipmesh.cluster.serve`: what it tells of its addresses, what it refuses, and that SIGTERM ends it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from pathlib import Path

import pytest

from kipmesh.client import NewTopic
from kipmesh.client.sync import AdminClient
from kipmesh.cluster import ports, serve
from kipmesh.cluster.layout import NodeInfo, Role

ADVERTISED = {"mesh": ["mesh.example:1", "mesh.example:2"], "kafka": ["kafka.example:3", "kafka.example:4"]}
_SCRIPT = """
import sys
from kipmesh.cluster import serve
serve.MESH_PORT, serve.KAFKA_PORT = int(sys.argv[1]), int(sys.argv[2])
sys.exit(serve.main(sys.argv[3:]))
"""


def options(file: Path | None, brokers: int = 2) -> Namespace:
    return Namespace(advertise_file=file, advertise="10.0.0.7", brokers=brokers)


def test_a_broker_listens_on_two_ports_of_all_addresses_and_tells_what_was_said() -> None:
    node = NodeInfo("follower-1", Role.FOLLOWER, 2, "rack-b", grpc="127.0.0.1:5000")
    said = serve.listeners(node, ADVERTISED)
    assert said["listeners"] == "MESH://127.0.0.1:5000,MESH_HOST://0.0.0.0:9201,KAFKA_HOST://0.0.0.0:9301"
    assert said["advertised.listeners"] == "MESH_HOST://mesh.example:2,KAFKA_HOST://kafka.example:4"


def test_a_controller_is_for_the_nodes_alone() -> None:
    assert serve.listeners(NodeInfo("controller-1", Role.CONTROLLER, 1001, "rack-a"), ADVERTISED) == {}


def test_one_host_for_all_ports() -> None:
    said = serve._advertised(options(None), threading.Event())
    assert said == {"mesh": ["10.0.0.7:9200", "10.0.0.7:9201"], "kafka": ["10.0.0.7:9300", "10.0.0.7:9301"]}


def test_a_file_is_waited_for_until_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "advertised.json"
    text = json.dumps(ADVERTISED)
    steps = iter([lambda: None, lambda: file.write_text(text[:20]), lambda: file.write_text(text)])

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            next(steps)()
            return False

    monkeypatch.setattr(serve.time, "sleep", lambda _s: None)
    assert serve._advertised(options(file), Event()) == ADVERTISED


def test_who_is_ended_before_waits_no_longer(tmp_path: Path) -> None:
    ends = threading.Event()
    ends.set()
    assert serve._advertised(options(tmp_path / "never.json"), ends) is None


@pytest.mark.parametrize("text", ["[]", "{}", '{"mesh": ["a:1"], "kafka": ["a:2", "b:3"]}', "1"])
def test_a_file_of_other_things_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "advertised.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="must contain 2 addresses for mesh and for kafka"):
        serve._advertised(options(file), threading.Event())


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--brokers", "10"], 2, "invalid choice: 10"),
        (["--controllers", "2"], 2, "invalid choice: 2"),
        (["--advertise", "a", "--advertise-file", "b"], 2, "not allowed with argument"),
        (["--config", "acks"], 1, "kipmesh: --config must be key=value, got 'acks'"),
        (["--config", "num.partitions=none", "--advertise", "127.0.0.1"], 1, "configuration key 'num.partitions'"),
        (["--dir", "/nowhere/at/all"], 1, "kipmesh: "),
    ],
)
def test_wrong_usage_is_told_in_one_line(
    arguments: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    try:
        found = serve.main(arguments)
    except SystemExit as ended:
        found = int(ended.code or 0)
    assert found == code
    said = capsys.readouterr().err.strip().splitlines()
    assert told in said[-1]
    assert code == 2 or len(said) == 1


def test_it_serves_until_sigterm(tmp_path: Path) -> None:
    held = ports.PortReservation()  # its nodes' own ports are others
    mesh, kafka = held.choose(2)
    command = [sys.executable, "-c", _SCRIPT, str(mesh), str(kafka), "--dir", str(tmp_path)]
    process = subprocess.Popen([*command, "--config", "num.partitions=2"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == serve.READY_LINE
        with AdminClient(f"127.0.0.1:{mesh}") as admin:
            admin.create_topics([NewTopic("greetings", 1, 1)])
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
        held.close()
    assert not list(tmp_path.iterdir())
