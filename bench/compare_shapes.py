"""The clusters that `bench.compare` compares: ours in two shapes, Apache Kafka as it is and with our timeouts.

Three brokers each, three replicas. Ours has three controllers of their own; each broker of Apache Kafka is a controller
as well, which needs the fewest JVMs.
"""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from bench import compare_clients, system
from bench.harness import BenchError
from bench.kafka_broker import HEAP, KafkaBroker, KafkaCluster, jmx_values
from kipmesh.cluster import LocalCluster, NodeInfo, Role

READY_SECONDS_MAX = 180
TUNED: Mapping[str, str] = {
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "controller.quorum.fetch.timeout.ms": "1000",
    "controller.quorum.election.timeout.ms": "500",
    "group.initial.rebalance.delay.ms": "0",
}
"""The timeouts that ours has by default, in Apache Kafka's configuration."""


class Running(Protocol):
    """A cluster that is up."""

    bootstrap: str

    def pids(self) -> list[int]:
        """All processes."""

    def kill(self, broker: int) -> None:
        """SIGKILL to that broker."""

    def restart(self, broker: int) -> None:
        """One that was killed begins again."""

    def bytes_out(self) -> float:
        """What all brokers say that they sent to consumers since they began."""

    def stop(self) -> None:
        """End all."""


class Apache:
    """Apache Kafka."""

    def __init__(self, properties: Mapping[str, str]) -> None:
        self._cluster = KafkaCluster(3, HEAP, lambda _broker: properties)
        self._cluster.__enter__()
        self.bootstrap = self._cluster.bootstrap

    def _alive(self) -> Sequence[KafkaBroker]:
        return [broker for broker in self._cluster.brokers if broker.is_running]

    def pids(self) -> list[int]:
        """All processes."""
        return system.with_children(broker.pid for broker in self._alive())

    def kill(self, broker: int) -> None:
        """SIGKILL to that broker."""
        self._cluster.brokers[broker - 1].kill()

    def restart(self, broker: int) -> None:
        """One that was killed begins again."""
        self._cluster.brokers[broker - 1].start()

    def bytes_out(self) -> float:
        """To consumers, of all brokers."""
        name = "kafka.server:type=BrokerTopicMetrics,name=BytesOutPerSec"
        found = [jmx_values(broker, [name]) for broker in self._alive()]
        return sum(value for each in found for key, value in each.items() if key.endswith(":Count"))

    def stop(self) -> None:
        """End all, by SIGKILL: in good order the last ones would wait a minute for a quorum that is gone."""
        for broker in self._alive():
            broker.kill()
        self._cluster.__exit__(None, None, None)


class Ours:
    """Ours, as processes."""

    def __init__(self, leaders: int) -> None:
        self._cluster = LocalCluster(mode="processes", controllers=3, leaders=leaders, followers=3 - leaders)
        self._cluster.up()
        found = self._cluster.kafka_bootstrap
        if found is None:
            self._cluster.down()
            raise BenchError("this cluster has no Kafka listener")
        self.bootstrap = found

    def _brokers(self) -> Sequence[NodeInfo]:
        return [node for node in self._cluster.nodes if node.role in (Role.LEADER, Role.FOLLOWER)]

    def pids(self) -> list[int]:
        """All processes."""
        return system.with_children(node.pid for node in self._cluster.nodes if node.pid is not None)

    def kill(self, broker: int) -> None:
        """SIGKILL to that broker."""
        self._cluster.kill(self._name(broker))

    def restart(self, broker: int) -> None:
        """One that was killed begins again."""
        self._cluster.start(self._name(broker))

    def _name(self, broker: int) -> str:
        return next(node.name for node in self._brokers() if node.node_id == broker)

    def bytes_out(self) -> float:
        """To consumers, of all brokers."""
        total = 0.0
        for node in self._brokers():
            with urllib.request.urlopen(f"http://{node.http}/metrics", timeout=30) as answer:
                text = answer.read().decode()
            pattern = r"^kafka_server_brokertopicmetrics_bytesout_total(?:\{.*\})? (\S+)$"
            total += sum(map(float, re.findall(pattern, text, re.MULTILINE)))
        return total

    def stop(self) -> None:
        """End all."""
        self._cluster.down()


_ALL = ("ready", "memory", "latency", "produce", "consume", "failover", "many")


class Shape(NamedTuple):
    """A kind of cluster."""

    key: str
    label: str
    leaders: int = 0
    """Of ours; 0 for Apache Kafka."""
    properties: Mapping[str, str] = {}
    groups: Sequence[str] = _ALL
    """What is measured on it."""

    def start(self) -> tuple[Running, float]:
        """Up, and how many seconds after nothing was there; a client knows of three brokers then."""
        begin = time.perf_counter()
        running: Running = Ours(self.leaders) if self.leaders else Apache(self.properties)
        try:
            while compare_clients.brokers(running.bootstrap) < 3:
                if time.perf_counter() - begin > READY_SECONDS_MAX:
                    raise BenchError(f"{self.label}: not ready within {READY_SECONDS_MAX} s")
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
