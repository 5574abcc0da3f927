"""Faults for tests: requests that are answered late, with an error, or not at all (what KAFKA-21074 asks for).

A fault is of one API, and of one client id or everybody's. It acts on the next `times` requests, each of which has one
fault, the oldest that fits. First it waits `delay_ms`; then the connection ends, or the request is answered with the
error and nothing is done, or it is carried out as always.

- An error is in the fields that the version has for it (`refusals`). A version without any ends the connection.
- Metadata is answered as always, with the error at each topic instead of its partitions; it counts if there is a topic.
- A fetch of a session that goes on names only what changed: it is answered FETCH_SESSION_ID_NOT_FOUND, which does not
  count, and the full fetch that follows gets the error at each partition.

Where faults are not enabled there is no hook at all: `faulty` wraps the registry's APIs where they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import structlog

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.messages import FetchResponse, InjectedFault
from kipmesh.wire.api import NO_ANSWER, Api, Call, Handle, HangUp
from kipmesh.wire.refusals import refusal
from kipmesh.wire.services import Services

log = structlog.get_logger(__name__)

FAULTS_MAX = 100
TIMES_MAX = 1_000_000
DELAY_MS_MAX = 600_000
CLIENT_ID_LENGTH_MAX = 1000
FETCH, METADATA, PRODUCE, API_VERSIONS = "Fetch", "Metadata", "Produce", "ApiVersions"
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
        """Its number; raises KafkaError INVALID_REQUEST, or POLICY_VIOLATION where there are too many."""
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
            return "a connection that ends has no answer with an error"
        if not (code or fault.delay_ms or fault.drops_connection):
            return "a fault is an error, a delay, or the end of the connection"
        return None

    def all(self) -> list[InjectedFault]:
        """Those that are still to act, with the requests that are left."""
        return list(self._faults.values())

    def clear(self, ids: frozenset[int] = frozenset()) -> int:
        """Take them away, all by default; gives how many."""
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
        """It acts on one request."""
        left = self._faults.get(fault.fault_id)
        if left is None:
            return
        if left.times > 1:
            self._faults[fault.fault_id] = left._replace(times=left.times - 1)
        else:
            del self._faults[fault.fault_id]


def faulty(apis: Mapping[int, Api], faults: Faults) -> dict[int, Api]:
    """The same APIs, with faults before their handlers."""
    faults.knows(frozenset(api.name for api in apis.values()))
    return {key: replace(api, handle=_with_faults(api, faults)) for key, api in apis.items()}


def _with_faults(api: Api, faults: Faults) -> Handle:
    async def handle(services: Services, request: Any, call: Call) -> Any:
        fault = None if request is None else faults.find(api.name, call.context.client_id)
        if fault is None:
            return await api.handle(services, request, call)
        if api.name == FETCH and fault.fault_error_code and request.session_id and request.session_epoch > 0:
            return FetchResponse(error_code=ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        if api.name == METADATA and fault.fault_error_code and request.topics == []:
            return await api.handle(services, request, call)
        faults.count(fault)
        log.info("fault injected", api=api.name, fault=fault.fault_id, client_id=call.context.client_id)
        if fault.delay_ms:
            await asyncio.sleep(fault.delay_ms / 1000)
        if fault.drops_connection:
            raise HangUp("fault", f"{api.name}: an injected fault")
        if fault.fault_error_code:
            return await _refused(api, services, request, call, ErrorCode.of(fault.fault_error_code))
        return await api.handle(services, request, call)

    return handle


async def _refused(api: Api, services: Services, request: Any, call: Call, code: ErrorCode) -> Any:
    if api.name == METADATA:
        response = await api.handle(services, request, call)
        topics = [topic._replace(error_code=code, partitions=()) for topic in response.topics]
        return response._replace(topics=topics)
    if api.name == PRODUCE and not request.acks:
        raise HangUp("fault", f"{api.name} with acks=0: an injected {code.name}")
    response = refusal(api, call.version, request, code)
    if response is NO_ANSWER:
        raise HangUp("fault", f"{api.name} v{call.version} has no field for an injected {code.name}")
    return response
