"""Processes of nodes: identity, signals, waiting, and HTTP probes.

The system reuses pids. `identity` therefore adds the start time of a process, and every signal checks it first. A
zombie counts as gone when its last thread has ended, because only then its files and ports are free.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from kipmesh.cluster.layout import ClusterState, NodeInfo, Role, has_majority

POLL_INTERVAL_S = 0.02
_PROBE_TIMEOUT_S = 5.0


class ProcessState(StrEnum):
    """State of a node's process."""

    RUNNING = "running"
    PAUSED = "paused"
    GONE = "gone"


class _Stat(NamedTuple):
    state: str
    started: str
    threads: int = 1

    @property
    def is_gone(self) -> bool:
        return self.state == "X" or (self.state == "Z" and self.threads <= 1)


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _stat_by_ps(pid)
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command name may contain spaces and brackets
    return _Stat(fields[0], fields[19], int(fields[17]))


def _stat_by_ps(pid: int) -> _Stat | None:
    """Like `_stat`, for systems without /proc (macOS)."""
    result = subprocess.run(  # noqa: S603 - fixed arguments
        ["/bin/ps", "-o", "state=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    state, _, started = result.stdout.strip().partition(" ")
    return _Stat(state[:1], "-".join(started.split())) if state else None


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    return "boot"


def identity(pid: int) -> str | None:
    """Return a string that identifies the process even if its pid is reused (boot id, start time); None if gone."""
    stat = _stat(pid)
    return None if stat is None or stat.is_gone else f"{_boot_id()}:{stat.started}"


def state_of(pid: int | None, process: str | None) -> ProcessState:
    """Return the state of a process; GONE if `process` is not its identity, or an argument is None."""
    if pid is None or process is None or identity(pid) != process:
        return ProcessState.GONE
    stat = _stat(pid)
    if stat is None:
        return ProcessState.GONE
    return ProcessState.PAUSED if stat.state in "Tt" else ProcessState.RUNNING


def send(pid: int | None, process: str | None, number: signal.Signals) -> bool:
    """Send a signal if the process with this pid has the identity `process`.

    Returns whether the signal was sent: False if the process is gone, or `pid` or `process` is None.
    """
    if pid is None or state_of(pid, process) is ProcessState.GONE:
        return False
    with suppress(ProcessLookupError):
        if not hasattr(os, "pidfd_open"):
            os.kill(pid, number)
            return True
        handle = os.pidfd_open(pid)
        try:
            if identity(pid) == process:
                signal.pidfd_send_signal(handle, number)
                return True
        finally:
            os.close(handle)
    return False


def wait_gone(wanted: Iterable[tuple[int | None, str | None]], timeout_s: float) -> bool:
    """Wait until all processes (pid, identity) are gone. Returns True, or False after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    left = list(wanted)
    while left := [one for one in left if state_of(*one) is not ProcessState.GONE]:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_INTERVAL_S)
    return True


def probe(address: str, path: str, *, certs: str | None = None) -> int | None:
    """Return the HTTP status of a GET request to `address` (host:port).

    Returns None if it cannot connect or receives no valid response. If `certs` names a directory, uses TLS and trusts
    the directory's `ca.crt`.
    """
    host, _, port = address.rpartition(":")
    try:
        with _connected(host, int(port), certs) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
            line = connection.makefile("rb").readline(256)
        return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _connected(host: str, port: int, certs: str | None) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S)
    if certs is None:
        return connection
    import ssl

    try:
        context = ssl.create_default_context(cafile=os.path.join(certs, "ca.crt"))
        return context.wrap_socket(connection, server_hostname=host)
    except BaseException:
        connection.close()
        raise


def listens(address: str) -> bool:
    """Return whether `host:port` accepts a connection within 5 s."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_PROBE_TIMEOUT_S):
            return True
    except OSError:
        return False


def log_tail(file: Path, offset: int, *, lines: int) -> list[str]:
    """Return up to `lines` of the last lines written to a log after byte `offset`, reading only its last 64 KiB.

    Empty if the log cannot be read.
    """
    bytes_max = 64 << 10
    try:
        with file.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(offset, end - bytes_max))
            return stream.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


# --- of nodes


def is_alive(node: NodeInfo) -> bool:
    """Return whether a node's process exists, paused or not."""
    return state_of(node.pid, node.process) is not ProcessState.GONE


def is_ready(node: NodeInfo) -> bool:
    """Return whether a node's `/readyz` responds with 200. False if it has no HTTP listener."""
    return node.http is not None and probe(node.http, "/readyz", certs=node.certs) == 200


def is_listening(node: NodeInfo) -> bool:
    """Return whether a node's gRPC listener accepts connections. False if it has no such listener."""
    return node.grpc is not None and listens(node.grpc)


def without_process(node: NodeInfo) -> NodeInfo:
    """Return the node without pid and identity if its process is gone, else unchanged."""
    return node if is_alive(node) else replace(node, pid=None, process=None)


def may_become_ready(state: ClusterState, node: NodeInfo) -> bool:
    """Return whether `node` can become ready once started.

    A controller needs a majority of controllers running (not paused), itself included. Always true for other roles.
    """
    if node.role is not Role.CONTROLLER:
        return True
    running = sum(
        state_of(one.pid, one.process) is ProcessState.RUNNING
        for one in state.nodes
        if one.role is Role.CONTROLLER and one.name != node.name
    )
    return has_majority(state.nodes, running + 1)


def status_of(node: NodeInfo) -> str:
    """Return "stopped", "paused", "ready" (`/readyz` responds with 200) or "not ready"."""
    match state_of(node.pid, node.process):
        case ProcessState.GONE:
            return "stopped"
        case ProcessState.PAUSED:
            return "paused"
        case ProcessState.RUNNING:
            return "ready" if is_ready(node) else "not ready"
