"""Whether anybody listens at an address: a process that is gone refuses, one that is held, slow or cut off does not."""

from __future__ import annotations

import asyncio

Address = tuple[str, int]


async def refuses(address: Address, timeout_s: float) -> bool:
    """Whether a connection is refused; False for everything else that may happen within the time limit."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(*address)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return False
