"""Offsets: who may commit, what is read, what is deleted and what expires; and groups as a whole."""

from __future__ import annotations

import pytest

from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.records import GroupRecord, decode_record
from kipmesh.core.group.types import Settings
from kipmesh.messages import (
    OffsetCommitRequest,
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from tests.unit.core.group.group_support import GROUP, World

E = ErrorCode
DAY_MS = 24 * 3600 * 1000
QUICK = Settings(group_initial_rebalance_delay_ms=0)


def delete_offsets(world: World, topic: str, partitions: tuple[int, ...] = (0,)) -> int:
    topics = [OffsetDeleteRequestTopic(topic, [OffsetDeleteRequestPartition(one) for one in partitions])]
    number = world.number()
    world.take(world.coordinator.delete_offsets(OffsetDeleteRequest(GROUP, topics), number, world.now))
    return number


def delete_group(world: World, group: str = GROUP) -> int:
    number = world.number()
    world.take(world.coordinator.delete_group(group, number, world.now))
    return number


def expire(world: World) -> None:
    world.take(world.coordinator.expire_offsets(world.now))
    assert world.replayed() == world.coordinator.table


def keep_alive(world: World, ids: list[str], generation: int, ms: int) -> None:
    for _ in range(ms // 1_000_000):
        world.now_ms += 1_000_000  # the coordinator is not told of the time between
        assert all(world.beat(one, generation) == 0 for one in ids)


# --- committing and reading ---------------------------------------------------------------------------------------


def test_an_offset_is_there_when_it_is_durable() -> None:
    world = World()
    world.commits = False
    number = world.commit(5, metadata="m")
    assert number not in world.answers
    assert world.fetch() == {}
    world.commit_all()
    assert world.commit_code(number) == 0
    wanted = OffsetFetchRequestGroup(GROUP, topics=[OffsetFetchRequestTopics("t", (0, 1))])
    asked = world.number()
    world.take(world.coordinator.fetch(wanted, asked))
    found = world.answers[asked].topics[0].partitions
    assert [(one.committed_offset, one.committed_leader_epoch, one.metadata) for one in found] == [
        (5, 3, "m"),
        (-1, -1, ""),
    ]


def test_a_commit_that_is_not_written_is_an_error() -> None:
    world = World()
    world.commits = False
    number = world.commit(5)
    world.fail_one(E.NOT_ENOUGH_REPLICAS)
    assert world.commit_code(number) == E.COORDINATOR_NOT_AVAILABLE
    assert world.fetch() == {}


def test_a_commit_that_takes_too_long_may_still_come_true() -> None:
    world = World()
    world.commits = False
    number = world.commit(5)
    write = world.waiting[0]
    world.take(world.coordinator.failed(write.id, E.REQUEST_TIMED_OUT, world.now, may_commit=True))
    assert world.commit_code(number) == E.COORDINATOR_NOT_AVAILABLE
    world.commit_all()
    assert world.fetch() == {("t", 0): 5}


def test_members_commit_in_their_generation() -> None:
    world = World()
    ids, generation = world.stable(2)
    assert world.commit_code(world.commit(1, ids[0], generation)) == 0
    assert world.commit_code(world.commit(2, ids[0], generation - 1)) == E.ILLEGAL_GENERATION
    assert world.commit_code(world.commit(2, ids[0], generation + 1)) == E.ILLEGAL_GENERATION
    assert world.commit_code(world.commit(2, "zombie", generation)) == E.UNKNOWN_MEMBER_ID
    assert world.commit_code(world.commit(2)) == E.UNKNOWN_MEMBER_ID, "a simple consumer, but the group has members"
    assert world.commit_code(world.commit(2, ids[0])) == E.ILLEGAL_GENERATION
    assert world.fetch() == {("t", 0): 1}


def test_members_commit_before_they_join_again_but_not_between_generations() -> None:
    world = World()
    ids, generation = world.stable(1)
    new_id, number = world.join_new()
    assert world.commit_code(world.commit(1, ids[0], generation)) == 0
    world.join(ids[0])
    assert world.joined(number).generation_id == generation + 1
    assert world.commit_code(world.commit(2, new_id, generation + 1)) == E.REBALANCE_IN_PROGRESS
    assert world.commit_code(world.commit(2, ids[0], generation)) == E.ILLEGAL_GENERATION


def test_a_commit_is_as_good_as_a_heartbeat() -> None:
    world = World()
    ids, generation = world.stable(1)
    for offset in range(5):
        world.pass_ms(9000)
        assert world.commit_code(world.commit(offset, ids[0], generation)) == 0


def test_who_is_a_member_of_a_group_that_there_is_not() -> None:
    world = World()
    assert world.commit_code(world.commit(1, "m", 3)) == E.GROUP_ID_NOT_FOUND
    world.stable(1)
    world.pass_ms(10_001)
    assert world.commit_code(world.commit(1, "m", 3)) == E.UNKNOWN_MEMBER_ID
    assert world.commit_code(world.commit(1)) == 0, "an empty group takes simple commits"


def test_metadata_has_a_limit_and_others_of_the_request_are_taken() -> None:
    world = World(Settings(offset_metadata_max_bytes=4))
    assert world.commit_code(world.commit(1, metadata="12345")) == E.OFFSET_METADATA_TOO_LARGE
    assert world.commit_code(world.commit(1, metadata="123é")) == E.OFFSET_METADATA_TOO_LARGE
    assert world.commit_code(world.commit(1, metadata="1234")) == 0
    assert world.commit_code(world.commit(1, topic="x" * 10_000)) == E.INVALID_TOPIC_EXCEPTION
    assert world.commit_code(world.commit(1, group="x" * 10_000)) == E.INVALID_GROUP_ID
    number = world.number()
    world.take(world.coordinator.commit(OffsetCommitRequest(GROUP), number, world.now))
    assert world.answers[number].topics == []


def test_offsets_survive_the_coordinator() -> None:
    world = World()
    ids, generation = world.stable(2)
    world.commit(7, ids[0], generation)
    world.fail_over()
    assert world.fetch() == {("t", 0): 7}
    assert world.beat(ids[1], generation) == 0
    assert world.commit_code(world.commit(8, ids[0], generation)) == 0
    world.pass_ms(10_001)
    assert world.coordinator.describe(GROUP).group_state == "Empty", "sessions began anew, and are over"


def test_who_waits_when_the_coordinator_ends_is_told() -> None:
    world = World()
    world.commits = False
    commit = world.commit(1)
    deletion = delete_group(world)
    member_id, join = world.join_new()
    world.take(world.coordinator.unloaded(world.now))
    assert world.commit_code(commit) == E.NOT_COORDINATOR
    assert world.answers[deletion].error_code == E.NOT_COORDINATOR
    assert world.joined(join).error_code == E.NOT_COORDINATOR
    assert world.beat(member_id, 0) == E.NOT_COORDINATOR
    assert world.joined(world.join()).error_code == E.NOT_COORDINATOR
    assert world.synced(world.sync(member_id, 1)).error_code == E.NOT_COORDINATOR
    assert world.leave(member_id) == E.NOT_COORDINATOR
    assert world.answers.keys() == world.asked


# --- deleting ----------------------------------------------------------------------------------------------------


def test_offsets_of_topics_that_nobody_reads_are_deleted() -> None:
    world = World()
    ids, generation = world.stable(1)
    for topic in ("t", "u"):
        world.commit(5, ids[0], generation, topic=topic)
    assert world.answers[delete_offsets(world, "t")].topics[0].partitions[0].error_code == E.GROUP_SUBSCRIBED_TO_TOPIC
    assert world.answers[delete_offsets(world, "u", (0, 1))].topics[0].partitions[1].error_code == 0
    assert world.fetch() == {("t", 0): 5}
    world.pass_ms(10_001)
    delete_offsets(world, "t")
    assert world.fetch() == {}


def test_offsets_of_other_kinds_of_groups_and_of_none() -> None:
    world = World()
    assert world.answers[delete_offsets(world, "t")].error_code == E.GROUP_ID_NOT_FOUND
    world.stable(1, protocol_type="connect")
    assert world.answers[delete_offsets(world, "t")].error_code == E.NON_EMPTY_GROUP


def test_empty_groups_are_deleted_with_their_offsets() -> None:
    world = World(QUICK)
    ids, generation = world.stable(1)
    world.commit(5, ids[0], generation)
    assert world.answers[delete_group(world)].error_code == E.NON_EMPTY_GROUP
    world.leave(ids[0])
    assert world.answers[delete_group(world)].error_code == 0
    assert world.replayed().group_ids() == []
    assert world.coordinator.list_groups() == []
    assert world.answers[delete_group(world)].error_code == E.GROUP_ID_NOT_FOUND


def test_a_group_is_deleted_with_the_offsets_that_are_on_their_way() -> None:
    world = World()
    world.commit(1)
    world.commits = False
    world.commit(2, partition=1)
    deletion = delete_group(world)
    world.commit_one()
    assert world.waiting
    assert deletion not in world.answers
    joining = world.join()
    late = world.commit(3, partition=2)
    assert not {joining, late} & set(world.answers), "they wait for what becomes of the group"
    world.commit_all()
    assert world.answers[deletion].error_code == 0
    assert world.joined(joining).error_code == E.MEMBER_ID_REQUIRED
    assert world.commit_code(late) == 0
    assert world.fetch() == {("t", 2): 3}
    assert world.replayed() == world.coordinator.table


def test_a_deletion_that_is_not_written_leaves_the_group() -> None:
    world = World()
    world.commit(1)
    world.commits = False
    deletion = delete_group(world)
    world.fail_one(E.NOT_ENOUGH_REPLICAS)
    assert world.answers[deletion].error_code == E.COORDINATOR_NOT_AVAILABLE
    assert world.fetch() == {("t", 0): 1}


def test_the_offsets_of_deleted_topics_go() -> None:
    world = World()
    ids, generation = world.stable(1)
    for topic in ("t", "u"):
        for partition in range(3):
            world.commit(5, ids[0], generation, topic=topic, partition=partition)
    world.take(world.coordinator.topics_deleted(["t", "x"], world.now))
    assert set(world.fetch()) == {("u", 0), ("u", 1), ("u", 2)}


# --- expiry --------------------------------------------------------------------------------------------------------


def test_offsets_of_a_simple_group_expire_after_their_commit() -> None:
    world = World()
    world.commit(1)
    world.now_ms += 3 * DAY_MS
    world.commit(2, partition=1)
    world.now_ms += 4 * DAY_MS - 1
    expire(world)
    assert len(world.fetch()) == 2
    world.now_ms += 1
    expire(world)
    assert world.fetch() == {("t", 1): 2}
    world.now_ms += 3 * DAY_MS
    expire(world)
    assert world.coordinator.list_groups() == []
    last = decode_record(*world.log[-1])
    assert isinstance(last, GroupRecord)
    assert last.value is None


@pytest.mark.parametrize("fails_over", [False, True])
def test_offsets_of_an_empty_group_expire_after_it_became_empty(fails_over: bool) -> None:
    world = World(QUICK)
    ids, generation = world.stable(1)
    world.commit(1, ids[0], generation)
    world.now_ms += 8 * DAY_MS
    assert world.beat(ids[0], generation) == 0
    world.leave(ids[0])
    if fails_over:
        world.fail_over()
    world.now_ms += 7 * DAY_MS - 1
    expire(world)
    assert world.fetch() == {("t", 0): 1}
    world.now_ms += 1
    expire(world)
    assert world.fetch() == {}
    assert world.coordinator.list_groups() == []


def test_offsets_of_topics_that_a_stable_group_reads_do_not_expire() -> None:
    world = World(QUICK)
    ids, generation = world.stable(1, session_ms=1_800_000)
    for topic in ("t", "other"):
        world.commit(1, ids[0], generation, topic=topic)
    keep_alive(world, ids, generation, 7 * DAY_MS)
    expire(world)
    assert len(world.fetch()) == 2
    world.now_ms += 1_000_000
    expire(world)
    assert world.fetch() == {("t", 0): 1}


def test_nothing_expires_while_a_group_rebalances_or_speaks_another_protocol() -> None:
    for kind in ("consumer", "connect"):
        world = World(QUICK)
        ids, generation = world.stable(1, protocol_type=kind, session_ms=1_800_000)
        world.commit(1, ids[0], generation, topic="other")
        world.now_ms += 8 * DAY_MS
        world.beat(ids[0], generation)
        if kind == "consumer":
            world.join_new()
        expire(world)
        assert world.fetch() == {("other", 0): 1}


def test_an_empty_group_without_offsets_goes_at_the_next_look() -> None:
    world = World(QUICK)
    ids, _ = world.stable(1)
    world.leave(ids[0])
    expire(world)
    assert world.coordinator.list_groups() == []


# --- describing ----------------------------------------------------------------------------------------------------


def test_describe_and_list() -> None:
    world = World()
    assert world.coordinator.describe(GROUP).group_state == "Dead"
    world.commit(1, group="simple")
    ids, _ = world.stable(2)
    group = world.coordinator.describe(GROUP)
    assert (group.group_state, group.protocol_type, group.protocol_data) == ("Stable", "consumer", "range")
    assert [(one.member_id, one.client_id, one.client_host, one.member_assignment) for one in group.members] == [
        (one, "client", "/127.0.0.1", one.encode()) for one in ids
    ]
    listed = {
        one.group_id: (one.protocol_type, one.group_state, one.group_type) for one in world.coordinator.list_groups()
    }
    assert listed == {GROUP: ("consumer", "Stable", "classic"), "simple": ("", "Empty", "classic")}
    assert [one.group_id for one in world.coordinator.list_groups(["STABLE"])] == [GROUP]
    assert world.coordinator.list_groups((), ["consumer"]) == []
    assert len(world.coordinator.list_groups((), ["Classic"])) == 2
    world.join_new()
    rebalancing = world.coordinator.describe(GROUP)
    assert (rebalancing.protocol_data, rebalancing.members[0].member_metadata) == ("", b"")
