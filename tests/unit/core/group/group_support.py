"""A group coordinator under test, with a simulated log, manual clock and numbered requests."""

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
    """One coordinator and its log. If `commits` is true, writes commit immediately."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.settings = settings
        self.now_ms = 1_000_000
        self.commits = True
        self.log: list[tuple[bytes, bytes | None]] = []
        self.waiting: list[Write] = []
        self.responses: dict[int, Any] = {}
        self.request_ids: set[int] = set()
        self._numbers = itertools.count(1)
        self.coordinator = GroupCoordinator(settings, GroupTable())

    @property
    def now(self) -> Instant:
        return Instant(1_700_000_000_000 + self.now_ms, self.now_ms)

    def new_request_id(self) -> int:
        number = next(self._numbers)
        self.request_ids.add(number)
        return number

    def apply(self, decision: Decision) -> None:
        for completion in decision.completions:
            assert completion.request_id in self.request_ids, "a response to an unknown request"
            assert completion.request_id not in self.responses, "two responses to one request"
            self.responses[completion.request_id] = completion.response
        self.waiting.extend(decision.writes)
        if self.commits:
            self.commit_all()

    def commit_all(self) -> None:
        while self.waiting:
            self.commit_one()

    def commit_one(self) -> None:
        write = self.waiting.pop(0)
        self.log.extend(encode_record(record) for record in write.records)
        self.apply(self.coordinator.committed(write.id, self.now))

    def fail_one(self, code: ErrorCode) -> None:
        self.apply(self.coordinator.failed(self.waiting.pop(0).id, code, self.now))

    def pass_ms(self, ms: int) -> None:
        """Advance the clock, from deadline to deadline."""
        end = self.now_ms + ms
        while (due := self.coordinator.next_deadline_ms()) is not None and due <= end:
            self.now_ms = max(self.now_ms, due)
            self.apply(self.coordinator.tick(self.now))
        self.now_ms = end

    def replayed(self) -> GroupTable:
        table = GroupTable()
        for key, value in self.log:
            record = decode_record(key, value)
            assert record is not None
            table.replay(record)
        return table

    def fail_over(self) -> None:
        """Load the log into a new coordinator."""
        self.apply(self.coordinator.unloaded(self.now))
        self.waiting.clear()
        self.coordinator = GroupCoordinator(self.settings, self.replayed())
        self.apply(self.coordinator.loaded(self.now))

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
        """Send a JoinGroup request and return its request id."""
        request = JoinGroupRequest(group, session_ms, rebalance_ms, member_id, instance, protocol_type, protocols)
        number = self.new_request_id()
        client = client or Client("client", "/127.0.0.1")
        self.apply(self.coordinator.join(request, client, f"u{number}", number, self.now))
        return number

    def join_new(self, **fields: Any) -> tuple[str, int]:
        """Join a dynamic member and return its member id and the request id of its second join."""
        first: JoinGroupResponse = self.responses[self.join(**fields)]
        assert first.error_code == ErrorCode.MEMBER_ID_REQUIRED
        return first.member_id, self.join(first.member_id, **fields)

    def join_response(self, number: int) -> JoinGroupResponse:
        response: JoinGroupResponse = self.responses[number]
        return response

    def sync(
        self, member_id: str, generation: int, assigned: dict[str, bytes] | None = None, instance: str | None = None
    ) -> int:
        assignments = [SyncGroupRequestAssignment(*item) for item in (assigned or {}).items()]
        request = SyncGroupRequest(GROUP, generation, member_id, instance, None, None, assignments)
        number = self.new_request_id()
        self.apply(self.coordinator.sync(request, number, self.now))
        return number

    def sync_response(self, number: int) -> SyncGroupResponse:
        response: SyncGroupResponse = self.responses[number]
        return response

    def heartbeat(self, member_id: str, generation: int, instance: str | None = None) -> ErrorCode:
        number = self.new_request_id()
        request = HeartbeatRequest(GROUP, generation, member_id, instance)
        self.apply(self.coordinator.heartbeat(request, number, self.now))
        response: HeartbeatResponse = self.responses[number]
        return ErrorCode(response.error_code)

    def leave(self, member_id: str, instance: str | None = None) -> ErrorCode:
        number = self.new_request_id()
        request = LeaveGroupRequest(GROUP, members=[MemberIdentity(member_id, instance)])
        self.apply(self.coordinator.leave(request, number, self.now))
        response: LeaveGroupResponse = self.responses[number]
        return ErrorCode(response.error_code or response.members[0].error_code)

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
        number = self.new_request_id()
        self.apply(self.coordinator.commit(request, number, self.now))
        return number

    def commit_code(self, number: int) -> ErrorCode:
        return ErrorCode(self.responses[number].topics[0].partitions[0].error_code)

    def fetch(self, group: str = GROUP) -> dict[tuple[str, int], int]:
        number = self.new_request_id()
        self.apply(self.coordinator.fetch(OffsetFetchRequestGroup(group, topics=None), number))
        return {
            (topic.name, partition.partition_index): partition.committed_offset
            for topic in self.responses[number].topics
            for partition in topic.partitions
        }

    # --- shortcuts -------------------------------------------------------------------------------------------------

    def stable(self, members: int = 2, **fields: Any) -> tuple[list[str], int]:
        """Form a stable group of new dynamic members led by the first. Return member ids and generation."""
        joins = [self.join_new(**fields) for _ in range(members)]
        self.pass_ms(3 * self.settings.group_initial_rebalance_delay_ms + 1)
        ids = [member_id for member_id, _ in joins]
        generation = self.join_response(joins[0][1]).generation_id
        syncs = [self.sync(member_id, generation) for member_id in ids[1:]]
        syncs.append(self.sync(ids[0], generation, {member_id: member_id.encode() for member_id in ids}))
        assert all(self.sync_response(sync).error_code == 0 for sync in syncs)
        return ids, generation
