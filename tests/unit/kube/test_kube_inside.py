"""Faults inside the container of a node: `kipmesh.kube.inside`, and its use by the release."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kipmesh.kube import inside
from kipmesh.kube import release as kube_release
from kipmesh.kube.__main__ import main
from kipmesh.kube.api import KubeError

WAIT_S = 100


def process(directory: Path, number: int, *arguments: str) -> None:
    (directory / str(number)).mkdir()
    (directory / str(number) / "cmdline").write_bytes(b"".join(argument.encode() + b"\0" for argument in arguments))


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "proc"
    directory.mkdir()
    (directory / "self").mkdir()
    monkeypatch.setattr(inside, "PROC", directory)
    return directory


def test_node_process_is_found_by_command_line(proc: Path) -> None:
    process(proc, 1, "/pause")
    process(proc, 20, "python", "-m", "kipmesh.kube", "leave")
    process(proc, 7, "python", "-m", "kipmesh_follower", "--config-file", "x")
    assert inside.node_process() == 7


def test_node_process_falls_back_to_process_1(proc: Path) -> None:
    process(proc, 1, "sh")
    assert inside.node_process() == 1


def test_process_1_is_not_paused(proc: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process(proc, 1, "python", "-m", "kipmesh_leader")
    assert main(["hold"]) == 1
    assert "cannot hold: cannot pause process 1 from inside its pod" in capsys.readouterr().err


def state_of(process_id: int) -> str:
    return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_held_node_stops_until_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as node:
        monkeypatch.setattr(inside, "node_process", lambda: node.pid)
        try:
            assert main(["hold"]) == 0
            until(lambda: state_of(node.pid) == "T")
            assert main(["resume"]) == 0
            until(lambda: state_of(node.pid) != "T")
        finally:
            node.kill()


def until(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_pressure_holds_memory_until_relieved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "PID_FILE", tmp_path / "pressing")
    monkeypatch.setattr(inside, "memory_bytes", lambda: (64 << 20, 16 << 20))
    assert main(["press", "--cpu=1", "--memory-share=0.5", "--for-s=600"]) == 0
    group = int(inside.PID_FILE.read_text())
    try:

        def held_bytes() -> int:
            lines = Path(f"/proc/{group}/status").read_text().splitlines()
            return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)

        until(lambda: held_bytes() >= 16 << 20)
        assert os.getpgid(group) == group
    finally:
        assert main(["relieve"]) == 0
    _, status = os.waitpid(group, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert main(["relieve"]) == 0
    assert not inside.PID_FILE.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_relieve_ignores_other_process_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "PID_FILE", tmp_path / "pressing")
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command, start_new_session=True) as other_group:
        try:
            inside.PID_FILE.write_text(str(other_group.pid))
            assert main(["relieve"]) == 0
            assert not inside.PID_FILE.exists()
        finally:
            other_group.terminate()  # an earlier SIGKILL would set the return code
    assert other_group.returncode == -signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_relieve_ends_pressure_without_its_group_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "PID_FILE", tmp_path / "pressing")
    assert main(["press", "--cpu=1", "--for-s=600"]) == 0
    group = int(inside.PID_FILE.read_text())
    until(lambda: len(inside.pressure_processes(group)) == 2)
    os.kill(group, signal.SIGKILL)
    os.waitpid(group, 0)
    assert len(inside.pressure_processes(group)) == 1
    assert main(["relieve"]) == 0
    until(lambda: not inside.pressure_processes(group))


@pytest.mark.parametrize("version", [1, 2])
def test_memory_limit_and_usage_are_read_from_the_cgroup(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inside, "CGROUP", tmp_path)
    directory = tmp_path if version == 2 else tmp_path / "memory"
    directory.mkdir(exist_ok=True)
    limit, used = (
        ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    (directory / limit).write_text("1000\n")
    (directory / used).write_text("700\n")
    (directory / "memory.stat").write_text("anon 5\ninactive_file 200\ntotal_inactive_file 200\n")
    assert inside.memory_bytes() == (1000, 500)
    (directory / limit).write_text("max\n" if version == 2 else "9223372036854771712\n")
    with pytest.raises(ValueError, match="no memory limit"):
        inside.memory_bytes()


class FakeApi:
    """One pod. Commands return the given outputs or raise the given errors."""

    def __init__(self, outputs: list[str | KubeError]) -> None:
        self.outputs = outputs
        self.ran: list[list[str]] = []

    def pods(self, namespace: str, selector: str) -> list[Any]:
        from types import SimpleNamespace

        args = ["--first-id=101", "--service=s", "--port=1"]
        return [
            SimpleNamespace(
                metadata=SimpleNamespace(
                    name="m-followers-0", labels={kube_release.COMPONENT: "followers"}, uid="u", deletion_timestamp=None
                ),
                spec=SimpleNamespace(
                    init_containers=[SimpleNamespace(args=args)], node_name="n1", share_process_namespace=True
                ),
                status=SimpleNamespace(
                    container_statuses=[
                        SimpleNamespace(container_id="c", state=SimpleNamespace(running=SimpleNamespace()))
                    ],
                    conditions=[],
                ),
            )
        ]

    def run(self, namespace: str, pod: str, command: list[str]) -> str:
        self.ran.append(command)
        output = self.outputs.pop(0)
        if isinstance(output, KubeError):
            raise output
        return output


def make_release(
    monkeypatch: pytest.MonkeyPatch, *outputs: str | KubeError
) -> tuple[kube_release.KubeRelease, FakeApi]:
    api = FakeApi(list(outputs))
    monkeypatch.setattr(kube_release, "KubeApi", lambda: api)
    monkeypatch.setattr(kube_release, "POLL_INTERVAL_S", 0.0)
    return kube_release.KubeRelease("ns", "m"), api


def test_only_small_volume_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    release_under_test, api = make_release(monkeypatch, f"/dev/vda {99 << 20} 5 {50 << 20} 1% /var/lib/kipmesh\n")
    with pytest.raises(KubeError, match="must have at most 4 GiB free to be filled, got 50 GiB"):
        release_under_test.fill("follower-1")
    assert len(api.ran) == 1
    release_under_test, api = make_release(monkeypatch, "tmpfs 65536 5 65000 1% /var/lib/kipmesh\n", "full\n")
    assert release_under_test.fill("follower-1") == "full\n"
    assert "head -c" in api.ran[1][-1]


def test_undo_is_retried_until_container_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    release_under_test, api = make_release(
        monkeypatch, "", KubeError("container not found"), KubeError("container not found"), ""
    )
    release_under_test.pause("follower-1")
    release_under_test.undo_faults()
    assert [command[-1] for command in api.ran] == ["hold", "resume", "resume", "resume"]
    release_under_test.undo_faults()
    assert len(api.ran) == 4
