"""The ISR is the same with fetch sessions and with full fetches: a model test.

Each follower fetches in a session from a real handler with real partitions. For each partition, a second
`PartitionLeader`, the model, receives all positions of the follower in every fetch, as in a full fetch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from prometheus_client import CollectorRegistry

from kipmesh import messages as m
from kipmesh.broker.observability.metrics import BrokerMetrics
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.replica import DirtyReplicas, Replica
from kipmesh.broker.requests.fetch import FetchHandler
from kipmesh.broker.requests.fetch_sessions import make_session_cache
from kipmesh.core.config import BrokerConfig, TopicConfig
from kipmesh.core.errors import ErrorCode
from kipmesh.core.fetch_session import FetchSessionHandler
from kipmesh.core.metadata.image import BrokerState, MetadataImage, PartitionState, TopicState
from kipmesh.core.record_batch import build, iterate
from kipmesh.core.replica.leader import IsrChange, PartitionLeader
from kipmesh.storage.log_manager import LogManager
from kipmesh.transport.grpc.server import RequestContext
from simulation.faulty_fs import FaultyFileSystem
from tests.unit.broker.broker_cluster import minimal_config

TOPIC_ID = b"t" * 16
LAG_MS = 1000
PARTITIONS = 4
FOLLOWERS = (2, 3)
MAX_BYTES = 1 << 20


def run(work: Coroutine[Any, Any, m.FetchResponse]) -> m.FetchResponse:
    """Run a fetch that does not wait."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the fetch waits")


def registered(broker: int, epoch: int, *, fenced: bool = False) -> BrokerState:
    return BrokerState(broker, epoch, b"x" * 16, {}, None, fenced, False, False)


class Follower:
    def __init__(self, broker: int) -> None:
        self.broker = broker
        self.epoch = 100 + broker
        self.session = FetchSessionHandler()
        self.ends = [0] * PARTITIONS
        self.leader_epochs = [0] * PARTITIONS
        self.wanted = set(range(PARTITIONS))

    def requested(self, partition: int) -> m.FetchPartition:
        return m.FetchPartition(partition, self.leader_epochs[partition], self.ends[partition], -1, 0, MAX_BYTES)


class Leaders(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        config = BrokerConfig.parse(
            {"node.id": 1, "cluster.id": "c", "controller.quorum.voters": "9@h:1", "log.dirs": "/d"}
        )
        manager = LogManager(FaultyFileSystem(), ("/d",), cluster_id="c", node_id=1, defaults=TopicConfig())
        manager.load(0)
        self.now_ms = 5000
        image = MetadataImage(offset=103)  # of the last registration
        image.brokers.update({broker: registered(broker, 100 + broker) for broker in (1, *FOLLOWERS)})
        self.states = [PartitionState((1, *FOLLOWERS), (1, *FOLLOWERS), 1, 0, 0) for _ in range(PARTITIONS)]
        image.topics[TOPIC_ID] = TopicState("t", TOPIC_ID, dict(enumerate(self.states)))
        self.hosted_replicas, self.dirty_replicas = HostedReplicas(image), DirtyReplicas()
        self.joins: set[int] = set()
        self.sessions = make_session_cache(config, self.dirty_replicas.subscriptions, self.hosted_replicas)
        self.handler = FetchHandler(
            minimal_config(1),
            self.hosted_replicas,
            self.sessions,
            BrokerMetrics(CollectorRegistry()),
            lambda replica, _isr: self.joins.add(replica.partition),
            lambda: self.now_ms,
        )
        self.replicas, self.models = [], []
        for number in range(PARTITIONS):
            log = manager.create("t", number, TOPIC_ID, TopicConfig(), 0)
            replica = Replica(1, log, 0, lambda: self.now_ms, self.dirty_replicas)
            self.hosted_replicas.add(replica)
            self.replicas.append(replica)
            self.models.append(self.model_leader(number, 0))
            self.lead(number)
        self.followers = {broker: Follower(broker) for broker in FOLLOWERS}

    def lead(self, number: int) -> None:
        self.replicas[number].become_leader(
            self.states[number],
            min_insync_replicas=1,
            lag_max_ms=LAG_MS,
            eligible_epoch=self.hosted_replicas.eligible_epoch,
        )

    def model_leader(self, number: int, high_watermark: int) -> PartitionLeader:
        state = self.states[number]
        return PartitionLeader(
            broker_id=1,
            leader_epoch=state.leader_epoch,
            partition_epoch=state.partition_epoch,
            replicas=state.replicas,
            isr=state.isr,
            log_end_offset=self.replicas[number].log.log_end_offset,
            high_watermark=high_watermark,
            min_insync_replicas=1,
            lag_max_ms=LAG_MS,
            eligible_epoch=self.hosted_replicas.eligible_epoch,
            now_ms=self.now_ms,
        )

    numbers = st.integers(0, PARTITIONS - 1)
    brokers = st.sampled_from(FOLLOWERS)

    @rule(number=numbers, records=st.integers(1, 3))
    def append(self, number: int, records: int) -> None:
        for _ in range(records):
            batch = build([(None, b"v")], base_offset=0, leader_epoch=-1, timestamp_ms=1)
            self.replicas[number].append(batch, 1, 1)
            self.models[number].appended(self.replicas[number].log.log_end_offset, self.now_ms)

    @rule(passed_ms=st.sampled_from((1, 100, LAG_MS // 2, LAG_MS, LAG_MS + 1)))
    def time_passes(self, passed_ms: int) -> None:
        self.now_ms += passed_ms

    @rule(
        broker=brokers,
        max_bytes=st.sampled_from((1, 100, 200, MAX_BYTES)),
        is_lost=st.sampled_from((False, False, False, True)),
    )
    def fetch(self, broker: int, max_bytes: int, is_lost: bool) -> None:
        follower = self.followers[broker]
        for number in range(PARTITIONS):
            if number in follower.wanted:
                follower.session.want("t", TOPIC_ID, follower.requested(number))
            else:
                follower.session.unwant("t", TOPIC_ID, number)
        if not follower.wanted:
            return
        request = follower.session.next_request()
        sent = m.FetchRequest(
            replica_id=broker, replica_epoch=follower.epoch, max_bytes=max_bytes, min_bytes=1, max_wait_ms=0
        )
        self.joins.clear()
        response = run(self.handler.fetch(request.fill(sent), RequestContext("f", "p")))
        if not response.error_code:
            self.fetch_from_models(follower, is_limited=max_bytes < MAX_BYTES)
        if is_lost:
            follower.session.handle_error(request)
            return
        for fetched in follower.session.handle_response(request, response).partitions:
            if fetched.data.error_code in (ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.UNKNOWN_LEADER_EPOCH):
                follower.leader_epochs[fetched.requested.partition] = self.states[
                    fetched.requested.partition
                ].leader_epoch
            for _, header in iterate(fetched.data.records):
                follower.ends[fetched.requested.partition] = header.base_offset + header.last_offset_delta + 1

    def fetch_from_models(self, follower: Follower, *, is_limited: bool) -> None:
        """Fetch from the models, and compare the followers that should join the ISR. A byte limit may delay a join."""
        joins = set()
        for number in follower.wanted:
            leader = self.models[number]
            if follower.leader_epochs[number] == leader.leader_epoch:
                leader.follower_fetched(follower.broker, follower.ends[number], 0, follower.epoch, self.now_ms)
                if leader.isr_to_join(follower.broker) is not None:
                    joins.add(number)
        assert self.joins <= joins if is_limited else self.joins == joins

    @rule(broker=brokers, number=numbers)
    def toggle_wanted(self, broker: int, number: int) -> None:
        self.followers[broker].wanted ^= {number}

    @rule(number=numbers, isr=st.sampled_from(((1,), (1, 2), (1, 3), (1, 2, 3))))
    def isr_changes(self, number: int, isr: tuple[int, ...]) -> None:
        state = self.states[number]
        self.states[number] = state._replace(isr=isr, partition_epoch=state.partition_epoch + 1)
        self.lead(number)
        self.models[number].isr_changed(isr, self.states[number].partition_epoch, self.now_ms)

    @rule(number=numbers)
    def reelect(self, number: int) -> None:
        state = self.states[number]
        self.states[number] = state._replace(
            leader_epoch=state.leader_epoch + 1, partition_epoch=state.partition_epoch + 1
        )
        self.lead(number)
        self.models[number] = self.model_leader(number, self.models[number].high_watermark)

    @rule(broker=brokers, fenced=st.booleans())
    def change_fencing(self, broker: int, fenced: bool) -> None:
        self.hosted_replicas.image.brokers[broker] = registered(broker, self.followers[broker].epoch, fenced=fenced)
        for replica, model in zip(self.replicas, self.models, strict=True):
            replica.brokers_changed()
            model.advance(self.now_ms)

    @rule(broker=brokers, lost=st.integers(0, 2))
    def restart(self, broker: int, lost: int) -> None:
        """Restart a follower with a new broker epoch, perhaps without its last records."""
        before, after = self.followers[broker], Follower(broker)
        after.epoch = before.epoch + 10
        after.ends = [max(end - lost, 0) for end in before.ends]
        after.leader_epochs = before.leader_epochs
        self.followers[broker] = after
        self.hosted_replicas.image.brokers[broker] = registered(broker, after.epoch)
        for replica, model in zip(self.replicas, self.models, strict=True):
            replica.brokers_changed()
            model.advance(self.now_ms)

    @invariant()
    def isr_and_high_watermark_match(self) -> None:
        for replica, model in zip(getattr(self, "replicas", ()), getattr(self, "models", ()), strict=True):
            model.advance(self.now_ms)
            expected = model.isr_without_laggards(self.now_ms)
            found: IsrChange | None = None
            if replica in self.dirty_replicas.behind:
                may_change, found = replica.check_lag(self.now_ms)
                if not may_change:
                    del self.dirty_replicas.behind[replica]
            assert (found and found.isr) == (expected and expected.isr)
            assert replica.high_watermark == model.high_watermark


Leaders.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLeaders = Leaders.TestCase


async def test_waiting_fetch_of_old_broker_epoch_does_not_update_restarted_follower() -> None:
    leaders = Leaders()
    leaders.begin()
    leaders.append(0, 3)
    before = leaders.followers[2]
    before.ends[0] = 3
    requested = [m.FetchTopic("t", TOPIC_ID, [before.requested(0)])]
    request = m.FetchRequest(
        replica_id=2, replica_epoch=before.epoch, max_bytes=MAX_BYTES, min_bytes=1, topics=requested
    )
    long_poll = request._replace(max_wait_ms=60_000, session_epoch=-1)
    waiting = asyncio.create_task(leaders.handler.fetch(long_poll, RequestContext("f", "p")))
    await asyncio.sleep(0)
    leaders.restart(2, 2)
    after = leaders.followers[2]
    topics = [m.FetchTopic("t", TOPIC_ID, [after.requested(0)])]
    run(leaders.handler.fetch(request._replace(replica_epoch=after.epoch, topics=topics), RequestContext("f", "p")))
    leaders.append(0, 1)
    await waiting
    leader = leaders.replicas[0].leader
    assert leader is not None
    assert (leader.followers[2].log_end_offset, leader.followers[2].broker_epoch) == (1, after.epoch)


def test_repeatedly_restarted_broker_has_one_session() -> None:
    leaders = Leaders()
    leaders.begin()
    for _ in range(5):
        leaders.restart(2, 0)
        leaders.fetch(2, MAX_BYTES, False)
        leaders.fetch(3, MAX_BYTES, False)
    assert [(session.replica_id, session.epoch) for session in leaders.sessions.list(0)] in (
        [(2, 1), (3, 5)],
        [(3, 5), (2, 1)],
    )
