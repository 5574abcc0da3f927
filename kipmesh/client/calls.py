"""Calls to brokers: the gRPC method of a request, waits between retries, and the KafkaErrors that failures become."""

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
_RANDOM = random.SystemRandom()  # has no state that programs or tests could share with it
_DOUBLINGS_MAX = 30


def api_of(request: Any) -> Api:
    """The API of a request; for Fetch, the broker's."""
    return _APIS[type(request)]


def call(
    pool: ConnectionPool, address: str, request: Any, timeout_s: float, meter: Meter | None = None
) -> Coroutine[Any, Any, Any]:
    """The response of the node at `address`; raises TransportError."""
    api = _APIS[type(request)]
    assert api.service is not None
    return pool.get(address).call(api.service.name, api.rpc, request, timeout_s, meter=meter)


def no_answer(error: TransportError) -> KafkaError:
    """The error of a call without a response."""
    return KafkaError(ErrorCode.REQUEST_TIMED_OUT if error.timed_out else ErrorCode.NETWORK_EXCEPTION, str(error))


class Backoff(NamedTuple):
    """`retry.backoff.ms` doubled with each attempt up to `retry.backoff.max.ms`, plus or minus a fifth.

    The jitter keeps clients from coming back all at once.
    """

    base_ms: int
    max_ms: int

    def delay_s(self, attempts: int) -> float:
        """Seconds to wait after `attempts` failed ones (1 = the first)."""
        delay_ms: float = min(
            self.base_ms * 2.0 ** min(max(attempts - 1, 0), _DOUBLINGS_MAX), max(self.max_ms, self.base_ms)
        )
        return delay_ms * _RANDOM.uniform(1 - _JITTER, 1 + _JITTER) / 1000


def task_failure(task: asyncio.Future[Any], what: str) -> KafkaError | None:
    """For a done-callback: the error of a background task that failed, logged; None if it was cancelled or succeeded.

    The client raises the error from all later calls, so that none of them waits for a task that has ended.
    """
    error = None if task.cancelled() else task.exception()
    if error is None:
        return None
    log.error("%s failed", what, exc_info=error)
    failure = KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, f"{what} failed: {error!r}")
    failure.__cause__ = error
    return failure


def raise_failure(failure: KafkaError | None) -> None:
    """Raise it, if there is one."""
    if failure is not None:
        raise failure.with_traceback(None)
