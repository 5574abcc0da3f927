"""gRPC calls to brokers: the method of a request, retry backoff, and conversion of failures to KafkaError."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages.table import APIS, Api
from kipmesh.transport.grpc.client import ConnectionPool, Meter, TransportError

log = logging.getLogger(__name__)

_APIS: Mapping[type, Api] = MappingProxyType({api.request: api for api in reversed(APIS) if api.service is not None})
_JITTER = 0.2
_RANDOM = random.SystemRandom()  # unaffected by random.seed(), so that seeded programs do not retry in lockstep
_DOUBLINGS_MAX = 30


def api_of(request: Any) -> Api:
    """Return the API that a request message belongs to. Fetch maps to the broker's API, not the controller's."""
    return _APIS[type(request)]


def call(
    pool: ConnectionPool, address: str, request: Any, timeout_s: float, meter: Meter | None = None
) -> Coroutine[Any, Any, Any]:
    """Return a coroutine that sends a request to the node at `address` and returns the response.

    The coroutine raises TransportError on failure or if there is no response within `timeout_s`. `meter` counts the
    bytes sent and received.
    """
    api = api_of(request)
    assert api.service is not None
    return pool.get(address).call(api.service.name, api.rpc, request, timeout_s, meter=meter)


def transport_failure(error: TransportError) -> KafkaError:
    """Return (do not raise) REQUEST_TIMED_OUT if the request timed out, otherwise NETWORK_EXCEPTION."""
    return KafkaError(ErrorCode.REQUEST_TIMED_OUT if error.timed_out else ErrorCode.NETWORK_EXCEPTION, str(error))


class Backoff(NamedTuple):
    """Exponential backoff from `retry.backoff.ms` to `retry.backoff.max.ms`, with 20 % jitter."""

    base_ms: int
    max_ms: int

    def delay_s(self, attempts: int) -> float:
        """Return the seconds to wait after `attempts` consecutive failures (1: the first)."""
        delay_ms: float = min(
            self.base_ms * 2.0 ** min(max(attempts - 1, 0), _DOUBLINGS_MAX), max(self.max_ms, self.base_ms)
        )
        return delay_ms * _RANDOM.uniform(1 - _JITTER, 1 + _JITTER) / 1000


def task_failure(task: asyncio.Future[Any], name: str) -> KafkaError | None:
    """Log and return the failure of a finished background task as UNKNOWN_SERVER_ERROR.

    Returns None if the task succeeded or was cancelled. The client raises the error from all later calls, which would
    otherwise wait for a task that has ended.
    """
    error = None if task.cancelled() else task.exception()
    if error is None:
        return None
    log.error("task failed task=%s", name, exc_info=error)
    failure = KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, f"{name} failed: {error!r}")
    failure.__cause__ = error
    return failure


def raise_failure(failure: KafkaError | None) -> None:
    """Raise `failure` unless it is None."""
    if failure is not None:
        raise failure.with_traceback(None)
