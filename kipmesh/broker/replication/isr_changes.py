"""Sends ISR changes to the controller (AlterPartition, REP-03): one request at a time, with all pending changes.

From the moment a change is proposed, the leader counts both ISRs. Only INELIGIBLE_REPLICA and INVALID_REQUEST state
that the change was not made; after any other error the metadata log decides.

`StartupIsrCheck` reports when all replicas of a restarted broker are in their ISRs again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import structlog

from kipmesh import messages as m
from kipmesh.broker.membership.controller_channel import RETRY_BACKOFF_S, ControllerChannel, try_call
from kipmesh.broker.observability.metrics import BrokerMetrics
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.replica import Replica
from kipmesh.core.errors import ErrorCode
from kipmesh.core.replica.leader import IsrChange
from kipmesh.messages.table import ALTER_PARTITION

log = structlog.get_logger(__name__)

REFUSED_BACKOFF_MS = 500
CALL_TIMEOUT_S = 10.0
# A retry cannot succeed. After the first two the change was not made. After the others it may have been made, or the
# metadata log has a newer state: the leader counts the pending ISR until the log decides.
_FINAL = frozenset(
    {
        ErrorCode.INELIGIBLE_REPLICA,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.INVALID_UPDATE_VERSION,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.NEW_LEADER_ELECTED,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    }
)


@dataclass(eq=False)
class IsrChanges:
    """The sender of AlterPartition on one broker. Belongs to the event loop."""

    broker_id: int
    hosted_replicas: HostedReplicas
    channel: ControllerChannel
    metrics: BrokerMetrics
    broker_epoch: Callable[[], int]
    monotonic_ms: Callable[[], int]

    def __post_init__(self) -> None:
        # At most one change per partition.
        self._proposed: dict[Replica, IsrChange] = {}
        self._refused_until_ms: dict[Replica, int] = {}
        self._wake = asyncio.Event()

    def propose(self, replica: Replica, change: IsrChange) -> None:
        """Send `change` to the controller soon.

        Ignored if the replica does not lead, has a pending change, or had one refused within `REFUSED_BACKOFF_MS`.
        """
        leader = replica.leader
        if leader is None or leader.pending is not None:
            return
        if self._refused_until_ms.get(replica, 0) > self.monotonic_ms():
            return
        self.metrics.isr_change_proposed(is_expansion=len(change.members) > len(leader.isr))
        leader.isr_change_sent(change)
        self._proposed[replica] = change
        self._wake.set()

    async def run(self) -> None:
        """Send proposed changes and apply the responses, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while sent := self._current_changes():
                if not await self._exchange(sent):
                    await asyncio.sleep(RETRY_BACKOFF_S)

    def _current_changes(self) -> dict[Replica, IsrChange]:
        """Return the proposed changes that are still pending at their leaders, and drop the others."""
        self._proposed = {
            replica: change
            for replica, change in self._proposed.items()
            if replica.leader is not None and replica.leader.pending is change
        }
        return dict(self._proposed)

    async def _exchange(self, sent: dict[Replica, IsrChange]) -> bool:
        """Send one request and apply its response. Returns False if changes must be sent again after a pause."""
        response = await try_call(self.channel, ALTER_PARTITION, self._request(sent), CALL_TIMEOUT_S)
        if response is None:
            return False
        for topic in response.topics:
            for result in topic.partitions:
                replica = self.hosted_replicas.get(topic.topic_id, result.partition_index)
                change = sent.get(replica) if replica is not None else None
                if replica is not None and change is not None and self._apply_response(replica, change, result):
                    del sent[replica]
        now_ms = self.monotonic_ms()
        self._refused_until_ms = {r: until for r, until in self._refused_until_ms.items() if until > now_ms}
        return not sent

    def _request(self, sent: dict[Replica, IsrChange]) -> m.AlterPartitionRequest:
        topics = []
        ordered = sorted(sent, key=lambda replica: replica.key)
        for topic_id, replicas in groupby(ordered, key=lambda replica: replica.topic_id):
            changes = []
            for replica in replicas:
                change = sent[replica]
                members = [m.IsrMember(broker, epoch) for broker, epoch in change.members]
                changes.append(
                    m.AlterPartitionPartition(replica.partition, change.leader_epoch, change.partition_epoch, members)
                )
            topics.append(m.AlterPartitionTopic(topic_id, changes))
        return m.AlterPartitionRequest(self.broker_id, self.broker_epoch(), topics)

    def _apply_response(self, replica: Replica, change: IsrChange, result: m.AlterPartitionPartitionResponse) -> bool:
        """Apply the result of `change`. Returns False if the change must be sent again."""
        leader, code = replica.leader, ErrorCode.of(result.error_code)
        if leader is None or leader.pending is not change:
            return True  # newer metadata replaced this change
        if not code:
            if result.leader_epoch == leader.leader_epoch:
                replica.isr_changed(result.isr, result.partition_epoch)
            elif result.leader_epoch > leader.leader_epoch:
                # The change completed a reassignment. Both ISRs count until the metadata log has the new epoch. A
                # retry would be fenced.
                del self._proposed[replica]
            return True
        log.info("refused ISR change", topic=replica.topic, partition=replica.partition, error=code.name)
        if code not in _FINAL:
            return False
        del self._proposed[replica]
        self._refused_until_ms[replica] = self.monotonic_ms() + REFUSED_BACKOFF_MS
        if code in (ErrorCode.INELIGIBLE_REPLICA, ErrorCode.INVALID_REQUEST):
            leader.isr_change_refused()
        return True


class StartupIsrCheck:
    """Checks whether every replica of a restarted broker is in its partition's ISR again.

    A rolling restart waits for this before it restarts the next broker. A replica that lags later does not change the
    result: that is no reason to redirect clients. Partitions without a leader do not count, because their replicas
    cannot join, nor do replicas that a reassignment adds.
    """

    def __init__(self, node_id: int, hosted_replicas: HostedReplicas) -> None:
        self._node_id = node_id
        self._hosted_replicas = hosted_replicas
        self._is_done = False

    def all_in_sync(self) -> bool:
        """Whether all replicas are in their ISRs, or were at an earlier call. Call it while the broker is ready."""
        self._is_done = self._is_done or not self.lagging()
        return self._is_done

    def lagging(self) -> int:
        """Return how many of the broker's replicas are not in the ISR according to the metadata image. O(replicas).

        Replicas of partitions without a leader and replicas that a reassignment adds are not counted.
        """
        image, node_id = self._hosted_replicas.image, self._node_id
        states = [image.partition(*key) for key in image.partitions_of_broker(node_id)]
        return sum(
            state.leader >= 0 and node_id not in state.adding_replicas and node_id not in state.isr
            for state in states
            if state is not None
        )
