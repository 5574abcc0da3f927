"""Liveness probes: the address of a dead process refuses connections; a paused, slow or isolated process does not."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

Address = tuple[str, int]


class LivenessProber:
    """Checks whether addresses refuse connections, until it is closed.

    It has its own threads to resolve names, because an unknown name blocks a thread for seconds, and the event loop's
    default threads read files.
    """

    def __init__(self) -> None:
        self._resolver = ThreadPoolExecutor(4, thread_name_prefix="probe-resolver")

    async def refuses(self, address: Address, timeout_s: float) -> bool:
        """Return whether all IP addresses of the host refuse a connection on the port.

        Returns False if an address accepts or fails in another way, if the name cannot be resolved, if there is no
        result within `timeout_s` seconds, or after `close`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                infos = await self._resolve(address)
                for family, kind, protocol, _, sockaddr in infos:
                    with socket.socket(family, kind, protocol) as probe:
                        probe.setblocking(False)
                        try:
                            await asyncio.get_running_loop().sock_connect(probe, sockaddr)
                        except ConnectionRefusedError:
                            continue
                        return False
        except (OSError, TimeoutError, UnicodeError, RuntimeError):  # the last two: an invalid name, a closed prober
            return False
        return bool(infos)

    async def _resolve(self, address: Address) -> list[Any]:
        """Return the result of `socket.getaddrinfo`, using a thread unless the address is numeric. Raises OSError."""
        resolve = partial(socket.getaddrinfo, *address, type=socket.SOCK_STREAM)
        try:
            return resolve(flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            return await asyncio.get_running_loop().run_in_executor(self._resolver, resolve)

    def close(self) -> None:
        """Stop the threads without waiting for them. Idempotent."""
        self._resolver.shutdown(wait=False, cancel_futures=True)
