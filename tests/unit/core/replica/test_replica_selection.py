"""Replica selectors, their views, and GuardedSelector (392-11 to 392-13, 392-15)."""

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

PARTITION = TopicPartition("t", 3)
ENDPOINTS = {node: NodeEndpoint(node, f"h{node}", 9, rack) for node, rack in {1: "a", 2: "b", 3: "b", 4: None}.items()}


def replica(node: int, rack: str | None, *, in_sync: bool = True, start: int | None = 0, end: int | None = 10) -> Any:
    return ReplicaView(NodeEndpoint(node, "h", 1, rack), in_sync, start, end, 0)


def view(*replicas: ReplicaView, offset: int | None = 5) -> PartitionView:
    return PartitionView(replicas, replicas[0], offset)


def chosen(partition_view: PartitionView, rack: str, client_id: str = "c") -> int:
    return (
        SELECTORS["RackAwareReplicaSelector"]()
        .select(PARTITION, ClientMetadata(rack, client_id), partition_view)
        .node_id
    )


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
def test_rack_aware_selector_uses_eligible_replica_of_rack(
    near: ReplicaView, offset: int | None, expected: int
) -> None:
    assert chosen(view(replica(1, "a"), near, offset=offset), "b") == expected


def test_rack_aware_selector_uses_leader_for_its_rack_and_rackless_clients() -> None:
    partition_view = view(replica(1, "b"), replica(2, "b"), replica(3, ""))
    assert chosen(partition_view, "b") == chosen(partition_view, "") == chosen(partition_view, "z") == 1


def test_rack_aware_selector_spreads_clients_with_stable_hashing() -> None:
    replicas = [replica(1, "a"), *(replica(node, "b") for node in range(2, 6))]
    clients = [f"client-{number}" for number in range(400)]
    before = {client: chosen(view(*replicas), "b", client) for client in clients}
    assert before == {client: chosen(view(*replicas), "b", client) for client in clients}
    counts = Counter(before.values())
    assert set(counts) == {2, 3, 4, 5}
    assert min(counts.values()) > 60
    without = {client: chosen(view(*replicas[:-1]), "b", client) for client in clients}
    assert all(without[client] == node for client, node in before.items() if node != 5)
    # Pinned: a client gets the same replica from every process and version.
    assert [before[client] for client in clients[:8]] == PINNED


PINNED = [3, 5, 2, 5, 3, 2, 2, 4]


class FakeSelector(ReplicaSelector):
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
def test_failing_selector_falls_back_to_leader_and_is_counted(result: object, failure: SelectorFailure | None) -> None:
    reported: list[tuple[TopicPartition, SelectorFailure, object]] = []
    guard = GuardedSelector(FakeSelector(result), lambda *failure_: reported.append(failure_))
    partition_view = view(replica(1, "a"), replica(2, "b"))
    assert guard.select(PARTITION, ClientMetadata("b"), partition_view) is partition_view.leader
    assert reported == ([(PARTITION, failure, result)] if failure else [])
    assert sum(guard.failures.values()) == len(reported)


def test_guarded_selector_returns_replica_of_view_and_catches_close_errors() -> None:
    partition_view = view(replica(1, "a"), replica(2, "b"))
    guard = GuardedSelector(FakeSelector(replica(2, "made up", end=None)))
    assert guard.select(PARTITION, ClientMetadata("b"), partition_view) is partition_view.replicas[1]
    guard.close()
    assert guard.failures[SelectorFailure.RAISED] == 1


@given(st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.booleans(), st.integers(0, 9), st.integers(0, 9))))
def test_rack_aware_selector_chooses_only_eligible_replicas(others: list[tuple[str | None, bool, int, int]]) -> None:
    replicas = [replica(1, "a")]
    for node, (rack, in_sync, start, end) in enumerate(others, 2):
        replicas.append(replica(node, rack, in_sync=in_sync, start=start, end=end))
    partition_view = view(*replicas)
    eligible = [near for near in replicas[1:] if near.rack == "b" and near.is_in_sync and near.holds(5)]
    assert chosen(partition_view, "b") in ([near.node_id for near in eligible] or [1])
    assert set(partition_view.candidates()) >= {replicas[0], *eligible}


def leader() -> PartitionLeader:
    partition_view = PartitionLeader(
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
    partition_view.follower_fetched(2, 10, 4, 2, 500)
    partition_view.follower_fetched(3, 3, 0, 3, 500)
    return partition_view


def redirected(
    client: ClientMetadata, offset: int, *, replica_id: int = -1, online: tuple[int, ...] = (1, 2, 3)
) -> int:
    return redirect_by_leader(
        GuardedSelector(SELECTORS["RackAwareReplicaSelector"]()),
        PARTITION,
        client,
        leader(),
        replica_id=replica_id,
        replicas=(1, 2, 3, 4),
        endpoints=lambda: {node: ENDPOINTS[node] for node in online},
        log_start_offset=0,
        fetch_offset=offset,
        now_ms=600,
    )


def test_leader_redirects_to_replica_with_fetch_offset() -> None:
    client = ClientMetadata("b", "c")
    assert redirected(client, 7) == 2  # replica 3 has not reached the offset
    assert redirected(client, 2) == 3  # replica 2 has deleted the offset
    assert redirected(client, 11) == -1
    assert redirected(client, 7, online=(1, 3)) == -1
    assert redirected(client, 7, replica_id=2) == -1
    assert redirected(client, 7, replica_id=-2) == -1
    assert redirected(ClientMetadata("", "c"), 7) == -1
    assert redirected(ClientMetadata("a", "c"), 7) == -1


def test_leader_selector_skips_view() -> None:
    assert not may_redirect(-1, ClientMetadata("b"), GuardedSelector(SELECTORS["LeaderSelector"]()))
    assert may_redirect(-1, ClientMetadata("b"), GuardedSelector(SELECTORS["RackAwareReplicaSelector"]()))


def test_preferred_read_replica_works_without_offsets() -> None:
    guard = GuardedSelector(SELECTORS["RackAwareReplicaSelector"]())
    partition_view = view_of(leader_id=1, replicas=(1, 2, 3, 4), isr=(1, 3), endpoints=ENDPOINTS)
    assert partition_view is not None
    assert partition_view.replicas[1][2:] == (None, None, None)
    assert preferred_read_replica(guard, PARTITION, ClientMetadata("b"), partition_view) == 3
    assert preferred_read_replica(guard, PARTITION, ClientMetadata("a"), partition_view) == -1
    gone = view_of(leader_id=-1, replicas=(1, 2), isr=(1,), endpoints=ENDPOINTS)
    assert preferred_read_replica(guard, PARTITION, ClientMetadata("b"), gone) == -1
