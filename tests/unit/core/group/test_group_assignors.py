"""Assignors: Kafka's examples, and properties of arbitrary groups."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kipmesh.core.group.assignors import (
    ASSIGNORS,
    COOPERATIVE_STICKY,
    RANGE,
    ROUND_ROBIN,
    Assignments,
    Assignor,
    GroupMember,
    StickyAssignment,
)
from kipmesh.core.group.records import Partition, Subscription, by_topic

TOPICS = ("t0", "t1", "t2", "t3")
Group = tuple[dict[str, int], dict[str, frozenset[str]]]


def member(name: str, topics: Collection[str], owned: Sequence[Partition] = (), generation: int = -1) -> GroupMember:
    return GroupMember(name, None, Subscription(tuple(sorted(topics)), None, by_topic(owned), generation))


def flat(assignments: Assignments) -> list[Partition]:
    return sorted(partition for owned in assignments.values() for partition in owned)


@st.composite
def groups(draw: st.DrawFn, *, equal: bool = False) -> Group:
    partitions = draw(st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 9), min_size=1))
    names = draw(st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=7, unique=True))
    subsets = st.frozensets(st.sampled_from(TOPICS), min_size=1)
    same = draw(subsets)
    return partitions, {name: same if equal else draw(subsets) for name in names}


def even_loads(partitions: Mapping[str, int], topics: Mapping[str, frozenset[str]]) -> list[int]:
    """Return the most even loads, by brute force: shift partitions along chains until no shift improves the balance."""
    load = dict.fromkeys(topics, 0)
    held: dict[Partition, str] = {}
    for topic, count in partitions.items():
        eligible = [name for name in topics if topic in topics[name]]
        for number in range(count if eligible else 0):
            held[topic, number] = eligible[0]
            load[eligible[0]] += 1
    while True:
        reach = {
            name: {
                other
                for (topic, _), owner in held.items()
                if owner == name
                for other in topics
                if topic in topics[other]
            }
            for name in topics
        }
        for _ in topics:  # transitive closure
            reach = {name: set().union(others, *(reach[other] for other in others)) for name, others in reach.items()}
        pair = next(((a, b) for a in topics for b in reach[a] if load[a] - load[b] >= 2), None)
        if pair is None:
            return sorted(load.values())
        _shift(pair[0], pair[1], held, topics)
        load[pair[0]] -= 1
        load[pair[1]] += 1


def _shift(source: str, target: str, held: dict[Partition, str], topics: Mapping[str, frozenset[str]]) -> None:
    paths: dict[str, list[tuple[Partition, str]]] = {source: []}
    while target not in paths:
        for partition, owner in list(held.items()):
            for other in topics:
                if owner in paths and other not in paths and partition[0] in topics[other]:
                    paths[other] = [*paths[owner], (partition, other)]
    held.update(paths[target])


# --- Kafka's examples ----------------------------------------------------------------------------------------------


def test_range_assignor_matches_kafka_examples() -> None:
    members = [member("c0", ["t0", "t1"]), member("c1", ["t0", "t1"])]
    assert RANGE.assign({"t0": 3, "t1": 3}, members) == {
        "c0": [("t0", 0), ("t0", 1), ("t1", 0), ("t1", 1)],
        "c1": [("t0", 2), ("t1", 2)],
    }
    static = [GroupMember("x", "I1", members[0].subscription), GroupMember("z", "I0", members[0].subscription)]
    assert RANGE.assign({"t0": 3, "t1": 3}, static)["z"] == [("t0", 0), ("t0", 1), ("t1", 0), ("t1", 1)]
    assert list(RANGE.assign({"t0": 1}, [member("a", ["t0"]), GroupMember("z", "I", members[0].subscription)])["z"])


def test_round_robin_assignor_matches_kafka_examples() -> None:
    assert ROUND_ROBIN.assign({"t0": 3, "t1": 3}, [member("c0", ["t0", "t1"]), member("c1", ["t0", "t1"])]) == {
        "c0": [("t0", 0), ("t0", 2), ("t1", 1)],
        "c1": [("t0", 1), ("t1", 0), ("t1", 2)],
    }
    unequal = [member("c0", ["t0"]), member("c1", ["t0", "t1"]), member("c2", ["t0", "t1", "t2"])]
    assert ROUND_ROBIN.assign({"t0": 1, "t1": 2, "t2": 3}, unequal) == {
        "c0": [("t0", 0)],
        "c1": [("t1", 0)],
        "c2": [("t1", 1), ("t2", 0), ("t2", 1), ("t2", 2)],
    }


def test_cooperative_sticky_balances_unequal_subscriptions() -> None:
    unequal = [member("c0", ["t0"]), member("c1", ["t0", "t1"]), member("c2", ["t0", "t1", "t2"])]
    loads = {
        name: len(owned) for name, owned in COOPERATIVE_STICKY.assign({"t0": 1, "t1": 2, "t2": 3}, unequal).items()
    }
    assert loads == {"c0": 1, "c1": 2, "c2": 3}


def test_cooperative_sticky_revokes_partition_before_reassigning_it() -> None:
    owned = [("t0", number) for number in range(4)]
    members = [member("a", ["t0"], owned, 1), member("b", ["t0"])]
    first = COOPERATIVE_STICKY.assign({"t0": 4}, members)
    assert (len(first["a"]), first["b"]) == (2, [])
    second = COOPERATIVE_STICKY.assign({"t0": 4}, [member("a", ["t0"], first["a"], 2), member("b", ["t0"], (), 2)])
    assert second["a"] == first["a"]
    assert len(second["b"]) == 2


def test_cooperative_sticky_prefers_claim_of_later_generation_after_revocation() -> None:
    claimed = [("t0", 0)]
    members = [member("old", ["t0"], claimed, 3), member("new", ["t0"], claimed, 4)]
    assert COOPERATIVE_STICKY.assign({"t0": 1}, members) == {"old": [], "new": []}
    assert COOPERATIVE_STICKY.assign({"t0": 1}, [member("old", ["t0"], (), 5), member("new", ["t0"], claimed, 5)]) == {
        "old": [],
        "new": claimed,
    }


def test_cooperative_sticky_reads_generation_from_user_data_of_older_java_clients() -> None:
    owned = by_topic([("t0", 0)])
    members = [
        GroupMember("a", None, Subscription(("t0",), (7).to_bytes(4, "big"), owned)),
        GroupMember("b", None, Subscription(("t0",), (6).to_bytes(4, "big"), owned)),
        GroupMember("c", None, Subscription(("t0",), b"?", ())),
    ]
    members = [members[0], members[1]._replace(subscription=Subscription(("t0",), (6).to_bytes(4, "big"))), members[2]]
    assert COOPERATIVE_STICKY.assign({"t0": 1}, members)["a"] == [("t0", 0)]


def test_assignors_accept_no_members_and_no_partitions() -> None:
    for assignor in ASSIGNORS.values():
        assert assignor.assign({"t0": 3}, []) == {}
        assert assignor.assign({}, [member("a", ["t0"])]) == {"a": []}
        assert assignor.assign({"t1": 3}, [member("a", ["t0"])]) == {"a": []}


def test_sticky_assignment_balances_500_members() -> None:
    topics = {f"m{number:04}": frozenset({"t"}) for number in range(500)}
    owners = {("t", number): "m0000" for number in range(1000)}
    loads = [len(owned) for owned in StickyAssignment({"t": 5000}, topics, owners).solve().values()]
    assert set(loads) == {10}


# --- properties --------------------------------------------------------------------------------------------------


@given(groups(), st.sampled_from(sorted(ASSIGNORS)))
def test_assignors_give_each_partition_one_subscribed_owner(group: Group, name: str) -> None:
    partitions, topics = group
    assignments = ASSIGNORS[name].assign(
        partitions, [member(member_name, wanted) for member_name, wanted in topics.items()]
    )
    assert assignments.keys() == topics.keys()
    wanted = sorted(
        (topic, number)
        for topic, count in partitions.items()
        for number in range(count)
        if any(topic in subscribed for subscribed in topics.values())
    )
    assert flat(assignments) == wanted
    assert all(topic in topics[name] for name, owned in assignments.items() for topic, _ in owned)


@given(groups(equal=True), st.sampled_from([ROUND_ROBIN, COOPERATIVE_STICKY]))
def test_equal_subscriptions_get_equal_shares(group: Group, assignor: Assignor) -> None:
    partitions, topics = group
    loads = [len(owned) for owned in assignor.assign(partitions, [member(*item) for item in topics.items()]).values()]
    assert max(loads) - min(loads) <= 1


@given(groups(equal=True))
def test_range_assignor_balances_each_topic(group: Group) -> None:
    partitions, topics = group
    assignments = RANGE.assign(partitions, [member(*item) for item in topics.items()])
    for topic in partitions:
        loads = [sum(assigned_topic == topic for assigned_topic, _ in owned) for owned in assignments.values()]
        assert max(loads) - min(loads) <= 1


@given(groups(), st.data())
@settings(max_examples=60)
def test_sticky_assignment_is_as_even_as_subscriptions_allow(group: Group, data: st.DataObject) -> None:
    partitions, topics = group
    owners = {
        (topic, number): data.draw(st.sampled_from(sorted(topics)))
        for topic, count in partitions.items()
        for number in range(count)
        if data.draw(st.booleans())
    }
    assert sorted(len(owned) for owned in StickyAssignment(partitions, topics, owners).solve().values()) == even_loads(
        partitions, topics
    )


@given(groups())
def test_sticky_assignment_keeps_balanced_assignment(group: Group) -> None:
    partitions, topics = group
    first = StickyAssignment(partitions, topics, {}).solve()
    owners = {partition: name for name, owned in first.items() for partition in owned}
    again = StickyAssignment(partitions, topics, owners).solve()
    assert {name: sorted(owned) for name, owned in again.items()} == {name: sorted(own) for name, own in first.items()}


@given(groups(equal=True), st.data())
def test_sticky_assignment_moves_minimum_when_members_change(group: Group, data: st.DataObject) -> None:
    partitions, topics = group
    first = StickyAssignment(partitions, topics, {}).solve()
    owners = {partition: name for name, owned in first.items() for partition in owned}
    leaver = data.draw(st.sampled_from(sorted(topics)))
    rest = {name: wanted for name, wanted in topics.items() if name != leaver}
    if rest:
        after = StickyAssignment(partitions, rest, owners).solve()
        assert all(set(first[name]) <= set(after[name]) for name in rest), (
            "remaining members keep their partitions when a member leaves"
        )
    more = topics | {"newcomer": next(iter(topics.values()))}
    grown = StickyAssignment(partitions, more, owners).solve()
    moved = sum(len(set(owned) - set(grown[name])) for name, owned in first.items())
    assert moved == len(grown["newcomer"]), "partitions move only to the new member"


@given(st.lists(st.tuples(groups(), st.frozensets(st.sampled_from("abcdefghij"), max_size=3)), min_size=1, max_size=6))
@settings(max_examples=80)
def test_cooperative_sticky_never_moves_partition_without_revocation(
    changes: list[tuple[Group, frozenset[str]]],
) -> None:
    """Members join, leave, change subscriptions, lose partitions. Owned partitions move only after revocation."""
    owned: dict[str, list[Partition]] = {}
    generation = 0
    for (partitions, topics), forgetful in changes:
        for _ in range(3):  # A rebalance may need a follow-up.
            generation += 1
            for name in forgetful & owned.keys():
                owned[name] = []  # A member that lost its membership revokes everything.
            members = [member(name, wanted, owned.get(name, ()), generation - 1) for name, wanted in topics.items()]
            assignments = COOPERATIVE_STICKY.assign(partitions, members)
            assert len(flat(assignments)) == len(set(flat(assignments)))
            for name, assigned in assignments.items():
                others = {partition for other in topics if other != name for partition in owned.get(other, ())}
                assert not others & set(assigned)
            owned = assignments
        members = [member(name, wanted, owned[name], generation) for name, wanted in topics.items()]
        stable = COOPERATIVE_STICKY.assign(partitions, members)
        assert {name: sorted(own) for name, own in stable.items()} == {name: sorted(own) for name, own in owned.items()}
