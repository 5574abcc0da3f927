"""Waiting for what has no event: a condition over the state of several objects of one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 60.0
POLL_S = 0.005


async def until(condition: Callable[[], Any], what: str = "what was waited for", timeout_s: float = TIMEOUT_S) -> Any:
    """Wait until the condition holds; gives its value. AssertionError that says `what` did not come."""
    try:
        async with asyncio.timeout(timeout_s):
            while not (result := condition()):  # noqa: ASYNC110 - a condition over the state of several objects
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"not in {timeout_s:g} s: {what}") from None
    return result
