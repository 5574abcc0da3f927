"""Whether anybody listens at an address: a process that is gone refuses, one that is held, slow or cut off does not."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

Address = tuple[str, int]

_RESOLVER = ThreadPoolExecutor(4, thread_name_prefix="knock-resolver")
"""A name that nobody knows keeps a thread for seconds, and many may be looked up; the loop's own threads read files."""


async def refuses(address: Address, timeout_s: float) -> bool:
    """Whether all that the host's name stands for refuse; False for everything else that may happen in that time."""
    try:
        async with asyncio.timeout(timeout_s):
            found = await _look_up(address)
            for family, kind, protocol, _, place in found:
                with socket.socket(family, kind, protocol) as knocker:
                    knocker.setblocking(False)
                    if not await _refused(knocker, place):
                        return False
    except (OSError, TimeoutError, UnicodeError):  # the last: what no name can be
        return False
    return bool(found)


async def _look_up(address: Address) -> list[Any]:
    """As `socket.getaddrinfo`, without a thread for what is no name."""
    look_up = partial(socket.getaddrinfo, *address, type=socket.SOCK_STREAM)
    try:
        return look_up(flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return await asyncio.get_running_loop().run_in_executor(_RESOLVER, look_up)


async def _refused(knocker: socket.socket, place: tuple[object, ...]) -> bool:
    try:
        await asyncio.get_running_loop().sock_connect(knocker, place)
    except ConnectionRefusedError:
        return True
    return False
