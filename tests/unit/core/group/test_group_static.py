"""Static members (KIP-345): a name keeps its place, and who has lost it is told so."""

from __future__ import annotations

from typing import Any

from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.types import Client, Settings
from kipmesh.messages import JoinGroupRequestProtocol
from tests.unit.core.group.group_support import GROUP, PROTOCOLS, World

E = ErrorCode
WIDER = (*PROTOCOLS, JoinGroupRequestProtocol("other", b"m"))


def stable(world: World, names: tuple[str, ...] = ("a", "b"), **how: Any) -> dict[str, str]:
    """A stable group of static members in generation 1, the first of which leads: name -> member id."""
    joins = {name: world.join(instance=name, **how) for name in names}
    world.pass_ms(3 * world.settings.group_initial_rebalance_delay_ms + 1)
    ids = {name: world.joined(number).member_id for name, number in joins.items()}
    for name in names[1:]:
        world.sync(ids[name], 1, instance=name)
    world.sync(ids[names[0]], 1, {one: one.encode() for one in ids.values()}, names[0])
    assert world.coordinator.describe(GROUP).group_state == "Stable"
    return ids


def test_a_static_member_needs_no_id() -> None:
    world = World()
    ids = stable(world)
    assert ids["a"].startswith("a-")
    assert ids["b"].startswith("b-")
    assert world.beat(ids["a"], 1, "a") == 0


def test_one_that_comes_back_has_its_assignment_without_a_rebalance() -> None:
    world = World()
    ids = stable(world)
    number = world.join(instance="b")
    answer = world.joined(number)
    assert (answer.error_code, answer.generation_id, answer.leader, answer.members) == (0, 1, ids["a"], ())
    assert answer.member_id != ids["b"]
    assert world.synced(world.sync(answer.member_id, 1, instance="b")).assignment == ids["b"].encode()
    assert {one.member_id for one in world.replayed().groups[GROUP].members} == {ids["a"], answer.member_id}


def test_the_old_one_is_fenced() -> None:
    world = World()
    ids = stable(world)
    world.join(instance="b")
    assert world.beat(ids["b"], 1, "b") == E.FENCED_INSTANCE_ID
    assert world.synced(world.sync(ids["b"], 1, instance="b")).error_code == E.FENCED_INSTANCE_ID
    assert world.joined(world.join(ids["b"], instance="b")).error_code == E.FENCED_INSTANCE_ID
    assert world.commit_code(world.commit(1, ids["b"], 1, instance="b")) == E.FENCED_INSTANCE_ID
    assert world.leave(ids["b"], "b") == E.FENCED_INSTANCE_ID
    assert world.beat(ids["b"], 1) == E.UNKNOWN_MEMBER_ID, "without its name it is nobody"


def test_requests_of_the_old_one_that_wait_are_fenced() -> None:
    world = World()
    first = world.join(instance="a")
    second = world.join(instance="a")
    assert world.joined(first).error_code == E.FENCED_INSTANCE_ID
    world.pass_ms(6001)
    assert world.joined(second).error_code == 0
    waiting = World()
    joins = [waiting.join(instance=name) for name in ("a", "b")]
    waiting.pass_ms(6001)
    sync = waiting.sync(waiting.joined(joins[1]).member_id, 1, instance="b")
    waiting.join(instance="b")
    assert waiting.synced(sync).error_code == E.FENCED_INSTANCE_ID


def test_a_leader_that_comes_back_has_nothing_to_assign() -> None:
    world = World()
    ids = stable(world)
    answer = world.joined(world.join(instance="a"))
    assert answer.skip_assignment
    assert answer.leader == answer.member_id
    assert [one.member_id for one in answer.members] == [answer.member_id, ids["b"]]
    assert world.synced(world.sync(answer.member_id, 1, instance="a")).assignment == ids["a"].encode()


def test_an_old_client_that_leads_and_comes_back_is_not_told_so() -> None:
    world = World()
    ids = stable(world)
    answer = world.joined(world.join(instance="a", client=Client("old", "/h", skips_assignment=False)))
    assert (answer.leader, answer.members, answer.skip_assignment) == (ids["a"], (), False)


def test_one_that_comes_back_for_another_protocol_rebalances() -> None:
    world = World()
    narrow = (JoinGroupRequestProtocol("narrow", b"m"), *PROTOCOLS)
    first = world.join(instance="a", protocols=narrow)
    second = world.join(instance="b", protocols=narrow)
    world.pass_ms(6001)
    ids = [world.joined(number).member_id for number in (first, second)]
    world.sync(ids[1], 1, instance="b")
    world.sync(ids[0], 1, {}, "a")
    number = world.join(instance="b", protocols=PROTOCOLS)
    assert number not in world.answers
    assert world.beat(ids[0], 1, "a") == E.REBALANCE_IN_PROGRESS
    world.join(ids[0], instance="a", protocols=narrow)
    assert world.joined(number).protocol_name == "range"


def test_one_that_comes_back_during_a_rebalance_joins_it() -> None:
    world = World()
    ids = stable(world)
    world.join(instance="c")
    number = world.join(instance="b")
    assert number not in world.answers
    world.join(ids["a"], instance="a")
    assert world.joined(number).generation_id == 2


def test_one_that_comes_back_is_answered_when_that_is_durable() -> None:
    world = World()
    ids = stable(world)
    world.commits = False
    number = world.join(instance="b")
    assert number not in world.answers
    world.fail_one(E.NOT_ENOUGH_REPLICAS)
    assert world.joined(number).error_code == E.COORDINATOR_NOT_AVAILABLE
    assert world.beat(ids["a"], 1, "a") == E.REBALANCE_IN_PROGRESS


def test_a_rebalance_does_not_wait_for_a_lost_static_member_longer_than_others_and_keeps_it() -> None:
    world = World(Settings(group_initial_rebalance_delay_ms=0))
    ids = stable(world, ("a", "b"), session_ms=200_000)
    number = world.join(ids["a"], instance="a", session_ms=200_000)
    world.pass_ms(60_000)
    answer = world.joined(number)
    assert (answer.generation_id, len(answer.members)) == (2, 2)


def test_without_any_the_rebalance_waits_for_the_sessions_to_end() -> None:
    world = World(Settings(group_initial_rebalance_delay_ms=0))
    ids = stable(world, ("a", "b", "c"), session_ms=150_000)
    assert world.leave("", "c") == 0  # by its name alone, as an administrator does
    world.pass_ms(60_000 + 60_000)
    assert world.coordinator.describe(GROUP).group_state == "PreparingRebalance"
    world.pass_ms(30_000)
    assert world.coordinator.describe(GROUP).group_state == "Empty"
    assert world.beat(ids["a"], 1, "a") == E.UNKNOWN_MEMBER_ID


def test_names_that_nobody_has() -> None:
    world = World()
    ids = stable(world)
    assert world.leave("", "nobody") == E.UNKNOWN_MEMBER_ID
    assert world.beat(ids["a"], 1, "nobody") == E.UNKNOWN_MEMBER_ID


def test_one_that_came_back_during_a_rebalance_is_not_fenced_by_the_next_coordinator() -> None:
    world = World()
    ids = stable(world)
    world.join(instance="c")
    number = world.join(instance="b")
    world.join(ids["a"], instance="a")
    new_id = world.joined(number).member_id
    world.fail_over()
    assert world.beat(new_id, 2, "b") == E.ILLEGAL_GENERATION
    assert world.beat(ids["b"], 1, "b") == E.FENCED_INSTANCE_ID
    assert world.joined(world.join(new_id, instance="b")).generation_id == 1
    assert world.synced(world.sync(new_id, 1, instance="b")).assignment == ids["b"].encode()


def test_a_name_is_kept_after_what_is_on_its_way() -> None:
    world = World()
    joins = [world.join(instance=name) for name in ("a", "b")]
    world.pass_ms(6001)
    ids = [world.joined(number).member_id for number in joins]
    world.commits = False
    world.sync(ids[0], 1, {one: one.encode() for one in ids}, "a")
    number = world.join(instance="b")
    world.commit_all()
    assert [one.group_instance_id for one in world.replayed().groups[GROUP].members] == ["a", "b"]
    assert world.replayed().groups[GROUP].members[1].member_id != ids[1]
    assert number not in world.answers


def test_names_survive_the_coordinator() -> None:
    world = World()
    ids = stable(world)
    world.fail_over()
    assert world.beat(ids["a"], 1, "a") == 0
    answer = world.joined(world.join(instance="b"))
    assert world.synced(world.sync(answer.member_id, 1, instance="b")).assignment == ids["b"].encode()
