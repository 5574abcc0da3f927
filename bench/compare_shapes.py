"""Clusters that `bench.compare` compares: kipmesh in two shapes, Apache Kafka with its defaults and with our timeouts.

Each has three brokers and three replicas. kipmesh has three separate controllers. Each broker of Apache Kafka is a
controller as well, which needs the fewest JVMs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from bench import compare_clients, harness, system
from bench.harness import BenchError
from bench.kafka import HEAP, KafkaBroker, KafkaCluster, jmx_values
from kipmesh.cluster import NodeInfo

READY_SECONDS_MAX = 180
TUNED: Mapping[str, str] = {
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "controller.quorum.fetch.timeout.ms": "1000",
    "controller.quorum.election.timeout.ms": "500",
    "group.initial.rebalance.delay.ms": "0",
}
"""Default timeouts of kipmesh, as configuration of Apache Kafka."""


class Apache:
    """A running cluster of Apache Kafka with additional properties. Brokers are numbered from 1."""

    def __init__(self, properties: Mapping[str, str]) -> None:
        self._cluster = KafkaCluster(3, HEAP, lambda _broker: properties)
        self._cluster.__enter__()
        self.bootstrap = self._cluster.bootstrap

    def _alive(self) -> Sequence[KafkaBroker]:
        return [broker for broker in self._cluster.brokers if broker.is_running]

    def pids(self) -> list[int]:
        """Return the process ids of all nodes."""
        return system.with_children(broker.pid for broker in self._alive())

    def kill(self, broker: int) -> None:
        """Send SIGKILL to a broker."""
        self._cluster.brokers[broker - 1].kill()

    def restart(self, broker: int) -> None:
        """Restart a killed broker."""
        self._cluster.brokers[broker - 1].start()

    def bytes_out(self) -> float:
        """Return the bytes that all brokers sent to consumers since their start, by their metrics."""
        name = "kafka.server:type=BrokerTopicMetrics,name=BytesOutPerSec"
        found = [jmx_values(broker, [name]) for broker in self._alive()]
        return sum(value for each in found for key, value in each.items() if key.endswith(":Count"))

    def stop(self) -> None:
        """Kill all nodes. A clean stop of the last ones would wait a minute for the lost quorum."""
        for broker in self._alive():
            broker.kill()
        self._cluster.stop()


class Ours:
    """A running cluster of kipmesh processes. Raises BenchError if it has no Kafka listener."""

    def __init__(self, leaders: int) -> None:
        self._cluster = harness.three_brokers(leaders, controllers=3)
        self._cluster.up()
        found = self._cluster.kafka_bootstrap
        if found is None:
            self._cluster.down()
            raise BenchError("the cluster has no Kafka listener")
        self.bootstrap = found

    def _brokers(self) -> Sequence[NodeInfo]:
        return [node for node in self._cluster.nodes if node.role.is_broker]

    def pids(self) -> list[int]:
        """Return the process ids of all nodes."""
        return harness.pids(self._cluster)

    def kill(self, broker: int) -> None:
        """Send SIGKILL to a broker."""
        self._cluster.kill(self._name(broker))

    def restart(self, broker: int) -> None:
        """Restart a killed broker."""
        self._cluster.start(self._name(broker))

    def _name(self, broker: int) -> str:
        return next(node.name for node in self._brokers() if node.node_id == broker)

    def bytes_out(self) -> float:
        """Return the bytes that all brokers sent to consumers since their start, by their metrics."""
        name = "kafka_server_brokertopicmetrics_bytesout_total"
        return sum(harness.metric(node.http, name) for node in self._brokers())

    def stop(self) -> None:
        """Stop all nodes."""
        self._cluster.down()


Running: TypeAlias = Ours | Apache
_ALL = ("ready", "memory", "latency", "produce", "consume", "failover", "many")


class Shape(NamedTuple):
    """A kind of cluster to compare."""

    key: str
    label: str
    leaders: int = 0
    """Preferred leaders among the three brokers of kipmesh; 0 for Apache Kafka."""
    properties: Mapping[str, str] = {}
    groups: Sequence[str] = _ALL
    """Groups of figures that are measured."""

    def start(self) -> tuple[Running, float]:
        """Start a cluster, and return it with the seconds until a client sees three brokers; BenchError."""
        begin = time.perf_counter()
        running: Running = Ours(self.leaders) if self.leaders else Apache(self.properties)
        try:
            while compare_clients.brokers(running.bootstrap) < 3:
                if time.perf_counter() - begin > READY_SECONDS_MAX:
                    raise BenchError(f"{self.label}: no three brokers within {READY_SECONDS_MAX} s")
                time.sleep(0.02)
        except BaseException:
            running.stop()
            raise
        return running, time.perf_counter() - begin


SHAPES: Sequence[Shape] = (
    Shape("ours", "kipmesh, 1 leader and 2 followers", leaders=1),
    Shape("kafka", "Apache Kafka"),
    Shape("ours3", "kipmesh, 3 leaders", leaders=3),
    Shape("tuned", "Apache Kafka, our timeouts", 0, TUNED, _ALL[:-1]),
)
