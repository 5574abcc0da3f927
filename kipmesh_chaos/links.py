"""A network between processes that can be cut: a TCP proxy for each ordered pair of nodes, on ports of its own.

Who is to reach a node by a link is given the link's address instead of the node's; that link alone is then what lies
between the two. A cut is between two nodes in one direction, whoever opened the
connection: bytes that go that way are held back, not lost, and come out when the cut is healed, as TCP would send them
again; ends of connections are held back like bytes. Opening a connection takes both directions. So neither side sees
more than silence.

A link holds at most `HELD_BYTES` of a connection in each direction; then the sender's own buffers fill up.

Where many reach a node by one address that they are told by others, an ingress is before it instead: who opened a
connection is then asked of `source_of`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"
HELD_BYTES = 64 << 10

Pair = tuple[str, str]
"""(from, to), names of nodes."""

SourceOf = Callable[[tuple[int, int]], Awaitable[str]]
"""Of a connection, by the ports that it comes from and goes to."""


class _Passage:
    """What lies between two nodes in one direction."""

    __slots__ = ("delay_s", "open")

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.delay_s = 0.0


class Links:
    """See the module; it belongs to one event loop. Use `async with`, or `close` at the end."""

    def __init__(self) -> None:
        self._passages: dict[Pair, _Passage] = {}
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._addresses: dict[Pair, str] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def address(self, source: str, target: str, target_address: str) -> str:
        """`host:port` by which `source` reaches `target`, which listens at `target_address`; made at the first call."""
        known = self._addresses.get((source, target))
        if known is None:

            async def source_of(_ports: tuple[int, int]) -> str:
                return source

            known = self._addresses[source, target] = await self._listen(source_of, target, target_address)
        return known

    async def ingress(self, target: str, target_address: str, source_of: SourceOf) -> str:
        """`host:port` by which everybody reaches `target`; `source_of` names who opened a connection."""
        return await self._listen(source_of, target, target_address)

    def cut(self, pairs: Iterable[Pair]) -> None:
        """Hold back what goes from the first to the second of each pair."""
        for pair in pairs:
            self._passage(*pair).open.clear()

    def join(self, pairs: Iterable[Pair]) -> None:
        """Undo `cut` of these."""
        for pair in pairs:
            self._passage(*pair).open.set()

    def delay(self, pairs: Iterable[Pair], delay_s: float) -> None:
        """What goes from the first to the second takes so long and, under load, at most twice as long; 0 undoes it."""
        for pair in pairs:
            self._passage(*pair).delay_s = delay_s

    def heal(self) -> None:
        """Let everything through again, at once."""
        for passage in self._passages.values():
            passage.open.set()
            passage.delay_s = 0.0

    async def close(self) -> None:
        """End all connections; idempotent."""
        for server in self._servers:
            server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    # -- inside

    def _passage(self, source: str, target: str) -> _Passage:
        """From source to target."""
        passage = self._passages.get((source, target))
        if passage is None:
            passage = self._passages[source, target] = _Passage()
        return passage

    async def _listen(self, source_of: SourceOf, target: str, target_address: str) -> str:
        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._connect(reader, writer, source_of, target, target_address))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

        server = await asyncio.start_server(accepted, HOST, 0)
        self._servers.append(server)
        return f"{HOST}:{server.sockets[0].getsockname()[1]}"

    async def _connect(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        source_of: SourceOf,
        target: str,
        target_address: str,
    ) -> None:
        """One connection, from its opening until either side has ended it."""
        writers = [writer]
        try:
            far, near = (writer.get_extra_info(name)[1] for name in ("peername", "sockname"))
            source = await source_of((far, near))
            there, back = self._passage(source, target), self._passage(target, source)
            while not (there.open.is_set() and back.open.is_set()):
                await there.open.wait()
                await back.open.wait()
            await asyncio.sleep(there.delay_s + back.delay_s)
            host, _, port = target_address.rpartition(":")
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            writers.append(far_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, far_writer, there))
                group.create_task(_pump(far_reader, writer, back))
        except (OSError, ExceptionGroup):
            pass  # closing it says all: broken connections are what this is for
        finally:
            for each in writers:
                each.transport.abort()


class _EndedError(OSError):
    """One side ended the connection: so does the other."""


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passage: _Passage) -> None:
    while data := await reader.read(HELD_BYTES):
        if passage.delay_s:
            await asyncio.sleep(passage.delay_s)
        await passage.open.wait()
        writer.write(data)
        await writer.drain()
    await passage.open.wait()
    with suppress(OSError):
        await writer.drain()
    raise _EndedError
