"""A network between local processes that can be cut and delayed: a TCP proxy for each ordered pair of nodes.

A source uses the link's address instead of the target's. A cut holds back bytes from one node to another, whichever
opened the connection, and delivers them when it heals, as TCP retransmission would. Ends of connections are held back,
too. Opening a connection needs both directions. So a cut looks like silence to both nodes.

A link buffers at most `HELD_BYTES` per connection and direction. An ingress is a link for an address that many sources
share: `source_of` then names the source of each connection.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"
HELD_BYTES = 64 << 10

Pair = tuple[str, str]
"""(source, target), names of nodes."""

SourceOf = Callable[[tuple[int, int]], Awaitable[str]]
"""Returns the name of the source of a connection, given its (source port, destination port)."""


class _Passage:
    """State of the network from one node to another: open or cut, and delay in seconds."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.delay_s = 0.0


class Links:
    """All links of one run. Belongs to one event loop. Use `async with`, or call `close`."""

    def __init__(self) -> None:
        self._passages: defaultdict[Pair, _Passage] = defaultdict(_Passage)
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
        """Return the `host:port` by which `source` reaches `target`. The first call opens the link. Raises OSError."""
        known = self._addresses.get((source, target))
        if known is None:

            async def source_of(_ports: tuple[int, int]) -> str:
                return source

            known = self._addresses[source, target] = await self._listen(source_of, target, target_address)
        return known

    async def ingress(self, target: str, target_address: str, source_of: SourceOf) -> str:
        """Open a new `host:port` by which all sources reach `target`; each call opens another. Raises OSError.

        `source_of` identifies the source of each connection.
        """
        return await self._listen(source_of, target, target_address)

    def cut(self, pairs: Iterable[Pair]) -> None:
        """Hold back bytes from the first to the second node of each pair, until `join` or `heal`."""
        for pair in pairs:
            self._passages[pair].open.clear()

    def join(self, pairs: Iterable[Pair]) -> None:
        """Undo `cut` for these pairs and deliver the held bytes."""
        for pair in pairs:
            self._passages[pair].open.set()

    def delay(self, pairs: Iterable[Pair], delay_s: float) -> None:
        """Delay bytes from the first to the second node of each pair by `delay_s` seconds; 0 removes the delay.

        Under load the delay is at most twice `delay_s`.
        """
        for pair in pairs:
            self._passages[pair].delay_s = delay_s

    def heal(self) -> None:
        """Undo all cuts and delays."""
        for passage in self._passages.values():
            passage.open.set()
            passage.delay_s = 0.0

    async def close(self) -> None:
        """Close all listeners and abort all connections; idempotent."""
        for server in self._servers:
            server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    # -- inside

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
        """Proxy one connection until either side ends it, then abort both sides."""
        writers = [writer]
        try:
            far, near = (writer.get_extra_info(name)[1] for name in ("peername", "sockname"))
            source = await source_of((far, near))
            there, back = self._passages[source, target], self._passages[target, source]
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
            pass  # both sides are closed below
        finally:
            for each in writers:
                each.transport.abort()


class _EndedError(OSError):
    """One side has ended the connection, so the other side is closed, too."""


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
