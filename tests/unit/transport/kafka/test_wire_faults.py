"""Injected faults: which requests they affect, and how each version encodes their errors."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import is_dataclass
from typing import Any

import pytest

from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages import FetchRequest, FetchResponse, HeartbeatRequest, HeartbeatResponse, InjectedFault
from kipmesh.messages.kafka import Out
from kipmesh.messages.table import KAFKA_APIS, Api, find_api
from kipmesh.transport.faults import FAULTS_MAX, Faults
from kipmesh.transport.pipeline import CloseConnection, Pipeline
from tests.unit.transport.kafka.kio_of_tests import entity_type, parse, plain, random_value

CODE = ErrorCode.REQUEST_TIMED_OUT
WITHOUT_FIELD = {("OffsetFetch", 1): False, ("DescribeLogDirs", 1): True, ("DescribeLogDirs", 2): True}
"""Versions without a field for this error. True: the API sends no response at all."""
CASES = [
    pytest.param(api, version, id=f"{api.name}-v{version}")
    for api in KAFKA_APIS.values()
    if api.name != "Metadata"  # Metadata has no faults
    for version in range(api.versions.first, api.versions.last + 1)
]


def _codes(entity: Any) -> list[int]:
    """Return the values of all fields named error_code."""
    codes = []
    for name in getattr(entity, "__dataclass_fields__", ()):
        value = getattr(entity, name)
        if name == "error_code":
            codes.append(plain(value))
        for item in value if isinstance(value, tuple) else [value]:
            if is_dataclass(item):
                codes += _codes(item)
    return codes


@pytest.mark.parametrize(("api", "version"), CASES)
def test_error_response_encodes_error_in_every_version(api: Api, version: int) -> None:
    source = random.Random(f"{api.name} {version}")
    encoded = 0
    for _ in range(10):
        request = random_value(source, api.request, version)
        response = api.error_response(request, CODE, None, version)
        if WITHOUT_FIELD.get((api.name, version), False):
            assert response is None
            continue
        assert response is not None
        out = Out()
        api.response_codec(version).write(out, response)
        entity = parse(entity_type(api, version, is_request=False), b"".join((*out.parts, out)))
        codes = [
            code for code in _codes(entity) if code or api.name != "Fetch"
        ]  # the top-level error of Fetch is for sessions
        assert set(codes) <= {CODE}
        encoded += len(codes)
    assert encoded or WITHOUT_FIELD.get((api.name, version), False)


def _fault(**more: Any) -> InjectedFault:
    return InjectedFault(**{"api_name": "Heartbeat", "fault_error_code": CODE, "times": 1, **more})


class _CountingHandler:
    """A handler that counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self, request: Any, context: RequestContext) -> Any:
        self.count += 1
        return HeartbeatResponse()


def _heartbeats(faults: Faults) -> tuple[_CountingHandler, Any]:
    handled = _CountingHandler()
    pipeline = Pipeline(dict.fromkeys(KAFKA_APIS.values(), handled), faults=faults)

    async def send(client_id: str = "app", name: str = "Heartbeat", request: Any = None) -> Any:
        api = find_api(name)
        context = RequestContext(client_id, "ipv4:127.0.0.1:1", version=api.versions.last)
        return await pipeline.handle(api, request or HeartbeatRequest("g"), context)

    return handled, send


async def test_fault_affects_given_number_of_requests_of_client() -> None:
    faults = Faults()
    handled, send = _heartbeats(faults)
    number = faults.add(_fault(times=2, client_id="app"))
    assert (await send("other")).error_code == 0
    assert (await send()).error_code == CODE
    assert [(fault.fault_id, fault.times) for fault in faults.all()] == [(number, 1)]
    assert (await send()).error_code == CODE
    assert faults.all() == []
    assert (await send()).error_code == 0
    assert handled.count == 2


async def test_faults_delay_requests_and_drop_connections() -> None:
    faults = Faults()
    handled, send = _heartbeats(faults)
    faults.add(_fault(fault_error_code=0, delay_ms=80))
    faults.add(_fault(fault_error_code=0, drops_connection=True))
    began = time.monotonic()
    assert (await send()).error_code == 0
    assert time.monotonic() - began >= 0.079
    with pytest.raises(CloseConnection):
        await send()
    assert handled.count == 1


async def test_fault_resets_fetch_session_before_failing_full_fetch() -> None:
    faults = Faults()
    handled, send = _heartbeats(faults)
    faults.add(_fault(api_name="Fetch"))
    candidates = (random_value(random.Random(seed), FetchRequest, 17) for seed in range(100))
    full = next(fetch for fetch in candidates if any(topic.partitions for topic in fetch.topics))
    full = full._replace(session_id=0, session_epoch=0)
    incremental = full._replace(session_id=5, session_epoch=3, topics=())
    assert await send(name="Fetch", request=incremental) == FetchResponse(
        error_code=ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    )
    assert len(faults.all()) == 1
    response = await send(name="Fetch", request=full)
    assert response.error_code == 0
    assert {data.error_code for topic in response.responses for data in topic.partitions} == {CODE}
    assert handled.count == 0


def test_invalid_faults_and_faults_above_limit_are_refused() -> None:
    faults = Faults()
    _heartbeats(faults)
    for bad in (
        _fault(api_name="Nothing"),
        _fault(fault_error_code=9999),
        _fault(fault_error_code=0),
        _fault(delay_ms=-1),
        _fault(times=0),
        _fault(drops_connection=True),
        _fault(client_id="x" * 2000),
    ):
        with pytest.raises(KafkaError) as refused:
            faults.add(bad)
        assert refused.value.code == ErrorCode.INVALID_REQUEST
    for _ in range(FAULTS_MAX):
        faults.add(_fault())
    with pytest.raises(KafkaError) as refused:
        faults.add(_fault())
    assert refused.value.code == ErrorCode.POLICY_VIOLATION
    assert faults.clear(frozenset([1, 2])) == 2
    assert faults.clear() == FAULTS_MAX - 2


async def test_cancelled_request_ends_delay_of_fault() -> None:
    faults = Faults()
    handled, send = _heartbeats(faults)
    faults.add(_fault(fault_error_code=0, delay_ms=60_000))
    task = asyncio.ensure_future(send())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert handled.count == 0
