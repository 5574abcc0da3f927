"""Which replicas here are being added by a reassignment, and how fast they may catch up.

The rate is `follower.replication.throttled.rate` in the broker's dynamic configuration, else in that of all brokers,
else in its own file; it is looked up at each use, so that a change holds within a second. It is the broker's, over all
leaders that it fetches from. A replica that is in the ISR, or that is not being added, is never throttled, nor is one
that has all that is committed.
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
"""Nobody waits longer before the rate is looked up again."""


@dataclass(eq=False)
class ReplicationThrottle:
    """One broker's; it belongs to the event loop."""

    config: BrokerConfig
    hosted_replicas: HostedReplicas
    metrics: BrokerMetrics
    monotonic_ms: Callable[[], int]

    def __post_init__(self) -> None:
        self._throttle = Throttle(self.monotonic_ms())
        self._adding: set[Replica] = set()
        self.forget = self._adding.discard
        """Called when the replica leaves this broker."""
        self.metrics.gauge(
            "kafka_server_replicamanager_reassigningpartitions",
            "Led partitions whose replicas are being moved.",
            self._count_reassigning,
        )
        self.metrics.gauge(
            "kipmesh_broker_adding_replicas", "Replicas here that a reassignment adds.", lambda: len(self._adding)
        )

    def _count_reassigning(self) -> int:
        image, me = self.hosted_replicas.image, self.config.node_id
        return sum(1 for key in list(image.reassigning) if (state := image.partition(*key)) and state.leader == me)

    def role_changed(self, replica: Replica, state: PartitionState) -> None:
        """The metadata says something new of the partition."""
        me = self.config.node_id
        if me in state.adding_replicas and me not in state.isr:
            self._adding.add(replica)
        else:
            self._adding.discard(replica)

    def applies_to(self, replica: Replica) -> bool:
        """Whether the replica is being added and lacks what is committed, as far as it was told.

        One that does not is about to join the ISR. Its leader may count it already, and hold back its high watermark
        and so its writes until it has fetched ("Log truth"): it is not to wait any more.
        """
        if replica not in self._adding:
            return False
        log = replica.log
        return log.log_end_offset == log.log_start_offset or log.log_end_offset < replica.told_high_watermark

    def has_room(self, planned_bytes: int) -> bool:
        """Whether one more replica that is being added may be asked for beside so many bytes of others."""
        return self._limited().available(self.monotonic_ms()) > planned_bytes

    @property
    def wait_s(self) -> float:
        """How long who has no room should wait."""
        return min(max(self._limited().wait_ms(self.monotonic_ms()) / 1000, 0.01), WAIT_S_MAX)

    def received(self, replica: Replica, size_bytes: int, *, was_held: bool) -> None:
        """Bytes of the replica came and were appended; `was_held` is what `applies_to` said before that.

        What did not wait for room takes none from those that do.
        """
        if size_bytes and replica in self._adding:
            if was_held:
                self._throttle.took(size_bytes, self.monotonic_ms())
            self.metrics.reassigned(size_bytes, is_throttled=was_held and self._throttle.rate is not None)

    def _limited(self) -> Throttle:
        config_of = self.hosted_replicas.image.broker_config
        own, common = config_of(str(self.config.node_id)), config_of("")
        text = own.get(FOLLOWER_THROTTLED_RATE, common.get(FOLLOWER_THROTTLED_RATE))
        rate = self.config.follower_replication_throttled_rate if text is None else int(text)
        self._throttle.limit(None if rate >= NO_THROTTLE else rate, self.monotonic_ms())
        return self._throttle
