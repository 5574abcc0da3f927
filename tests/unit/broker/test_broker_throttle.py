"""ReplicationThrottle: only added replicas that are not caught up are limited."""

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
from tests.unit.broker.broker_cluster import CLUSTER_ID

TOPIC_ID = b"t" * 16
ADDED = PartitionState((1, 2, 3), (1, 2), 1, 0, 0, adding_replicas=(3,))


class AddedReplicas:
    """Broker 3 as an added replica of two partitions at 1,000 bytes per second. The clock does not advance."""

    def __init__(self, directory: Path) -> None:
        self.manager = LogManager(
            RealFileSystem(), (str(directory),), cluster_id=CLUSTER_ID, node_id=3, defaults=TopicConfig()
        )
        self.manager.load(0)
        config = BrokerConfig.parse(
            {
                "node.id": 3,
                "cluster.id": CLUSTER_ID,
                "controller.quorum.voters": "100@127.0.0.1:1",
                "log.dirs": str(directory),
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

    def receive(self, replica: Replica, size: int, high_watermark: int) -> int:
        """Append a record of `size` bytes as the fetcher does and return the appended bytes."""
        end = replica.log.log_end_offset
        batch = build([(None, b"v" * size)], base_offset=end, leader_epoch=0, timestamp_ms=1)
        was_throttled = self.throttle.applies_to(replica)
        received_bytes = replica.append_from_leader(m.PartitionData(0, 0, high_watermark, records=batch), 0)
        self.throttle.received(replica, received_bytes, was_throttled=was_throttled)
        return received_bytes

    def metric(self, name: str) -> float:
        return self.registry.get_sample_value(name) or 0.0


@pytest.fixture
def added(tmp_path: Path) -> Iterator[AddedReplicas]:
    replicas = AddedReplicas(tmp_path)
    yield replicas
    replicas.manager.abandon()


def test_caught_up_replica_uses_no_throttle_quota(added: AddedReplicas) -> None:
    throttle = added.throttle
    assert throttle.has_room(0)
    first = added.receive(added.caught_up, 10, 1)
    assert first < 1000
    assert not throttle.applies_to(added.caught_up)
    more = added.receive(added.caught_up, 5000, 2)
    assert throttle.applies_to(added.behind)
    assert throttle.has_room(0), "the lagging replica has not used its bytes"
    assert not throttle.has_room(1000 - first)
    assert added.metric("kafka_server_brokertopicmetrics_reassignmentbytesin_total") == first + more
    assert added.metric("kipmesh_broker_throttled_replication_bytes_total") == first


def test_batch_that_catches_up_counts_against_throttle(added: AddedReplicas) -> None:
    assert added.throttle.has_room(0)
    assert added.receive(added.behind, 5000, 1) > 5000
    assert not added.throttle.applies_to(added.behind)
    assert not added.throttle.has_room(0)
    assert added.throttle.wait_s == 1.0
