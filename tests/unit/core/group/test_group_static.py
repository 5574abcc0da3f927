"""Static members (KIP-345): an instance id keeps its membership, and its previous member is fenced."""

from __future__ import annotations

from typing import Any

from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.types import Client, Settings
from kipmesh.messages import JoinGroupRequestProtocol
from tests.unit.core.group.group_support import GROUP, PROTOCOLS, World

E = ErrorCode
WIDER = (*PROTOCOLS, JoinGroupRequestProtocol("other", b"m"))


def stable(world: World, names: tuple[str, ...] = ("a", "b"), **fields: Any) -> dict[str, str]:
    """Form a stable group of static members in generation 1, led by the first. Return member ids by instance id."""
    joins = {name: world.join(instance=name, **fields) for name in names}
    world.pass_ms(3 * world.settings.group_initial_rebalance_delay_ms + 1)
    ids = {name: world.join_response(number).member_id for name, number in joins.items()}
    for name in names[1:]:
        world.sync(ids[name], 1, instance=name)
    world.sync(ids[names[0]], 1, {member_id: member_id.encode() for member_id in ids.values()}, names[0])
    assert world.coordinator.describe(GROUP).group_state == "Stable"
    return ids


def test_static_member_joins_without_member_id() -> None:
    world = World()
    ids = stable(world)
    assert ids["a"].startswith("a-")
    assert ids["b"].startswith("b-")
    assert world.heartbeat(ids["a"], 1, "a") == 0


def test_restarted_static_member_keeps_assignment_without_rebalance() -> None:
    world = World()
    ids = stable(world)
    number = world.join(instance="b")
    response = world.join_response(number)
    assert (response.error_code, response.generation_id, response.leader, response.members) == (0, 1, ids["a"], ())
    assert response.member_id != ids["b"]
    assert world.sync_response(world.sync(response.member_id, 1, instance="b")).assignment == ids["b"].encode()
    assert {member.member_id for member in world.replayed().groups[GROUP].members} == {ids["a"], response.member_id}


def test_previous_member_of_static_instance_is_fenced() -> None:
    world = World()
    ids = stable(world)
    world.join(instance="b")
    assert world.heartbeat(ids["b"], 1, "b") == E.FENCED_INSTANCE_ID
    assert world.sync_response(world.sync(ids["b"], 1, instance="b")).error_code == E.FENCED_INSTANCE_ID
    assert world.join_response(world.join(ids["b"], instance="b")).error_code == E.FENCED_INSTANCE_ID
    assert world.commit_code(world.commit(1, ids["b"], 1, instance="b")) == E.FENCED_INSTANCE_ID
    assert world.leave(ids["b"], "b") == E.FENCED_INSTANCE_ID
    assert world.heartbeat(ids["b"], 1) == E.UNKNOWN_MEMBER_ID, "without instance id, the member is unknown"


def test_pending_requests_of_previous_static_member_are_fenced() -> None:
    world = World()
    first = world.join(instance="a")
    second = world.join(instance="a")
    assert world.join_response(first).error_code == E.FENCED_INSTANCE_ID
    world.pass_ms(6001)
    assert world.join_response(second).error_code == 0
    waiting = World()
    joins = [waiting.join(instance=name) for name in ("a", "b")]
    waiting.pass_ms(6001)
    sync = waiting.sync(waiting.join_response(joins[1]).member_id, 1, instance="b")
    waiting.join(instance="b")
    assert waiting.sync_response(sync).error_code == E.FENCED_INSTANCE_ID


def test_restarted_static_leader_skips_assignment() -> None:
    world = World()
    ids = stable(world)
    response = world.join_response(world.join(instance="a"))
    assert response.skip_assignment
    assert response.leader == response.member_id
    assert [member.member_id for member in response.members] == [response.member_id, ids["b"]]
    assert world.sync_response(world.sync(response.member_id, 1, instance="a")).assignment == ids["a"].encode()


def test_restarted_static_leader_with_old_client_gets_previous_leader() -> None:
    world = World()
    ids = stable(world)
    response = world.join_response(world.join(instance="a", client=Client("old", "/h", skips_assignment=False)))
    assert (response.leader, response.members, response.skip_assignment) == (ids["a"], (), False)


def test_restarted_static_member_with_other_protocol_starts_rebalance() -> None:
    world = World()
    narrow = (JoinGroupRequestProtocol("narrow", b"m"), *PROTOCOLS)
    first = world.join(instance="a", protocols=narrow)
    second = world.join(instance="b", protocols=narrow)
    world.pass_ms(6001)
    ids = [world.join_response(number).member_id for number in (first, second)]
    world.sync(ids[1], 1, instance="b")
    world.sync(ids[0], 1, {}, "a")
    number = world.join(instance="b", protocols=PROTOCOLS)
    assert number not in world.responses
    assert world.heartbeat(ids[0], 1, "a") == E.REBALANCE_IN_PROGRESS
    world.join(ids[0], instance="a", protocols=narrow)
    assert world.join_response(number).protocol_name == "range"


def test_restarted_static_member_joins_running_rebalance() -> None:
    world = World()
    ids = stable(world)
    world.join(instance="c")
    number = world.join(instance="b")
    assert number not in world.responses
    world.join(ids["a"], instance="a")
    assert world.join_response(number).generation_id == 2


def test_join_of_restarted_static_member_completes_when_durable() -> None:
    world = World()
    ids = stable(world)
    world.commits = False
    number = world.join(instance="b")
    assert number not in world.responses
    world.fail_one(E.NOT_ENOUGH_REPLICAS)
    assert world.join_response(number).error_code == E.COORDINATOR_NOT_AVAILABLE
    assert world.heartbeat(ids["a"], 1, "a") == E.REBALANCE_IN_PROGRESS


def test_rebalance_timeout_keeps_missing_static_member() -> None:
    world = World(Settings(group_initial_rebalance_delay_ms=0))
    ids = stable(world, ("a", "b"), session_ms=200_000)
    number = world.join(ids["a"], instance="a", session_ms=200_000)
    world.pass_ms(60_000)
    response = world.join_response(number)
    assert (response.generation_id, len(response.members)) == (2, 2)


def test_rebalance_without_joins_waits_for_session_timeouts() -> None:
    world = World(Settings(group_initial_rebalance_delay_ms=0))
    ids = stable(world, ("a", "b", "c"), session_ms=150_000)
    assert world.leave("", "c") == 0  # by instance id alone, as administrators do
    world.pass_ms(60_000 + 60_000)
    assert world.coordinator.describe(GROUP).group_state == "PreparingRebalance"
    world.pass_ms(30_000)
    assert world.coordinator.describe(GROUP).group_state == "Empty"
    assert world.heartbeat(ids["a"], 1, "a") == E.UNKNOWN_MEMBER_ID


def test_unknown_static_instance_is_refused() -> None:
    world = World()
    ids = stable(world)
    assert world.leave("", "nobody") == E.UNKNOWN_MEMBER_ID
    assert world.heartbeat(ids["a"], 1, "nobody") == E.UNKNOWN_MEMBER_ID


def test_failover_does_not_fence_static_member_restarted_in_rebalance() -> None:
    world = World()
    ids = stable(world)
    world.join(instance="c")
    number = world.join(instance="b")
    world.join(ids["a"], instance="a")
    new_id = world.join_response(number).member_id
    world.fail_over()
    assert world.heartbeat(new_id, 2, "b") == E.ILLEGAL_GENERATION
    assert world.heartbeat(ids["b"], 1, "b") == E.FENCED_INSTANCE_ID
    assert world.join_response(world.join(new_id, instance="b")).generation_id == 1
    assert world.sync_response(world.sync(new_id, 1, instance="b")).assignment == ids["b"].encode()


def test_static_member_restart_follows_pending_assignment_write() -> None:
    world = World()
    joins = [world.join(instance=name) for name in ("a", "b")]
    world.pass_ms(6001)
    ids = [world.join_response(number).member_id for number in joins]
    world.commits = False
    world.sync(ids[0], 1, {member_id: member_id.encode() for member_id in ids}, "a")
    number = world.join(instance="b")
    world.commit_all()
    assert [member.group_instance_id for member in world.replayed().groups[GROUP].members] == ["a", "b"]
    assert world.replayed().groups[GROUP].members[1].member_id != ids[1]
    assert number not in world.responses


def test_static_members_survive_coordinator_failover() -> None:
    world = World()
    ids = stable(world)
    world.fail_over()
    assert world.heartbeat(ids["a"], 1, "a") == 0
    response = world.join_response(world.join(instance="b"))
    assert world.sync_response(world.sync(response.member_id, 1, instance="b")).assignment == ids["b"].encode()
