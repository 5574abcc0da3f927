"""One Metadata request to whichever broker answers first: while one is silent, as a stopped process is, the next one is
asked as well."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages import MetadataRequest, MetadataResponse
from kipmesh.rpc.client import ConnectionPool, Meter, TransportError

log = logging.getLogger(__name__)

SILENCE_S = 0.5
"""A broker that has not answered for so long may never: others are asked beside it."""


async def ask_any(
    pool: ConnectionPool,
    addresses: Sequence[str],
    request: MetadataRequest,
    timeout_s: float,
    meter: Meter | None = None,
) -> MetadataResponse:
    """The first answer that names brokers; raises TransportError or KafkaError when there is none.

    `timeout_s` is each broker's own; `meter` is told the bytes sent to and received from each.
    """
    failure: Exception = KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, "no address")
    left = list(addresses)
    asked: set[asyncio.Task[MetadataResponse | Exception]] = set()
    try:
        while left or asked:
            if left:
                asked.add(asyncio.create_task(_ask(pool, left.pop(0), request, timeout_s, meter)))
            wait_s = SILENCE_S if left else None
            done, asked = await asyncio.wait(asked, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                answer = task.result()
                if not isinstance(answer, Exception):
                    return answer
                failure = answer
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    raise failure


async def _ask(
    pool: ConnectionPool, address: str, request: MetadataRequest, timeout_s: float, meter: Meter | None
) -> MetadataResponse | Exception:
    """The answer of one broker, or why there is none."""
    try:
        response: MetadataResponse = await pool.get(address).call("Broker", "Metadata", request, timeout_s, meter=meter)
    except TransportError as error:
        return error
    except Exception as error:  # whatever an answer is made of, the next broker's may be better
        log.exception("metadata of %s cannot be read", address)
        return KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, f"metadata of {address} cannot be read: {error!r}")
    if response.brokers:
        return response
    return KafkaError(response.error_code or ErrorCode.BROKER_NOT_AVAILABLE, f"{address} knows no brokers yet")
