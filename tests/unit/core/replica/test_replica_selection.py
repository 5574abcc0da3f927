"""Selectors, what they are shown, and the guard around them (392-11 to 392-13, 392-15)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kipmesh.core.replica.leader import PartitionLeader
from kipmesh.core.replica.selection import (
    SELECTORS,
    ClientMetadata,
    GuardedSelector,
    PartitionView,
    ReplicaSelector,
    ReplicaView,
    SelectorFailure,
    TopicPartition,
)
from kipmesh.core.replica.selection_views import (
    may_redirect,
    preferred_read_replica,
    redirect_by_leader,
    view_of,
)
from kipmesh.messages import NodeEndpoint

WHERE = TopicPartition("t", 3)
ENDPOINTS = {each: NodeEndpoint(each, f"h{each}", 9, rack) for each, rack in {1: "a", 2: "b", 3: "b", 4: None}.items()}


def replica(node: int, rack: str | None, *, in_sync: bool = True, start: int | None = 0, end: int | None = 10) -> Any:
    return ReplicaView(NodeEndpoint(node, "h", 1, rack), in_sync, start, end, 0)


def view(*replicas: ReplicaView, offset: int | None = 5) -> PartitionView:
    return PartitionView(replicas, replicas[0], offset)


def chosen(it: PartitionView, rack: str, client_id: str = "c") -> int:
    return SELECTORS["RackAwareReplicaSelector"]().select(WHERE, ClientMetadata(rack, client_id), it).node_id


@pytest.mark.parametrize(
    ("near", "offset", "expected"),
    [
        (replica(2, "b"), 5, 2),
        (replica(2, "b"), 10, 2),
        (replica(2, "b"), 11, 1),
        (replica(2, "b", start=6), 5, 1),
        (replica(2, "b", start=5), 5, 2),
        (replica(2, "b", in_sync=False), 5, 1),
        (replica(2, "bb"), 5, 1),
        (replica(2, None), 5, 1),
        (replica(2, "b", start=None, end=None), 5, 2),
        (replica(2, "b"), None, 2),
    ],
)
def test_the_rack_s_replica_serves_if_it_can(near: ReplicaView, offset: int | None, expected: int) -> None:
    assert chosen(view(replica(1, "a"), near, offset=offset), "b") == expected


def test_the_leader_serves_its_own_rack_and_clients_without_one() -> None:
    it = view(replica(1, "b"), replica(2, "b"), replica(3, ""))
    assert chosen(it, "b") == chosen(it, "") == chosen(it, "z") == 1


def test_clients_are_spread_stably_and_move_only_when_their_replica_goes() -> None:
    replicas = [replica(1, "a"), *(replica(node, "b") for node in range(2, 6))]
    clients = [f"client-{number}" for number in range(400)]
    before = {client: chosen(view(*replicas), "b", client) for client in clients}
    assert before == {client: chosen(view(*replicas), "b", client) for client in clients}
    counts = Counter(before.values())
    assert set(counts) == {2, 3, 4, 5}
    assert min(counts.values()) > 60
    without = {client: chosen(view(*replicas[:-1]), "b", client) for client in clients}
    assert all(without[client] == node for client, node in before.items() if node != 5)
    # Pinned: a client must get the same answer from every process and every version.
    assert [before[client] for client in clients[:8]] == PINNED


PINNED = [3, 5, 2, 5, 3, 2, 2, 4]


class Odd(ReplicaSelector):
    def __init__(self, result: object) -> None:
        self.result = result

    def configure(self, configs: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def select(self, topic_partition: TopicPartition, client: ClientMetadata, view: PartitionView) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def close(self) -> None:
        raise RuntimeError("no end")


@pytest.mark.parametrize(
    ("result", "failure"),
    [
        (ValueError("broken"), SelectorFailure.RAISED),
        (replica(9, "b"), SelectorFailure.UNKNOWN_REPLICA),
        (2, SelectorFailure.UNKNOWN_REPLICA),
        ("b", SelectorFailure.UNKNOWN_REPLICA),
        (None, None),
    ],
)
def test_what_a_plugin_does_wrong_means_the_leader_and_is_counted(
    result: object, failure: SelectorFailure | None
) -> None:
    told: list[tuple[TopicPartition, SelectorFailure, object]] = []
    guard = GuardedSelector(Odd(result), lambda *what: told.append(what))
    it = view(replica(1, "a"), replica(2, "b"))
    assert guard.select(WHERE, ClientMetadata("b"), it) is it.leader
    assert told == ([(WHERE, failure, result)] if failure else [])
    assert sum(guard.failures.values()) == len(told)


def test_a_guard_gives_the_view_s_own_replica_and_survives_the_end() -> None:
    it = view(replica(1, "a"), replica(2, "b"))
    guard = GuardedSelector(Odd(replica(2, "made up", end=None)))
    assert guard.select(WHERE, ClientMetadata("b"), it) is it.replicas[1]
    guard.close()
    assert guard.failures[SelectorFailure.RAISED] == 1


@given(st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.booleans(), st.integers(0, 9), st.integers(0, 9))))
def test_rack_aware_never_picks_what_the_rule_excludes(others: list[tuple[str | None, bool, int, int]]) -> None:
    replicas = [replica(1, "a")]
    for node, (rack, in_sync, start, end) in enumerate(others, 2):
        replicas.append(replica(node, rack, in_sync=in_sync, start=start, end=end))
    it = view(*replicas)
    good = [each for each in replicas[1:] if each.rack == "b" and each.is_in_sync and each.holds(5)]
    assert chosen(it, "b") in ([each.node_id for each in good] or [1])
    assert set(it.candidates()) >= {replicas[0], *good}


def leader() -> PartitionLeader:
    it = PartitionLeader(
        broker_id=1,
        leader_epoch=5,
        partition_epoch=7,
        replicas=(1, 2, 3, 4),
        isr=frozenset({1, 2, 3}),
        log_end_offset=10,
        high_watermark=0,
        min_insync_replicas=1,
        lag_max_ms=1000,
        eligible_epoch=lambda broker: broker,
        now_ms=0,
    )
    it.follower_fetched(2, 10, 4, 2, 500)
    it.follower_fetched(3, 3, 0, 3, 500)
    return it


def redirected(
    client: ClientMetadata, offset: int, *, replica_id: int = -1, online: tuple[int, ...] = (1, 2, 3)
) -> int:
    return redirect_by_leader(
        GuardedSelector(SELECTORS["RackAwareReplicaSelector"]()),
        WHERE,
        client,
        leader(),
        replica_id=replica_id,
        replicas=(1, 2, 3, 4),
        endpoints=lambda: {each: ENDPOINTS[each] for each in online},
        log_start_offset=0,
        fetch_offset=offset,
        now_ms=600,
    )


def test_a_leader_redirects_to_who_has_the_offset() -> None:
    client = ClientMetadata("b", "c")
    assert redirected(client, 7) == 2  # 3 does not have it yet
    assert redirected(client, 2) == 3  # 2 does not have it any more
    assert redirected(client, 11) == -1
    assert redirected(client, 7, online=(1, 3)) == -1
    assert redirected(client, 7, replica_id=2) == -1
    assert redirected(client, 7, replica_id=-2) == -1
    assert redirected(ClientMetadata("", "c"), 7) == -1
    assert redirected(ClientMetadata("a", "c"), 7) == -1


def test_the_default_selector_costs_no_view() -> None:
    assert not may_redirect(-1, ClientMetadata("b"), GuardedSelector(SELECTORS["LeaderSelector"]()))
    assert may_redirect(-1, ClientMetadata("b"), GuardedSelector(SELECTORS["RackAwareReplicaSelector"]()))


def test_metadata_says_a_preferred_replica_without_knowing_offsets() -> None:
    guard = GuardedSelector(SELECTORS["RackAwareReplicaSelector"]())
    it = view_of(leader_id=1, replicas=(1, 2, 3, 4), isr=(1, 3), endpoints=ENDPOINTS)
    assert it is not None
    assert it.replicas[1][2:] == (None, None, None)
    assert preferred_read_replica(guard, WHERE, ClientMetadata("b"), it) == 3
    assert preferred_read_replica(guard, WHERE, ClientMetadata("a"), it) == -1
    gone = view_of(leader_id=-1, replicas=(1, 2), isr=(1,), endpoints=ENDPOINTS)
    assert preferred_read_replica(guard, WHERE, ClientMetadata("b"), gone) == -1
