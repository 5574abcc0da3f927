"""A coordinator under test: a log that commits by itself or when told to, clocks, and members that count requests."""

from __future__ import annotations

import itertools
from typing import Any

from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.coordinator import GroupCoordinator
from kipmesh.core.group.records import Subscription, decode_record, encode_record, encode_subscription
from kipmesh.core.group.table import GroupTable
from kipmesh.core.group.types import Client, Decision, Instant, Settings, Write
from kipmesh.messages import (
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    MemberIdentity,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetFetchRequestGroup,
    SyncGroupRequest,
    SyncGroupRequestAssignment,
    SyncGroupResponse,
)

GROUP = "g"
SETTINGS = Settings(group_initial_rebalance_delay_ms=3000)
PROTOCOLS = (JoinGroupRequestProtocol("range", encode_subscription(Subscription(("t",)))),)


class World:
    """One coordinator; `commits` says whether writes commit at once."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.settings = settings
        self.now_ms = 1_000_000
        self.commits = True
        self.log: list[tuple[bytes, bytes | None]] = []
        self.waiting: list[Write] = []
        self.answers: dict[int, Any] = {}
        self.asked: set[int] = set()
        self._numbers = itertools.count(1)
        self.coordinator = GroupCoordinator(settings, GroupTable())

    @property
    def now(self) -> Instant:
        return Instant(1_700_000_000_000 + self.now_ms, self.now_ms)

    def number(self) -> int:
        number = next(self._numbers)
        self.asked.add(number)
        return number

    def take(self, decision: Decision) -> None:
        for completion in decision.completions:
            assert completion.request_id in self.asked, "a response to an unknown request"
            assert completion.request_id not in self.answers, "two responses to one request"
            self.answers[completion.request_id] = completion.response
        self.waiting.extend(decision.writes)
        if self.commits:
            self.commit_all()

    def commit_all(self) -> None:
        while self.waiting:
            self.commit_one()

    def commit_one(self) -> None:
        write = self.waiting.pop(0)
        self.log.extend(encode_record(record) for record in write.records)
        self.take(self.coordinator.committed(write.id, self.now))

    def fail_one(self, code: ErrorCode) -> None:
        self.take(self.coordinator.failed(self.waiting.pop(0).id, code, self.now))

    def pass_ms(self, ms: int) -> None:
        """Time goes on from deadline to deadline."""
        end = self.now_ms + ms
        while (due := self.coordinator.next_deadline_ms()) is not None and due <= end:
            self.now_ms = max(self.now_ms, due)
            self.take(self.coordinator.tick(self.now))
        self.now_ms = end

    def replayed(self) -> GroupTable:
        table = GroupTable()
        for key, value in self.log:
            record = decode_record(key, value)
            assert record is not None
            table.replay(record)
        return table

    def fail_over(self) -> None:
        """Another broker reads the log and goes on."""
        self.take(self.coordinator.unloaded(self.now))
        self.waiting.clear()
        self.coordinator = GroupCoordinator(self.settings, self.replayed())
        self.take(self.coordinator.loaded(self.now))

    # --- requests --------------------------------------------------------------------------------------------------

    def join(
        self,
        member_id: str = "",
        *,
        instance: str | None = None,
        protocols: tuple[JoinGroupRequestProtocol, ...] = PROTOCOLS,
        protocol_type: str = "consumer",
        session_ms: int = 10_000,
        rebalance_ms: int = 60_000,
        group: str = GROUP,
        client: Client | None = None,
    ) -> int:
        """The number of the request."""
        request = JoinGroupRequest(group, session_ms, rebalance_ms, member_id, instance, protocol_type, protocols)
        number = self.number()
        client = client or Client("client", "/127.0.0.1")
        self.take(self.coordinator.join(request, client, f"u{number}", number, self.now))
        return number

    def join_new(self, **how: Any) -> tuple[str, int]:
        """A dynamic member's two joins: its id, and the number of the second."""
        first: JoinGroupResponse = self.answers[self.join(**how)]
        assert first.error_code == ErrorCode.MEMBER_ID_REQUIRED
        return first.member_id, self.join(first.member_id, **how)

    def joined(self, number: int) -> JoinGroupResponse:
        answer: JoinGroupResponse = self.answers[number]
        return answer

    def sync(
        self, member_id: str, generation: int, given: dict[str, bytes] | None = None, instance: str | None = None
    ) -> int:
        assignments = [SyncGroupRequestAssignment(*one) for one in (given or {}).items()]
        request = SyncGroupRequest(GROUP, generation, member_id, instance, None, None, assignments)
        number = self.number()
        self.take(self.coordinator.sync(request, number, self.now))
        return number

    def synced(self, number: int) -> SyncGroupResponse:
        answer: SyncGroupResponse = self.answers[number]
        return answer

    def beat(self, member_id: str, generation: int, instance: str | None = None) -> ErrorCode:
        number = self.number()
        request = HeartbeatRequest(GROUP, generation, member_id, instance)
        self.take(self.coordinator.heartbeat(request, number, self.now))
        answer: HeartbeatResponse = self.answers[number]
        return ErrorCode(answer.error_code)

    def leave(self, member_id: str, instance: str | None = None) -> ErrorCode:
        number = self.number()
        request = LeaveGroupRequest(GROUP, members=[MemberIdentity(member_id, instance)])
        self.take(self.coordinator.leave(request, number, self.now))
        answer: LeaveGroupResponse = self.answers[number]
        return ErrorCode(answer.error_code or answer.members[0].error_code)

    def commit(
        self,
        offset: int,
        member_id: str = "",
        generation: int = -1,
        *,
        topic: str = "t",
        partition: int = 0,
        metadata: str = "",
        instance: str | None = None,
        group: str = GROUP,
    ) -> int:
        place = OffsetCommitRequestPartition(partition, offset, 3, metadata)
        topics = [OffsetCommitRequestTopic(topic, [place])]
        request = OffsetCommitRequest(group, generation, member_id, instance, topics=topics)
        number = self.number()
        self.take(self.coordinator.commit(request, number, self.now))
        return number

    def commit_code(self, number: int) -> ErrorCode:
        return ErrorCode(self.answers[number].topics[0].partitions[0].error_code)

    def fetch(self, group: str = GROUP) -> dict[tuple[str, int], int]:
        number = self.number()
        self.take(self.coordinator.fetch(OffsetFetchRequestGroup(group, topics=None), number))
        return {
            (topic.name, one.partition_index): one.committed_offset
            for topic in self.answers[number].topics
            for one in topic.partitions
        }

    # --- shortcuts -------------------------------------------------------------------------------------------------

    def stable(self, members: int = 2, **how: Any) -> tuple[list[str], int]:
        """A stable group of new dynamic members, the first of which leads: their ids, and the generation."""
        joins = [self.join_new(**how) for _ in range(members)]
        self.pass_ms(3 * self.settings.group_initial_rebalance_delay_ms + 1)
        ids = [member_id for member_id, _ in joins]
        generation = self.joined(joins[0][1]).generation_id
        syncs = [self.sync(member_id, generation) for member_id in ids[1:]]
        syncs.append(self.sync(ids[0], generation, {one: one.encode() for one in ids}))
        assert all(self.synced(one).error_code == 0 for one in syncs)
        return ids, generation
