"""Sizes, limits and configuration of a run, drawn from the seed."""

from __future__ import annotations

from random import Random
from typing import Any

from kipmesh.core.config import BrokerConfig, ControllerConfig

TOPIC = "sim"
CONTROLLER_IDS = (101, 102, 103)
RACKS = ("a", "b", "c")
DATA = "/data"
LISTENER = "MESH"
VIRTUAL_MS = 15_000.0
QUIET_MS = 5_500.0
"""Duration of the last part of a run, without faults."""
STILL_MS = 2_200.0
"""Duration of the end of that part, without producers."""
PRODUCE_UNTIL_MS = VIRTUAL_MS - STILL_MS


def address_of(node_id: int) -> str:
    """Return the listener address ("host:port") of a node."""
    return f"node{node_id}:9092"


class Settings:
    """Randomly chosen sizes and configuration of one run. Tests may fix some of the sizes."""

    def __init__(self, rng: Random, brokers: int | None, min_isr: int | None, is_unclean: bool | None) -> None:
        drawn = (rng.choice((3, 3, 3, 4, 5)), rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 2, 3)), rng.random() < 0.1)
        self.broker_ids = range(1, (brokers or drawn[0]) + 1)
        self.partitions = drawn[1]
        self.min_isr = min_isr or drawn[2]
        self.is_unclean = drawn[3] if is_unclean is None else is_unclean
        self.produce_every_ms = rng.uniform(120, 500)
        self.fetch_bytes = rng.choice((1, 300, 1 << 20))
        self.topic_id = rng.randbytes(16)
        self._shared_keys: dict[str, Any] = {
            "cluster.id": "sim",
            "controller.quorum.voters": ",".join(f"{node_id}@{address_of(node_id)}" for node_id in CONTROLLER_IDS),
            "min.insync.replicas": self.min_isr,
            "broker.session.timeout.ms": rng.choice((700, 1000, 1500)),
            "broker.connection.loss.timeout.ms": rng.choice((0, 150)),
            "broker.heartbeat.interval.ms": 200,
        }
        self._broker_keys = {
            "replica.lag.time.max.ms": rng.choice((500, 900, 1500)),
            "replica.fetch.wait.max.ms": rng.choice((250, 500)),
            "replica.fetch.backoff.ms": 60,
            "replica.fetch.max.bytes": rng.choice((1, 400, 1 << 20)),
            "replica.socket.timeout.ms": 1200,
            "replica.high.watermark.checkpoint.interval.ms": rng.choice((300, 2000)),
            "replica.fetch.high.watermark.wakeup": rng.random() < 0.8,
            "log.flush.scheduler.interval.ms": 300,
            "log.flush.offset.checkpoint.interval.ms": rng.choice((500, 3000)),
            "log.flush.interval.ms": rng.choice((200, 1000, 1 << 40)),
            "log.flush.interval.messages": rng.choice((1, 5, 1 << 40, 1 << 40)),
            "log.segment.bytes": rng.choice((400, 2000, 1 << 20)),
            "log.retention.check.interval.ms": 4000,
            "enable.incremental.fetch": rng.random() < 0.9,
            "shutdown.grace.ms": 1500,
            "replica.selector.class": rng.choice(("", "RackAwareReplicaSelector", "RackAwareReplicaSelector")),
        }

    def broker_config(self, node_id: int) -> BrokerConfig:
        """Return the configuration of a broker."""
        own = {
            "node.id": node_id,
            "listeners": f"{LISTENER}://{address_of(node_id)}",
            "log.dirs": DATA,
            "broker.rack": RACKS[node_id % len(RACKS)],
        }
        return BrokerConfig.parse(self._shared_keys | self._broker_keys | own)

    def controller_config(self, node_id: int) -> ControllerConfig:
        """Return the configuration of a controller."""
        own = {
            "node.id": node_id,
            "metadata.log.dir": "/metadata",
            "unclean.leader.election.enable": self.is_unclean,
        }
        return ControllerConfig.parse(self._shared_keys | own)
