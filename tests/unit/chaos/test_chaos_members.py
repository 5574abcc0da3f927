"""Members of a workload's group that leave, die and fail: every consumer is closed, and no bug is swallowed."""

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
    """Ends as it is told; knows whether it has."""

    made: list[FakeMember]
    may_go: asyncio.Event

    def __init__(self, *about: Any) -> None:
        self.name = about[3]
        self.fails = asyncio.Event()
        self.leaving_fails = self.is_going = self.is_gone = False
        self.made.append(self)

    async def run(self) -> None:
        await self.fails.wait()
        raise RuntimeError(f"{self.name} has a bug")

    async def leave(self) -> None:
        self.is_going = True
        await self.may_go.wait()
        self.is_gone = True
        if self.leaving_fails:
            raise ValueError(f"{self.name} does not leave well")

    die = leave


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    it = Recorder(tmp_path / "history.jsonl")
    yield it
    it.close()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeMember]:
    monkeypatch.setattr(workload, "Member", FakeMember)
    FakeMember.made, FakeMember.may_go = [], asyncio.Event()
    return FakeMember.made


def started(recorder: Recorder) -> Members:
    members = Members(RunClients("localhost:1", "topic", recorder), 1, PART, 1)
    members.start()
    return members


async def test_one_that_is_going_goes_when_the_churn_ends(recorder: Recorder, made: list[FakeMember]) -> None:
    members = started(recorder)
    members.start_churning()
    await until(lambda: any(member.is_going for member in made), "a member that goes")
    await members.stop_churning()
    assert not any(member.is_gone for member in made)
    FakeMember.may_go.set()
    await until(lambda: len(made) == 4, "the one that comes for it")
    assert [member.is_gone for member in made].count(True) == 1
    await members.close()
    assert all(member.is_gone for member in made)


async def test_the_end_waits_for_one_that_is_going(recorder: Recorder, made: list[FakeMember]) -> None:
    members = started(recorder)
    members.start_churning()
    await until(lambda: any(member.is_going for member in made), "a member that goes")
    closing = asyncio.create_task(members.close())
    await until(lambda: all(member.is_going for member in made), "all others")
    assert not closing.done()
    FakeMember.may_go.set()
    await closing
    assert [member.is_gone for member in made] == [True] * 3  # nobody has come
    await members.close()


async def test_one_that_does_not_go_is_not_waited_for_forever(
    recorder: Recorder, made: list[FakeMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "LEAVE_TIMEOUT_S", 0.01)
    members = Members(RunClients("localhost:1", "topic", recorder), 1, GroupPart(members=1, churn_s=0.001), 1)
    members.start()
    members.start_churning()
    await until(lambda: made[0].is_going, "a member that goes")
    with pytest.raises(TimeoutError):
        await members.close()


async def test_all_leave_though_one_fails(recorder: Recorder, made: list[FakeMember]) -> None:
    FakeMember.may_go.set()
    members = started(recorder)
    await asyncio.sleep(0)  # they run
    made[0].leaving_fails = True
    made[1].fails.set()
    await asyncio.wait(members._running.values(), return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(RuntimeError, match="member-2 has a bug"):
        await members.close()
    assert all(member.is_gone for member in made)
    members = started(recorder)
    made[3].leaving_fails = True
    with pytest.raises(ValueError, match="member-1 does not leave well"):
        await members.close()
    assert all(member.is_gone for member in made)


async def test_a_bug_of_one_that_is_to_go_is_told(recorder: Recorder, made: list[FakeMember]) -> None:
    FakeMember.may_go.set()
    members = started(recorder)
    for member in made:
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
    assert all(member.is_gone for member in made)


async def test_the_caller_of_cancelled_may_be_cancelled() -> None:
    told, may_end = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            told.set()
            await may_end.wait()

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    caller = asyncio.create_task(workload._cancelled(task))
    await told.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not task.done()
    may_end.set()
    await workload._cancelled(task)
    assert task.cancelled()


async def test_a_consumer_is_closed_though_the_commit_fails(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
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
