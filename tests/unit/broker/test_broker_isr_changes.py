"""ISR changes of a leader: it sends AlterPartition and counts the maximal ISR until the outcome is certain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from kipmesh import messages as m
from kipmesh.broker.membership.controller_channel import RETRY_BACKOFF_S
from kipmesh.broker.observability.metrics import BrokerMetrics
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.isr_changes import IsrChanges
from kipmesh.broker.replication.replica import DirtyReplicas, Replica
from kipmesh.broker.requests.reading import read_for_follower
from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import BrokerState, MetadataImage, PartitionState
from kipmesh.core.record_batch import build
from kipmesh.messages.table import Api
from kipmesh.storage.fs import RealFileSystem
from kipmesh.storage.log_manager import LogManager
from kipmesh.testing import until
from kipmesh.transport.grpc.client import TransportError

TOPIC_ID = b"t" * 16


class Leader:
    """Broker 1 leads with ISR {1, 2}; broker 3 follows. `responses` compute the responses of the controller."""

    def __init__(self, directory: Path) -> None:
        self.manager = LogManager(
            RealFileSystem(), (str(directory),), cluster_id="c", node_id=1, defaults=TopicConfig()
        )
        self.manager.load(0)
        log = self.manager.create("t", 0, TOPIC_ID, TopicConfig(), 0)
        image = MetadataImage()
        image.brokers.update({broker: registered(broker, 100 + broker) for broker in (1, 2, 3)})
        self.hosted_replicas = HostedReplicas(image)
        dirty_replicas = DirtyReplicas()
        self.behind = dirty_replicas.behind
        self.replica = Replica(1, log, 0, lambda: 1000, dirty_replicas)
        self.hosted_replicas.add(self.replica)
        self.replica.become_leader(
            PartitionState((1, 2, 3), (1, 2), 1, 0, 0),
            min_insync_replicas=2,
            lag_max_ms=30_000,
            eligible_epoch=self.hosted_replicas.eligible_epoch,
        )
        for _ in range(10):
            batch = build([(None, b"v")], base_offset=0, leader_epoch=-1, timestamp_ms=1)
            self.replica.append(batch, -1, 1)
        self.requests: list[m.AlterPartitionRequest] = []
        self.responses: list[Callable[[m.AlterPartitionRequest], m.AlterPartitionResponse]] = []
        metrics = BrokerMetrics(CollectorRegistry())
        self.changes = IsrChanges(1, self.hosted_replicas, self, metrics, lambda: 101, lambda: 1000)  # type: ignore[arg-type]

    async def call(self, api: Api, request: Any, timeout_s: float) -> Any:
        self.requests.append(request)
        if not self.responses:
            await asyncio.sleep(3600)
        return self.responses.pop(0)(request)

    def fetch(self, broker: int, offset: int) -> None:
        requested = m.FetchPartition(0, 0, offset, 0 if offset else -1, 0, 1000)
        result = read_for_follower(
            self.replica, requested, broker, self.hosted_replicas.broker_epoch(broker), 1000, True
        )
        assert result.data.error_code == 0
        join = self.replica.isr_to_join(broker) if result.again else None
        if join is not None:
            self.changes.propose(self.replica, join)

    async def run(self, requests: int = 1) -> None:
        """Run until `requests` requests were sent, then long enough for a retry to appear."""
        task = asyncio.create_task(self.changes.run())
        await until(lambda: len(self.requests) >= requests, f"{requests} requests")
        await asyncio.sleep(4 * RETRY_BACKOFF_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def registered(broker: int, epoch: int) -> BrokerState:
    return BrokerState(broker, epoch, b"x" * 16, {}, None, False, False, False)


def unavailable(request: m.AlterPartitionRequest) -> m.AlterPartitionResponse:
    raise TransportError("controller", "AlterPartition", grpc.StatusCode.UNAVAILABLE, "restarting")


@pytest.fixture
def leader(tmp_path: Path) -> Any:
    running = Leader(tmp_path)
    yield running
    running.manager.abandon()


def requested_partition(request: m.AlterPartitionRequest) -> m.AlterPartitionPartition:
    return request.topics[0].partitions[0]


async def test_alter_partition_retry_names_broker_epoch_of_fetch(leader: Leader) -> None:
    def restart(request: m.AlterPartitionRequest) -> m.AlterPartitionResponse:
        leader.hosted_replicas.image.brokers[3] = registered(3, 199)  # a restart, perhaps with an empty log
        return unavailable(request)

    leader.responses.append(restart)
    leader.fetch(2, 10)
    leader.fetch(3, 10)
    await leader.run(2)
    assert len(leader.requests) == 2
    assert m.IsrMember(3, 103) in requested_partition(leader.requests[1]).new_isr_with_epochs


async def test_follower_that_lost_its_tail_leaves_isr_after_lag_time(leader: Leader) -> None:
    leader.fetch(2, 10)
    leader.behind.clear()  # as maintenance does if all followers are caught up
    leader.fetch(2, 9)
    assert leader.replica in leader.behind
    may_change, change = leader.replica.check_lag(1000 + 30_001)
    assert may_change
    assert change is not None
    assert 2 not in change.isr


async def test_newer_isr_from_metadata_cancels_pending_change(leader: Leader) -> None:
    def change_isr(request: m.AlterPartitionRequest) -> m.AlterPartitionResponse:
        leader.replica.isr_changed((1, 2), 7)
        return unavailable(request)

    leader.responses.append(change_isr)
    leader.fetch(2, 10)
    leader.fetch(3, 10)
    await leader.run()
    assert len(leader.requests) == 1
    assert leader.replica.leader is not None
    assert leader.replica.leader.pending is None


@pytest.mark.parametrize(
    ("code", "is_pending"), [(ErrorCode.INELIGIBLE_REPLICA, False), (ErrorCode.INVALID_UPDATE_VERSION, True)]
)
async def test_leader_drops_pending_isr_only_after_definite_refusal(
    leader: Leader, code: ErrorCode, is_pending: bool
) -> None:
    response = m.AlterPartitionPartitionResponse(0, code)
    topics = [m.AlterPartitionTopicResponse(TOPIC_ID, [response])]
    leader.responses.append(lambda request: m.AlterPartitionResponse(topics=topics))
    leader.fetch(2, 10)
    leader.fetch(3, 10)
    await leader.run()
    assert leader.replica.leader is not None
    assert (leader.replica.leader.pending is not None) is is_pending


async def test_successful_alter_partition_response_sets_isr(leader: Leader) -> None:
    response = m.AlterPartitionPartitionResponse(0, 0, 1, 0, (1, 2, 3), 0, 1)
    topics = [m.AlterPartitionTopicResponse(TOPIC_ID, [response])]
    leader.responses.append(lambda request: m.AlterPartitionResponse(topics=topics))
    leader.fetch(2, 10)
    leader.fetch(3, 10)
    await leader.run()
    assert leader.replica.leader is not None
    assert leader.replica.leader.isr == {1, 2, 3}


async def test_response_with_newer_leader_epoch_waits_for_metadata_log(leader: Leader) -> None:
    """The change completed a reassignment. A retry in the old epoch would be fenced."""
    response = m.AlterPartitionPartitionResponse(0, 0, 1, 1, (1, 2, 3), 0, 1)
    topics = [m.AlterPartitionTopicResponse(TOPIC_ID, [response])]
    leader.responses.append(lambda request: m.AlterPartitionResponse(topics=topics))
    leader.fetch(2, 10)
    leader.fetch(3, 10)
    await leader.run()
    assert len(leader.requests) == 1
    assert leader.replica.leader is not None
    assert leader.replica.leader.maximal_isr == {1, 2, 3}, "both followers count until the metadata log has the change"


def test_leader_does_not_acknowledge_append_of_its_earlier_epoch(leader: Leader) -> None:
    """The broker lost and regained leadership after the append, so the offset may hold a different record."""
    codes: list[ErrorCode] = []
    leader.fetch(2, 10)
    assert leader.replica.high_watermark == 10
    leader.replica.become_follower(PartitionState((1, 2, 3), (2,), 2, 1, 1))
    leader.replica.become_leader(
        PartitionState((1, 2, 3), (1, 2), 1, 2, 2),
        min_insync_replicas=2,
        lag_max_ms=30_000,
        eligible_epoch=leader.hosted_replicas.eligible_epoch,
    )
    assert leader.replica.when_replicated(9, 0, codes.append) is None
    assert codes == [ErrorCode.NOT_LEADER_OR_FOLLOWER]


def test_replication_waiters_complete_in_offset_order(leader: Leader) -> None:
    """A waiter that registers late, after a slow fsync, does not wait for higher offsets."""
    completed: list[int] = []
    for offset in (9, 3, 6):
        leader.replica.when_replicated(offset, 0, lambda code, offset=offset: completed.append(offset))
    leader.fetch(2, 5)
    assert completed == [3]
    leader.fetch(2, 10)
    assert completed == [3, 6, 9]


async def test_late_refusal_does_not_cancel_newer_change(leader: Leader) -> None:
    """The metadata cancels the first change and a fetch proposes the second before the first is refused."""

    def overtaken(request: m.AlterPartitionRequest) -> m.AlterPartitionResponse:
        leader.replica.isr_changed((1, 2), 1)
        leader.fetch(3, 10)
        response = m.AlterPartitionPartitionResponse(0, ErrorCode.INVALID_UPDATE_VERSION)
        return m.AlterPartitionResponse(topics=[m.AlterPartitionTopicResponse(TOPIC_ID, [response])])

    leader.responses.append(overtaken)
    leader.fetch(2, 10)
    leader.fetch(3, 10)
    await leader.run(2)
    assert [requested_partition(request).partition_epoch for request in leader.requests] == [0, 1]


async def test_leader_retries_alter_partition_after_unknown_error(leader: Leader) -> None:
    def failed(request: m.AlterPartitionRequest) -> m.AlterPartitionResponse:
        response = m.AlterPartitionPartitionResponse(0, ErrorCode.UNKNOWN_SERVER_ERROR)
        return m.AlterPartitionResponse(topics=[m.AlterPartitionTopicResponse(TOPIC_ID, [response])])

    leader.responses += [failed, lambda request: m.AlterPartitionResponse()]
    leader.fetch(2, 10)
    leader.fetch(3, 10)
    await leader.run(3)
    assert len(leader.requests) == 3
