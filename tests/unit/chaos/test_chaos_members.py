"""Members of the workload's group that leave, die and fail: every consumer is closed, every error is raised."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kipmesh.testing import until
from kipmesh_chaos import workload
from kipmesh_chaos.experiment import GroupPart
from kipmesh_chaos.recorder import Recorder, RunClients
from kipmesh_chaos.workload import Member, Members

PART = GroupPart(members=3, churn_s=0.001)


class FakeMember:
    """Member without a consumer. Leaves after `may_leave` is set."""

    members_made: list[FakeMember]
    may_leave: asyncio.Event

    def __init__(self, *arguments: Any) -> None:
        self.name = arguments[3]
        self.fails = asyncio.Event()
        self.leaving_fails = self.is_leaving = self.has_left = False
        self.members_made.append(self)

    async def run(self) -> None:
        await self.fails.wait()
        raise RuntimeError(f"{self.name} has a bug")

    async def leave(self) -> None:
        self.is_leaving = True
        await self.may_leave.wait()
        self.has_left = True
        if self.leaving_fails:
            raise ValueError(f"{self.name} failed to leave")

    die = leave


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    recorder = Recorder(tmp_path / "history.jsonl")
    yield recorder
    recorder.close()


@pytest.fixture
def members_made(monkeypatch: pytest.MonkeyPatch) -> list[FakeMember]:
    monkeypatch.setattr(workload, "Member", FakeMember)
    FakeMember.members_made, FakeMember.may_leave = [], asyncio.Event()
    return FakeMember.members_made


def start_members(recorder: Recorder) -> Members:
    members = Members(RunClients("localhost:1", "topic", recorder), 1, PART, 1)
    members.start()
    return members


async def test_leaving_member_is_replaced_after_churn_stops(recorder: Recorder, members_made: list[FakeMember]) -> None:
    members = start_members(recorder)
    members.start_churning()
    await until(lambda: any(member.is_leaving for member in members_made), "a leaving member")
    await members.stop_churning()
    assert not any(member.has_left for member in members_made)
    FakeMember.may_leave.set()
    await until(lambda: len(members_made) == 4, "the replacement")
    assert [member.has_left for member in members_made].count(True) == 1
    await members.close()
    assert all(member.has_left for member in members_made)


async def test_close_waits_for_leaving_member(recorder: Recorder, members_made: list[FakeMember]) -> None:
    members = start_members(recorder)
    members.start_churning()
    await until(lambda: any(member.is_leaving for member in members_made), "a leaving member")
    closing = asyncio.create_task(members.close())
    await until(lambda: all(member.is_leaving for member in members_made), "all members to leave")
    assert not closing.done()
    FakeMember.may_leave.set()
    await closing
    assert [member.has_left for member in members_made] == [True] * 3  # no replacement joined
    await members.close()


async def test_close_times_out_if_member_does_not_leave(
    recorder: Recorder, members_made: list[FakeMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "LEAVE_TIMEOUT_S", 0.01)
    members = Members(RunClients("localhost:1", "topic", recorder), 1, GroupPart(members=1, churn_s=0.001), 1)
    members.start()
    members.start_churning()
    await until(lambda: members_made[0].is_leaving, "a leaving member")
    with pytest.raises(TimeoutError):
        await members.close()


async def test_all_members_leave_on_close_if_one_fails(recorder: Recorder, members_made: list[FakeMember]) -> None:
    FakeMember.may_leave.set()
    members = start_members(recorder)
    await asyncio.sleep(0)  # start the tasks of the members
    members_made[0].leaving_fails = True
    members_made[1].fails.set()
    await asyncio.wait(members._running.values(), return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(RuntimeError, match="member-2 has a bug"):
        await members.close()
    assert all(member.has_left for member in members_made)
    members = start_members(recorder)
    members_made[3].leaving_fails = True
    with pytest.raises(ValueError, match="member-1 failed to leave"):
        await members.close()
    assert all(member.has_left for member in members_made)


async def test_error_of_churning_member_is_raised(recorder: Recorder, members_made: list[FakeMember]) -> None:
    FakeMember.may_leave.set()
    members = start_members(recorder)
    for member in members_made:
        member.fails.set()
    members.start_churning()
    churning = members._churning
    assert churning is not None
    await until(churning.done, "the end of the churning")
    with pytest.raises(RuntimeError, match="has a bug"):
        members.check()
    with pytest.raises(RuntimeError, match="has a bug"):
        await members.stop_churning()
    with pytest.raises(RuntimeError, match="has a bug"):
        await members.close()
    assert all(member.has_left for member in members_made)


async def test_cancelled_caller_does_not_wait_for_task() -> None:
    cancelled, may_end = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
            await may_end.wait()

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    caller = asyncio.create_task(workload._cancelled(task))
    await cancelled.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not task.done()
    may_end.set()
    await workload._cancelled(task)
    assert task.cancelled()


async def test_member_closes_consumer_if_commit_fails(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    async def commit(offsets: Mapping[int, int]) -> None:
        raise RuntimeError("the fetcher has failed")

    async def close(**options: bool) -> None:
        closed.append(options)

    closed: list[dict[str, bool]] = []
    member = Member(RunClients("localhost:1", "topic", recorder), PART, {}, "member-1")
    consumer = member._consumer
    monkeypatch.setattr(member, "_commit", commit)
    with monkeypatch.context() as patch:
        patch.setattr(consumer, "close", close)
        with pytest.raises(RuntimeError, match="the fetcher has failed"):
            await member.leave()
    assert closed == [{"commit": False}]
    await consumer.close()
