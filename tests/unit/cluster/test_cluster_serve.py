"""`python -m kipmesh.cluster.serve`: advertised addresses, invalid usage, and the end by SIGTERM."""

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


def test_broker_listens_on_all_addresses_and_advertises_given_ones() -> None:
    node = NodeInfo("follower-1", Role.FOLLOWER, 2, "rack-b", grpc="127.0.0.1:5000")
    advertised = serve.listeners(node, ADVERTISED)
    assert advertised["listeners"] == "MESH://127.0.0.1:5000,MESH_HOST://0.0.0.0:9201,KAFKA_HOST://0.0.0.0:9301"
    assert advertised["advertised.listeners"] == "MESH_HOST://mesh.example:2,KAFKA_HOST://kafka.example:4"


def test_controller_has_no_external_listener() -> None:
    assert serve.listeners(NodeInfo("controller-1", Role.CONTROLLER, 1001, "rack-a"), ADVERTISED) == {}


def test_advertised_host_applies_to_all_ports() -> None:
    advertised = serve._advertised(options(None), threading.Event())
    assert advertised == {"mesh": ["10.0.0.7:9200", "10.0.0.7:9201"], "kafka": ["10.0.0.7:9300", "10.0.0.7:9301"]}


def test_serve_waits_for_complete_advertise_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "advertised.json"
    text = json.dumps(ADVERTISED)
    steps = iter([lambda: None, lambda: file.write_text(text[:20]), lambda: file.write_text(text)])

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            next(steps)()
            return False

    monkeypatch.setattr(serve.time, "sleep", lambda _s: None)
    assert serve._advertised(options(file), Event()) == ADVERTISED


def test_serve_stops_waiting_when_ended(tmp_path: Path) -> None:
    stop_event = threading.Event()
    stop_event.set()
    assert serve._advertised(options(tmp_path / "never.json"), stop_event) is None


@pytest.mark.parametrize("text", ["[]", "{}", '{"mesh": ["a:1"], "kafka": ["a:2", "b:3"]}', "1"])
def test_invalid_advertise_file_is_rejected(tmp_path: Path, text: str) -> None:
    file = tmp_path / "advertised.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="must contain 2 addresses for mesh and for kafka"):
        serve._advertised(options(file), threading.Event())


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["--brokers", "10"], 2, "invalid choice: 10"),
        (["--controllers", "2"], 2, "invalid choice: 2"),
        (["--advertise", "a", "--advertise-file", "b"], 2, "not allowed with argument"),
        (["--config", "acks"], 1, "kipmesh: --config must be key=value, got 'acks'"),
        (
            ["--config", "num.partitions=none", "--advertise", "127.0.0.1"],
            1,
            "num.partitions must be an integer, got 'none'",
        ),
        (["--dir", "/nowhere/at/all"], 1, "kipmesh: "),
    ],
)
def test_serve_reports_usage_error_in_one_line(
    arguments: list[str], code: int, error: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    try:
        exit_code = serve.main(arguments)
    except SystemExit as exit_error:
        exit_code = int(exit_error.code or 0)
    assert exit_code == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert error in lines[-1]
    assert code == 2 or len(lines) == 1


def test_serve_runs_until_sigterm(tmp_path: Path) -> None:
    reservation = ports.PortReservation()  # the nodes use other ports
    mesh, kafka = reservation.choose(2)
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
        reservation.close()
    assert not list(tmp_path.iterdir())
