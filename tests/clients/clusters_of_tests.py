"""The clusters that clients are tried on: ours, Apache Kafka's own as the oracle, or any that runs already.

The variable `CLUSTERS` names them: `kipmesh` (the default), `apache`, or a bootstrap address, separated by spaces. Each
has three brokers in three racks. What is beyond the Kafka protocol, ending a broker and reading its counters, a cluster
that was only named cannot do: it raises `CannotError`, and the test is skipped.
"""

from __future__ import annotations

import os
import re
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from bench.kafka_broker import KafkaBroker, KafkaCluster, jmx_values
from kipmesh.cluster import LocalCluster, NodeInfo, Role

RACKS = ("rack-a", "rack-b", "rack-c")
SELECTOR = "org.apache.kafka.common.replica.RackAwareReplicaSelector"
SESSION_TIMEOUT_MS = 3000
LEADERS_RETURN = {"leader.imbalance.check.interval.seconds": "1"}
"""Soon after a broker is back, so that a test can wait for it (`scenarios_of_tests.at_home`)."""


class CannotError(Exception):
    """This cluster has no such thing."""


class Counters(NamedTuple):
    """What a broker says of itself."""

    bytes_out: float
    """To consumers."""
    sessions: float
    metadata_requests: float


class Cluster(Protocol):
    """Three brokers, which are up."""

    name: str
    bootstrap: str

    def kill(self, broker: int) -> None:
        """SIGKILL."""

    def start(self, broker: int) -> None:
        """Again, on what it kept."""

    def counters(self, broker: int) -> Counters:
        """Now."""

    def down(self) -> None:
        """End everything."""


class Apache:
    """Apache Kafka, with the timeouts that our brokers have by default."""

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
        asked = "kafka.network:type=RequestMetrics,name=RequestsPerSec,request=Metadata,*"
        cached = "kafka.server:type=FetchSessionCache,name=NumIncrementalFetchSessions"
        names = [out, asked, cached + ",*", cached]
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
    """Ours, as processes: `leaders` of the three brokers are preferred as leaders."""

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
        """Name, labels and value of all that a broker tells."""
        with urllib.request.urlopen(f"http://{self._node(broker).http}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        lines = re.findall(r"^(\w+)(\{[^}]*\})? (\S+)$", text, re.MULTILINE)
        return [(name, labels, float(value)) for name, labels, value in lines]

    def counters(self, broker: int) -> Counters:
        found = self.metrics(broker)

        def total(name: str, *labels: str) -> float:
            return sum(value for each, told, value in found if each == name and all(one in told for one in labels))

        return Counters(
            bytes_out=total("kafka_server_brokertopicmetrics_bytesout_total"),
            sessions=total("kafka_server_fetchsessioncache_numincrementalfetchsessions"),
            metadata_requests=total("kafka_network_requestmetrics_requests_total", 'request="Metadata"'),
        )

    def down(self) -> None:
        self._cluster.down()


class Named:
    """One that runs already."""

    def __init__(self, bootstrap: str) -> None:
        self.name = self.bootstrap = bootstrap

    def kill(self, broker: int) -> None:
        raise CannotError("brokers of a cluster that was named are not ended")

    start = kill

    def counters(self, broker: int) -> Counters:
        raise CannotError("nobody knows where the brokers of a cluster that was named tell their counters")

    def down(self) -> None:
        pass


def wanted() -> Sequence[str]:
    """Names of clusters."""
    return os.environ.get("CLUSTERS", "kipmesh").split()


def make(name: str) -> Cluster:
    """Start it; CannotError, KafkaMissingError."""
    if name == "kipmesh":
        return Kipmesh()
    return Apache() if name == "apache" else Named(name)


def wait_for(what: str, holds: object, timeout_s: float = 60.0) -> None:
    """Until `holds()`."""
    assert callable(holds)
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.1)
