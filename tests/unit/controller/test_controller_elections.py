"""ElectLeaders and automatic leader balancing of a running controller, over gRPC."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kipmesh import messages as m
from kipmesh.controller import decision_queue, leader_balance
from kipmesh.controller.decision_queue import ControllerParts
from kipmesh.controller.handlers import controller_pipeline, elections
from kipmesh.controller.leader_balance import LeaderBalance
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.elections import ElectionResult
from kipmesh.core.metadata.image import PartitionState
from kipmesh.messages import proto
from kipmesh.messages.kafka import MalformedError
from kipmesh.messages.table import find_api
from kipmesh.testing import until
from kipmesh.transport.grpc.server import RequestContext
from tests.unit.controller.controller_support import FakeBroker, LiveController

IMBALANCE = "kafka_controller_kafkacontroller_preferredreplicaimbalancecount"
MANUAL: dict[str, Any] = {"auto.leader.rebalance.enable": "false"}


class ThreeBrokers:
    """Fake broker 1, a leader service, and fake followers 2 and 3."""

    def __init__(self, controller: LiveController) -> None:
        self.controller = controller
        self.brokers = [FakeBroker(controller, broker_id, leads=broker_id == 1) for broker_id in (1, 2, 3)]

    async def start(self, partitions: int) -> bytes:
        for broker in self.brokers:
            await broker.join()
        result = await self.controller.create("t", partitions, 3)
        return result.topic_id

    def state(self, topic_id: bytes, partition: int = 0) -> PartitionState:
        return self.controller.node.image.topics[topic_id].partitions[partition]

    async def alter_isr(self, topic_id: bytes, partition: int, isr: list[int]) -> None:
        state = self.state(topic_id, partition)
        leader = self.brokers[state.leader - 1]
        members = [m.IsrMember(member, self.brokers[member - 1].epoch) for member in isr]
        requested = m.AlterPartitionPartition(partition, state.leader_epoch, state.partition_epoch, members)
        request = m.AlterPartitionRequest(
            leader.broker_id, leader.epoch, [m.AlterPartitionTopic(topic_id, [requested])]
        )
        response = await self.controller.call("Controller", "AlterPartition", request)
        assert not response.topics[0].partitions[0].error_code, response

    async def elect(self, kind: int = 0, *partitions: int, timeout_ms: int = 5000) -> m.ElectLeadersResponse:
        topics = [m.TopicPartitions("t", partitions)] if partitions else None
        request = m.ElectLeadersRequest(kind, topics, timeout_ms)
        response: m.ElectLeadersResponse = await self.controller.call("Admin", "ElectLeaders", request)
        return response

    async def stop_leader(self) -> None:
        """Stop broker 1 by controlled shutdown, which needs no session timeout."""
        first = self.brokers[0]
        while not (await first.heartbeat(shut_down=True)).should_shut_down:
            for broker in self.brokers[1:]:
                await broker.catch_up()
                await broker.heartbeat()

    async def restart_leader(self, topic_id: bytes) -> None:
        """Restart broker 1, which then is in sync in all partitions except the last."""
        await self.stop_leader()
        first = self.brokers[0]
        first.incarnation = b"restart" + bytes(9)
        await first.join(first.epoch)
        for partition in range(len(self.controller.node.image.topics[topic_id].partitions) - 1):
            await self.alter_isr(topic_id, partition, [1, 2, 3])


def results(response: m.ElectLeadersResponse) -> dict[int, int]:
    assert not response.error_code
    return {
        result.partition_id: result.error_code
        for topic in response.replica_election_results
        for result in topic.partition_result
    }


async def test_preferred_election_elects_only_in_sync_preferred_leaders(tmp_path: Path) -> None:
    async with LiveController(tmp_path, **MANUAL) as controller:
        cluster = ThreeBrokers(controller)
        topic_id = await cluster.start(4)
        assert results(await cluster.elect()) == {}
        assert results(await cluster.elect(0, 0, 7)) == {
            0: ErrorCode.ELECTION_NOT_NEEDED,
            7: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        }
        await cluster.restart_leader(topic_id)
        registry = controller.node.registry
        assert registry.get_sample_value(IMBALANCE) == 4
        assert results(await cluster.elect(0, 1, 3)) == {1: 0, 3: ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE}
        assert results(await cluster.elect()) == {0: 0, 2: 0, 3: ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE}
        assert [cluster.state(topic_id, partition).leader for partition in range(3)] == [1, 1, 1]
        assert registry.get_sample_value(IMBALANCE) == 1
        response = await controller.call("Admin", "ElectLeaders", m.ElectLeadersRequest(2, None))
        assert response.error_code == ErrorCode.INVALID_REQUEST


def test_elect_leaders_with_all_and_named_partitions_is_malformed() -> None:
    some = proto.encode(m.ElectLeadersRequest(0, [m.TopicPartitions("t", [0])]))
    all_partitions = bytes([2 << 3, 1])
    assert proto.decode(m.ElectLeadersRequest, all_partitions).topic_partitions is None
    with pytest.raises(MalformedError):
        proto.decode(m.ElectLeadersRequest, some + all_partitions)


async def test_election_of_many_partitions_is_split_into_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elections, "DECIDED_MAX", 2)
    async with LiveController(tmp_path, **MANUAL) as controller:
        cluster = ThreeBrokers(controller)
        await cluster.start(3)
        assert results(await cluster.elect(0, *range(7))) == {
            **dict.fromkeys(range(3), ErrorCode.ELECTION_NOT_NEEDED),
            **dict.fromkeys(range(3, 7), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        }


async def test_leader_balance_restores_in_sync_preferred_leaders(tmp_path: Path) -> None:
    values: dict[str, Any] = {"leader.imbalance.check.interval.seconds": "1"}
    async with LiveController(tmp_path, **values) as controller:
        cluster = ThreeBrokers(controller)
        topic_id = await cluster.start(3)
        await cluster.restart_leader(topic_id)

        def is_led_by_1() -> list[bool]:
            return [cluster.state(topic_id, partition).leader == 1 for partition in range(3)]

        await until(lambda: is_led_by_1() == [True, True, False], "the preferred leaders")


async def test_unclean_election_waits_for_log_end_offsets(tmp_path: Path) -> None:
    async with LiveController(tmp_path, **MANUAL) as controller:
        cluster = ThreeBrokers(controller)
        topic_id = await cluster.start(2)
        for partition in (0, 1):
            await cluster.alter_isr(topic_id, partition, [1])
        await cluster.stop_leader()
        assert cluster.state(topic_id).leader == -1
        election = asyncio.create_task(cluster.elect(1, timeout_ms=30_000))
        for broker in cluster.brokers[1:]:
            wanted: list[m.TopicIdPartition] = []
            while not wanted:
                wanted = list((await broker.heartbeat()).wanted_log_ends)
            ends = [m.PartitionLogEnd(key.topic_id, key.partition, 0, 5 * broker.broker_id) for key in wanted]
            await broker.heartbeat(log_ends=ends)
        assert results(await election) == {0: 0, 1: 0}
        assert [cluster.state(topic_id, partition).leader for partition in (0, 1)] == [3, 3]
        assert results(await cluster.elect(1, 0)) == {0: ErrorCode.ELECTION_NOT_NEEDED}


async def test_unclean_election_without_reported_log_ends_times_out(tmp_path: Path) -> None:
    async with LiveController(tmp_path, **MANUAL) as controller:
        cluster = ThreeBrokers(controller)
        topic_id = await cluster.start(1)
        await cluster.alter_isr(topic_id, 0, [1])
        await cluster.stop_leader()
        election = await cluster.elect(1, timeout_ms=300)
        assert results(election) == {0: ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE}
        assert not (await cluster.brokers[1].heartbeat()).wanted_log_ends, "the election is withdrawn"


async def test_timed_out_unclean_election_is_withdrawn_although_queue_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue refuses new operations when the election times out, but accepts its withdrawal."""
    async with LiveController(tmp_path, **MANUAL) as controller:
        cluster = ThreeBrokers(controller)
        topic_id = await cluster.start(1)
        await cluster.alter_isr(topic_id, 0, [1])
        await cluster.stop_leader()
        election = asyncio.create_task(cluster.elect(1, timeout_ms=30_000))
        wanted: list[m.TopicIdPartition] = []
        while not wanted:
            wanted = list((await cluster.brokers[1].heartbeat()).wanted_log_ends)
        monkeypatch.setattr(decision_queue, "OPERATIONS_MAX", 0)
        assert (await election).error_code == ErrorCode.REQUEST_TIMED_OUT
        monkeypatch.undo()
        assert not (await cluster.brokers[1].heartbeat()).wanted_log_ends, "the election is withdrawn"


@pytest.mark.parametrize("error", [KafkaError(ErrorCode.REQUEST_TIMED_OUT), asyncio.CancelledError()])
async def test_failed_unclean_election_withdraws_pending_partitions(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elections, "DECIDED_MAX", 2)
    withdrawn: list[Any] = []
    outcomes: list[Any] = [[ElectionResult("t", 0), ElectionResult("t", 1, is_pending=True)], error]

    async def do(operation: str, decide: Any, *, is_cleanup: bool = False) -> Any:
        assert is_cleanup is not bool(outcomes)
        if not outcomes:
            decide(SimpleNamespace(withdraw_elections=withdrawn.extend))
            return None
        outcome = outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    request = m.ElectLeadersRequest(1, [m.TopicPartitions("t", range(5))], 1000)
    parts = ControllerParts(do=do, now_ms=lambda: 0, next_offset=lambda: 0, disconnected=lambda broker, stream: None)
    election = controller_pipeline(parts).handle(find_api("ElectLeaders"), request, RequestContext("test", "here"))
    if isinstance(error, KafkaError):
        assert (await election).error_code == error.code
    else:
        with pytest.raises(asyncio.CancelledError):
            await election
    assert withdrawn == [("t", 1), ("t", 2), ("t", 3), ("t", 4)]


async def test_leader_balance_continues_after_errors_and_bounds_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_balance, "ELECTIONS_MAX", 3)
    monkeypatch.setattr(leader_balance, "CHECKED_MAX", 2)
    outcomes: list[Any] = [KafkaError(ErrorCode.NOT_CONTROLLER), list(range(9)), 1, 2, ValueError("a bug"), [], [7], 1]
    done = asyncio.Event()

    async def do(operation: str, decide: Any) -> Any:
        if not outcomes:
            done.set()
            return []
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    balance = LeaderBalance(do, 0.001)
    running = asyncio.create_task(balance.run())
    await asyncio.wait_for(done.wait(), 60)
    running.cancel()
    outcomes[:] = [list(range(9)), 1, 2]
    assert await LeaderBalance(do, 1).round(), "more partitions remain"
    outcomes[:] = [list(range(3)), 2, 0]
    assert not await LeaderBalance(do, 1).round()
