"""The throttle of what a reassignment adds: who waits for room pays for it, and nobody else does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kipmesh import messages as m
from kipmesh.broker.observability.metrics import BrokerMetrics
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.replica import DirtyReplicas, Replica
from kipmesh.broker.replication.throttle import ReplicationThrottle
from kipmesh.core.config import BrokerConfig, TopicConfig
from kipmesh.core.metadata.image import MetadataImage, PartitionState
from kipmesh.core.record_batch import build
from kipmesh.storage.fs import RealFileSystem
from kipmesh.storage.log_manager import LogManager
from tests.unit.broker.conftest_broker import CLUSTER_ID

TOPIC_ID = b"t" * 16
ADDED = PartitionState((1, 2, 3), (1, 2), 1, 0, 0, adding_replicas=(3,))


class Adding:
    """Broker 3, which is being added to two partitions of broker 1, at 1,000 bytes a second; the clock stands still."""

    def __init__(self, folder: Path) -> None:
        self.manager = LogManager(
            RealFileSystem(), (str(folder),), cluster_id=CLUSTER_ID, node_id=3, defaults=TopicConfig()
        )
        self.manager.load(0)
        config = BrokerConfig.parse(
            {
                "node.id": 3,
                "cluster.id": CLUSTER_ID,
                "controller.quorum.voters": "100@127.0.0.1:1",
                "log.dirs": str(folder),
                "follower.replication.throttled.rate": 1000,
            }
        )
        self.registry = CollectorRegistry()
        metrics = BrokerMetrics(self.registry)
        self.throttle = ReplicationThrottle(config, HostedReplicas(MetadataImage()), metrics, lambda: 0)
        self.behind, self.caught_up = [self._replica(partition) for partition in range(2)]

    def _replica(self, partition: int) -> Replica:
        log = self.manager.create("t", partition, TOPIC_ID, TopicConfig(), 0)
        replica = Replica(3, log, 0, lambda: 0, DirtyReplicas())
        replica.become_follower(ADDED)
        self.throttle.role_changed(replica, ADDED)
        return replica

    def take(self, replica: Replica, size: int, high_watermark: int) -> int:
        """One record comes from the leader, as the fetcher takes it."""
        end = replica.log.log_end_offset
        batch = build([(None, b"v" * size)], base_offset=end, leader_epoch=0, timestamp_ms=1)
        was_throttled = self.throttle.applies_to(replica)
        taken = replica.append_from_leader(m.PartitionData(0, 0, high_watermark, records=batch), 0)
        self.throttle.received(replica, taken, was_throttled=was_throttled)
        return taken

    def metric(self, name: str) -> float:
        return self.registry.get_sample_value(name) or 0.0


@pytest.fixture
def adding(tmp_path: Path) -> Iterator[Adding]:
    it = Adding(tmp_path)
    yield it
    it.manager.abandon()


def test_what_has_caught_up_takes_no_room_from_the_others(adding: Adding) -> None:
    throttle = adding.throttle
    assert throttle.has_room(0)
    first = adding.take(adding.caught_up, 10, 1)
    assert first < 1000
    assert not throttle.applies_to(adding.caught_up)
    more = adding.take(adding.caught_up, 5000, 2)
    assert throttle.applies_to(adding.behind)
    assert throttle.has_room(0), "the other one has not used its bytes"
    assert not throttle.has_room(1000 - first)
    assert adding.metric("kafka_server_brokertopicmetrics_reassignmentbytesin_total") == first + more
    assert adding.metric("kipmesh_broker_throttled_replication_bytes_total") == first


def test_the_batch_that_catches_up_is_paid_for(adding: Adding) -> None:
    assert adding.throttle.has_room(0)
    assert adding.take(adding.behind, 5000, 1) > 5000
    assert not adding.throttle.applies_to(adding.behind)
    assert not adding.throttle.has_room(0)
    assert adding.throttle.wait_s == 1.0
