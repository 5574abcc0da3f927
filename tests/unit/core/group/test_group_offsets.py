"""Committed offsets: commit, fetch, deletion and expiry; and deleting, describing and listing groups."""

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
    topics = [OffsetDeleteRequestTopic(topic, [OffsetDeleteRequestPartition(partition) for partition in partitions])]
    number = world.new_request_id()
    world.apply(world.coordinator.delete_offsets(OffsetDeleteRequest(GROUP, topics), number, world.now))
    return number


def delete_group(world: World, group: str = GROUP) -> int:
    number = world.new_request_id()
    world.apply(world.coordinator.delete_group(group, number, world.now))
    return number


def expire(world: World) -> None:
    world.apply(world.coordinator.expire_offsets(world.now))
    assert world.replayed() == world.coordinator.table


def keep_alive(world: World, ids: list[str], generation: int, ms: int) -> None:
    for _ in range(ms // 1_000_000):
        world.now_ms += 1_000_000  # no tick between the heartbeats
        assert all(world.heartbeat(member_id, generation) == 0 for member_id in ids)


# --- committing and reading ---------------------------------------------------------------------------------------


def test_committed_offset_is_visible_when_durable() -> None:
    world = World()
    world.commits = False
    number = world.commit(5, metadata="m")
    assert number not in world.responses
    assert world.fetch() == {}
    world.commit_all()
    assert world.commit_code(number) == 0
    request = OffsetFetchRequestGroup(GROUP, topics=[OffsetFetchRequestTopics("t", (0, 1))])
    number = world.new_request_id()
    world.apply(world.coordinator.fetch(request, number))
    partitions = world.responses[number].topics[0].partitions
    assert [(found.committed_offset, found.committed_leader_epoch, found.metadata) for found in partitions] == [
        (5, 3, "m"),
        (-1, -1, ""),
    ]


def test_failed_offset_write_fails_commit() -> None:
    world = World()
    world.commits = False
    number = world.commit(5)
    world.fail_one(E.NOT_ENOUGH_REPLICAS)
    assert world.commit_code(number) == E.COORDINATOR_NOT_AVAILABLE
    assert world.fetch() == {}


def test_timed_out_commit_may_still_take_effect() -> None:
    world = World()
    world.commits = False
    number = world.commit(5)
    write = world.waiting[0]
    world.apply(world.coordinator.failed(write.id, E.REQUEST_TIMED_OUT, world.now, may_commit=True))
    assert world.commit_code(number) == E.COORDINATOR_NOT_AVAILABLE
    world.commit_all()
    assert world.fetch() == {("t", 0): 5}


def test_commit_requires_current_generation_and_membership() -> None:
    world = World()
    ids, generation = world.stable(2)
    assert world.commit_code(world.commit(1, ids[0], generation)) == 0
    assert world.commit_code(world.commit(2, ids[0], generation - 1)) == E.ILLEGAL_GENERATION
    assert world.commit_code(world.commit(2, ids[0], generation + 1)) == E.ILLEGAL_GENERATION
    assert world.commit_code(world.commit(2, "zombie", generation)) == E.UNKNOWN_MEMBER_ID
    assert world.commit_code(world.commit(2)) == E.UNKNOWN_MEMBER_ID, "a simple commit to a group with members"
    assert world.commit_code(world.commit(2, ids[0])) == E.ILLEGAL_GENERATION
    assert world.fetch() == {("t", 0): 1}


def test_commit_is_accepted_until_member_rejoins() -> None:
    world = World()
    ids, generation = world.stable(1)
    new_id, number = world.join_new()
    assert world.commit_code(world.commit(1, ids[0], generation)) == 0
    world.join(ids[0])
    assert world.join_response(number).generation_id == generation + 1
    assert world.commit_code(world.commit(2, new_id, generation + 1)) == E.REBALANCE_IN_PROGRESS
    assert world.commit_code(world.commit(2, ids[0], generation)) == E.ILLEGAL_GENERATION


def test_commit_extends_session_like_heartbeat() -> None:
    world = World()
    ids, generation = world.stable(1)
    for offset in range(5):
        world.pass_ms(9000)
        assert world.commit_code(world.commit(offset, ids[0], generation)) == 0


def test_member_commit_to_unknown_or_empty_group_is_refused() -> None:
    world = World()
    assert world.commit_code(world.commit(1, "m", 3)) == E.GROUP_ID_NOT_FOUND
    world.stable(1)
    world.pass_ms(10_001)
    assert world.commit_code(world.commit(1, "m", 3)) == E.UNKNOWN_MEMBER_ID
    assert world.commit_code(world.commit(1)) == 0, "an empty group accepts simple commits"


def test_commit_checks_metadata_topic_and_group_sizes() -> None:
    world = World(Settings(offset_metadata_max_bytes=4))
    assert world.commit_code(world.commit(1, metadata="12345")) == E.OFFSET_METADATA_TOO_LARGE
    assert world.commit_code(world.commit(1, metadata="123é")) == E.OFFSET_METADATA_TOO_LARGE
    assert world.commit_code(world.commit(1, metadata="1234")) == 0
    assert world.commit_code(world.commit(1, topic="x" * 10_000)) == E.INVALID_TOPIC_EXCEPTION
    assert world.commit_code(world.commit(1, group="x" * 10_000)) == E.INVALID_GROUP_ID
    number = world.new_request_id()
    world.apply(world.coordinator.commit(OffsetCommitRequest(GROUP), number, world.now))
    assert world.responses[number].topics == []


def test_offsets_survive_coordinator_failover() -> None:
    world = World()
    ids, generation = world.stable(2)
    world.commit(7, ids[0], generation)
    world.fail_over()
    assert world.fetch() == {("t", 0): 7}
    assert world.heartbeat(ids[1], generation) == 0
    assert world.commit_code(world.commit(8, ids[0], generation)) == 0
    world.pass_ms(10_001)
    assert world.coordinator.describe(GROUP).group_state == "Empty", "sessions restarted at the failover and expired"


def test_unloading_completes_pending_requests_with_not_coordinator() -> None:
    world = World()
    world.commits = False
    commit = world.commit(1)
    deletion = delete_group(world)
    member_id, join = world.join_new()
    world.apply(world.coordinator.unloaded(world.now))
    assert world.commit_code(commit) == E.NOT_COORDINATOR
    assert world.responses[deletion].error_code == E.NOT_COORDINATOR
    assert world.join_response(join).error_code == E.NOT_COORDINATOR
    assert world.heartbeat(member_id, 0) == E.NOT_COORDINATOR
    assert world.join_response(world.join()).error_code == E.NOT_COORDINATOR
    assert world.sync_response(world.sync(member_id, 1)).error_code == E.NOT_COORDINATOR
    assert world.leave(member_id) == E.NOT_COORDINATOR
    assert world.responses.keys() == world.request_ids


# --- deleting ----------------------------------------------------------------------------------------------------


def test_only_offsets_of_unsubscribed_topics_can_be_deleted() -> None:
    world = World()
    ids, generation = world.stable(1)
    for topic in ("t", "u"):
        world.commit(5, ids[0], generation, topic=topic)
    assert world.responses[delete_offsets(world, "t")].topics[0].partitions[0].error_code == E.GROUP_SUBSCRIBED_TO_TOPIC
    assert world.responses[delete_offsets(world, "u", (0, 1))].topics[0].partitions[1].error_code == 0
    assert world.fetch() == {("t", 0): 5}
    world.pass_ms(10_001)
    delete_offsets(world, "t")
    assert world.fetch() == {}


def test_deleting_offsets_of_unknown_or_active_connect_group_is_refused() -> None:
    world = World()
    assert world.responses[delete_offsets(world, "t")].error_code == E.GROUP_ID_NOT_FOUND
    world.stable(1, protocol_type="connect")
    assert world.responses[delete_offsets(world, "t")].error_code == E.NON_EMPTY_GROUP


def test_empty_group_is_deleted_with_its_offsets() -> None:
    world = World(QUICK)
    ids, generation = world.stable(1)
    world.commit(5, ids[0], generation)
    assert world.responses[delete_group(world)].error_code == E.NON_EMPTY_GROUP
    world.leave(ids[0])
    assert world.responses[delete_group(world)].error_code == 0
    assert world.replayed().group_ids() == []
    assert world.coordinator.list_groups() == []
    assert world.responses[delete_group(world)].error_code == E.GROUP_ID_NOT_FOUND


def test_group_deletion_covers_uncommitted_offset_writes() -> None:
    world = World()
    world.commit(1)
    world.commits = False
    world.commit(2, partition=1)
    deletion = delete_group(world)
    world.commit_one()
    assert world.waiting
    assert deletion not in world.responses
    joining = world.join()
    late = world.commit(3, partition=2)
    assert not {joining, late} & set(world.responses), "requests wait for the deletion"
    world.commit_all()
    assert world.responses[deletion].error_code == 0
    assert world.join_response(joining).error_code == E.MEMBER_ID_REQUIRED
    assert world.commit_code(late) == 0
    assert world.fetch() == {("t", 2): 3}
    assert world.replayed() == world.coordinator.table


def test_failed_deletion_write_keeps_group() -> None:
    world = World()
    world.commit(1)
    world.commits = False
    deletion = delete_group(world)
    world.fail_one(E.NOT_ENOUGH_REPLICAS)
    assert world.responses[deletion].error_code == E.COORDINATOR_NOT_AVAILABLE
    assert world.fetch() == {("t", 0): 1}


def test_offsets_of_deleted_topics_are_removed() -> None:
    world = World()
    ids, generation = world.stable(1)
    for topic in ("t", "u"):
        for partition in range(3):
            world.commit(5, ids[0], generation, topic=topic, partition=partition)
    world.apply(world.coordinator.topics_deleted(["t", "x"], world.now))
    assert set(world.fetch()) == {("u", 0), ("u", 1), ("u", 2)}


# --- expiry --------------------------------------------------------------------------------------------------------


def test_offsets_of_simple_group_expire_after_commit_time() -> None:
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
def test_offsets_of_empty_group_expire_after_it_became_empty(fails_over: bool) -> None:
    world = World(QUICK)
    ids, generation = world.stable(1)
    world.commit(1, ids[0], generation)
    world.now_ms += 8 * DAY_MS
    assert world.heartbeat(ids[0], generation) == 0
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


def test_offsets_of_subscribed_topics_do_not_expire() -> None:
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


def test_offsets_of_rebalancing_or_non_consumer_groups_do_not_expire() -> None:
    for kind in ("consumer", "connect"):
        world = World(QUICK)
        ids, generation = world.stable(1, protocol_type=kind, session_ms=1_800_000)
        world.commit(1, ids[0], generation, topic="other")
        world.now_ms += 8 * DAY_MS
        world.heartbeat(ids[0], generation)
        if kind == "consumer":
            world.join_new()
        expire(world)
        assert world.fetch() == {("other", 0): 1}


def test_empty_group_without_offsets_is_removed_by_expiry_check() -> None:
    world = World(QUICK)
    ids, _ = world.stable(1)
    world.leave(ids[0])
    expire(world)
    assert world.coordinator.list_groups() == []


# --- describing ----------------------------------------------------------------------------------------------------


def test_groups_are_described_and_listed_by_state_and_type() -> None:
    world = World()
    assert world.coordinator.describe(GROUP).group_state == "Dead"
    world.commit(1, group="simple")
    ids, _ = world.stable(2)
    group = world.coordinator.describe(GROUP)
    assert (group.group_state, group.protocol_type, group.protocol_data) == ("Stable", "consumer", "range")
    members = [
        (member.member_id, member.client_id, member.client_host, member.member_assignment) for member in group.members
    ]
    assert members == [(member_id, "client", "/127.0.0.1", member_id.encode()) for member_id in ids]
    listed = {
        listing.group_id: (listing.protocol_type, listing.group_state, listing.group_type)
        for listing in world.coordinator.list_groups()
    }
    assert listed == {GROUP: ("consumer", "Stable", "classic"), "simple": ("", "Empty", "classic")}
    assert [listing.group_id for listing in world.coordinator.list_groups(["STABLE"])] == [GROUP]
    assert world.coordinator.list_groups((), ["consumer"]) == []
    assert len(world.coordinator.list_groups((), ["Classic"])) == 2
    world.join_new()
    rebalancing = world.coordinator.describe(GROUP)
    assert (rebalancing.protocol_data, rebalancing.members[0].member_metadata) == ("", b"")
