"""Asks the controller for ISR changes (AlterPartition), one request at a time, all waiting changes together.

From the moment a change is asked for, the leader counts both ISRs. Only INELIGIBLE_REPLICA means that the change was
certainly not made; after any other error the metadata log tells what holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import groupby

import structlog

from kipmesh.core.errors import ErrorCode
from kipmesh.core.messages import (
    AlterPartitionPartition,
    AlterPartitionPartitionResponse,
    AlterPartitionRequest,
    AlterPartitionTopic,
    IsrMember,
)
from kipmesh.core.replica.leader import IsrChange
from kipmesh.node.broker.controller_channel import RETRY_BACKOFF_S, ControllerChannel
from kipmesh.node.broker.metrics import BrokerMetrics
from kipmesh.node.broker.partitions import Partitions
from kipmesh.node.broker.replica import Replica
from kipmesh.rpc.client import TransportError

log = structlog.get_logger(__name__)

REFUSED_BACKOFF_MS = 500
CALL_TIMEOUT_S = 10.0


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
            while request := self._request():
                try:
                    response = await self._channel.call("Controller", "AlterPartition", request, CALL_TIMEOUT_S)
                except TransportError as error:
                    log.warning("AlterPartition failed", error=str(error))
                    await asyncio.sleep(RETRY_BACKOFF_S)
                    continue
                if response.error_code:
                    # A stale broker epoch is for the next heartbeat to find out, which ends this process.
                    log.warning("AlterPartition refused", error=ErrorCode.of(response.error_code).name)
                    await asyncio.sleep(RETRY_BACKOFF_S)
                    continue
                for topic in response.topics:
                    for answer in topic.partitions:
                        self._answered(topic.topic_id, answer)
                self._drop_unanswered(request)
                now_ms = self._monotonic_ms()
                self._refused_until_ms = {r: until for r, until in self._refused_until_ms.items() if until > now_ms}

    def _request(self) -> AlterPartitionRequest | None:
        """All that was asked for and still counts at its leader; newer news of a partition ends what came before."""
        for replica, change in list(self._asked.items()):
            if replica.leader is None or replica.leader.pending is not change:
                del self._asked[replica]
        if not self._asked:
            return None
        topics = []
        waiting = sorted(self._asked, key=lambda replica: (replica.topic_id, replica.partition))
        for topic_id, replicas in groupby(waiting, key=lambda replica: replica.topic_id):
            changes = []
            for replica in replicas:
                change = self._asked[replica]
                members = [IsrMember(broker, epoch) for broker, epoch in change.members]
                changes.append(
                    AlterPartitionPartition(replica.partition, change.leader_epoch, change.partition_epoch, members)
                )
            topics.append(AlterPartitionTopic(topic_id, changes))
        return AlterPartitionRequest(self._broker_id, self._broker_epoch(), topics)

    def _answered(self, topic_id: bytes, answer: AlterPartitionPartitionResponse) -> None:
        replica = self._partitions.get(topic_id, answer.partition_index)
        change = self._asked.pop(replica, None) if replica is not None else None
        if replica is None or change is None or replica.leader is None or replica.leader.pending is not change:
            return
        code = ErrorCode.of(answer.error_code)
        if not code:
            if answer.leader_epoch == replica.leader.leader_epoch:
                replica.isr_changed(answer.isr, answer.partition_epoch)
            return
        log.info("ISR change refused", topic=replica.topic, partition=replica.partition, error=code.name)
        self._refused_until_ms[replica] = self._monotonic_ms() + REFUSED_BACKOFF_MS
        if code == ErrorCode.INELIGIBLE_REPLICA:
            replica.leader.isr_change_refused()

    def _drop_unanswered(self, request: AlterPartitionRequest) -> None:
        """A partition that the answer left out is given up: the metadata log will tell."""
        for topic in request.topics:
            for change in topic.partitions:
                replica = self._partitions.get(topic.topic_id, change.partition_index)
                if replica is not None:
                    self._asked.pop(replica, None)
