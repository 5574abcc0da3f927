"""Free TCP ports for nodes.

They are taken below the range that the system gives to outgoing connections: a node that is restarted finds its
port free, whatever connections its neighbours opened meanwhile. Between the choice and the node's own `listen` seconds
may pass, in which another cluster chooses: who holds its ports (`Held`) loses none to it.
"""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Collection
from contextlib import closing
from pathlib import Path

from kipmesh.cluster.layout import ClusterError

HOST = "127.0.0.1"
FIRST = 10_240
LAST_BY_DEFAULT = 32_767
ATTEMPTS_MAX = 2000
CAN_HOLD = sys.platform.startswith("linux")
"""Elsewhere no server can listen on a port that another socket is bound to, listening or not."""


def is_free(port: int) -> bool:
    """Whether a server can listen on the port now."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        # As servers do it: a port whose old connections still linger is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError:
            return False
        return True


def choose(number: int, taken: Collection[int] = ()) -> list[int]:
    """`number` ports that are free now, none of them in `taken`; raises ClusterError."""
    with closing(Held()) as held:
        return held.choose(number, taken)


class Held:
    """Ports that servers of ours can listen on, and that nobody else chooses before `close`."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def choose(self, number: int, taken: Collection[int] = ()) -> list[int]:
        """`number` more ports that nobody has or holds, none of them in `taken`; raises ClusterError."""
        source = random.SystemRandom()
        last = _last_port()
        chosen: list[int] = []
        for _ in range(ATTEMPTS_MAX):
            if len(chosen) == number:
                break
            port = source.randint(FIRST, last)
            if port not in chosen and port not in taken and self._hold(port):
                chosen.append(port)
        if len(chosen) < number:
            raise ClusterError(f"found no {number} free ports between {FIRST} and {last}")
        return chosen

    def close(self) -> None:
        """Hold none any more; idempotent."""
        while self._sockets:
            self._sockets.pop().close()

    def _hold(self, port: int) -> bool:
        """Bind a socket that never listens: who connects is refused. Whether the port was free for it."""
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            held.bind((HOST, port))  # without SO_REUSEADDR: not beside a socket that somebody else holds
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # from now on a server may, which has it too
        except OSError:
            held.close()
            return False
        if CAN_HOLD:
            self._sockets.append(held)
        else:
            held.close()
        return True


def _last_port() -> int:
    try:
        first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return LAST_BY_DEFAULT
    return first_outgoing - 1 if first_outgoing > FIRST + 1000 else LAST_BY_DEFAULT


def port_of(address: str) -> int:
    """The port of `host:port`."""
    return int(address.rpartition(":")[2])
