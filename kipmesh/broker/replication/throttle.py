"""Throttle of the replicas that a reassignment adds to this broker (KIP-73, KIP-455).

The rate is `follower.replication.throttled.rate` in the dynamic configuration of this broker, else in the cluster-wide
default, else in the broker's own file. It is read at each use, so a change applies within a second. It covers all
leaders that the broker fetches from. A replica that is in the ISR, is not being added or has all committed records is
never throttled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kipmesh.broker.observability.metrics import BrokerMetrics
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.replica import Replica
from kipmesh.core.config import BrokerConfig
from kipmesh.core.config.base import FOLLOWER_THROTTLED_RATE, NO_THROTTLE
from kipmesh.core.metadata.image import PartitionState
from kipmesh.core.replica.follower import Throttle

WAIT_S_MAX = 1.0
"""Maximum wait before the rate is read again."""


@dataclass(eq=False)
class ReplicationThrottle:
    """The throttle of one broker for replicas that a reassignment adds. Belongs to the event loop."""

    config: BrokerConfig
    hosted_replicas: HostedReplicas
    metrics: BrokerMetrics
    monotonic_ms: Callable[[], int]

    def __post_init__(self) -> None:
        self._throttle = Throttle(self.monotonic_ms())
        self._adding: set[Replica] = set()
        self.remove = self._adding.discard
        """Drop a replica that this broker no longer hosts."""
        self.metrics.gauge(
            "kafka_server_replicamanager_reassigningpartitions",
            "Led partitions with a reassignment in progress.",
            self._count_reassigning,
        )
        self.metrics.gauge(
            "kipmesh_broker_adding_replicas",
            "Replicas that a reassignment is adding to this broker.",
            lambda: len(self._adding),
        )

    def _count_reassigning(self) -> int:
        image, me = self.hosted_replicas.image, self.config.node_id
        return sum(1 for key in list(image.reassigning) if (state := image.partition(*key)) and state.leader == me)

    def role_changed(self, replica: Replica, state: PartitionState) -> None:
        """Record whether the partition's new state adds this replica."""
        me = self.config.node_id
        if me in state.adding_replicas and me not in state.isr:
            self._adding.add(replica)
        else:
            self._adding.discard(replica)

    def applies_to(self, replica: Replica) -> bool:
        """Whether the replica is being added, and is empty or lacks records below the last high watermark received.

        A replica that has all these records is about to join the ISR. Its leader may already count it and hold back the
        high watermark until it fetches (REP-02), so it must not wait.
        """
        if replica not in self._adding:
            return False
        log = replica.log
        return log.log_end_offset == log.log_start_offset or log.log_end_offset < replica.leader_high_watermark

    def has_room(self, planned_bytes: int) -> bool:
        """Whether one more throttled replica may be fetched, in addition to `planned_bytes` in the same request."""
        return self._limited().available(self.monotonic_ms()) > planned_bytes

    @property
    def wait_s(self) -> float:
        """Seconds to wait before `has_room` is called again, from 0.01 to `WAIT_S_MAX`."""
        return min(max(self._limited().wait_ms(self.monotonic_ms()) / 1000, 0.01), WAIT_S_MAX)

    def received(self, replica: Replica, size_bytes: int, *, was_throttled: bool) -> None:
        """Account for the bytes that were appended to a replica.

        `was_throttled` is the result of `applies_to` before the append. Unthrottled bytes do not count towards the
        rate.
        """
        if size_bytes and replica in self._adding:
            if was_throttled:
                self._throttle.consume(size_bytes, self.monotonic_ms())
            self.metrics.reassigned(size_bytes, is_throttled=was_throttled and self._throttle.rate is not None)

    def _limited(self) -> Throttle:
        config_of = self.hosted_replicas.image.broker_config
        own, common = config_of(str(self.config.node_id)), config_of("")
        text = own.get(FOLLOWER_THROTTLED_RATE, common.get(FOLLOWER_THROTTLED_RATE))
        rate = self.config.follower_replication_throttled_rate if text is None else int(text)
        self._throttle.set_limit(None if rate >= NO_THROTTLE else rate, self.monotonic_ms())
        return self._throttle
