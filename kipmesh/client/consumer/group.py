"""A consumer's membership in a group: Kafka's classic protocol, eager and cooperative.

The membership goes on within `poll` (`advance`): only then are partitions given up and taken, and the listener called,
so that records which `poll` returned belong to who has them until the next `poll`. A task of its own sends heartbeats;
what they bring (a rebalance, that the membership is lost) wakes `poll`. Who does not poll for `max.poll.interval.ms`
leaves the group, so that others go on with its partitions.

    outside --(advance)--> joining --(the assignment)--> member --(a rebalance, a loss, other topics)--> joining ...

Eager members give up all before they join; cooperative ones keep what they have, give up what the new assignment lacks,
and join once more so that others get it; `poll` returns records of what they keep while they join. What is lost is
dropped without a commit: somebody else may have it already.

Invariants: `_is_lost` is never set without `_must_join`, and only a join that begins later clears them; so nothing that
is heard while partitions are taken or given up is forgotten.
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
"""How much longer than the rebalance may take its answer is waited for."""
CLOSE_TIMEOUT_S = 5.0
"""For the last commit, so that the next owner begins where this one ended; and for saying goodbye."""
TOPIC_TIMEOUT_S = 5.0
_LOST = frozenset({ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION})


class ConsumerGroupMetadata(NamedTuple):
    """Who a consumer is in its group."""

    group_id: str
    generation_id: int
    member_id: str


class RebalanceListener:
    """Told of partitions that come and go, within `poll` and `close`; the methods may be coroutines."""

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> Any:
        """These are new here; their positions are the committed ones, and can be changed with `seek`."""

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> Any:
        """These are about to go, and still may be committed."""

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> Any:
        """These are gone, and others may have them already."""


class _Joined(NamedTuple):
    """What a join came to."""

    generation_id: int
    owned: frozenset[TopicPartition]
    committed: Mapping[TopicPartition, int]
    """Of those that are new here."""


class Membership:
    """One consumer's. `advance` is called by one task at a time."""

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
        """The id that the coordinator gave; empty before."""
        self.generation_id = -1
        """The generation that this is a member of; -1 outside."""
        self._owned: frozenset[TopicPartition] = frozenset()
        self._counts: dict[str, int] | None = None
        """As the leader: how many partitions the topics had that it assigned."""
        self._must_join = self._is_lost = False
        self._is_between = False
        """Partitions are being given up or taken; whoever is cancelled there joins again."""
        self._failure: KafkaError | None = None
        self._joining: asyncio.Task[_Joined | None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._committing: asyncio.Task[None] | None = None
        self._polled_at = self._committed_at = 0.0

    @property
    def is_subscribed(self) -> bool:
        """Whether partitions are the group's business; before `subscribe` only offsets are."""
        return self._topics is not None

    def subscribe(self, topics: tuple[str, ...], listener: RebalanceListener | None) -> None:
        """Share these topics with the group, from the next `advance` on."""
        if self._topics is None:
            self._fetcher.assign([])  # what was assigned by hand
        self._topics, self._must_join = topics, True
        self._listener = listener or RebalanceListener()

    # --- within poll -------------------------------------------------------------------------------------------------

    async def advance(self, timeout_s: float) -> None:
        """Go on with the membership for at most about `timeout_s`; raises KafkaError when that is not possible."""
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
            if self._joining is None:
                if not (self._must_join or self._is_between or self._topics_changed()):
                    return
                await self._prepare()
                self._joining = asyncio.create_task(self._join(), name="join-group")
                self._joining.add_done_callback(lambda _: self._fetcher.arrived.set())
            # Who keeps partitions reads them meanwhile: a rebalance may take as long as a session that is to end.
            left = 0.0 if self._owned else deadline - asyncio.get_running_loop().time()
            await asyncio.wait({self._joining}, timeout=max(left, 0))
            if not self._joining.done():
                return
            task, self._joining = self._joining, None
            try:
                joined = task.result()
            except BaseException:
                self._must_join = True
                raise
            if joined is not None:
                await self._take(joined)

    def _topics_changed(self) -> bool:
        counts = self._counts
        return counts is not None and any(count != self._count(topic) for topic, count in counts.items())

    def _count(self, topic: str) -> int:
        metadata = self._cluster.metadata.topic(topic)
        return 0 if metadata is None else len(metadata.partitions)

    async def _prepare(self) -> None:
        """Before a join: what is lost goes, and eager members give up the rest."""
        self._is_between = True
        if not self._is_lost and not self._is_cooperative:
            await self._give_up(self._owned)
        if self._is_lost:
            await self._drop_lost()
        if self._beating is not None:
            self._beating.cancel()
        self._must_join = self._is_lost = self._is_between = False

    async def _drop_lost(self) -> None:
        self._is_lost, self._must_join = False, True
        lost, self._owned = self._owned, frozenset()
        self._fetcher.assign([])
        if lost:
            await _told(self._listener.on_partitions_lost(sorted(lost)))

    async def _give_up(self, gone: frozenset[TopicPartition]) -> None:
        if not gone:
            return
        if self._config.enable_auto_commit:
            if self._committing is not None:
                await asyncio.wait({self._committing})  # it has older positions: it must not come second
            positions = self.positions()
            offsets = {where: positions[where] for where in gone if where in positions}
            await self._commit_quietly(offsets, self._config.default_api_timeout_ms / 1000)
        if self._is_lost:  # that is what the commit was told, or a heartbeat meanwhile
            await self._drop_lost()
            return
        await _told(self._listener.on_partitions_revoked(sorted(gone)))
        self._owned -= gone
        self._fetcher.assign(sorted(self._owned))

    async def _take(self, joined: _Joined) -> None:
        if self._is_lost:  # a heartbeat since then
            return
        self._is_between = True
        before = self._owned
        await self._give_up(before - joined.owned)
        if self.generation_id != joined.generation_id:  # lost meanwhile
            return
        added = joined.owned - before
        self._owned = joined.owned
        self._fetcher.assign(sorted(self._owned))
        for where, offset in joined.committed.items():
            self._fetcher.states[where].seek(offset)
        self._fetcher.wake.set()
        await _told(self._listener.on_partitions_assigned(sorted(added)))
        self._must_join |= self._is_cooperative and bool(before - joined.owned)
        self._is_between = False
        self._committed_at = asyncio.get_running_loop().time()

    # --- joining -----------------------------------------------------------------------------------------------------

    async def _join(self) -> _Joined | None:
        """Join and get an assignment; None when the membership was lost, and so what it owned."""
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
                raise KafkaError(code, f"group {self.group_id!r}")
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
        answer: m.JoinGroupResponse = await self.coordinator.call(
            request, max(timeout_s, wait_s), attempt_timeout_s=wait_s
        )
        if answer.error_code:
            if answer.error_code == ErrorCode.MEMBER_ID_REQUIRED:
                self.member_id = answer.member_id
            return ErrorCode.of(answer.error_code), None
        self.member_id, self.generation_id, self._counts = answer.member_id, answer.generation_id, None
        is_leader = answer.leader == answer.member_id
        given = await self._assign(answer) if is_leader and not answer.skip_assignment else []
        sync = m.SyncGroupRequest(
            self.group_id,
            answer.generation_id,
            answer.member_id,
            config.group_instance_id,
            answer.protocol_type,
            answer.protocol_name,
            given,
        )
        synced = await self.coordinator.call(sync, max(timeout_s, wait_s), attempt_timeout_s=wait_s)
        if synced.error_code:
            return ErrorCode.of(synced.error_code), None
        self._beating = asyncio.create_task(self._beat(), name="heartbeat")  # the offsets may be long in coming
        lists = decode_assignment(synced.assignment).assigned_partitions
        mine = frozenset(TopicPartition(*where) for where in flat(lists))
        committed = await self.coordinator.committed(mine - owned, timeout_s)
        return ErrorCode.NONE, _Joined(answer.generation_id, mine, committed)

    async def _assign(self, answer: m.JoinGroupResponse) -> list[m.SyncGroupRequestAssignment]:
        """As the leader: who gets what."""
        members = [
            GroupMember(one.member_id, one.group_instance_id, decode_subscription(one.metadata))
            for one in answer.members
        ]
        topics = {topic for member in members for topic in member.subscription.topics}
        counts = {}
        for topic in sorted(topics):
            self._cluster.metadata.track(topic)
            try:
                await self._cluster.metadata.wait_for_topic(topic, TOPIC_TIMEOUT_S)
            except KafkaError as error:
                log.warning("topic %s cannot be assigned: %s", topic, error)
            counts[topic] = self._count(topic)
        self._counts = counts
        assignor = ASSIGNORS[answer.protocol_name or ""]
        given = assignor.assign({topic: count for topic, count in counts.items() if count}, members)
        return [
            m.SyncGroupRequestAssignment(member_id, encode_assignment(Assignment(by_topic(owned))))
            for member_id, owned in given.items()
        ]

    # --- heartbeats --------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        config, loop = self._config, asyncio.get_running_loop()
        request = m.HeartbeatRequest(self.group_id, self.generation_id, self.member_id, config.group_instance_id)
        interval_s, attempts = config.heartbeat_interval_ms / 1000, 0
        while True:
            # Without an answer the next one is not far: a new coordinator takes who is silent for dead before long.
            await asyncio.sleep(min(self._cluster.backoff.delay_s(attempts), interval_s) if attempts else interval_s)
            if loop.time() - self._polled_at > config.max_poll_interval_ms / 1000:
                log.warning("no poll within max.poll.interval.ms: leaving group %s", self.group_id)
                await self._leave()
                code = ErrorCode.UNKNOWN_MEMBER_ID
            else:
                try:
                    answer = await self.coordinator.call_once(request, config.session_timeout_ms / 1000)
                except KafkaError as error:
                    log.info("no answer to a heartbeat of group %s: %s", self.group_id, error)
                    attempts += 1
                    continue
                code = ErrorCode.of(answer.error_code)
                attempts = attempts + 1 if code in COORDINATOR_ERRORS else 0
            if code is ErrorCode.REBALANCE_IN_PROGRESS:
                self._must_join = True
                self._fetcher.arrived.set()
            elif code in _LOST or code is ErrorCode.FENCED_INSTANCE_ID:
                self._lose(code)
                return

    def _lose(self, code: ErrorCode) -> None:
        self._must_join = self._is_lost = True
        self.generation_id = -1
        if code is ErrorCode.UNKNOWN_MEMBER_ID:
            self.member_id = ""
        if code is ErrorCode.FENCED_INSTANCE_ID:
            self._failure = KafkaError(code, f"another member has {self._config.group_instance_id!r} now")
        self._fetcher.arrived.set()

    async def _leave(self) -> None:
        """A static member keeps its place."""
        if self.member_id and self._config.group_instance_id is None:
            request = m.LeaveGroupRequest(self.group_id, members=[m.MemberIdentity(self.member_id)])
            try:
                await self.coordinator.call_once(request, CLOSE_TIMEOUT_S)
            except KafkaError as error:
                log.info("not left group %s: %s", self.group_id, error)

    # --- offsets -----------------------------------------------------------------------------------------------------

    async def commit(self, offsets: Mapping[TopicPartition, int] | None, timeout_s: float) -> None:
        """Commit, by default the positions of all assigned partitions; raises KafkaError."""
        given = self.positions() if offsets is None else offsets
        if not given:
            return
        who = MemberIdentity()
        if self._topics is not None:
            if self.generation_id < 0:  # as nobody's, an empty group would take it
                raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID, f"no member of group {self.group_id!r} now")
            who = MemberIdentity(self.generation_id, self.member_id, self._config.group_instance_id)
        try:
            await self.coordinator.commit(given, who, timeout_s)
        except KafkaError as error:
            # While it joins, the answer to that says whether it is a member.
            is_ours = who.generation_id == self.generation_id and self._joining is None
            if is_ours and (error.code in _LOST or error.code is ErrorCode.FENCED_INSTANCE_ID):
                self._lose(error.code)
            elif is_ours and error.code is ErrorCode.REBALANCE_IN_PROGRESS:
                self._must_join = True
            raise

    def positions(self) -> dict[TopicPartition, int]:
        """Of the assigned partitions those that have one."""
        states = self._fetcher.states
        return {where: state.position for where, state in states.items() if state.position is not None}

    async def _commit_quietly(self, offsets: Mapping[TopicPartition, int], timeout_s: float) -> None:
        try:
            await self.commit(offsets, timeout_s)
        except KafkaError as error:
            log.warning("offsets of group %s not committed: %s", self.group_id, error)

    def _commit_if_due(self) -> None:
        now = asyncio.get_running_loop().time()
        is_due = now - self._committed_at >= self._config.auto_commit_interval_ms / 1000
        is_under_way = self._committing is not None and not self._committing.done()
        is_joining = self._joining is not None and not self._owned
        if not (self._config.enable_auto_commit and is_due) or is_under_way or is_joining:
            return
        self._committed_at = now
        timeout_s = self._config.default_api_timeout_ms / 1000
        work = self._commit_quietly(self.positions(), timeout_s)  # now: the same poll moves them before the task runs
        self._committing = asyncio.create_task(work, name="auto-commit")

    # --- the end -----------------------------------------------------------------------------------------------------

    async def close(self, *, commit: bool = True, leave: bool = True) -> None:
        """Commit if that is automatic, give up all, and leave; or without one or the other."""
        tasks = [task for task in (self._joining, self._beating, self._committing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._joining = self._beating = self._committing = None
        if commit and self._config.enable_auto_commit and not self._is_lost:
            await self._commit_quietly(self.positions(), CLOSE_TIMEOUT_S)
        if self._topics is not None:
            owned, self._owned = self._owned, frozenset()
            try:
                if owned:
                    gone = self._listener.on_partitions_lost if self._is_lost else self._listener.on_partitions_revoked
                    await _told(gone(sorted(owned)))
            finally:
                if leave:
                    await self._leave()


async def _told(answer: Any) -> None:
    if inspect.isawaitable(answer):
        await answer
