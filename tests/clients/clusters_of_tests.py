"""Clusters that third-party clients are tested with: kipmesh, Apache Kafka as the oracle, or a running cluster.

The environment variable `CLUSTERS` selects them: `kipmesh` (the default), `apache` or a bootstrap address, separated by
spaces. Each cluster has three brokers in three racks. Operations outside the Kafka protocol (kill a broker, read its
counters) raise `UnsupportedError` for a running cluster, and the test is skipped.
"""

from __future__ import annotations

import os
import re
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from bench.kafka import KafkaBroker, KafkaCluster, jmx_values
from kipmesh.cluster import LocalCluster, NodeInfo, Role

RACKS = ("rack-a", "rack-b", "rack-c")
SELECTOR = "org.apache.kafka.common.replica.RackAwareReplicaSelector"
SESSION_TIMEOUT_MS = 3000
LEADERS_RETURN = {"leader.imbalance.check.interval.seconds": "1"}
"""Restores preferred leaders soon after a restart, so that tests can wait for it (`wait_leaders_restored`)."""


class UnsupportedError(Exception):
    """The cluster does not support the operation."""


class Counters(NamedTuple):
    """Counters of one broker."""

    bytes_out: float
    """Bytes sent to consumers."""
    sessions: float
    metadata_requests: float


class Cluster(Protocol):
    """Three running brokers."""

    name: str
    bootstrap: str

    def kill(self, broker: int) -> None:
        """Send SIGKILL to the broker."""

    def start(self, broker: int) -> None:
        """Start the broker again with its data."""

    def counters(self, broker: int) -> Counters:
        """Return the current counters of the broker."""

    def down(self) -> None:
        """Stop all nodes."""


class Apache:
    """Apache Kafka with kipmesh's default timeouts."""

    def __init__(self) -> None:
        self.name = "apache"
        self._cluster = KafkaCluster(3, heap=("-Xms256m", "-Xmx512m"), properties=self._properties)
        self._cluster.__enter__()
        self.bootstrap = self._cluster.bootstrap

    @staticmethod
    def _properties(broker: KafkaBroker) -> Mapping[str, str]:
        return {
            "broker.rack": RACKS[broker.node_id - 1],
            "replica.selector.class": SELECTOR,
            "default.replication.factor": "3",
            "min.insync.replicas": "2",
            "offsets.topic.num.partitions": "3",
            "group.initial.rebalance.delay.ms": "0",
            "auto.create.topics.enable": "false",
            "broker.session.timeout.ms": str(SESSION_TIMEOUT_MS),
            "broker.heartbeat.interval.ms": "500",
            **LEADERS_RETURN,
        }

    def kill(self, broker: int) -> None:
        self._cluster.brokers[broker - 1].kill()

    def start(self, broker: int) -> None:
        node = self._cluster.brokers[broker - 1]
        node.start()
        node.wait_until_ready()

    def counters(self, broker: int) -> Counters:
        out = "kafka.server:type=BrokerTopicMetrics,name=BytesOutPerSec"
        requests = "kafka.network:type=RequestMetrics,name=RequestsPerSec,request=Metadata,*"
        cached = "kafka.server:type=FetchSessionCache,name=NumIncrementalFetchSessions"
        names = [out, requests, cached + ",*", cached]
        found = jmx_values(self._cluster.brokers[broker - 1], names)
        return Counters(
            bytes_out=_sum(found, "BytesOutPerSec", ":Count"),
            sessions=_sum(found, "NumIncrementalFetchSessions", ":Value"),
            metadata_requests=_sum(found, "request=Metadata", ":Count"),
        )

    def down(self) -> None:
        self._cluster.__exit__(None, None, None)


def _sum(found: Mapping[str, float], part: str, end: str) -> float:
    return sum(value for name, value in found.items() if part in name and name.endswith(end))


class Kipmesh:
    """kipmesh as processes. `leaders` of the three brokers are preferred leaders."""

    def __init__(self, leaders: int = 1) -> None:
        self.name = "kipmesh"
        config = {"replica.selector.class": SELECTOR, "auto.create.topics.enable": "false", **LEADERS_RETURN}
        self._cluster = LocalCluster(
            mode="processes", controllers=1, leaders=leaders, followers=3 - leaders, config=config
        )
        self._cluster.up()
        found = self._cluster.kafka_bootstrap
        assert found is not None
        self.bootstrap = found

    def _node(self, broker: int) -> NodeInfo:
        return next(node for node in self._cluster.nodes if node.node_id == broker and node.role is not Role.CONTROLLER)

    def kill(self, broker: int) -> None:
        self._cluster.kill(self._node(broker).name)

    def start(self, broker: int) -> None:
        self._cluster.start(self._node(broker).name)

    def metrics(self, broker: int) -> list[tuple[str, str, float]]:
        """Return name, labels and value of all samples of the broker's /metrics."""
        with urllib.request.urlopen(f"http://{self._node(broker).http}/metrics", timeout=10) as response:
            text = response.read().decode()
        lines = re.findall(r"^(\w+)(\{[^}]*\})? (\S+)$", text, re.MULTILINE)
        return [(name, labels, float(value)) for name, labels, value in lines]

    def counters(self, broker: int) -> Counters:
        found = self.metrics(broker)

        def total(name: str, *labels: str) -> float:
            return sum(
                value
                for found_name, found_labels, value in found
                if found_name == name and all(label in found_labels for label in labels)
            )

        return Counters(
            bytes_out=total("kafka_server_brokertopicmetrics_bytesout_total"),
            sessions=total("kafka_server_fetchsessioncache_numincrementalfetchsessions"),
            metadata_requests=total("kafka_network_requestmetrics_requests_total", 'request="Metadata"'),
        )

    def down(self) -> None:
        self._cluster.down()


class External:
    """A running cluster, known by its bootstrap address."""

    def __init__(self, bootstrap: str) -> None:
        self.name = self.bootstrap = bootstrap

    def kill(self, broker: int) -> None:
        raise UnsupportedError("brokers of a running cluster are not killed")

    start = kill

    def counters(self, broker: int) -> Counters:
        raise UnsupportedError("the counters of a running cluster's brokers are unknown")

    def down(self) -> None:
        pass


def wanted() -> Sequence[str]:
    """Return the selected names or addresses of clusters."""
    return os.environ.get("CLUSTERS", "kipmesh").split()


def make(name: str) -> Cluster:
    """Start the cluster. Raises KafkaMissingError."""
    if name == "kipmesh":
        return Kipmesh()
    return Apache() if name == "apache" else External(name)


def wait_for(expected: str, holds: object, timeout_s: float = 60.0) -> None:
    """Wait until `holds()` is true."""
    assert callable(holds)
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {expected}"
        time.sleep(0.1)
