"""Fault injection for tests: delayed requests, error responses and closed connections.

A fault applies to the next `times` requests of one API, from one client id or from all. The oldest match is used. It
waits `delay_ms`, then closes the connection, or responds with the error without calling the handler, or continues.

- The error is set in the fields that the request's version has for it. Without such a field the connection is closed.
- Metadata is handled, then each topic has the error instead of its partitions. A request without topics does not count.
- An incremental fetch gets FETCH_SESSION_ID_NOT_FOUND, which does not count. The full fetch after it gets the error.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages import FetchResponse, InjectedFault
from kipmesh.messages.table import Api
from kipmesh.transport.pipeline import CloseConnection, Handler

log = structlog.get_logger(__name__)

FAULTS_MAX = 100
TIMES_MAX = 1_000_000
DELAY_MS_MAX = 600_000
CLIENT_ID_LENGTH_MAX = 1000
FETCH, METADATA, PRODUCE = "Fetch", "Metadata", "Produce"
_UNSUPPORTED = frozenset({"SaslHandshake", "SaslAuthenticate"})


class Faults:
    """An `Interceptor` with the faults of one broker, oldest first. Not thread-safe."""

    def __init__(self) -> None:
        self._faults: dict[int, InjectedFault] = {}
        self._last_id = 0
        self._names: frozenset[str] = frozenset()

    def set_api_names(self, names: frozenset[str]) -> None:
        """Set the names of the APIs that can have faults. SaslHandshake and SaslAuthenticate are ignored."""
        self._names = names - _UNSUPPORTED

    def add(self, fault: InjectedFault) -> int:
        """Add a fault and return its id.

        Raises KafkaError: INVALID_REQUEST for an invalid fault, POLICY_VIOLATION beyond FAULTS_MAX faults.
        """
        problem = self._problem(fault)
        if problem:
            raise KafkaError(ErrorCode.INVALID_REQUEST, problem)
        if len(self._faults) >= FAULTS_MAX:
            raise KafkaError(ErrorCode.POLICY_VIOLATION, f"at most {FAULTS_MAX} faults are allowed; clear some first")
        self._last_id += 1
        self._faults[self._last_id] = fault._replace(fault_id=self._last_id)
        return self._last_id

    def _problem(self, fault: InjectedFault) -> str | None:
        if fault.api_name not in self._names:
            return f"unknown API {fault.api_name[:50]!r}; use one of {', '.join(sorted(self._names))}"
        code = fault.fault_error_code
        if code and ErrorCode.of(code) != code:
            return f"unknown error code {code}"
        if not 0 <= fault.delay_ms <= DELAY_MS_MAX:
            return f"delay_ms must be between 0 and {DELAY_MS_MAX}, got {fault.delay_ms}"
        if not 1 <= fault.times <= TIMES_MAX:
            return f"times must be between 1 and {TIMES_MAX}, got {fault.times}"
        if len(fault.client_id) > CLIENT_ID_LENGTH_MAX:
            return f"client_id must have at most {CLIENT_ID_LENGTH_MAX} characters, got {len(fault.client_id)}"
        if fault.drops_connection and code:
            return "drops_connection and fault_error_code exclude each other; set one of them"
        if not (code or fault.delay_ms or fault.drops_connection):
            return "a fault must have fault_error_code, delay_ms or drops_connection"
        return None

    def all(self) -> list[InjectedFault]:
        """Return the remaining faults, each with its remaining number of requests as `times`."""
        return list(self._faults.values())

    def clear(self, ids: frozenset[int] = frozenset()) -> int:
        """Remove the faults with these ids, or all faults if `ids` is empty; return the number of removed faults."""
        removed = [number for number in self._faults if not ids or number in ids]
        for number in removed:
            del self._faults[number]
        return len(removed)

    def find(self, api_name: str, client_id: str) -> InjectedFault | None:
        """Return the oldest fault that matches a request, or None. Does not count it as applied (`count`)."""
        for fault in self._faults.values():
            if fault.api_name == api_name and fault.client_id in ("", client_id):
                return fault
        return None

    def count(self, fault: InjectedFault) -> None:
        """Count one application of a fault, and remove the fault after the last one. Ignores a removed fault."""
        current = self._faults.get(fault.fault_id)
        if current is None:
            return
        if current.times > 1:
            self._faults[fault.fault_id] = current._replace(times=current.times - 1)
        else:
            del self._faults[fault.fault_id]

    async def handle(self, api: Api, request: Any, context: RequestContext, handler: Handler) -> Any:
        """Return the response to one request. Applies the matching fault, if any.

        Raises CloseConnection if the fault closes connections, or if the response has no field for its error.
        """
        fault = None if request is None else self.find(api.name, context.client_id)
        if fault is None:
            return await handler(request, context)
        if api.name == FETCH and fault.fault_error_code and request.session_id and request.session_epoch > 0:
            return FetchResponse(error_code=ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        names_no_topic = api.name == METADATA and request.topics is not None and not request.topics
        if names_no_topic and fault.fault_error_code:
            return await handler(request, context)
        self.count(fault)
        log.info("fault injected", api=api.name, fault=fault.fault_id, client_id=context.client_id)
        if fault.delay_ms:
            await asyncio.sleep(fault.delay_ms / 1000)
        if fault.drops_connection:
            raise CloseConnection("fault", f"{api.name}: injected fault")
        if fault.fault_error_code:
            return await _error_response(api, request, context, handler, ErrorCode.of(fault.fault_error_code))
        return await handler(request, context)


async def _error_response(api: Api, request: Any, context: RequestContext, handler: Handler, code: ErrorCode) -> Any:
    if api.name == METADATA:
        response = await handler(request, context)
        topics = [topic._replace(error_code=code, partitions=()) for topic in response.topics]
        return response._replace(topics=topics)
    if api.name == PRODUCE and not request.acks:
        raise CloseConnection("fault", f"{api.name} with acks=0: injected {code.name}")
    response = api.error_response(request, code, None, context.version)
    if response is None:
        raise CloseConnection("fault", f"{api.name} v{context.version} has no error field for the injected {code.name}")
    return response
