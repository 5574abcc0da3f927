"""Drivers that stop during an election or a fetch: pending requests get a response, and events follow durability."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.raft import ElectionState, State
from kipmesh.core.raft.wire import fetch_request, vote_request
from tests.unit.node.quorum.quorum_support import Node, Quorum, batch_of, until


class SlowElections:
    """Blocks writes of elections on the thread of one node until `resume` is set."""

    def __init__(self, node: Node) -> None:
        self.started = asyncio.Event()
        self.resume = threading.Event()
        persist, loop = node.replica.persist, asyncio.get_running_loop()

        def persist_slowly(election: ElectionState) -> None:
            loop.call_soon_threadsafe(self.started.set)
            assert self.resume.wait(30)
            persist(election)

        node.replica.persist = persist_slowly  # type: ignore[method-assign]


@pytest.mark.parametrize("method", ["stop", "abort"])
async def test_driver_ended_during_election_write_fails_pending_requests(tmp_path: Path, method: str) -> None:
    async with Quorum(tmp_path, 3) as quorum:
        leader = await quorum.leader()
        node = quorum.followers(leader)[0]
        await quorum.append(leader, b"a")
        await until(lambda: node.driver.high_watermark == leader.driver.high_watermark)
        elections, driver = SlowElections(node), node.driver
        epoch, events = driver.epoch, len(node.listener.events)
        requested = vote_request(quorum.config(leader.node_id), epoch + 5, epoch, 1_000)
        vote = asyncio.create_task(driver.request(requested))
        await elections.started.wait()
        later = asyncio.create_task(driver.request(fetch_request(quorum.config(leader.node_id), epoch, 0, 0, 0)))
        ending = asyncio.create_task(getattr(driver, method)())
        responses = await asyncio.wait_for(asyncio.gather(vote, later), 20)
        assert responses[0].error_code is ErrorCode.BROKER_NOT_AVAILABLE
        assert responses[1].error_code is ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert not ending.done(), "the thread has not finished"
        elections.resume.set()
        await ending
        assert driver.epoch == epoch
        assert len(node.listener.events) == events
        assert not node.failures
        await node.kill()
        await node.boot()
        assert node.replica.election.epoch >= epoch + 5, "the vote is durable"
        await quorum.append(await quorum.leader(), b"b")


async def test_leader_refuses_appends_while_newer_epoch_is_written(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3) as quorum:
        leader = await quorum.leader()
        other = quorum.followers(leader)[0]
        await quorum.append(leader, b"a")
        elections, epoch = SlowElections(leader), leader.driver.epoch
        requested = vote_request(quorum.config(other.node_id), epoch + 1, 0, 0)
        vote = asyncio.create_task(leader.driver.request(requested))
        await elections.started.wait()
        assert leader.driver.is_leader, "no event yet"
        with pytest.raises(KafkaError) as caught:
            leader.driver.append(batch_of(b"lost"), epoch)
        assert caught.value.code is ErrorCode.NOT_CONTROLLER
        waiting = asyncio.create_task(leader.driver.request(fetch_request(leader.driver.config, epoch, 0, 0, 0)))
        elections.resume.set()
        await vote
        await waiting
        states = [state for state in leader.listener.of("state") if state[1] > epoch]  # type: ignore[index]
        assert states[0][0] is not State.LEADER  # type: ignore[index]
        successor = await quorum.leader()
        await quorum.append(successor, b"b")
        await until(lambda: all(node.log_values == [b"a", b"b"] for node in quorum.all))


async def test_stopped_leader_ends_waiting_fetches(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 1) as quorum:
        leader = await quorum.leader()
        end = await quorum.append(leader, b"a")
        epoch = leader.driver.epoch
        requested = [
            fetch_request(quorum.config(id_), epoch, end, epoch, 0)._replace(max_wait_ms=60_000) for id_ in (201, 202)
        ]
        for request in requested:  # the first fetch returns the high watermark
            await leader.service.fetch(request, None)  # type: ignore[arg-type]
        waiting = [asyncio.create_task(leader.service.fetch(request, None)) for request in requested]  # type: ignore[arg-type]
        await until(lambda: leader.driver.machine.leadership and len(leader.driver.machine.leadership.waiting) == 2)
        cancelled = waiting.pop()
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await leader.driver.stop()
        (response,) = await asyncio.wait_for(asyncio.gather(*waiting), 10)
        assert response.error_code is ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert not leader.driver._pending
