"""Whether a process listens at an address: a dead one refuses connections, a held, slow or isolated one does not."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

Address = tuple[str, int]


class LivenessProber:
    """Probes addresses; `close` it. Owns the threads that resolve names.

    An unknown name keeps a thread for seconds, and many may be resolved; the loop's own threads read files.
    """

    def __init__(self) -> None:
        self._resolver = ThreadPoolExecutor(4, thread_name_prefix="probe-resolver")

    async def refuses(self, address: Address, timeout_s: float) -> bool:
        """Whether all addresses of the host refuse; False for everything else that may happen in that time."""
        try:
            async with asyncio.timeout(timeout_s):
                found = await self._resolve(address)
                for family, kind, protocol, _, place in found:
                    with socket.socket(family, kind, protocol) as probe:
                        probe.setblocking(False)
                        try:
                            await asyncio.get_running_loop().sock_connect(probe, place)
                        except ConnectionRefusedError:
                            continue
                        return False
        except (OSError, TimeoutError, UnicodeError, RuntimeError):  # the latter two: not a valid name, and closed
            return False
        return bool(found)

    async def _resolve(self, address: Address) -> list[Any]:
        """As `socket.getaddrinfo`, without a thread for a numeric address."""
        resolve = partial(socket.getaddrinfo, *address, type=socket.SOCK_STREAM)
        try:
            return resolve(flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            return await asyncio.get_running_loop().run_in_executor(self._resolver, resolve)

    def close(self) -> None:
        """Resolve no more names; idempotent."""
        self._resolver.shutdown(wait=False, cancel_futures=True)
