"""JoinGroup, SyncGroup, Heartbeat and LeaveGroup behave as in Kafka's coordinator."""

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


def test_new_member_receives_its_id_before_joining() -> None:
    world = World()
    response = world.join_response(world.join())
    assert response.error_code == E.MEMBER_ID_REQUIRED
    assert response.member_id.startswith("client-")
    number = world.join(response.member_id)
    assert number not in world.responses
    world.pass_ms(3001)
    assert (world.join_response(number).error_code, world.join_response(number).generation_id) == (0, 1)
    assert world.join_response(number).leader == response.member_id


def test_unused_member_id_expires_before_long_session() -> None:
    world = World()
    first = world.join_response(world.join(session_ms=1_800_000))
    second = world.join_response(world.join(session_ms=6_000, group="short"))
    world.pass_ms(59_000)
    late = world.join_response(world.join(second.member_id, group="short"))
    assert late.error_code == E.UNKNOWN_MEMBER_ID
    world.pass_ms(2_000)
    assert world.join_response(world.join(first.member_id)).error_code == E.UNKNOWN_MEMBER_ID


def test_older_client_joins_without_member_id() -> None:
    world = World()
    number = world.join(client=Client("old", "/h", requires_member_id=False))
    world.pass_ms(3001)
    assert world.join_response(number).error_code == 0


def test_only_group_leader_receives_member_list() -> None:
    world = World()
    joins = [world.join_new() for _ in range(3)]
    world.pass_ms(9001)
    responses = [world.join_response(number) for _, number in joins]
    assert {response.leader for response in responses} == {joins[0][0]}
    assert [len(response.members) for response in responses] == [3, 0, 0]
    assert [member.member_id for member in responses[0].members] == [member_id for member_id, _ in joins]
    assert all(member.metadata == PROTOCOLS[0].metadata for member in responses[0].members)


def test_disconnected_member_keeps_membership_but_does_not_lead() -> None:
    world = World()
    (first, gone), (second, number), (third, _) = (world.join_new() for _ in range(3))
    world.coordinator.join_disconnected(GROUP, gone)
    world.coordinator.join_disconnected("nowhere", gone)
    world.pass_ms(9001)
    response = world.join_response(number)
    assert response.leader == second
    assert [member.member_id for member in response.members] == [first, second, third]
    again = world.join(second)  # The leader starts a rebalance, the others rejoin, and a reconnected member may lead.
    back, _ = world.join(first), world.join(third)
    assert world.join_response(again).leader == second
    world.coordinator.join_disconnected(GROUP, back)  # The join has completed.


def test_disconnected_member_leads_if_all_are_disconnected() -> None:
    world = World()
    member, number = world.join_new()
    world.coordinator.join_disconnected(GROUP, number)
    world.pass_ms(9001)
    assert world.join_response(number).leader == member


def test_initial_rebalance_delay_extends_up_to_rebalance_timeout() -> None:
    world = World()
    first = world.join_new(rebalance_ms=10_000)[1]
    for _ in range(2):
        world.pass_ms(2900)
        world.join_new(rebalance_ms=10_000)
    world.pass_ms(3199)
    assert first not in world.responses
    world.pass_ms(1)
    assert world.join_response(first).error_code == 0
    late = World()
    number = late.join_new(rebalance_ms=4000)[1]
    for _ in range(3):
        late.pass_ms(1100)
        late.join_new(rebalance_ms=4000)
    late.pass_ms(701)
    assert late.join_response(number).generation_id == 1


@pytest.mark.parametrize("session_ms", [5999, 1_800_001])
def test_session_timeout_out_of_bounds_is_refused(session_ms: int) -> None:
    world = World()
    assert world.join_response(world.join(session_ms=session_ms)).error_code == E.INVALID_SESSION_TIMEOUT


def test_invalid_joins_are_refused_and_create_no_group() -> None:
    world = World()
    assert world.join_response(world.join(group="")).error_code == E.INVALID_GROUP_ID
    assert world.join_response(world.join(group="x" * 10_000)).error_code == E.INVALID_GROUP_ID
    assert world.join_response(world.join(client=Client("x" * 10_000, "/h"))).error_code == E.INVALID_REQUEST
    assert world.join_response(world.join("nobody")).error_code == E.UNKNOWN_MEMBER_ID
    assert world.join_response(world.join(protocols=())).error_code == E.INCONSISTENT_GROUP_PROTOCOL
    assert world.join_response(world.join(protocol_type="")).error_code == E.INCONSISTENT_GROUP_PROTOCOL
    assert not world.coordinator.list_groups(), "refused joins leave no group"
    world.stable()
    assert world.join_response(world.join("nobody")).error_code == E.UNKNOWN_MEMBER_ID
    assert world.join_response(world.join(protocol_type="connect")).error_code == E.INCONSISTENT_GROUP_PROTOCOL
    assert world.join_response(world.join(protocols=protocols("other"))).error_code == E.INCONSISTENT_GROUP_PROTOCOL


def test_full_group_refuses_new_member() -> None:
    world = World(Settings(group_max_size=2))
    world.stable(2)
    assert world.join_response(world.join()).error_code == E.GROUP_MAX_SIZE_REACHED


def test_shrunk_group_size_limit_refuses_last_member_on_rebalance() -> None:
    world = World(Settings(group_max_size=3))
    ids, _ = world.stable(3)
    world.settings = Settings(group_max_size=2)
    world.fail_over()
    assert state(world) == "PreparingRebalance"
    joins = [world.join(member_id) for member_id in ids]
    assert world.join_response(joins[2]).error_code == E.GROUP_MAX_SIZE_REACHED
    world.pass_ms(60_000)
    assert [world.join_response(join).error_code for join in joins[:2]] == [0, 0]


def test_protocol_with_most_votes_among_common_ones_wins() -> None:
    world = World()
    joins = [
        world.join_new(protocols=protocols(*names))
        for names in (("a", "b", "c"), ("b", "c", "a", "x"), ("x", "c", "b"), ("c", "b"))
    ]
    world.pass_ms(12_001)
    assert {world.join_response(number).protocol_name for _, number in joins} == {"b"}


def test_group_of_unused_member_ids_is_removed() -> None:
    world = World()
    world.join()
    assert [group.group_state for group in world.coordinator.list_groups()] == ["Empty"]
    world.pass_ms(10_000)
    assert not world.coordinator.list_groups()


def test_rebalance_waits_for_pending_member() -> None:
    world = World()
    ids, _ = world.stable(1)
    announced = world.join_response(world.join()).member_id
    assert state(world) == "Stable"
    again = world.join(ids[0])
    assert again not in world.responses
    number = world.join(announced)
    assert (world.join_response(again).generation_id, world.join_response(number).generation_id) == (2, 2)


def test_second_join_completes_first_with_rebalance_in_progress() -> None:
    world = World()
    member_id, first = world.join_new()
    second = world.join(member_id)
    assert world.join_response(first).error_code == E.REBALANCE_IN_PROGRESS
    world.pass_ms(3001)
    assert world.join_response(second).error_code == 0


def test_unchanged_follower_rejoins_current_generation() -> None:
    world = World()
    ids, generation = world.stable(2)
    response = world.join_response(world.join(ids[1]))
    assert (response.error_code, response.generation_id, response.members) == (0, generation, ())
    assert world.sync_response(world.sync(ids[1], generation)).assignment == ids[1].encode()


def test_leader_rejoin_and_changed_subscription_start_rebalance() -> None:
    world = World()
    ids, generation = world.stable(2)
    number = world.join(ids[0])
    assert number not in world.responses
    assert world.heartbeat(ids[1], generation) == E.REBALANCE_IN_PROGRESS
    other = world.join(ids[1], protocols=(*PROTOCOLS, *protocols("x")))
    assert {world.join_response(join).generation_id for join in (number, other)} == {generation + 1}


def test_member_that_misses_rebalance_timeout_is_removed() -> None:
    world = World()
    ids, generation = world.stable(3, session_ms=100_000)
    joins = [world.join(member_id) for member_id in ids[:2]]
    world.pass_ms(59_999)
    assert not set(joins) & set(world.responses)
    world.pass_ms(1)
    assert [world.join_response(join).generation_id for join in joins] == [generation + 1] * 2
    assert world.heartbeat(ids[2], generation) == E.UNKNOWN_MEMBER_ID


def test_leader_that_misses_rebalance_is_replaced() -> None:
    world = World()
    ids, _ = world.stable(2, session_ms=100_000)
    number = world.join(ids[1], protocols=(*PROTOCOLS, *protocols("x")))
    world.pass_ms(60_000)
    assert world.join_response(number).leader == ids[1]


# --- syncing -----------------------------------------------------------------------------------------------------


def test_sync_completes_when_assignment_is_durable() -> None:
    world = World()
    joins = [world.join_new() for _ in range(2)]
    world.pass_ms(6001)
    ids = [member_id for member_id, _ in joins]
    follower = world.sync(ids[1], 1)
    world.commits = False
    leader = world.sync(ids[0], 1, {ids[0]: b"A", ids[1]: b"B"})
    assert not {leader, follower} & set(world.responses)
    assert state(world) == "CompletingRebalance"
    world.commit_all()
    assert (world.sync_response(leader).assignment, world.sync_response(follower).assignment) == (b"A", b"B")
    assert state(world) == "Stable"


def test_second_sync_of_leader_keeps_first_assignment() -> None:
    world = World()
    member_id = world.join_new()[0]
    world.pass_ms(3001)
    world.commits = False
    first = world.sync(member_id, 1, {member_id: b"A"})
    second = world.sync(member_id, 1, {member_id: b"B"})
    assert world.sync_response(first).error_code == E.REBALANCE_IN_PROGRESS
    world.commit_all()
    assert world.sync_response(second).assignment == b"A"
    assert world.replayed().groups[GROUP].members[0].assignment == b"A"


@pytest.mark.parametrize(
    ("code", "returned"),
    [
        (E.NOT_ENOUGH_REPLICAS, E.COORDINATOR_NOT_AVAILABLE),
        (E.REQUEST_TIMED_OUT, E.COORDINATOR_NOT_AVAILABLE),
        (E.NOT_LEADER_OR_FOLLOWER, E.NOT_COORDINATOR),
        (E.RECORD_LIST_TOO_LARGE, E.UNKNOWN_SERVER_ERROR),
    ],
)
def test_failed_assignment_write_restarts_rebalance(code: ErrorCode, returned: ErrorCode) -> None:
    world = World()
    joins = [world.join_new() for _ in range(2)]
    world.pass_ms(6001)
    ids = [member_id for member_id, _ in joins]
    world.commits = False
    syncs = [world.sync(ids[1], 1), world.sync(ids[0], 1, {ids[0]: b"A"})]
    world.fail_one(code)
    assert [world.sync_response(sync).error_code for sync in syncs] == [returned, returned]
    assert state(world) == "PreparingRebalance"
    world.commits = True
    again = [world.join(member_id) for member_id in ids]
    assert {world.join_response(join).generation_id for join in again} == {2}


def test_sync_with_wrong_generation_member_or_protocol_is_refused() -> None:
    world = World()
    ids, generation = world.stable(1)
    assert world.sync_response(world.sync(ids[0], generation - 1)).error_code == E.ILLEGAL_GENERATION
    assert world.sync_response(world.sync("nobody", generation)).error_code == E.UNKNOWN_MEMBER_ID
    for kind, name in (("connect", None), ("consumer", "roundrobin")):
        number = world.new_request_id()
        request = SyncGroupRequest(GROUP, generation, ids[0], None, kind, name)
        world.apply(world.coordinator.sync(request, number, world.now))
        assert world.sync_response(number).error_code == E.INCONSISTENT_GROUP_PROTOCOL


def test_rebalance_completes_waiting_sync_with_rebalance_in_progress() -> None:
    world = World()
    joins = [world.join_new() for _ in range(2)]
    world.pass_ms(6001)
    waiting = world.sync(joins[1][0], 1)
    world.join_new()
    assert world.sync_response(waiting).error_code == E.REBALANCE_IN_PROGRESS
    assert world.sync_response(world.sync(joins[1][0], 1)).error_code == E.REBALANCE_IN_PROGRESS


def test_assignment_committed_after_next_rebalance_is_ignored() -> None:
    world = World()
    ids = [world.join_new()[0]]
    world.pass_ms(3001)
    world.commits = False
    old = world.sync(ids[0], 1, {ids[0]: b"old"})
    new_id, _ = world.join_new()
    assert world.sync_response(old).error_code == E.REBALANCE_IN_PROGRESS
    world.join(ids[0])
    world.commit_all()
    assert state(world) == "CompletingRebalance"
    numbers = [world.sync(ids[0], 2, {ids[0]: b"1", new_id: b"2"}), world.sync(new_id, 2)]
    world.commit_all()
    assert [world.sync_response(sync).assignment for sync in numbers] == [b"1", b"2"]


def test_member_that_misses_sync_timeout_is_removed() -> None:
    world = World()
    joins = [world.join_new(session_ms=200_000) for _ in range(2)]
    world.pass_ms(6001)
    number = world.sync(joins[0][0], 1, {joins[0][0]: b"A"})
    assert world.sync_response(number).error_code == 0
    world.pass_ms(60_000)
    assert world.heartbeat(joins[0][0], 1) == E.REBALANCE_IN_PROGRESS
    assert world.heartbeat(joins[1][0], 1) == E.UNKNOWN_MEMBER_ID


# --- heartbeats and leaving ---------------------------------------------------------------------------------------


def test_heartbeat_checks_member_and_generation_and_extends_session() -> None:
    world = World()
    ids, generation = world.stable(2)
    assert world.heartbeat(ids[0], generation) == 0
    assert world.heartbeat(ids[0], generation - 1) == E.ILLEGAL_GENERATION
    assert world.heartbeat(ids[0], generation + 1) == E.ILLEGAL_GENERATION
    assert world.heartbeat("nobody", generation) == E.UNKNOWN_MEMBER_ID
    world.pass_ms(9000)
    assert world.heartbeat(ids[0], generation) == 0
    world.pass_ms(1000)
    assert world.heartbeat(ids[0], generation) == E.REBALANCE_IN_PROGRESS
    assert world.heartbeat(ids[1], generation) == E.UNKNOWN_MEMBER_ID


def test_new_member_waits_five_minutes_at_most() -> None:
    world = World()
    ids, _ = world.stable(1, rebalance_ms=600_000, session_ms=1_000_000)
    _, number = world.join_new(session_ms=6000)
    world.pass_ms(299_999)
    assert number not in world.responses
    world.pass_ms(1)
    assert world.join_response(number).error_code == E.UNKNOWN_MEMBER_ID
    assert world.heartbeat(ids[0], 1) == E.REBALANCE_IN_PROGRESS


def test_leaving_member_starts_rebalance_or_empties_group() -> None:
    world = World()
    ids, generation = world.stable(2)
    assert world.leave("nobody") == E.UNKNOWN_MEMBER_ID
    assert world.leave(ids[0]) == 0
    assert world.heartbeat(ids[1], generation) == E.REBALANCE_IN_PROGRESS
    number = world.join(ids[1])
    assert (world.join_response(number).leader, world.join_response(number).generation_id) == (ids[1], generation + 1)
    assert world.leave(ids[1]) == 0
    assert state(world) == "Empty"
    value = world.replayed().groups[GROUP]
    assert (value.generation, value.protocol, value.leader, value.members) == (generation + 2, None, None, ())
    assert world.leave(ids[1]) == E.UNKNOWN_MEMBER_ID
    assert world.heartbeat(ids[1], generation) == E.UNKNOWN_MEMBER_ID


def test_leave_completes_pending_join() -> None:
    world = World()
    member_id, number = world.join_new()
    assert world.leave(member_id) == 0
    assert world.join_response(number).error_code == E.UNKNOWN_MEMBER_ID
    world.pass_ms(3001)
    assert state(world) == "Empty"


def test_pending_member_can_leave() -> None:
    world = World()
    assert world.leave(world.join_response(world.join()).member_id) == 0
    assert not world.coordinator.list_groups()


def test_leaving_unknown_group_is_refused() -> None:
    assert World().leave("m") == E.UNKNOWN_MEMBER_ID


# --- the partition of a group -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group_id", "java_hash"),
    [("", 0), ("a", 97), ("group", 98629247), ("my-consumer-group", None), ("polygenelubricants", -(2**31))],
)
def test_group_partition_follows_java_string_hash(group_id: str, java_hash: int | None) -> None:
    if java_hash is None:
        java_hash = 0
        for char in group_id:
            java_hash = (31 * java_hash + ord(char) + 2**31) % 2**32 - 2**31
    expected = 0 if java_hash == -(2**31) else abs(java_hash) % 50
    assert partition_for(group_id, 50) == expected
