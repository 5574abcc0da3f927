"""Asks the controller for ISR changes (AlterPartition), one request at a time, all waiting changes together.

From the moment a change is asked for, the leader counts both ISRs. Only INELIGIBLE_REPLICA means that the change was
certainly not made; after any other error the metadata log tells what holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import groupby

import structlog

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.replica.leader import IsrChange
from kipmesh.messages.table import ALTER_PARTITION
from kipmesh.node.broker.controller_channel import RETRY_BACKOFF_S, ControllerChannel
from kipmesh.node.broker.metrics import BrokerMetrics
from kipmesh.node.broker.partitions import Partitions
from kipmesh.node.broker.replica import Replica
from kipmesh.rpc.client import TransportError

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


class IsrChanges:
    """The broker's one sender of AlterPartition."""

    def __init__(
        self,
        broker_id: int,
        partitions: Partitions,
        channel: ControllerChannel,
        metrics: BrokerMetrics,
        broker_epoch: Callable[[], int],
        monotonic_ms: Callable[[], int],
    ) -> None:
        self._broker_id = broker_id
        self._partitions = partitions
        self._channel = channel
        self._metrics = metrics
        self._broker_epoch = broker_epoch
        self._monotonic_ms = monotonic_ms
        # What was asked for; at most one entry a partition, so this is bounded by the partitions.
        self._asked: dict[Replica, IsrChange] = {}
        self._refused_until_ms: dict[Replica, int] = {}
        self._wake = asyncio.Event()

    def propose(self, replica: Replica, change: IsrChange) -> None:
        """Ask for `change` soon; nothing happens while a change of the partition is under way."""
        leader = replica.leader
        if leader is None or leader.pending is not None:
            return
        if self._refused_until_ms.get(replica, 0) > self._monotonic_ms():
            return
        self._metrics.isr_asked(len(change.members) > len(leader.isr))
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
        try:
            response = await self._channel.call(ALTER_PARTITION, self._request(sent), CALL_TIMEOUT_S)
        except TransportError as error:
            log.warning("AlterPartition failed", error=str(error))
            return False
        if response.error_code:
            # A stale broker epoch is for the next heartbeat to find out, which ends this process.
            log.warning("AlterPartition refused", error=ErrorCode.of(response.error_code).name)
            return False
        for topic in response.topics:
            for answer in topic.partitions:
                replica = self._partitions.get(topic.topic_id, answer.partition_index)
                change = sent.get(replica) if replica is not None else None
                if replica is not None and change is not None and self._answered(replica, change, answer):
                    del sent[replica]
        now_ms = self._monotonic_ms()
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
        return m.AlterPartitionRequest(self._broker_id, self._broker_epoch(), topics)

    def _answered(self, replica: Replica, change: IsrChange, answer: m.AlterPartitionPartitionResponse) -> bool:
        """Take the answer to `change`; False when it says nothing that is final."""
        leader, code = replica.leader, ErrorCode.of(answer.error_code)
        if leader is None or leader.pending is not change:
            return True  # newer news came first; what was asked since then waits for its own answer
        if not code:
            if answer.leader_epoch == leader.leader_epoch:
                replica.isr_changed(answer.isr, answer.partition_epoch)
            elif answer.leader_epoch > leader.leader_epoch:
                # The change has ended a reassignment. The metadata log brings the new epoch; until then both ISRs
                # count, and to ask once more would only be fenced.
                del self._asked[replica]
            return True
        log.info("ISR change refused", topic=replica.topic, partition=replica.partition, error=code.name)
        if code not in _FINAL:
            return False
        del self._asked[replica]
        self._refused_until_ms[replica] = self._monotonic_ms() + REFUSED_BACKOFF_MS
        if code in (ErrorCode.INELIGIBLE_REPLICA, ErrorCode.INVALID_REQUEST):
            leader.isr_change_refused()
        return True
