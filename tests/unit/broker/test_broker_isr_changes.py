"""AlterPartition from a leader: what was decided is asked for, once, and counted until the answer is certain."""

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
    """Broker 1 leads with ISR {1, 2}; 3 follows. `answers` say what the controller does with each request."""

    def __init__(self, folder: Path) -> None:
        self.manager = LogManager(RealFileSystem(), (str(folder),), cluster_id="c", node_id=1, defaults=TopicConfig())
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
        self.answers: list[Callable[[m.AlterPartitionRequest], m.AlterPartitionResponse]] = []
        metrics = BrokerMetrics(CollectorRegistry())
        self.changes = IsrChanges(1, self.hosted_replicas, self, metrics, lambda: 101, lambda: 1000)  # type: ignore[arg-type]

    async def call(self, api: Api, request: Any, timeout_s: float) -> Any:
        self.requests.append(request)
        if not self.answers:
            await asyncio.sleep(3600)
        return self.answers.pop(0)(request)

    def fetch(self, broker: int, offset: int) -> None:
        asked = m.FetchPartition(0, 0, offset, 0 if offset else -1, 0, 1000)
        result = read_for_follower(self.replica, asked, broker, self.hosted_replicas.broker_epoch(broker), 1000, True)
        assert result.data.error_code == 0
        join = self.replica.isr_to_join(broker) if result.again else None
        if join is not None:
            self.changes.propose(self.replica, join)

    async def run(self, requests: int = 1) -> None:
        """Until there were so many requests and all is done; then a while longer, in which there might be more."""
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
    it = Leader(tmp_path)
    yield it
    it.manager.abandon()


def asked(request: m.AlterPartitionRequest) -> m.AlterPartitionPartition:
    return request.topics[0].partitions[0]


async def test_a_retry_names_the_registration_that_fetched(leader: Leader) -> None:
    def restart(request: m.AlterPartitionRequest) -> m.AlterPartitionResponse:
        leader.hosted_replicas.image.brokers[3] = registered(3, 199)  # it came back, perhaps empty
        return unavailable(request)

    leader.answers.append(restart)
    leader.fetch(2, 10)
    leader.fetch(3, 10)
    await leader.run(2)
    assert len(leader.requests) == 2
    assert m.IsrMember(3, 103) in asked(leader.requests[1]).new_isr_with_epochs


async def test_one_that_was_caught_up_and_comes_back_without_its_tail_leaves_by_time(leader: Leader) -> None:
    leader.fetch(2, 10)
    leader.behind.clear()  # what the housekeeping does where everybody has everything
    leader.fetch(2, 9)
    assert leader.replica in leader.behind
    may_change, change = leader.replica.check_lag(1000 + 30_001)
    assert may_change
    assert change is not None
    assert 2 not in change.isr


async def test_newer_news_ends_what_was_asked_before(leader: Leader) -> None:
    def news(request: m.AlterPartitionRequest) -> m.AlterPartitionResponse:
        leader.replica.isr_changed((1, 2), 7)
        return unavailable(request)

    leader.answers.append(news)
    leader.fetch(2, 10)
    leader.fetch(3, 10)
    await leader.run()
    assert len(leader.requests) == 1
    assert leader.replica.leader is not None
    assert leader.replica.leader.pending is None


@pytest.mark.parametrize(
    ("code", "still_counts"), [(ErrorCode.INELIGIBLE_REPLICA, False), (ErrorCode.INVALID_UPDATE_VERSION, True)]
)
async def test_only_a_certain_refusal_stops_the_counting(leader: Leader, code: ErrorCode, still_counts: bool) -> None:
    answer = m.AlterPartitionPartitionResponse(0, code)
    topics = [m.AlterPartitionTopicResponse(TOPIC_ID, [answer])]
    leader.answers.append(lambda request: m.AlterPartitionResponse(topics=topics))
    leader.fetch(2, 10)
    leader.fetch(3, 10)
    await leader.run()
    assert leader.replica.leader is not None
    assert (leader.replica.leader.pending is not None) is still_counts


async def test_an_answer_of_success_is_the_new_isr(leader: Leader) -> None:
    answer = m.AlterPartitionPartitionResponse(0, 0, 1, 0, (1, 2, 3), 0, 1)
    topics = [m.AlterPartitionTopicResponse(TOPIC_ID, [answer])]
    leader.answers.append(lambda request: m.AlterPartitionResponse(topics=topics))
    leader.fetch(2, 10)
    leader.fetch(3, 10)
    await leader.run()
    assert leader.replica.leader is not None
    assert leader.replica.leader.isr == {1, 2, 3}


async def test_a_success_in_a_newer_leader_epoch_waits_for_the_metadata_log(leader: Leader) -> None:
    """The change has completed a reassignment: the same again would be fenced."""
    answer = m.AlterPartitionPartitionResponse(0, 0, 1, 1, (1, 2, 3), 0, 1)
    topics = [m.AlterPartitionTopicResponse(TOPIC_ID, [answer])]
    leader.answers.append(lambda request: m.AlterPartitionResponse(topics=topics))
    leader.fetch(2, 10)
    leader.fetch(3, 10)
    await leader.run()
    assert len(leader.requests) == 1
    assert leader.replica.leader is not None
    assert leader.replica.leader.maximal_isr == {1, 2, 3}, "both count until the log tells"


def test_acks_of_an_earlier_leadership_are_not_given_by_a_later_one(leader: Leader) -> None:
    """Between append and answer the broker was deposed, truncated, and led again: the offset is another record's."""
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


def test_waiters_are_answered_in_the_order_of_offsets(leader: Leader) -> None:
    """One whose fsync took longer waits from later on, and is not held up by the others."""
    answered: list[int] = []
    for offset in (9, 3, 6):
        leader.replica.when_replicated(offset, 0, lambda code, offset=offset: answered.append(offset))
    leader.fetch(2, 5)
    assert answered == [3]
    leader.fetch(2, 10)
    assert answered == [3, 6, 9]


async def test_a_late_refusal_does_not_end_what_was_asked_since(leader: Leader) -> None:
    """News clears the first change, a fetch asks for a second one, and only then the first is refused."""

    def overtaken(request: m.AlterPartitionRequest) -> m.AlterPartitionResponse:
        leader.replica.isr_changed((1, 2), 1)
        leader.fetch(3, 10)
        answer = m.AlterPartitionPartitionResponse(0, ErrorCode.INVALID_UPDATE_VERSION)
        return m.AlterPartitionResponse(topics=[m.AlterPartitionTopicResponse(TOPIC_ID, [answer])])

    leader.answers.append(overtaken)
    leader.fetch(2, 10)
    leader.fetch(3, 10)
    await leader.run(2)
    assert [asked(request).partition_epoch for request in leader.requests] == [0, 1]


async def test_an_error_that_says_nothing_final_is_asked_again(leader: Leader) -> None:
    def failed(request: m.AlterPartitionRequest) -> m.AlterPartitionResponse:
        answer = m.AlterPartitionPartitionResponse(0, ErrorCode.UNKNOWN_SERVER_ERROR)
        return m.AlterPartitionResponse(topics=[m.AlterPartitionTopicResponse(TOPIC_ID, [answer])])

    leader.answers += [failed, lambda request: m.AlterPartitionResponse()]
    leader.fetch(2, 10)
    leader.fetch(3, 10)
    await leader.run(3)
    assert len(leader.requests) == 3
