"""ControllerChannel with voters that are active, inactive, unresponsive or stopped; real gRPC on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kipmesh import messages as m
from kipmesh.broker.membership import controller_channel
from kipmesh.broker.membership.controller_channel import SEARCH_TIMEOUT_S, ControllerChannel, is_inactive
from kipmesh.core.config import Voter
from kipmesh.core.errors import ErrorCode
from kipmesh.messages.table import APIS, BROKER_HEARTBEAT, CREATE_TOPICS, find_api
from kipmesh.transport.grpc.client import ConnectionPool, TransportError
from kipmesh.transport.grpc.server import Server
from kipmesh.transport.pipeline import pipeline_of

HEARTBEAT = m.BrokerHeartbeatRequest(broker_id=1, broker_epoch=1)
ACTIVE, INACTIVE, SILENT = "active", "inactive", "silent"
CALL_S = 60.0
"""Timeout of a call. A response within SOON_S did not wait for it, even on a slow machine."""
SOON_S = 30.0


class Controller:
    """A voter with the services that brokers call; `mode` sets its behaviour."""

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id
        self.mode = INACTIVE
        self.calls = 0
        self.was_called = asyncio.Event()
        self.resumed = asyncio.Event()
        """Lets pending calls of a silent voter finish."""
        self.voter: Voter
        self._server = Server(pipeline_of({"Controller": self, "Admin": self, "Quorum": self}))

    async def start(self) -> None:
        port = await self._server.start("127.0.0.1", 0)
        self.voter = Voter(id=self.node_id, host="127.0.0.1", port=port)

    async def stop(self) -> None:
        await self._server.stop(0)

    async def _code(self) -> ErrorCode:
        self.calls += 1
        self.was_called.set()
        if self.mode == SILENT:
            await self.resumed.wait()
        return ErrorCode.NONE if self.mode == ACTIVE else ErrorCode.NOT_CONTROLLER

    async def broker_heartbeat(self, request: m.BrokerHeartbeatRequest, context: Any) -> m.BrokerHeartbeatResponse:
        return m.BrokerHeartbeatResponse(error_code=await self._code())

    async def create_topics(self, request: m.CreateTopicsRequest, context: Any) -> m.CreateTopicsResponse:
        code = await self._code()
        return m.CreateTopicsResponse(topics=[m.CreatableTopicResult(t.name, b"", code) for t in request.topics])

    async def describe_quorum(self, request: m.DescribeQuorumRequest, context: Any) -> m.DescribeQuorumResponse:
        code = ErrorCode.NOT_LEADER_OR_FOLLOWER if await self._code() else ErrorCode.NONE
        found = m.DescribeQuorumPartition(0, code, leader_id=self.node_id)
        return m.DescribeQuorumResponse(topics=[m.DescribeQuorumTopicResponse("__cluster_metadata", [found])])


class Voters:
    """Three voters and the channel of one broker."""

    def __init__(self) -> None:
        self.controllers = [Controller(node_id) for node_id in (101, 102, 103)]
        self.pool = ConnectionPool("tests")
        self.channel: ControllerChannel

    async def start(self) -> None:
        for controller in self.controllers:
            await controller.start()
        self.channel = ControllerChannel(tuple(each.voter for each in self.controllers), self.pool)

    async def stop(self) -> None:
        await self.pool.close()
        for controller in self.controllers:
            await controller.stop()

    async def heartbeat(self, timeout_s: float = CALL_S) -> m.BrokerHeartbeatResponse:
        response: m.BrokerHeartbeatResponse = await self.channel.call(BROKER_HEARTBEAT, HEARTBEAT, timeout_s)
        return response


@pytest.fixture
async def voters(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Voters]:
    """Three voters, and a search timeout that a slow voter does not exceed; see `short_searches`."""
    monkeypatch.setattr(controller_channel, "SEARCH_TIMEOUT_S", CALL_S)
    running = Voters()
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
def short_searches(voters: Voters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the short timeout for voters that are not known to lead."""
    monkeypatch.setattr(controller_channel, "SEARCH_TIMEOUT_S", SEARCH_TIMEOUT_S)


async def test_channel_finds_active_controller_and_reuses_it_for_next_call(voters: Voters) -> None:
    first, second, third = voters.controllers
    third.mode = ACTIVE
    assert (await voters.heartbeat()).error_code == 0
    assert (first.calls, second.calls, third.calls) == (1, 1, 1)
    assert (await voters.heartbeat()).error_code == 0
    assert (first.calls, second.calls, third.calls) == (1, 1, 2)


async def test_channel_calls_new_leader_of_quorum_first(voters: Voters) -> None:
    first, second, third = voters.controllers
    third.mode = ACTIVE
    voters.channel.leader_changed(third.voter)
    assert (await voters.heartbeat()).error_code == 0
    assert (first.calls, second.calls) == (0, 0)


async def test_channel_fails_over_from_stopped_controller(voters: Voters) -> None:
    first, second, _ = voters.controllers
    second.mode = ACTIVE
    voters.channel.leader_changed(first.voter)
    await first.stop()
    async with asyncio.timeout(SOON_S):
        assert (await voters.heartbeat()).error_code == 0


async def test_channel_abandons_call_to_unresponsive_leader_when_leader_changes(voters: Voters) -> None:
    """A process that was stopped by a signal keeps its connection and sends no responses."""
    first, _, third = voters.controllers
    first.mode, third.mode = SILENT, ACTIVE
    voters.channel.leader_changed(first.voter)
    call = asyncio.create_task(voters.heartbeat())
    await first.was_called.wait()
    voters.channel.leader_changed(third.voter)
    async with asyncio.timeout(SOON_S):
        assert (await call).error_code == 0
    assert third.calls == 1


@pytest.mark.usefixtures("short_searches")
async def test_channel_limits_call_to_search_timeout_when_leader_becomes_unknown(voters: Voters) -> None:
    first, second, _ = voters.controllers
    first.mode, second.mode = SILENT, ACTIVE
    voters.channel.leader_changed(first.voter)
    call = asyncio.create_task(voters.heartbeat())
    await first.was_called.wait()
    voters.channel.leader_changed(None)
    async with asyncio.timeout(SOON_S):
        assert (await call).error_code == 0


@pytest.mark.usefixtures("short_searches")
async def test_channel_skips_unresponsive_voter_that_is_not_leader(voters: Voters) -> None:
    first, second, _ = voters.controllers
    first.mode, second.mode = SILENT, ACTIVE
    async with asyncio.timeout(SOON_S):
        assert (await voters.heartbeat()).error_code == 0


async def test_channel_waits_for_leader_to_become_active(voters: Voters) -> None:
    first, second, third = voters.controllers
    voters.channel.leader_changed(second.voter)
    call = asyncio.create_task(voters.heartbeat())
    await second.was_called.wait()
    second.mode = ACTIVE
    async with asyncio.timeout(SOON_S):
        assert (await call).error_code == 0
    assert (first.calls, third.calls) == (0, 0)


async def test_channel_returns_last_response_if_no_controller_is_active(
    voters: Voters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The channel returns before the call times out: the backoff leaves no time for a third attempt."""
    first, second, third = voters.controllers
    second.mode = SILENT
    call = asyncio.create_task(voters.heartbeat())
    await second.was_called.wait()
    monkeypatch.setattr(controller_channel, "RETRY_BACKOFF_S", CALL_S)
    second.mode = INACTIVE
    second.resumed.set()
    async with asyncio.timeout(SOON_S):
        assert (await call).error_code == ErrorCode.NOT_CONTROLLER
    assert (first.calls, second.calls, third.calls) == (1, 1, 0)


async def test_channel_call_times_out_if_no_voter_responds(voters: Voters) -> None:
    for controller in voters.controllers:
        controller.mode = SILENT
    async with asyncio.timeout(SOON_S):
        with pytest.raises(TransportError):
            await voters.heartbeat(0.3)


async def test_channel_marks_response_of_repeated_call(voters: Voters) -> None:
    first, second, _ = voters.controllers
    first.mode = ACTIVE
    request = m.CreateTopicsRequest([m.CreatableTopic("t")], 1000)
    response = await voters.channel.forward(CREATE_TOPICS, request, CALL_S)
    assert not response.is_repeated
    first.mode, second.mode = SILENT, ACTIVE
    first.was_called.clear()
    call = asyncio.create_task(voters.channel.forward(CREATE_TOPICS, request, CALL_S))
    await first.was_called.wait()
    voters.channel.leader_changed(second.voter)
    response = await call
    assert response.is_repeated
    assert response.response.topics[0].error_code == 0


async def test_channel_reopens_broken_stream_to_same_controller(voters: Voters) -> None:
    first, second, third = voters.controllers
    second.mode = ACTIVE
    voters.channel.leader_changed(second.voter)

    async def heartbeat() -> int:
        response = await voters.channel.call(BROKER_HEARTBEAT, HEARTBEAT, CALL_S, streaming=True)
        return int(response.error_code)

    assert await heartbeat() == 0
    for _ in range(3):
        # A failed call of another kind moves the channel to the next voter. The stream stays open.
        voters.channel._try_next_voter(voters.channel.voter)
        assert await heartbeat() == 0
        ((stream,),) = voters.pool.get(second.voter.address)._idle_streams.values()
        stream.cancel()
        assert await heartbeat() == 0
    assert (first.calls, third.calls) == (0, 0)
    await second.stop()
    third.mode = ACTIVE
    assert await heartbeat() == 0


async def test_concurrent_failed_calls_move_channel_to_next_voter_once(voters: Voters) -> None:
    first, second, third = voters.controllers
    second.mode = ACTIVE
    responses = await asyncio.gather(*(voters.heartbeat() for _ in range(50)))
    assert all(response.error_code == 0 for response in responses)
    assert third.calls == 0, "a call that failed later moved the channel again"
    assert voters.channel.voter == second.voter
    assert 1 <= first.calls <= 50  # on a slow machine, some calls start after the move


@pytest.mark.usefixtures("short_searches")
async def test_channel_waits_for_only_voter_instead_of_repeating_call(voters: Voters) -> None:
    """The quorum has no other voter to try, so the call keeps its full timeout."""
    (only, *_) = voters.controllers
    only.mode = SILENT
    channel = ControllerChannel((only.voter,), voters.pool)
    channel.leader_changed(only.voter)
    call = asyncio.create_task(channel.call(BROKER_HEARTBEAT, HEARTBEAT, CALL_S))
    await only.was_called.wait()
    channel.leader_changed(None)
    await asyncio.sleep(SEARCH_TIMEOUT_S + 0.2)  # an attempt with the search timeout would have been repeated
    only.mode = ACTIVE
    only.resumed.set()
    assert (await call).error_code == 0
    assert only.calls == 1


async def test_channel_sends_describe_quorum_to_active_controller(voters: Voters) -> None:
    voters.controllers[1].mode = ACTIVE
    response = await voters.channel.call(find_api("DescribeQuorum"), m.DescribeQuorumRequest(), CALL_S)
    assert response.topics[0].partitions[0].leader_id == 102


@pytest.mark.parametrize(
    ("response", "inactive"),
    [
        (m.BrokerHeartbeatResponse(), False),
        (m.BrokerHeartbeatResponse(error_code=ErrorCode.NOT_CONTROLLER), True),
        (m.BrokerHeartbeatResponse(error_code=ErrorCode.STALE_BROKER_EPOCH), False),
        (m.CreateTopicsResponse(), False),
        (m.CreateTopicsResponse(topics=[m.CreatableTopicResult("a", b"", ErrorCode.NOT_CONTROLLER)]), True),
        (
            m.CreateTopicsResponse(
                topics=[m.CreatableTopicResult("a", b"", ErrorCode.NOT_CONTROLLER), m.CreatableTopicResult("b")]
            ),
            False,
        ),
        (m.DeleteTopicsResponse(responses=[m.DeletableTopicResult("a", b"", ErrorCode.NOT_CONTROLLER)]), True),
        (m.DescribeConfigsResponse(results=[m.DescribeConfigsResult(ErrorCode.NOT_CONTROLLER)]), True),
        (m.AlterPartitionResponse(), False),
        (m.AlterPartitionResponse(error_code=ErrorCode.NOT_CONTROLLER), True),
    ],
)
def test_is_inactive_detects_not_controller_in_every_response_type(response: Any, inactive: bool) -> None:
    api = next(api for api in APIS if type(response) is api.response)
    assert is_inactive(api, response) is inactive
