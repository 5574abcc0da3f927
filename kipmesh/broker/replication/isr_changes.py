"""Asks the controller for ISR changes (AlterPartition), one request at a time, all waiting changes together.

From the moment a change is asked for, the leader counts both ISRs. Only INELIGIBLE_REPLICA means that the change was
certainly not made; after any other error the metadata log tells what holds.

`StartupIsrCheck` reports when all replicas of a broker that has started are in their ISRs again.
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
# Asking the same again cannot succeed. But for the first two, the change may have been made all the same, or the
# metadata log brings what overtook it: the pending ISR counts until then.
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
    """The broker's one sender of AlterPartition."""

    broker_id: int
    hosted_replicas: HostedReplicas
    channel: ControllerChannel
    metrics: BrokerMetrics
    broker_epoch: Callable[[], int]
    monotonic_ms: Callable[[], int]

    def __post_init__(self) -> None:
        # What was asked for; at most one entry a partition, so this is bounded by the partitions.
        self._asked: dict[Replica, IsrChange] = {}
        self._refused_until_ms: dict[Replica, int] = {}
        self._wake = asyncio.Event()

    def propose(self, replica: Replica, change: IsrChange) -> None:
        """Ask for `change` soon; nothing happens while a change of the partition is under way."""
        leader = replica.leader
        if leader is None or leader.pending is not None:
            return
        if self._refused_until_ms.get(replica, 0) > self.monotonic_ms():
            return
        self.metrics.isr_asked(len(change.members) > len(leader.isr))
        leader.isr_change_sent(change)
        self._asked[replica] = change
        self._wake.set()

    async def run(self) -> None:
        """Send what is proposed, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while sent := self._still_asked():
                if not await self._exchange(sent):
                    await asyncio.sleep(RETRY_BACKOFF_S)

    def _still_asked(self) -> dict[Replica, IsrChange]:
        """All that was asked for and still counts at its leader; newer news of a partition ends what came before."""
        self._asked = {
            replica: change
            for replica, change in self._asked.items()
            if replica.leader is not None and replica.leader.pending is change
        }
        return dict(self._asked)

    async def _exchange(self, sent: dict[Replica, IsrChange]) -> bool:
        """One request and its answer; False when something of it is to be asked again, after a pause."""
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
        waiting = sorted(sent, key=lambda replica: (replica.topic_id, replica.partition))
        for topic_id, replicas in groupby(waiting, key=lambda replica: replica.topic_id):
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
        """Take the answer to `change`; False when it says nothing that is final."""
        leader, code = replica.leader, ErrorCode.of(result.error_code)
        if leader is None or leader.pending is not change:
            return True  # newer news came first; what was asked since then waits for its own answer
        if not code:
            if result.leader_epoch == leader.leader_epoch:
                replica.isr_changed(result.isr, result.partition_epoch)
            elif result.leader_epoch > leader.leader_epoch:
                # The change has ended a reassignment. The metadata log brings the new epoch; until then both ISRs
                # count, and to ask once more would only be fenced.
                del self._asked[replica]
            return True
        log.info("ISR change refused", topic=replica.topic, partition=replica.partition, error=code.name)
        if code not in _FINAL:
            return False
        del self._asked[replica]
        self._refused_until_ms[replica] = self.monotonic_ms() + REFUSED_BACKOFF_MS
        if code in (ErrorCode.INELIGIBLE_REPLICA, ErrorCode.INVALID_REQUEST):
            leader.isr_change_refused()
        return True


class StartupIsrCheck:
    """Whether every replica of a broker that has started is in its partition's ISR again. For the event loop's thread.

    A rolling restart waits for that before the next broker: while a replica is not in sync, its partition has one
    fewer that may fail. A replica that lags later does not change the result: that is no reason to send clients away.

    Left out are partitions without a leader, whose replicas cannot join, and replicas that a reassignment adds.
    """

    def __init__(self, node_id: int, hosted_replicas: HostedReplicas) -> None:
        self._node_id = node_id
        self._hosted_replicas = hosted_replicas
        self._is_done = False

    def all_in_sync(self) -> bool:
        """Whether all replicas are in sync, or have been since the start. The caller checks that it is ready."""
        self._is_done = self._is_done or not self.lagging()
        return self._is_done

    def lagging(self) -> int:
        """How many of the broker's replicas are to be in sync and are not; O(replicas)."""
        image, node_id = self._hosted_replicas.image, self._node_id
        found = 0
        for topic_id, number in image.partitions_of_broker(node_id):
            state = image.partition(topic_id, number)
            if state is None or state.leader < 0 or node_id in state.adding_replicas:
                continue
            found += node_id not in state.isr
        return found
