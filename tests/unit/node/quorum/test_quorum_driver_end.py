"""The end of a driver at inconvenient moments: whoever waits is answered, nothing is told that is not durable."""

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
    """What one node's thread writes of elections waits for `go`."""

    def __init__(self, node: Node) -> None:
        self.begun = asyncio.Event()
        self.go = threading.Event()
        persist, loop = node.replica.persist, asyncio.get_running_loop()

        def slow(election: ElectionState) -> None:
            loop.call_soon_threadsafe(self.begun.set)
            assert self.go.wait(30)
            persist(election)

        node.replica.persist = slow  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["stop", "abort"])
async def test_an_end_while_an_election_is_written(tmp_path: Path, how: str) -> None:
    async with Quorum(tmp_path, 3) as quorum:
        leader = await quorum.leader()
        node = quorum.followers(leader)[0]
        await quorum.append(leader, b"a")
        await until(lambda: node.driver.high_watermark == leader.driver.high_watermark)
        elections, driver = SlowElections(node), node.driver
        epoch, told = driver.epoch, len(node.listener.told)
        asked = vote_request(quorum.config(leader.node_id), epoch + 5, epoch, 1_000)
        vote = asyncio.create_task(driver.request(asked))
        await elections.begun.wait()
        later = asyncio.create_task(driver.request(fetch_request(quorum.config(leader.node_id), epoch, 0, 0, 0)))
        ending = asyncio.create_task(getattr(driver, how)())
        answers = await asyncio.wait_for(asyncio.gather(vote, later), 20)
        assert answers[0].error_code is ErrorCode.BROKER_NOT_AVAILABLE
        assert answers[1].error_code is ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert not ending.done(), "the thread has the file open"
        elections.go.set()
        await ending
        assert driver.epoch == epoch
        assert len(node.listener.told) == told
        assert not node.failures
        await node.kill()
        await node.boot()
        assert node.replica.election.epoch >= epoch + 5, "it was written all the same, and holds"
        await quorum.append(await quorum.leader(), b"b")


async def test_a_leader_that_learns_of_an_epoch_takes_nothing_while_it_is_written(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3) as quorum:
        leader = await quorum.leader()
        other = quorum.followers(leader)[0]
        await quorum.append(leader, b"a")
        elections, epoch = SlowElections(leader), leader.driver.epoch
        asked = vote_request(quorum.config(other.node_id), epoch + 1, 0, 0)
        vote = asyncio.create_task(leader.driver.request(asked))
        await elections.begun.wait()
        assert leader.driver.is_leader, "nobody was told yet"
        with pytest.raises(KafkaError) as caught:
            leader.driver.append(batch_of(b"lost"), epoch)
        assert caught.value.code is ErrorCode.NOT_CONTROLLER
        waiting = asyncio.create_task(leader.driver.request(fetch_request(leader.driver.config, epoch, 0, 0, 0)))
        elections.go.set()
        await vote
        await waiting
        states = [what for what in leader.listener.of("state") if what[1] > epoch]  # type: ignore[index]
        assert states[0][0] is not State.LEADER  # type: ignore[index]
        successor = await quorum.leader()
        await quorum.append(successor, b"b")
        await until(lambda: all(node.log_values == [b"a", b"b"] for node in quorum.all))


async def test_fetches_that_wait_are_answered_when_their_leader_goes(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 1) as quorum:
        leader = await quorum.leader()
        end = await quorum.append(leader, b"a")
        epoch = leader.driver.epoch
        asked = [
            fetch_request(quorum.config(id_), epoch, end, epoch, 0)._replace(max_wait_ms=60_000) for id_ in (201, 202)
        ]
        for each in asked:  # the high watermark is news, once
            await leader.service.fetch(each, None)  # type: ignore[arg-type]
        waiting = [asyncio.create_task(leader.service.fetch(each, None)) for each in asked]  # type: ignore[arg-type]
        await until(lambda: leader.driver.machine.leadership and len(leader.driver.machine.leadership.waiting) == 2)
        left = waiting.pop()
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        await leader.driver.stop()
        (answer,) = await asyncio.wait_for(asyncio.gather(*waiting), 10)
        assert answer.error_code is ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert not leader.driver._pending
