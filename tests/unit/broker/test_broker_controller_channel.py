"""The way to the active controller, with voters that are active, inactive, silent or gone; real gRPC on loopback."""

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
"""The time of a call: an answer that comes much earlier did not wait for its end, however slow the machine is."""
SOON_S = 30.0


class Controller:
    """A voter with the two services that brokers call; it does as `mode` says."""

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id
        self.mode = INACTIVE
        self.asked = 0
        self.was_asked = asyncio.Event()
        self.wakes = asyncio.Event()
        """Ends the silence of what was asked."""
        self.voter: Voter
        self._server = Server(pipeline_of({"Controller": self, "Admin": self, "Quorum": self}))

    async def start(self) -> None:
        port = await self._server.start("127.0.0.1", 0)
        self.voter = Voter(id=self.node_id, host="127.0.0.1", port=port)

    async def stop(self) -> None:
        await self._server.stop(0)

    async def _code(self) -> ErrorCode:
        self.asked += 1
        self.was_asked.set()
        if self.mode == SILENT:
            await self.wakes.wait()
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
    """Three of them and a broker's channel."""

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

    async def beat(self, timeout_s: float = CALL_S) -> m.BrokerHeartbeatResponse:
        answer: m.BrokerHeartbeatResponse = await self.channel.call(BROKER_HEARTBEAT, HEARTBEAT, timeout_s)
        return answer


@pytest.fixture
async def voters(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Voters]:
    """A voter that answers late is no silent one: see `searches`."""
    monkeypatch.setattr(controller_channel, "SEARCH_TIMEOUT_S", CALL_S)
    it = Voters()
    await it.start()
    yield it
    await it.stop()


@pytest.fixture
def searches(voters: Voters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is not known to lead has as little time as everywhere."""
    monkeypatch.setattr(controller_channel, "SEARCH_TIMEOUT_S", SEARCH_TIMEOUT_S)


async def test_a_call_finds_the_active_controller_and_the_next_goes_there_at_once(voters: Voters) -> None:
    first, second, third = voters.controllers
    third.mode = ACTIVE
    assert (await voters.beat()).error_code == 0
    assert (first.asked, second.asked, third.asked) == (1, 1, 1)
    assert (await voters.beat()).error_code == 0
    assert (first.asked, second.asked, third.asked) == (1, 1, 2)


async def test_what_the_quorum_says_is_believed_at_once(voters: Voters) -> None:
    first, second, third = voters.controllers
    third.mode = ACTIVE
    voters.channel.leader_changed(third.voter)
    assert (await voters.beat()).error_code == 0
    assert (first.asked, second.asked) == (0, 0)


async def test_a_dead_controller_costs_a_moment(voters: Voters) -> None:
    first, second, _ = voters.controllers
    second.mode = ACTIVE
    voters.channel.leader_changed(first.voter)
    await first.stop()
    async with asyncio.timeout(SOON_S):
        assert (await voters.beat()).error_code == 0


async def test_a_call_to_a_stopped_leader_is_given_up_when_another_one_leads(voters: Voters) -> None:
    """A stopped process keeps its connection and answers nothing."""
    first, _, third = voters.controllers
    first.mode, third.mode = SILENT, ACTIVE
    voters.channel.leader_changed(first.voter)
    call = asyncio.create_task(voters.beat())
    await first.was_asked.wait()
    voters.channel.leader_changed(third.voter)
    async with asyncio.timeout(SOON_S):
        assert (await call).error_code == 0
    assert third.asked == 1


@pytest.mark.usefixtures("searches")
async def test_a_stopped_leader_is_asked_no_longer_than_a_search_takes_once_it_is_doubted(voters: Voters) -> None:
    first, second, _ = voters.controllers
    first.mode, second.mode = SILENT, ACTIVE
    voters.channel.leader_changed(first.voter)
    call = asyncio.create_task(voters.beat())
    await first.was_asked.wait()
    voters.channel.leader_changed(None)
    async with asyncio.timeout(SOON_S):
        assert (await call).error_code == 0


@pytest.mark.usefixtures("searches")
async def test_a_silent_voter_that_does_not_lead_is_passed_by(voters: Voters) -> None:
    first, second, _ = voters.controllers
    first.mode, second.mode = SILENT, ACTIVE
    async with asyncio.timeout(SOON_S):
        assert (await voters.beat()).error_code == 0


async def test_a_leader_that_is_not_active_yet_is_waited_for(voters: Voters) -> None:
    first, second, third = voters.controllers
    voters.channel.leader_changed(second.voter)
    call = asyncio.create_task(voters.beat())
    await second.was_asked.wait()
    second.mode = ACTIVE
    async with asyncio.timeout(SOON_S):
        assert (await call).error_code == 0
    assert (first.asked, third.asked) == (0, 0)


async def test_without_an_active_controller_the_last_answer_is_given_in_time(
    voters: Voters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In time is before there is no more time for another attempt, which here is after the second one."""
    first, second, third = voters.controllers
    second.mode = SILENT
    call = asyncio.create_task(voters.beat())
    await second.was_asked.wait()
    monkeypatch.setattr(controller_channel, "RETRY_BACKOFF_S", CALL_S)
    second.mode = INACTIVE
    second.wakes.set()
    async with asyncio.timeout(SOON_S):
        assert (await call).error_code == ErrorCode.NOT_CONTROLLER
    assert (first.asked, second.asked, third.asked) == (1, 1, 0)


async def test_without_any_answer_the_call_fails_in_time(voters: Voters) -> None:
    for controller in voters.controllers:
        controller.mode = SILENT
    async with asyncio.timeout(SOON_S):
        with pytest.raises(TransportError):
            await voters.beat(0.3)


async def test_a_call_that_was_repeated_says_so(voters: Voters) -> None:
    first, second, _ = voters.controllers
    first.mode = ACTIVE
    request = m.CreateTopicsRequest([m.CreatableTopic("t")], 1000)
    answer = await voters.channel.forward(CREATE_TOPICS, request, CALL_S)
    assert not answer.is_repeated
    first.mode, second.mode = SILENT, ACTIVE
    first.was_asked.clear()
    call = asyncio.create_task(voters.channel.forward(CREATE_TOPICS, request, CALL_S))
    await first.was_asked.wait()
    voters.channel.leader_changed(second.voter)
    answer = await call
    assert answer.is_repeated
    assert answer.response.topics[0].error_code == 0


async def test_a_stream_that_breaks_is_opened_again_where_it_was(voters: Voters) -> None:
    first, second, third = voters.controllers
    second.mode = ACTIVE
    voters.channel.leader_changed(second.voter)

    async def beat() -> int:
        answer = await voters.channel.call(BROKER_HEARTBEAT, HEARTBEAT, CALL_S, streaming=True)
        return int(answer.error_code)

    assert await beat() == 0
    for _ in range(3):
        # Another call has failed: the channel looks elsewhere, but the stream stays.
        voters.channel._try_next_voter(voters.channel.voter)
        assert await beat() == 0
        ((stream,),) = voters.pool.get(second.voter.address)._idle_streams.values()
        stream.cancel()
        assert await beat() == 0
    assert (first.asked, third.asked) == (0, 0)
    await second.stop()
    third.mode = ACTIVE
    assert await beat() == 0


async def test_many_calls_that_fail_together_move_the_channel_once(voters: Voters) -> None:
    first, second, third = voters.controllers
    second.mode = ACTIVE
    answers = await asyncio.gather(*(voters.beat() for _ in range(50)))
    assert all(answer.error_code == 0 for answer in answers)
    assert third.asked == 0, "one that failed later than the others moved it on"
    assert voters.channel.voter == second.voter
    assert 1 <= first.asked <= 50  # on a busy machine some have not come so far


@pytest.mark.usefixtures("searches")
async def test_a_quorum_of_one_is_waited_for(voters: Voters) -> None:
    """Nobody else could answer, so what it was asked is not asked again before it had its time."""
    (only, *_) = voters.controllers
    only.mode = SILENT
    channel = ControllerChannel((only.voter,), voters.pool)
    channel.leader_changed(only.voter)
    call = asyncio.create_task(channel.call(BROKER_HEARTBEAT, HEARTBEAT, CALL_S))
    await only.was_asked.wait()
    channel.leader_changed(None)
    await asyncio.sleep(SEARCH_TIMEOUT_S + 0.2)  # an attempt with little time has ended, and was repeated
    only.mode = ACTIVE
    only.wakes.set()
    assert (await call).error_code == 0
    assert only.asked == 1


async def test_describe_quorum_goes_to_the_leader(voters: Voters) -> None:
    voters.controllers[1].mode = ACTIVE
    answer = await voters.channel.call(find_api("DescribeQuorum"), m.DescribeQuorumRequest(), CALL_S)
    assert answer.topics[0].partitions[0].leader_id == 102


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
def test_who_is_inactive_is_told_by_every_kind_of_answer(response: Any, inactive: bool) -> None:
    api = next(api for api in APIS if type(response) is api.response)
    assert is_inactive(api, response) is inactive
