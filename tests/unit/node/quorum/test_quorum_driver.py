"""Elections, appends and the end of leaders in a metadata quorum over gRPC and files."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from pathlib import Path

import pytest

from kipmesh.core.config import BrokerConfig, ControllerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.raft import ElectionState, RaftConfig, State
from kipmesh.core.raft.wire import fetch_request
from kipmesh.messages import DescribeQuorumRequest, FetchRequest, FetchResponse, VoteRequest
from kipmesh.node.quorum import driver as driver_module
from kipmesh.node.quorum.driver import Alarm, raft_config
from tests.unit.node.quorum.quorum_support import CLUSTER_ID, WAIT_S, Node, Quorum, batch_of, until


async def test_one_of_three_is_elected_and_commits_on_a_majority(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3) as quorum:
        leader = await quorum.leader()
        end = await quorum.append(leader, b"a", b"b")
        await until(lambda: all(node.driver.high_watermark >= end for node in quorum.all))
        assert all(node.log_values == [b"a", b"b"] for node in quorum.all)
        assert all(node.driver.election.leader_id == leader.node_id for node in quorum.all)
        assert leader.listener.of("committed")[-1] == end
        assert leader.listener.of("state")[-1] == (State.LEADER, leader.driver.epoch, leader.node_id)
        assert not any(node.failures for node in quorum.all)


async def test_a_single_voter_leads_at_once(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 1, 1) as quorum:
        leader = await quorum.leader()
        await quorum.append(leader, b"a")
        await until(lambda: quorum.observers[101].log_values == [b"a"])
        epoch = leader.driver.epoch
        await leader.stop()
        await leader.boot()
        await quorum.leader()
        assert leader.driver.epoch == epoch + 1
        assert leader.log_values == [b"a"]


async def test_nothing_committed_is_lost_with_a_leader(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3, 1) as quorum:
        first = await quorum.leader()
        for value in (b"a", b"b", b"c"):
            await quorum.append(first, value)
        await first.kill()
        second = await quorum.leader()
        assert second.log_values == [b"a", b"b", b"c"]
        assert second.driver.epoch > first.driver.epoch
        end = await quorum.append(second, b"d")
        await first.boot()
        await until(lambda: all(node.driver.high_watermark >= end for node in quorum.all))
        assert all(node.log_values == [b"a", b"b", b"c", b"d"] for node in quorum.all)
        assert not any(node.failures for node in quorum.all)


async def test_what_a_deposed_leader_appended_alone_is_cut(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3) as quorum:
        first = await quorum.leader()
        committed = await quorum.append(first, b"a")
        await until(lambda: all(node.driver.high_watermark >= committed for node in quorum.all))
        others = quorum.followers(first)
        for other in others:
            await other.kill()
        end = first.driver.append(batch_of(b"alone"), first.driver.epoch)
        await until(lambda: first.driver.machine.durable_end >= end)
        assert first.driver.high_watermark == committed
        await first.kill()
        for other in others:
            await other.boot()
        second = await quorum.leader()
        end = await quorum.append(second, b"b")
        await first.boot()
        await until(lambda: first.driver.high_watermark >= end)
        assert first.log_values == [b"a", b"b"]
        assert first.listener.of("truncated") == [committed]


async def test_a_leader_without_a_quorum_resigns(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3) as quorum:
        leader = await quorum.leader()
        epoch = leader.driver.epoch
        for other in quorum.followers(leader):
            await other.kill()
        leader.expire()
        await until(lambda: not leader.driver.is_leader)
        with pytest.raises(KafkaError, match="no controller is active"):
            leader.driver.append(batch_of(b"x"), epoch)


async def test_who_may_not_append_is_told_who_may(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3, 1) as quorum:
        leader = await quorum.leader()
        await until(lambda: all(node.driver.election.leader_id == leader.node_id for node in quorum.all))
        voter = leader.driver.leader
        assert voter is not None
        for node in [*quorum.followers(leader), *quorum.observers.values()]:
            with pytest.raises(KafkaError, match=rf"controller {voter.id} \({voter.address}\) is active") as refused:
                node.driver.append(batch_of(b"x"), leader.driver.epoch)
            assert refused.value.code is ErrorCode.NOT_CONTROLLER
        with pytest.raises(KafkaError, match="is no longer active in epoch 0"):
            leader.driver.append(batch_of(b"x"), 0)
        with pytest.raises(KafkaError) as corrupt:
            leader.driver.append(batch_of(b"x")[:-1], leader.driver.epoch)
        assert corrupt.value.code is ErrorCode.CORRUPT_MESSAGE
        assert leader.driver.is_leader
        assert leader.log_values == []


async def test_a_leader_that_stops_names_its_successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far sooner than by the fetch timeout of ten minutes, and who waits is answered."""
    monkeypatch.setattr(driver_module, "RESIGN_WAIT_S", WAIT_S)  # it says so to all, however slow they are
    async with Quorum(tmp_path, 3) as quorum:
        leader = await quorum.leader()
        await quorum.append(leader, b"a")
        end = leader.driver.machine.log.log_end_offset
        consumer = FetchRequest(CLUSTER_ID, max_wait_ms=60_000, min_bytes=1)._replace(
            topics=fetch_request(leader.driver.config, leader.driver.epoch, end, leader.driver.epoch, 0).topics
        )
        waiting = asyncio.create_task(leader.driver.request(consumer))
        leadership = leader.driver.machine.leadership
        assert leadership is not None
        await until(lambda: len(leadership.waiting) == 3)
        epoch = leader.driver.epoch
        await asyncio.gather(leader.stop(), leader.driver.stop())
        answer = await waiting
        assert isinstance(answer, FetchResponse)
        assert answer.responses[0].partitions[0].error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        others = quorum.followers(leader)
        await until(lambda: all(node.driver.epoch > epoch for node in others))  # nobody else ends that epoch for them
        successor = await quorum.leader()
        assert successor.log_values == [b"a"]
        refused = await leader.driver.request(VoteRequest(CLUSTER_ID))
        assert refused.error_code == ErrorCode.BROKER_NOT_AVAILABLE
        await leader.driver.stop()


async def test_a_leader_resigns_when_it_is_told_to(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3) as quorum:
        first = await quorum.leader()
        await quorum.append(first, b"a")
        first.driver.resign()
        assert not first.driver.is_leader
        second = await quorum.leader(other_than=first.node_id)
        await quorum.append(second, b"b")
        await until(lambda: first.log_values == [b"a", b"b"])


async def test_elections_are_written_on_a_thread_and_before_they_are_told(tmp_path: Path) -> None:
    quorum = Quorum(tmp_path, 3)
    threads: list[threading.Thread] = []
    written: dict[int, list[ElectionState]] = {}

    def watch(node: Node) -> None:
        persist, states = node.replica.persist, written.setdefault(node.node_id, [])

        def watched(election: ElectionState) -> None:
            threads.append(threading.current_thread())
            time.sleep(0.02)
            persist(election)
            states.append(election)

        def state_changed(state: State, epoch: int, leader_id: int) -> None:
            if epoch:
                assert states[-1].epoch == epoch, "told before it was durable"

        node.replica.persist = watched  # type: ignore[method-assign]
        node.listener.state_changed = state_changed  # type: ignore[method-assign]

    quorum.on_boot = watch
    async with quorum:
        leader = await quorum.leader()
        await quorum.append(leader, b"a")
        assert len(threads) >= 4
        assert threading.main_thread() not in threads
        assert not any(node.failures for node in quorum.all)


async def test_heavy_appends_cost_no_message_each(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3, 1) as quorum:
        leader = await quorum.leader()
        asked = 0
        request = leader.driver.request

        async def counted(message: FetchRequest) -> object:
            nonlocal asked
            asked += 1
            return await request(message)

        leader.driver.request = counted  # type: ignore[assignment,method-assign]
        for _ in range(20):
            for _ in range(100):
                end = leader.driver.append(batch_of(b"x" * 100), leader.driver.epoch)
            await asyncio.sleep(0.001)
        await quorum.committed(leader, end)
        assert asked < 2000, "of three replicas, for 2000 appends"
        await until(lambda: all(node.driver.high_watermark >= end for node in quorum.all))


async def test_describe_quorum_names_voters_observers_and_where_they_are(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3, 1) as quorum:
        leader = await quorum.leader()
        end = await quorum.append(leader, b"a")

        def caught_up() -> bool:
            partition = leader.driver.describe(DescribeQuorumRequest()).topics[0].partitions[0]
            replicas = [*partition.current_voters, *partition.observers]
            return len(replicas) == 4 and all(replica.log_end_offset == end for replica in replicas)

        await until(caught_up)
        for node in quorum.all:
            response = node.driver.describe(DescribeQuorumRequest())
            partition = response.topics[0].partitions[0]
            assert [endpoint.port for endpoint in response.endpoints] == [voter.port for voter in quorum.voters]
            assert (partition.leader_id, partition.leader_epoch) == (leader.node_id, leader.driver.epoch)
            assert partition.error_code == (0 if node is leader else ErrorCode.NOT_LEADER_OR_FOLLOWER)


async def test_an_alarm_gives_way_to_answers_that_lie_there() -> None:
    told: list[str] = []
    rung = asyncio.Event()

    def ring() -> None:
        told.append("alarm")
        rung.set()

    alarm = Alarm(ring)
    alarm.set(int(time.monotonic() * 1000) + 5)
    near, far = socket.socketpair()
    with near, far:
        loop = asyncio.get_running_loop()
        loop.add_reader(near, lambda: told.append(near.recv(1).decode()))
        time.sleep(0.1)  # noqa: ASYNC251 - the loop stands still
        far.send(b"!")
        await rung.wait()
        loop.remove_reader(near)
    assert told == ["!", "alarm"]


def test_the_configuration_as_nodes_have_it() -> None:
    keys = {
        "node.id": "2",
        "cluster.id": "c",
        "controller.quorum.voters": "3@h:1,2@h:2",
        "controller.quorum.fetch.timeout.ms": "600",
        "controller.quorum.election.timeout.ms": "70",
        "controller.quorum.retry.backoff.ms": "9",
    }
    voter = raft_config(ControllerConfig.parse({**keys, "metadata.log.dir": "/d"}))
    assert voter == RaftConfig(
        2, (2, 3), "c", 70, 600, retry_backoff_ms=9, fetch_max_wait_ms=300, fetch_max_bytes=voter.fetch_max_bytes
    )
    assert voter.is_voter
    observer = BrokerConfig.parse({**keys, "node.id": "7", "log.dirs": "/d"})
    assert not raft_config(observer).is_voter
    assert observer.metadata_snapshot_min_changed_records_ratio == 0.5
    assert "metadata.snapshot.min.changed_records.ratio" in BrokerConfig.keys()  # noqa: SIM118 - no dict
