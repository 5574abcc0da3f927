"""Faults for tests: requests that are responded to late, with an error, or not at all.

A fault is for one API, and for one client id or all of them. It applies to the next `times` requests, and a request has
one fault: the oldest that matches. First it waits `delay_ms`. Then the connection ends, or the response is the error
and nothing is done, or the request is handled as usual.

- The error is in the fields that the version has for it. A version without any ends the connection.
- Metadata is handled as usual, with the error at each topic instead of its partitions; it counts if there is a topic.
- An incremental fetch names only what changed: the response is FETCH_SESSION_ID_NOT_FOUND, which does not count, and
  the full fetch that follows gets the error at each partition.
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
    """One broker's, oldest first; owned by the event loop."""

    def __init__(self) -> None:
        self._faults: dict[int, InjectedFault] = {}
        self._last_id = 0
        self._names: frozenset[str] = frozenset()

    def knows(self, names: frozenset[str]) -> None:
        """The APIs that can have faults."""
        self._names = names - _UNSUPPORTED

    def add(self, fault: InjectedFault) -> int:
        """Return the fault's number. Raises KafkaError INVALID_REQUEST, or POLICY_VIOLATION if there are too many."""
        problem = self._problem(fault)
        if problem:
            raise KafkaError(ErrorCode.INVALID_REQUEST, problem)
        if len(self._faults) >= FAULTS_MAX:
            raise KafkaError(ErrorCode.POLICY_VIOLATION, f"there are {FAULTS_MAX} faults already")
        self._last_id += 1
        self._faults[self._last_id] = fault._replace(fault_id=self._last_id)
        return self._last_id

    def _problem(self, fault: InjectedFault) -> str | None:
        if fault.api_name not in self._names:
            return f"there is no API {fault.api_name[:50]!r}; there are {', '.join(sorted(self._names))}"
        code = fault.fault_error_code
        if code and ErrorCode.of(code) != code:
            return f"there is no error code {code}"
        if not 0 <= fault.delay_ms <= DELAY_MS_MAX:
            return f"a delay is between 0 and {DELAY_MS_MAX} ms"
        if not 1 <= fault.times <= TIMES_MAX:
            return f"a fault is for 1 to {TIMES_MAX} requests"
        if len(fault.client_id) > CLIENT_ID_LENGTH_MAX:
            return f"a client id has at most {CLIENT_ID_LENGTH_MAX} characters here"
        if fault.drops_connection and code:
            return "drops_connection and fault_error_code exclude each other"
        if not (code or fault.delay_ms or fault.drops_connection):
            return "a fault is an error, a delay, or the end of the connection"
        return None

    def all(self) -> list[InjectedFault]:
        """Return the faults that still apply, each with the number of requests left."""
        return list(self._faults.values())

    def clear(self, ids: frozenset[int] = frozenset()) -> int:
        """Remove faults, all by default; return how many."""
        gone = [number for number in self._faults if not ids or number in ids]
        for number in gone:
            del self._faults[number]
        return len(gone)

    def find(self, api_name: str, client_id: str) -> InjectedFault | None:
        """The oldest one that fits a request; `count` when it acts."""
        for fault in self._faults.values():
            if fault.api_name == api_name and fault.client_id in ("", client_id):
                return fault
        return None

    def count(self, fault: InjectedFault) -> None:
        """Count one use of the fault."""
        left = self._faults.get(fault.fault_id)
        if left is None:
            return
        if left.times > 1:
            self._faults[fault.fault_id] = left._replace(times=left.times - 1)
        else:
            del self._faults[fault.fault_id]

    async def handle(self, api: Api, request: Any, context: RequestContext, handler: Handler) -> Any:
        """Respond to one request, with the fault that matches it if there is one."""
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
            raise CloseConnection("fault", f"{api.name}: an injected fault")
        if fault.fault_error_code:
            return await _refused(api, request, context, handler, ErrorCode.of(fault.fault_error_code))
        return await handler(request, context)


async def _refused(api: Api, request: Any, context: RequestContext, handler: Handler, code: ErrorCode) -> Any:
    if api.name == METADATA:
        response = await handler(request, context)
        topics = [topic._replace(error_code=code, partitions=()) for topic in response.topics]
        return response._replace(topics=topics)
    if api.name == PRODUCE and not request.acks:
        raise CloseConnection("fault", f"{api.name} with acks=0: an injected {code.name}")
    response = api.error_response(request, code, None, context.version)
    if response is None:
        raise CloseConnection("fault", f"{api.name} v{context.version} has no field for an injected {code.name}")
    return response
