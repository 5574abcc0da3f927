from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kipmesh.core.metadata.placement import Placement
from kipmesh.core.metadata.states import BrokerState


def broker(broker_id: int, rack: str | None, is_leader_role: bool, fenced: bool = False) -> BrokerState:
    return BrokerState(broker_id, 0, bytes(16), {}, rack, fenced, False, is_leader_role)


def placement_of(brokers: list[BrokerState], factor: int) -> Placement:
    return Placement(brokers, dict.fromkeys([broker_.broker_id for broker_ in brokers], 0), factor)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[BrokerState], dict[int, int], int, int]:
    count = draw(st.integers(1, 12))
    racks = draw(st.integers(0, 5))
    brokers = [
        broker(
            number,
            f"rack-{draw(st.integers(0, racks - 1))}" if racks else None,
            draw(st.booleans()),
            draw(st.integers(0, 9)) == 0 and number > 0,
        )
        for number in range(count)
    ]
    replica_counts = {number: draw(st.integers(0, 20)) for number in range(count)}
    return brokers, replica_counts, draw(st.integers(1, count)), draw(st.integers(1, 40))


@given(clusters())
def test_placement_spreads_replicas_racks_and_leaders(
    cluster: tuple[list[BrokerState], dict[int, int], int, int],
) -> None:
    brokers, replica_counts, factor, partitions = cluster
    placement = Placement(brokers, replica_counts, factor)
    placed = [placement.place() for _ in range(partitions)]
    by_id = {state.broker_id: state for state in brokers}
    unfenced = [state for state in brokers if not state.fenced]
    leaders = {state.broker_id for state in unfenced if state.is_leader_role} or {state.broker_id for state in unfenced}
    enough = len(unfenced) >= factor
    racks = Counter(state.rack for state in (unfenced if enough else brokers))
    for replicas in placed:
        assert len(replicas) == factor == len(set(replicas))
        assert replicas[0] in leaders
        assert not (enough and any(by_id[replica].fenced for replica in replicas))
        used = Counter(by_id[replica].rack for replica in replicas)
        if factor <= len(racks):
            assert max(used.values()) == 1
        for rack, size in racks.items():  # Replica counts of racks with capacity differ by one at most.
            for other, taken in used.items():
                assert used[rack] >= taken - 1 or used[rack] == size or rack == other
    preferred = Counter(replicas[0] for replicas in placed)
    assert max(preferred.values()) - min(preferred[leader] for leader in leaders) <= 1
    again = Placement(brokers, replica_counts, factor)
    assert [again.place() for _ in range(partitions)] == placed


@pytest.mark.parametrize("leaders", [0, 1, 2, 3])
@pytest.mark.parametrize("per_rack", [1, 2, 5])
def test_placement_balances_equal_racks(per_rack: int, leaders: int) -> None:
    brokers = [broker(n, f"rack-{n % 3}", n < leaders) for n in range(3 * per_rack)]
    placement = placement_of(brokers, 3)
    placed = [placement.place() for _ in range(300)]
    load = Counter(replica for replicas in placed for replica in replicas)
    for role in (range(leaders), range(leaders, 3 * per_rack)):
        loads = [load[replica] for replica in role]
        if leaders in (0, 3) and loads:
            assert max(loads) - min(loads) <= 2 * bool(leaders) + (not leaders)
    # Partitions of one leader fail over to several brokers.
    heirs = Counter(replicas[1] for replicas in placed if replicas[0] == 0)
    assert len(heirs) >= 2


def test_placement_of_new_topics_uses_all_brokers() -> None:
    counts = dict.fromkeys(range(3), 0)
    for _ in range(9):
        (placed,) = Placement([broker(n, None, False) for n in counts], counts, 1).place()
        counts[placed] += 1
    assert set(counts.values()) == {3}


def test_placement_without_enough_unfenced_brokers_is_refused() -> None:
    single = broker(1, None, True)
    for brokers, factor in (([], 1), ([single], 2), ([single], 0), ([single._replace(fenced=True)], 1)):
        with pytest.raises(ValueError, match="replicas on"):
            placement_of(brokers, factor)
