"""Group membership of a consumer: Kafka's classic protocol, eager and cooperative.

Partitions are assigned and revoked only within `poll` (`advance`), so that records returned by `poll` belong to this
member until the next `poll`. A separate task sends heartbeats; a rebalance or a lost membership wakes `poll`. A member
that does not poll within `max.poll.interval.ms` leaves the group.

    outside --(advance)--> joining --(assignment)--> member --(rebalance, lost membership, new topics)--> joining ...

Eager members revoke all partitions before they join. Cooperative members revoke those that the new assignment lacks and
join again. Lost partitions are dropped without a commit. Invariant: `_is_lost` implies `_must_join`; only a later join
clears them, so an event during a rebalance is never ignored.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from kipmesh import messages as m
from kipmesh.client.cluster import Cluster
from kipmesh.client.consumer.fetcher import Fetcher
from kipmesh.client.group_coordinator import COORDINATOR_ERRORS, GroupCoordinator, MemberIdentity
from kipmesh.client.types import TopicPartition
from kipmesh.core.config import ConsumerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.group.assignors import ASSIGNORS, GroupMember, RebalanceProtocol
from kipmesh.core.group.records import (
    PROTOCOL_TYPE,
    Assignment,
    Subscription,
    by_topic,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
    flat,
)

log = logging.getLogger(__name__)

JOIN_GRACE_S = 5.0
"""Time beyond the maximum duration of a rebalance to wait for JoinGroup and SyncGroup responses."""
CLOSE_TIMEOUT_S = 5.0
"""Timeout of the last commit and of LeaveGroup when the consumer closes."""
TOPIC_TIMEOUT_S = 5.0
_LOST = frozenset({ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION})


class ConsumerGroupMetadata(NamedTuple):
    """Identity of a consumer in its group. Generation -1 means that the consumer is not a member."""

    group_id: str
    generation_id: int
    member_id: str


class RebalanceListener:
    """Base class for callbacks about assigned and revoked partitions, called within `poll` and `close`.

    The methods do nothing by default and may be coroutines. Their exceptions are raised by `poll` or `close`.
    """

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> Any:
        """Handle newly assigned partitions, possibly none, after a rebalance.

        Each starts at its committed offset or, without one, according to `auto.offset.reset`, unless this method calls
        `seek`.
        """

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> Any:
        """Handle partitions that are about to be revoked. Their offsets can still be committed.

        With `enable.auto.commit`, the offsets are committed before this call.
        """

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> Any:
        """Handle partitions that other members may already own. Their offsets cannot be committed.

        Unlike in Kafka, the default does not call `on_partitions_revoked`.
        """


class _Joined(NamedTuple):
    """Result of a join: the generation and the assigned partitions (`owned`)."""

    generation_id: int
    owned: frozenset[TopicPartition]
    committed: Mapping[TopicPartition, int]
    """Committed offsets of the newly assigned partitions."""


class Membership:
    """Group membership of one consumer. Only one task at a time may call `advance`."""

    def __init__(self, config: ConsumerConfig, cluster: Cluster, fetcher: Fetcher) -> None:
        assert config.group_id is not None
        self._config = config
        self.group_id = config.group_id
        self._cluster = cluster
        self._fetcher = fetcher
        self.coordinator = GroupCoordinator(cluster, self.group_id)
        self._assignors = [ASSIGNORS[name] for name in config.partition_assignment_strategy]
        self._is_cooperative = all(one.protocol is RebalanceProtocol.COOPERATIVE for one in self._assignors)
        self._topics: tuple[str, ...] | None = None
        self._listener = RebalanceListener()
        self.member_id = ""
        """Member id from the coordinator; empty before the first join."""
        self.generation_id = -1
        """Current generation; -1 outside the group."""
        self._owned: frozenset[TopicPartition] = frozenset()
        self._counts: dict[str, int] | None = None
        """If this member is the leader: partition counts of the topics in the last assignment."""
        self._must_join = self._is_lost = False
        self._is_rebalancing = False
        """Set while partitions are assigned or revoked. After a cancelled poll the member joins again."""
        self._failure: KafkaError | None = None
        self._join_task: asyncio.Task[_Joined | None] | None = None
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._commit_task: asyncio.Task[None] | None = None
        self._polled_at = self._committed_at = 0.0

    @property
    def is_subscribed(self) -> bool:
        """Whether the group assigns the partitions. Before `subscribe` the group only stores offsets."""
        return self._topics is not None

    def subscribe(self, topics: tuple[str, ...], listener: RebalanceListener | None) -> None:
        """Replace the subscription and the listener. The next `advance` joins the group."""
        if self._topics is None:
            self._fetcher.assign([])  # remove manually assigned partitions
        self._topics, self._must_join = topics, True
        self._listener = listener or RebalanceListener()

    # --- within poll -------------------------------------------------------------------------------------------------

    async def advance(self, timeout_s: float) -> None:
        """Join or rebalance if needed, for up to about `timeout_s`, and start an automatic commit if one is due.

        Raises KafkaError if joining fails (FENCED_INSTANCE_ID if another member uses `group.instance.id`), and the
        exceptions of the listener. Failed automatic commits are only logged.
        """
        self._polled_at = asyncio.get_running_loop().time()
        if self._topics is not None:
            await self._advance(timeout_s)
        self._commit_if_due()

    async def _advance(self, timeout_s: float) -> None:
        deadline = self._polled_at + timeout_s
        while True:
            if self._failure is not None:
                failure, self._failure, self._must_join = self._failure, None, True
                await self._drop_lost()
                raise failure
            if self._join_task is None:
                if not (self._must_join or self._is_rebalancing or self._topics_changed()):
                    return
                await self._prepare_join()
                self._join_task = asyncio.create_task(self._join(), name="join-group")
                self._join_task.add_done_callback(lambda _: self._fetcher.arrived.set())
            # A member that keeps partitions returns their records during the rebalance, which may take long.
            remaining_s = 0.0 if self._owned else deadline - asyncio.get_running_loop().time()
            await asyncio.wait({self._join_task}, timeout=max(remaining_s, 0))
            if not self._join_task.done():
                return
            task, self._join_task = self._join_task, None
            try:
                joined = task.result()
            except BaseException:
                self._must_join = True
                raise
            if joined is not None:
                await self._apply_assignment(joined)

    def _topics_changed(self) -> bool:
        counts = self._counts
        return counts is not None and any(count != self._count(topic) for topic, count in counts.items())

    def _count(self, topic: str) -> int:
        metadata = self._cluster.metadata.topic(topic)
        return 0 if metadata is None else len(metadata.partitions)

    async def _prepare_join(self) -> None:
        """Drop lost partitions and, for eager assignors, revoke all others before a join."""
        self._is_rebalancing = True
        if not self._is_lost and not self._is_cooperative:
            await self._revoke(self._owned)
        if self._is_lost:
            await self._drop_lost()
        if self._heartbeat_task is not None:
            self._heartbeat_task.cancel()
        self._must_join = self._is_lost = self._is_rebalancing = False

    async def _drop_lost(self) -> None:
        self._is_lost, self._must_join = False, True
        lost, self._owned = self._owned, frozenset()
        self._fetcher.assign([])
        if lost:
            await _call_listener(self._listener.on_partitions_lost(sorted(lost)))

    async def _revoke(self, revoked: frozenset[TopicPartition]) -> None:
        if not revoked:
            return
        if self._config.enable_auto_commit:
            if self._commit_task is not None:
                await asyncio.wait({self._commit_task})  # its positions are older and must not be committed last
            offsets = {each: offset for each, offset in self.positions().items() if each in revoked}
            await self._commit_quietly(offsets, self._config.default_api_timeout_ms / 1000)
        if self._is_lost:  # detected by the commit or by a heartbeat meanwhile
            await self._drop_lost()
            return
        await _call_listener(self._listener.on_partitions_revoked(sorted(revoked)))
        self._owned -= revoked
        self._fetcher.assign(sorted(self._owned))

    async def _apply_assignment(self, joined: _Joined) -> None:
        if self._is_lost:  # detected by a heartbeat after the join
            return
        self._is_rebalancing = True
        before = self._owned
        await self._revoke(before - joined.owned)
        if self.generation_id != joined.generation_id:  # lost while revoking
            return
        added = joined.owned - before
        self._owned = joined.owned
        self._fetcher.assign(sorted(self._owned))
        for topic_partition, offset in joined.committed.items():
            self._fetcher.states[topic_partition].seek(offset)
        self._fetcher.wake.set()
        await _call_listener(self._listener.on_partitions_assigned(sorted(added)))
        self._must_join |= self._is_cooperative and bool(before - joined.owned)
        self._is_rebalancing = False
        self._committed_at = asyncio.get_running_loop().time()

    # --- joining -----------------------------------------------------------------------------------------------------

    async def _join(self) -> _Joined | None:
        """Join the group and return the assignment, or None if the membership and its partitions were lost."""
        attempts = 0
        while True:
            code, joined = await self._join_once()
            if joined is not None:
                return joined
            if code in _LOST:
                self.generation_id = -1
                if code is ErrorCode.UNKNOWN_MEMBER_ID:
                    self.member_id = ""
                if self._owned:
                    self._is_lost = self._must_join = True
                    return None
            elif code is ErrorCode.MEMBER_ID_REQUIRED:
                continue
            elif code is not ErrorCode.REBALANCE_IN_PROGRESS:
                self._must_join = True
                self._is_lost = code is ErrorCode.FENCED_INSTANCE_ID
                raise KafkaError(code, f"cannot join group {self.group_id!r}")
            attempts += 1
            await asyncio.sleep(self._cluster.backoff.delay_s(attempts))

    async def _join_once(self) -> tuple[ErrorCode, _Joined | None]:
        config, timeout_s = self._config, self._config.default_api_timeout_ms / 1000
        owned = self._owned
        subscription = Subscription(
            tuple(sorted(self._topics or ())),
            None,
            by_topic(owned),
            self.generation_id if owned else -1,
            config.client_rack or None,
        )
        metadata = encode_subscription(subscription)
        request = m.JoinGroupRequest(
            self.group_id,
            config.session_timeout_ms,
            config.max_poll_interval_ms,
            self.member_id,
            config.group_instance_id,
            PROTOCOL_TYPE,
            [m.JoinGroupRequestProtocol(one.name, metadata) for one in self._assignors],
        )
        wait_s = config.max_poll_interval_ms / 1000 + JOIN_GRACE_S
        response: m.JoinGroupResponse = await self.coordinator.call(
            request, max(timeout_s, wait_s), attempt_timeout_s=wait_s
        )
        if response.error_code:
            if response.error_code == ErrorCode.MEMBER_ID_REQUIRED:
                self.member_id = response.member_id
            return ErrorCode.of(response.error_code), None
        self.member_id, self.generation_id, self._counts = response.member_id, response.generation_id, None
        is_leader = response.leader == response.member_id
        assignments = await self._assign(response) if is_leader and not response.skip_assignment else []
        sync = m.SyncGroupRequest(
            self.group_id,
            response.generation_id,
            response.member_id,
            config.group_instance_id,
            response.protocol_type,
            response.protocol_name,
            assignments,
        )
        synced = await self.coordinator.call(sync, max(timeout_s, wait_s), attempt_timeout_s=wait_s)
        if synced.error_code:
            return ErrorCode.of(synced.error_code), None
        # Heartbeats start before the committed offsets are fetched, which may take long.
        self._heartbeat_task = asyncio.create_task(self._send_heartbeats(), name="heartbeat")
        lists = decode_assignment(synced.assignment).assigned_partitions
        mine = frozenset(TopicPartition(*topic_partition) for topic_partition in flat(lists))
        committed = await self.coordinator.committed(mine - owned, timeout_s)
        return ErrorCode.NONE, _Joined(response.generation_id, mine, committed)

    async def _assign(self, response: m.JoinGroupResponse) -> list[m.SyncGroupRequestAssignment]:
        """Compute and return the assignments of all members. Only the leader of the group does this."""
        members = [
            GroupMember(one.member_id, one.group_instance_id, decode_subscription(one.metadata))
            for one in response.members
        ]
        topics = {topic for member in members for topic in member.subscription.topics}
        counts = {}
        for topic in sorted(topics):
            self._cluster.metadata.track(topic)
            try:
                await self._cluster.metadata.wait_for_topic(topic, TOPIC_TIMEOUT_S)
            except KafkaError as error:
                log.warning("topic cannot be assigned topic=%s error=%s", topic, error)
            counts[topic] = self._count(topic)
        self._counts = counts
        assignor = ASSIGNORS[response.protocol_name or ""]
        assignments = assignor.assign({topic: count for topic, count in counts.items() if count}, members)
        return [
            m.SyncGroupRequestAssignment(member_id, encode_assignment(Assignment(by_topic(owned))))
            for member_id, owned in assignments.items()
        ]

    # --- heartbeats --------------------------------------------------------------------------------------------------

    async def _send_heartbeats(self) -> None:
        config, loop = self._config, asyncio.get_running_loop()
        request = m.HeartbeatRequest(self.group_id, self.generation_id, self.member_id, config.group_instance_id)
        interval_s, attempts = config.heartbeat_interval_ms / 1000, 0
        while True:
            # After a failure the next heartbeat is sent early, before a new coordinator's session timeout expires.
            await asyncio.sleep(min(self._cluster.backoff.delay_s(attempts), interval_s) if attempts else interval_s)
            if loop.time() - self._polled_at > config.max_poll_interval_ms / 1000:
                log.warning("leaving group, no poll within max.poll.interval.ms group=%s", self.group_id)
                await self._leave()
                code = ErrorCode.UNKNOWN_MEMBER_ID
            else:
                try:
                    response = await self.coordinator.call_once(request, config.session_timeout_ms / 1000)
                except KafkaError as error:
                    log.info("heartbeat failed group=%s error=%s", self.group_id, error)
                    attempts += 1
                    continue
                code = ErrorCode.of(response.error_code)
                attempts = attempts + 1 if code in COORDINATOR_ERRORS else 0
            if code is ErrorCode.REBALANCE_IN_PROGRESS:
                self._must_join = True
                self._fetcher.arrived.set()
            elif code in _LOST or code is ErrorCode.FENCED_INSTANCE_ID:
                self._lose_membership(code)
                return

    def _lose_membership(self, code: ErrorCode) -> None:
        self._must_join = self._is_lost = True
        self.generation_id = -1
        if code is ErrorCode.UNKNOWN_MEMBER_ID:
            self.member_id = ""
        if code is ErrorCode.FENCED_INSTANCE_ID:
            text = f"another member uses group.instance.id {self._config.group_instance_id!r}"
            self._failure = KafkaError(code, text)
        self._fetcher.arrived.set()

    async def _leave(self) -> None:
        """Leave the group, unless this is a static member. Logs errors."""
        if self.member_id and self._config.group_instance_id is None:
            request = m.LeaveGroupRequest(self.group_id, members=[m.MemberIdentity(self.member_id)])
            try:
                await self.coordinator.call_once(request, CLOSE_TIMEOUT_S)
            except KafkaError as error:
                log.info("leaving group failed group=%s error=%s", self.group_id, error)

    # --- offsets -----------------------------------------------------------------------------------------------------

    async def commit(self, offsets: Mapping[TopicPartition, int] | None, timeout_s: float) -> None:
        """Commit offsets (None: the positions of all assigned partitions).

        Does nothing if there are no offsets. Raises KafkaError: UNKNOWN_MEMBER_ID if the consumer has subscribed and is
        not a member now, ILLEGAL_GENERATION, REBALANCE_IN_PROGRESS, or another error of the coordinator.
        """
        if offsets is None:
            offsets = self.positions()
        if not offsets:
            return
        member = MemberIdentity()
        if self._topics is not None:
            if self.generation_id < 0:  # without a member id, an empty group would accept the commit
                raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID, f"consumer is not a member of group {self.group_id!r}")
            member = MemberIdentity(self.generation_id, self.member_id, self._config.group_instance_id)
        try:
            await self.coordinator.commit(offsets, member, timeout_s)
        except KafkaError as error:
            # During a join, the JoinGroup response decides about the membership.
            is_current = member.generation_id == self.generation_id and self._join_task is None
            if is_current and (error.code in _LOST or error.code is ErrorCode.FENCED_INSTANCE_ID):
                self._lose_membership(error.code)
            elif is_current and error.code is ErrorCode.REBALANCE_IN_PROGRESS:
                self._must_join = True
            raise

    def positions(self) -> dict[TopicPartition, int]:
        """Return the known positions by assigned partition. Partitions without a position are omitted."""
        states = self._fetcher.states
        return {each: state.position for each, state in states.items() if state.position is not None}

    async def _commit_quietly(self, offsets: Mapping[TopicPartition, int], timeout_s: float) -> None:
        try:
            await self.commit(offsets, timeout_s)
        except KafkaError as error:
            log.warning("commit failed group=%s error=%s", self.group_id, error)

    def _commit_if_due(self) -> None:
        now = asyncio.get_running_loop().time()
        is_due = now - self._committed_at >= self._config.auto_commit_interval_ms / 1000
        is_committing = self._commit_task is not None and not self._commit_task.done()
        is_joining = self._join_task is not None and not self._owned
        if not (self._config.enable_auto_commit and is_due) or is_committing or is_joining:
            return
        self._committed_at = now
        timeout_s = self._config.default_api_timeout_ms / 1000
        work = self._commit_quietly(self.positions(), timeout_s)  # positions before this poll returns more records
        self._commit_task = asyncio.create_task(work, name="auto-commit")

    # --- closing -----------------------------------------------------------------------------------------------------

    async def close(self, *, commit: bool = True, leave: bool = True) -> None:
        """Commit if `commit` and `enable.auto.commit`, revoke all partitions, and leave the group if `leave`.

        A static member never leaves. Errors of the commit and of leaving are only logged.
        """
        tasks = [task for task in (self._join_task, self._heartbeat_task, self._commit_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._join_task = self._heartbeat_task = self._commit_task = None
        if commit and self._config.enable_auto_commit and not self._is_lost:
            await self._commit_quietly(self.positions(), CLOSE_TIMEOUT_S)
        if self._topics is not None:
            owned, self._owned = self._owned, frozenset()
            try:
                if owned:
                    listener = self._listener
                    callback = listener.on_partitions_lost if self._is_lost else listener.on_partitions_revoked
                    await _call_listener(callback(sorted(owned)))
            finally:
                if leave:
                    await self._leave()


async def _call_listener(result: Any) -> None:
    if inspect.isawaitable(result):
        await result
