"""Joining, syncing, heartbeats and leaving, as Kafka's coordinator answers them."""

from __future__ import annotations

import pytest

from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.coordinator import partition_for
from kipmesh.core.group.types import Client, Settings
from kipmesh.messages import JoinGroupRequestProtocol, SyncGroupRequest
from tests.unit.core.group.group_support import GROUP, PROTOCOLS, World

E = ErrorCode


def protocols(*names: str) -> tuple[JoinGroupRequestProtocol, ...]:
    return tuple(JoinGroupRequestProtocol(name, f"m-{name}".encode()) for name in names)


def state(world: World) -> str:
    return world.coordinator.describe(GROUP).group_state


# --- joining -----------------------------------------------------------------------------------------------------


def test_a_new_member_is_told_its_id_first() -> None:
    world = World()
    answer = world.joined(world.join())
    assert answer.error_code == E.MEMBER_ID_REQUIRED
    assert answer.member_id.startswith("client-")
    number = world.join(answer.member_id)
    assert number not in world.answers
    world.pass_ms(3001)
    assert (world.joined(number).error_code, world.joined(number).generation_id) == (0, 1)
    assert world.joined(number).leader == answer.member_id


def test_an_id_that_nobody_comes_back_with_is_forgotten_before_its_long_session_ends() -> None:
    world = World()
    first = world.joined(world.join(session_ms=1_800_000))
    second = world.joined(world.join(session_ms=6_000, group="short"))
    world.pass_ms(59_000)
    late = world.joined(world.join(second.member_id, group="short"))
    assert late.error_code == E.UNKNOWN_MEMBER_ID
    world.pass_ms(2_000)
    assert world.joined(world.join(first.member_id)).error_code == E.UNKNOWN_MEMBER_ID


def test_an_older_client_joins_at_once() -> None:
    world = World()
    number = world.join(client=Client("old", "/h", requires_member_id=False))
    world.pass_ms(3001)
    assert world.joined(number).error_code == 0


def test_the_leader_alone_is_told_of_the_members() -> None:
    world = World()
    joins = [world.join_new() for _ in range(3)]
    world.pass_ms(9001)
    answers = [world.joined(number) for _, number in joins]
    assert {answer.leader for answer in answers} == {joins[0][0]}
    assert [len(answer.members) for answer in answers] == [3, 0, 0]
    assert [member.member_id for member in answers[0].members] == [member_id for member_id, _ in joins]
    assert all(member.metadata == PROTOCOLS[0].metadata for member in answers[0].members)


def test_who_hung_up_while_it_waited_keeps_its_place_and_does_not_lead() -> None:
    world = World()
    (first, gone), (second, number), (third, _) = (world.join_new() for _ in range(3))
    world.coordinator.join_disconnected(GROUP, gone)
    world.coordinator.join_disconnected("nowhere", gone)
    world.pass_ms(9001)
    answer = world.joined(number)
    assert answer.leader == second
    assert [member.member_id for member in answer.members] == [first, second, third]
    again = world.join(second)  # the leader asks for another rebalance, and the others join again: who is back may lead
    back, _ = world.join(first), world.join(third)
    assert world.joined(again).leader == second
    world.coordinator.join_disconnected(GROUP, back)  # answered before: nothing to hang up


def test_if_all_hung_up_one_of_them_leads() -> None:
    world = World()
    member, number = world.join_new()
    world.coordinator.join_disconnected(GROUP, number)
    world.pass_ms(9001)
    assert world.joined(number).leader == member


def test_the_first_rebalance_waits_longer_while_members_come_up_to_the_rebalance_timeout() -> None:
    world = World()
    first = world.join_new(rebalance_ms=10_000)[1]
    for _ in range(2):
        world.pass_ms(2900)
        world.join_new(rebalance_ms=10_000)
    world.pass_ms(3199)
    assert first not in world.answers
    world.pass_ms(1)
    assert world.joined(first).error_code == 0
    late = World()
    number = late.join_new(rebalance_ms=4000)[1]
    for _ in range(3):
        late.pass_ms(1100)
        late.join_new(rebalance_ms=4000)
    late.pass_ms(701)
    assert late.joined(number).generation_id == 1


@pytest.mark.parametrize("session_ms", [5999, 1_800_001])
def test_session_timeouts_have_bounds(session_ms: int) -> None:
    world = World()
    assert world.joined(world.join(session_ms=session_ms)).error_code == E.INVALID_SESSION_TIMEOUT


def test_bad_joins() -> None:
    world = World()
    assert world.joined(world.join(group="")).error_code == E.INVALID_GROUP_ID
    assert world.joined(world.join(group="x" * 10_000)).error_code == E.INVALID_GROUP_ID
    assert world.joined(world.join(client=Client("x" * 10_000, "/h"))).error_code == E.INVALID_REQUEST
    assert world.joined(world.join("nobody")).error_code == E.UNKNOWN_MEMBER_ID
    assert world.joined(world.join(protocols=())).error_code == E.INCONSISTENT_GROUP_PROTOCOL
    assert world.joined(world.join(protocol_type="")).error_code == E.INCONSISTENT_GROUP_PROTOCOL
    assert not world.coordinator.list_groups(), "nothing is left of them"
    world.stable()
    assert world.joined(world.join("nobody")).error_code == E.UNKNOWN_MEMBER_ID
    assert world.joined(world.join(protocol_type="connect")).error_code == E.INCONSISTENT_GROUP_PROTOCOL
    assert world.joined(world.join(protocols=protocols("other"))).error_code == E.INCONSISTENT_GROUP_PROTOCOL


def test_a_full_group_takes_nobody() -> None:
    world = World(Settings(group_max_size=2))
    world.stable(2)
    assert world.joined(world.join()).error_code == E.GROUP_MAX_SIZE_REACHED


def test_a_full_group_that_rebalances_sends_the_last_away() -> None:
    world = World(Settings(group_max_size=3))
    ids, _ = world.stable(3)
    world.settings = Settings(group_max_size=2)
    world.fail_over()
    assert state(world) == "PreparingRebalance"
    joins = [world.join(member_id) for member_id in ids]
    assert world.joined(joins[2]).error_code == E.GROUP_MAX_SIZE_REACHED
    world.pass_ms(60_000)
    assert [world.joined(one).error_code for one in joins[:2]] == [0, 0]


def test_the_protocol_is_the_one_that_most_like_best_of_those_that_all_know() -> None:
    world = World()
    joins = [
        world.join_new(protocols=protocols(*names))
        for names in (("a", "b", "c"), ("b", "c", "a", "x"), ("x", "c", "b"), ("c", "b"))
    ]
    world.pass_ms(12_001)
    assert {world.joined(number).protocol_name for _, number in joins} == {"b"}


def test_a_member_that_never_comes_back_with_its_id_is_forgotten() -> None:
    world = World()
    world.join()
    assert [group.group_state for group in world.coordinator.list_groups()] == ["Empty"]
    world.pass_ms(10_000)
    assert not world.coordinator.list_groups()


def test_a_rebalance_waits_for_a_member_that_is_announced() -> None:
    world = World()
    ids, _ = world.stable(1)
    announced = world.joined(world.join()).member_id
    assert state(world) == "Stable"
    again = world.join(ids[0])
    assert again not in world.answers
    number = world.join(announced)
    assert (world.joined(again).generation_id, world.joined(number).generation_id) == (2, 2)


def test_who_joins_twice_is_answered_twice() -> None:
    world = World()
    member_id, first = world.join_new()
    second = world.join(member_id)
    assert world.joined(first).error_code == E.REBALANCE_IN_PROGRESS
    world.pass_ms(3001)
    assert world.joined(second).error_code == 0


def test_a_follower_that_joins_again_unchanged_gets_the_present_generation() -> None:
    world = World()
    ids, generation = world.stable(2)
    answer = world.joined(world.join(ids[1]))
    assert (answer.error_code, answer.generation_id, answer.members) == (0, generation, ())
    assert world.synced(world.sync(ids[1], generation)).assignment == ids[1].encode()


def test_the_leader_rebalances_by_joining_and_so_does_a_member_that_changed() -> None:
    world = World()
    ids, generation = world.stable(2)
    number = world.join(ids[0])
    assert number not in world.answers
    assert world.beat(ids[1], generation) == E.REBALANCE_IN_PROGRESS
    other = world.join(ids[1], protocols=(*PROTOCOLS, *protocols("x")))
    assert {world.joined(one).generation_id for one in (number, other)} == {generation + 1}


def test_who_does_not_join_a_rebalance_in_time_is_out() -> None:
    world = World()
    ids, generation = world.stable(3, session_ms=100_000)
    joins = [world.join(member_id) for member_id in ids[:2]]
    world.pass_ms(59_999)
    assert not set(joins) & set(world.answers)
    world.pass_ms(1)
    assert [world.joined(one).generation_id for one in joins] == [generation + 1] * 2
    assert world.beat(ids[2], generation) == E.UNKNOWN_MEMBER_ID


def test_a_leader_that_does_not_join_leads_no_more() -> None:
    world = World()
    ids, _ = world.stable(2, session_ms=100_000)
    number = world.join(ids[1], protocols=(*PROTOCOLS, *protocols("x")))
    world.pass_ms(60_000)
    assert world.joined(number).leader == ids[1]


# --- syncing -----------------------------------------------------------------------------------------------------


def test_assignments_come_when_they_are_durable() -> None:
    world = World()
    joins = [world.join_new() for _ in range(2)]
    world.pass_ms(6001)
    ids = [one for one, _ in joins]
    follower = world.sync(ids[1], 1)
    world.commits = False
    leader = world.sync(ids[0], 1, {ids[0]: b"A", ids[1]: b"B"})
    assert not {leader, follower} & set(world.answers)
    assert state(world) == "CompletingRebalance"
    world.commit_all()
    assert (world.synced(leader).assignment, world.synced(follower).assignment) == (b"A", b"B")
    assert state(world) == "Stable"


def test_a_leader_that_syncs_twice_does_not_assign_twice() -> None:
    world = World()
    member_id = world.join_new()[0]
    world.pass_ms(3001)
    world.commits = False
    first = world.sync(member_id, 1, {member_id: b"A"})
    second = world.sync(member_id, 1, {member_id: b"B"})
    assert world.synced(first).error_code == E.REBALANCE_IN_PROGRESS
    world.commit_all()
    assert world.synced(second).assignment == b"A"
    assert world.replayed().groups[GROUP].members[0].assignment == b"A"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (E.NOT_ENOUGH_REPLICAS, E.COORDINATOR_NOT_AVAILABLE),
        (E.REQUEST_TIMED_OUT, E.COORDINATOR_NOT_AVAILABLE),
        (E.NOT_LEADER_OR_FOLLOWER, E.NOT_COORDINATOR),
        (E.RECORD_LIST_TOO_LARGE, E.UNKNOWN_SERVER_ERROR),
    ],
)
def test_an_assignment_that_is_not_written_is_none(code: ErrorCode, told: ErrorCode) -> None:
    world = World()
    joins = [world.join_new() for _ in range(2)]
    world.pass_ms(6001)
    ids = [one for one, _ in joins]
    world.commits = False
    syncs = [world.sync(ids[1], 1), world.sync(ids[0], 1, {ids[0]: b"A"})]
    world.fail_one(code)
    assert [world.synced(one).error_code for one in syncs] == [told, told]
    assert state(world) == "PreparingRebalance"
    world.commits = True
    again = [world.join(member_id) for member_id in ids]
    assert {world.joined(one).generation_id for one in again} == {2}


def test_a_sync_of_another_generation_or_protocol() -> None:
    world = World()
    ids, generation = world.stable(1)
    assert world.synced(world.sync(ids[0], generation - 1)).error_code == E.ILLEGAL_GENERATION
    assert world.synced(world.sync("nobody", generation)).error_code == E.UNKNOWN_MEMBER_ID
    for kind, name in (("connect", None), ("consumer", "roundrobin")):
        number = world.number()
        request = SyncGroupRequest(GROUP, generation, ids[0], None, kind, name)
        world.take(world.coordinator.sync(request, number, world.now))
        assert world.synced(number).error_code == E.INCONSISTENT_GROUP_PROTOCOL


def test_a_rebalance_sends_those_who_wait_for_an_assignment_to_join_again() -> None:
    world = World()
    joins = [world.join_new() for _ in range(2)]
    world.pass_ms(6001)
    waiting = world.sync(joins[1][0], 1)
    world.join_new()
    assert world.synced(waiting).error_code == E.REBALANCE_IN_PROGRESS
    assert world.synced(world.sync(joins[1][0], 1)).error_code == E.REBALANCE_IN_PROGRESS


def test_an_assignment_that_comes_after_the_next_rebalance_began_is_history() -> None:
    world = World()
    ids = [world.join_new()[0]]
    world.pass_ms(3001)
    world.commits = False
    old = world.sync(ids[0], 1, {ids[0]: b"old"})
    new_id, _ = world.join_new()
    assert world.synced(old).error_code == E.REBALANCE_IN_PROGRESS
    world.join(ids[0])
    world.commit_all()
    assert state(world) == "CompletingRebalance"
    numbers = [world.sync(ids[0], 2, {ids[0]: b"1", new_id: b"2"}), world.sync(new_id, 2)]
    world.commit_all()
    assert [world.synced(one).assignment for one in numbers] == [b"1", b"2"]


def test_who_does_not_sync_in_time_is_out() -> None:
    world = World()
    joins = [world.join_new(session_ms=200_000) for _ in range(2)]
    world.pass_ms(6001)
    number = world.sync(joins[0][0], 1, {joins[0][0]: b"A"})
    assert world.synced(number).error_code == 0
    world.pass_ms(60_000)
    assert world.beat(joins[0][0], 1) == E.REBALANCE_IN_PROGRESS
    assert world.beat(joins[1][0], 1) == E.UNKNOWN_MEMBER_ID


# --- heartbeats and leaving ---------------------------------------------------------------------------------------


def test_heartbeats() -> None:
    world = World()
    ids, generation = world.stable(2)
    assert world.beat(ids[0], generation) == 0
    assert world.beat(ids[0], generation - 1) == E.ILLEGAL_GENERATION
    assert world.beat(ids[0], generation + 1) == E.ILLEGAL_GENERATION
    assert world.beat("nobody", generation) == E.UNKNOWN_MEMBER_ID
    world.pass_ms(9000)
    assert world.beat(ids[0], generation) == 0
    world.pass_ms(1000)
    assert world.beat(ids[0], generation) == E.REBALANCE_IN_PROGRESS
    assert world.beat(ids[1], generation) == E.UNKNOWN_MEMBER_ID


def test_a_new_member_waits_for_five_minutes_at_most() -> None:
    world = World()
    ids, _ = world.stable(1, rebalance_ms=600_000, session_ms=1_000_000)
    _, number = world.join_new(session_ms=6000)
    world.pass_ms(299_999)
    assert number not in world.answers
    world.pass_ms(1)
    assert world.joined(number).error_code == E.UNKNOWN_MEMBER_ID
    assert world.beat(ids[0], 1) == E.REBALANCE_IN_PROGRESS


def test_leaving() -> None:
    world = World()
    ids, generation = world.stable(2)
    assert world.leave("nobody") == E.UNKNOWN_MEMBER_ID
    assert world.leave(ids[0]) == 0
    assert world.beat(ids[1], generation) == E.REBALANCE_IN_PROGRESS
    number = world.join(ids[1])
    assert (world.joined(number).leader, world.joined(number).generation_id) == (ids[1], generation + 1)
    assert world.leave(ids[1]) == 0
    assert state(world) == "Empty"
    value = world.replayed().groups[GROUP]
    assert (value.generation, value.protocol, value.leader, value.members) == (generation + 2, None, None, ())
    assert world.leave(ids[1]) == E.UNKNOWN_MEMBER_ID
    assert world.beat(ids[1], generation) == E.UNKNOWN_MEMBER_ID


def test_a_member_that_leaves_while_it_joins_is_answered() -> None:
    world = World()
    member_id, number = world.join_new()
    assert world.leave(member_id) == 0
    assert world.joined(number).error_code == E.UNKNOWN_MEMBER_ID
    world.pass_ms(3001)
    assert state(world) == "Empty"


def test_an_announced_member_can_leave() -> None:
    world = World()
    assert world.leave(world.joined(world.join()).member_id) == 0
    assert not world.coordinator.list_groups()


def test_leaving_a_group_that_there_is_not() -> None:
    assert World().leave("m") == E.UNKNOWN_MEMBER_ID


# --- the partition of a group -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group_id", "java_hash"),
    [("", 0), ("a", 97), ("group", 98629247), ("my-consumer-group", None), ("polygenelubricants", -(2**31))],
)
def test_groups_are_where_javas_hash_puts_them(group_id: str, java_hash: int | None) -> None:
    if java_hash is None:
        java_hash = 0
        for char in group_id:
            java_hash = (31 * java_hash + ord(char) + 2**31) % 2**32 - 2**31
    expected = 0 if java_hash == -(2**31) else abs(java_hash) % 50
    assert partition_for(group_id, 50) == expected
