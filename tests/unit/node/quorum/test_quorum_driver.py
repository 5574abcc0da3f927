"""Elections, appends and resignations in a metadata quorum over gRPC and files."""

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


async def test_quorum_of_three_elects_leader_that_commits_on_majority(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3) as quorum:
        leader = await quorum.leader()
        end = await quorum.append(leader, b"a", b"b")
        await until(lambda: all(node.driver.high_watermark >= end for node in quorum.all))
        assert all(node.log_values == [b"a", b"b"] for node in quorum.all)
        assert all(node.driver.election.leader_id == leader.node_id for node in quorum.all)
        assert leader.listener.of("committed")[-1] == end
        assert leader.listener.of("state")[-1] == (State.LEADER, leader.driver.epoch, leader.node_id)
        assert not any(node.failures for node in quorum.all)


async def test_single_voter_becomes_leader_after_each_start(tmp_path: Path) -> None:
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


async def test_committed_records_survive_killed_leader(tmp_path: Path) -> None:
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


async def test_deposed_leader_truncates_uncommitted_records(tmp_path: Path) -> None:
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


async def test_leader_without_majority_resigns(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3) as quorum:
        leader = await quorum.leader()
        epoch = leader.driver.epoch
        for other in quorum.followers(leader):
            await other.kill()
        leader.expire()
        await until(lambda: not leader.driver.is_leader)
        with pytest.raises(KafkaError, match="no controller is active"):
            leader.driver.append(batch_of(b"x"), epoch)


async def test_append_to_follower_names_active_controller(tmp_path: Path) -> None:
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


async def test_stopping_leader_hands_over_and_ends_waiting_fetches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The followers start an election without waiting for the fetch timeout of ten minutes."""
    monkeypatch.setattr(driver_module, "RESIGN_WAIT_S", WAIT_S)  # long enough to reach slow followers
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
        response = await waiting
        assert isinstance(response, FetchResponse)
        assert response.responses[0].partitions[0].error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        others = quorum.followers(leader)
        await until(lambda: all(node.driver.epoch > epoch for node in others))  # only EndQuorumEpoch can end the epoch
        successor = await quorum.leader()
        assert successor.log_values == [b"a"]
        refused = await leader.driver.request(VoteRequest(CLUSTER_ID))
        assert refused.error_code == ErrorCode.BROKER_NOT_AVAILABLE
        await leader.driver.stop()


async def test_resigned_leader_is_replaced(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3) as quorum:
        first = await quorum.leader()
        await quorum.append(first, b"a")
        first.driver.resign()
        assert not first.driver.is_leader
        second = await quorum.leader(other_than=first.node_id)
        await quorum.append(second, b"b")
        await until(lambda: first.log_values == [b"a", b"b"])


async def test_elections_are_persisted_on_thread_before_event(tmp_path: Path) -> None:
    quorum = Quorum(tmp_path, 3)
    threads: list[threading.Thread] = []
    written: dict[int, list[ElectionState]] = {}

    def watch_elections(node: Node) -> None:
        persist, states = node.replica.persist, written.setdefault(node.node_id, [])

        def persist_slowly(election: ElectionState) -> None:
            threads.append(threading.current_thread())
            time.sleep(0.02)
            persist(election)
            states.append(election)

        def state_changed(state: State, epoch: int, leader_id: int) -> None:
            if epoch:
                assert states[-1].epoch == epoch, "event before the election was durable"

        node.replica.persist = persist_slowly  # type: ignore[method-assign]
        node.listener.state_changed = state_changed  # type: ignore[method-assign]

    quorum.on_boot = watch_elections
    async with quorum:
        leader = await quorum.leader()
        await quorum.append(leader, b"a")
        assert len(threads) >= 4
        assert threading.main_thread() not in threads
        assert not any(node.failures for node in quorum.all)


async def test_many_appends_share_fetches(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 3, 1) as quorum:
        leader = await quorum.leader()
        fetches = 0
        request = leader.driver.request

        async def count_fetches(message: FetchRequest) -> object:
            nonlocal fetches
            fetches += 1
            return await request(message)

        leader.driver.request = count_fetches  # type: ignore[assignment,method-assign]
        for _ in range(20):
            for _ in range(100):
                end = leader.driver.append(batch_of(b"x" * 100), leader.driver.epoch)
            await asyncio.sleep(0.001)
        await quorum.committed(leader, end)
        assert fetches < 2000, "three replicas fetch less than once per append"
        await until(lambda: all(node.driver.high_watermark >= end for node in quorum.all))


async def test_describe_quorum_returns_voters_observers_and_endpoints(tmp_path: Path) -> None:
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


async def test_alarm_fires_after_pending_reads() -> None:
    events: list[str] = []
    fired = asyncio.Event()

    def fire() -> None:
        events.append("alarm")
        fired.set()

    alarm = Alarm(fire)
    alarm.set(int(time.monotonic() * 1000) + 5)
    near, far = socket.socketpair()
    with near, far:
        loop = asyncio.get_running_loop()
        loop.add_reader(near, lambda: events.append(near.recv(1).decode()))
        time.sleep(0.1)  # noqa: ASYNC251 - blocks the loop
        far.send(b"!")
        await fired.wait()
        loop.remove_reader(near)
    assert events == ["!", "alarm"]


def test_raft_config_is_parsed_from_node_configuration() -> None:
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
