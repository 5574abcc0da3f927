"""Who opened a connection: the process that has the socket at its far port, by the tables in /proc (Linux).

Reading them takes longer the more connections there are, and whoever waits too long for an answer connects again. So
all who ask at the same time are answered by one look, in a thread, however many they are.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
TIMEOUT_S = 2.0
RETRY_S = 0.05
_LOCALHOSTS = {"tcp": "0100007F", "tcp6": "0000000000000000FFFF00000100007F"}
"""127.0.0.1 as the kernel's tables have it; gRPC's sockets are IPv6 ones, whatever they connect to."""
_CLOSED = "0"
"""The inode of a socket that no process has any more."""


def owners_of(ports: Collection[int], pids: Mapping[int, str], proc: Path = PROC) -> dict[int, str | None]:
    """The names of those processes among `pids` that have the sockets of these local TCP ports.

    None for one that was closed; a port is missing when none of the processes has it.
    """
    inodes = _inodes(ports, proc)
    found: dict[int, str | None] = {port: None for port, inode in inodes.items() if inode == _CLOSED}
    wanted = {f"socket:[{inode}]": port for port, inode in inodes.items() if inode != _CLOSED}
    for pid, name in pids.items():
        if not wanted:
            break
        try:
            with os.scandir(proc / str(pid) / "fd") as entries:
                for entry in entries:
                    port = wanted.pop(_target(entry.path), None)
                    if port is not None:
                        found[port] = name
        except OSError:
            continue  # it ended
    return found


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""


def _inodes(ports: Collection[int], proc: Path) -> dict[int, str]:
    found: dict[int, str] = {}
    for table, address in _LOCALHOSTS.items():
        wanted = {f"{address}:{port:04X}": port for port in ports}
        try:
            lines = (proc / "net" / table).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            fields = line.split(None, 10)
            if len(fields) > 9 and fields[1] in wanted:
                found[wanted[fields[1]]] = fields[9]
    return found


class _Asked(NamedTuple):
    port: int
    answer: asyncio.Future[str | None]
    deadline: float


class Owners:
    """Answers who has which port; belongs to one event loop."""

    def __init__(self, pids: Callable[[], Mapping[int, str]]) -> None:
        """`pids` gives the processes as they are known now."""
        self._pids = pids
        self._asked: list[_Asked] = []
        self._looking: asyncio.Task[None] | None = None

    async def of(self, port: int) -> str | None:
        """The process's name; None for a socket that is closed, or that none of them has within `TIMEOUT_S`."""
        loop = asyncio.get_running_loop()
        asked = _Asked(port, loop.create_future(), loop.time() + TIMEOUT_S)
        self._asked.append(asked)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        return await asked.answer

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while self._asked:
            asked, self._asked = self._asked, []
            began, ports, late = loop.time(), {one.port for one in asked}, []
            try:
                found = await asyncio.to_thread(owners_of, ports, self._pids())
            except Exception as error:
                for one in asked:
                    if not one.answer.done():
                        one.answer.set_exception(error)
                continue
            for one in asked:
                if one.answer.done():  # nobody waits any more
                    continue
                if one.port in found or began >= one.deadline:
                    one.answer.set_result(found.get(one.port))
                else:
                    late.append(one)
            if late:
                await asyncio.sleep(RETRY_S)
                self._asked += late
