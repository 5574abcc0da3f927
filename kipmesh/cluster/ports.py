"""Chooses free TCP ports for nodes.

Ports are below the system's range for outgoing connections, so a connection cannot take the port of a stopped node. A
`PortReservation` keeps other clusters from choosing the same ports before the nodes listen on them.
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
CAN_RESERVE = sys.platform.startswith("linux")
"""Only Linux lets a server listen on a port to which another socket is bound without listening."""


def is_free(port: int) -> bool:
    """Return whether a server can listen on the port of 127.0.0.1."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        # Servers set it too: a port with connections in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError:
            return False
        return True


def choose(number: int, taken: Collection[int] = ()) -> list[int]:
    """Return `number` free ports that are not in `taken`, without reserving them.

    Raises ClusterError if too few are found.
    """
    with closing(PortReservation()) as reservation:
        return reservation.choose(number, taken)


class PortReservation:
    """Ports reserved for this cluster's servers until `close`.

    On Linux no other reservation chooses them, not even in another process. Elsewhere they are only checked, not
    reserved.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def choose(self, number: int, taken: Collection[int] = ()) -> list[int]:
        """Reserve and return `number` more free ports that are not in `taken`.

        Raises ClusterError if it finds too few in ATTEMPTS_MAX attempts.
        """
        source = random.SystemRandom()
        last = _last_port()
        chosen: list[int] = []
        for _ in range(ATTEMPTS_MAX):
            if len(chosen) == number:
                break
            port = source.randint(FIRST, last)
            if port not in chosen and port not in taken and self._reserve(port):
                chosen.append(port)
        if len(chosen) < number:
            raise ClusterError(f"found only {len(chosen)} of {number} free ports between {FIRST} and {last}: free some")
        return chosen

    def close(self) -> None:
        """Release all ports. Idempotent."""
        while self._sockets:
            self._sockets.pop().close()

    def _reserve(self, port: int) -> bool:
        """Reserve the port with a bound socket, and return whether it was free.

        The socket never listens: connections are refused until a server listens.
        """
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            bound.bind((HOST, port))  # fails beside any other socket, because SO_REUSEADDR is not set yet
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lets a server with SO_REUSEADDR listen
        except OSError:
            bound.close()
            return False
        if CAN_RESERVE:
            self._sockets.append(bound)
        else:
            bound.close()
        return True


def _last_port() -> int:
    try:
        first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return LAST_BY_DEFAULT
    return first_outgoing - 1 if first_outgoing > FIRST + 1000 else LAST_BY_DEFAULT


def port_of(address: str) -> int:
    """Return the port of a `host:port` address. Raises ValueError if it is not a number."""
    return int(address.rpartition(":")[2])
