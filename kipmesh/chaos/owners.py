"""Who opened a connection: the process that has the socket at its far end, by the tables in /proc (Linux).

A port alone is not a connection's: the system gives one to as many as go to different places, those that ended a minute
ago included. So both ports are looked for.

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
Connection = tuple[int, int]
"""The ports that it comes from and goes to."""
_LOCALHOSTS = {"tcp": "0100007F", "tcp6": "0000000000000000FFFF00000100007F"}
"""127.0.0.1 as the kernel's tables have it; gRPC's sockets are IPv6 ones, whatever they connect to."""
_CLOSED = "0"
"""The inode of a socket that no process has any more."""


def owners_of(
    connections: Collection[Connection], pids: Mapping[int, str], proc: Path = PROC
) -> dict[Connection, str | None]:
    """The names of those processes among `pids` that have the sockets from which these TCP connections come.

    None for one that was closed; a connection is missing when none of the processes has it.
    """
    inodes = _inodes(connections, proc)
    found: dict[Connection, str | None] = {one: None for one, inode in inodes.items() if inode == _CLOSED}
    wanted = {f"socket:[{inode}]": one for one, inode in inodes.items() if inode != _CLOSED}
    for pid, name in pids.items():
        if not wanted:
            break
        try:
            with os.scandir(proc / str(pid) / "fd") as entries:
                for entry in entries:
                    one = wanted.pop(_target(entry.path), None)
                    if one is not None:
                        found[one] = name
        except OSError:
            continue  # it ended
    return found


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""


def _inodes(connections: Collection[Connection], proc: Path) -> dict[Connection, str]:
    found: dict[Connection, str] = {}
    for table, host in _LOCALHOSTS.items():
        wanted = {(f"{host}:{one[0]:04X}", f"{host}:{one[1]:04X}"): one for one in connections}
        try:
            lines = (proc / "net" / table).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            fields = line.split(None, 10)
            if len(fields) > 9 and (one := wanted.get((fields[1], fields[2]))) is not None:
                found[one] = fields[9]
    return found


class _Asked(NamedTuple):
    connection: Connection
    answer: asyncio.Future[str | None]
    deadline: float


class Owners:
    """Answers whose a connection is; belongs to one event loop."""

    def __init__(self, pids: Callable[[], Mapping[int, str]]) -> None:
        """`pids` gives the processes as they are known now."""
        self._pids = pids
        self._asked: list[_Asked] = []
        self._looking: asyncio.Task[None] | None = None

    async def of(self, connection: Connection) -> str | None:
        """The process's name; None for a socket that is closed, or that none of them has within `TIMEOUT_S`."""
        loop = asyncio.get_running_loop()
        asked = _Asked(connection, loop.create_future(), loop.time() + TIMEOUT_S)
        self._asked.append(asked)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        return await asked.answer

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while self._asked:
            asked, self._asked = self._asked, []
            began, connections, late = loop.time(), {one.connection for one in asked}, []
            try:
                found = await asyncio.to_thread(owners_of, connections, self._pids())
            except Exception as error:
                for one in asked:
                    if not one.answer.done():
                        one.answer.set_exception(error)
                continue
            for one in asked:
                if one.answer.done():  # nobody waits any more
                    continue
                if one.connection in found or began >= one.deadline:
                    one.answer.set_result(found.get(one.connection))
                else:
                    late.append(one)
            if late:
                await asyncio.sleep(RETRY_S)
                self._asked += late
