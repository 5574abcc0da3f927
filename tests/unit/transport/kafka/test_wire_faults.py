"""Injected faults: which requests have them, and that their errors are where each version has them."""

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
"""Versions that have errors elsewhere only; True where there is no answer at all."""
CASES = [
    pytest.param(api, version, id=f"{api.name}-v{version}")
    for api in KAFKA_APIS.values()
    if api.name != "Metadata"  # answered as always, see below
    for version in range(api.versions.first, api.versions.last + 1)
]


def _codes(entity: Any) -> list[int]:
    """All fields called error_code."""
    found = []
    for name in getattr(entity, "__dataclass_fields__", ()):
        value = getattr(entity, name)
        if name == "error_code":
            found.append(plain(value))
        for one in value if isinstance(value, tuple) else [value]:
            if is_dataclass(one):
                found += _codes(one)
    return found


@pytest.mark.parametrize(("api", "version"), CASES)
def test_an_error_is_where_the_version_has_it(api: Api, version: int) -> None:
    source = random.Random(f"{api.name} {version}")
    answered = 0
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
        codes = [code for code in _codes(entity) if code or api.name != "Fetch"]  # its own one is the session's
        assert set(codes) <= {CODE}
        answered += len(codes)
    assert answered or WITHOUT_FIELD.get((api.name, version), False)


def _fault(**more: Any) -> InjectedFault:
    return InjectedFault(**{"api_name": "Heartbeat", "fault_error_code": CODE, "times": 1, **more})


class _Handled:
    """An API's handler that counts."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self, request: Any, context: RequestContext) -> Any:
        self.count += 1
        return HeartbeatResponse()


def _heartbeats(faults: Faults) -> tuple[_Handled, Any]:
    handled = _Handled()
    pipeline = Pipeline(dict.fromkeys(KAFKA_APIS.values(), handled), faults=faults)

    async def ask(client_id: str = "app", name: str = "Heartbeat", request: Any = None) -> Any:
        api = find_api(name)
        context = RequestContext(client_id, "ipv4:127.0.0.1:1", version=api.versions.last)
        return await pipeline.handle(api, request or HeartbeatRequest("g"), context)

    return handled, ask


async def test_so_many_requests_of_one_client() -> None:
    faults = Faults()
    handled, ask = _heartbeats(faults)
    number = faults.add(_fault(times=2, client_id="app"))
    assert (await ask("other")).error_code == 0
    assert (await ask()).error_code == CODE
    assert [(one.fault_id, one.times) for one in faults.all()] == [(number, 1)]
    assert (await ask()).error_code == CODE
    assert faults.all() == []
    assert (await ask()).error_code == 0
    assert handled.count == 2


async def test_delays_and_ends_of_connections() -> None:
    faults = Faults()
    handled, ask = _heartbeats(faults)
    faults.add(_fault(fault_error_code=0, delay_ms=80))
    faults.add(_fault(fault_error_code=0, drops_connection=True))
    began = time.monotonic()
    assert (await ask()).error_code == 0
    assert time.monotonic() - began >= 0.079
    with pytest.raises(CloseConnection):
        await ask()
    assert handled.count == 1


async def test_a_fetch_of_a_session_is_made_full_first() -> None:
    faults = Faults()
    handled, ask = _heartbeats(faults)
    faults.add(_fault(api_name="Fetch"))
    some = (random_value(random.Random(seed), FetchRequest, 17) for seed in range(100))
    full = next(one for one in some if any(topic.partitions for topic in one.topics))
    full = full._replace(session_id=0, session_epoch=0)
    going_on = full._replace(session_id=5, session_epoch=3, topics=())
    assert await ask(name="Fetch", request=going_on) == FetchResponse(error_code=ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
    assert len(faults.all()) == 1
    answer = await ask(name="Fetch", request=full)
    assert answer.error_code == 0
    assert {data.error_code for topic in answer.responses for data in topic.partitions} == {CODE}
    assert handled.count == 0


def test_what_is_refused() -> None:
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


async def test_a_client_that_goes_away_ends_the_delay() -> None:
    faults = Faults()
    handled, ask = _heartbeats(faults)
    faults.add(_fault(fault_error_code=0, delay_ms=60_000))
    task = asyncio.ensure_future(ask())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert handled.count == 0
