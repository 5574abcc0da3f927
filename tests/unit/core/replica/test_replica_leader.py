"""State of a partition leader: by case, and against an oracle that recomputes it from the history."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kipmesh.core.replica.leader import FollowerFetches, IsrChange, PartitionLeader

LAG_MS = 1000
EPOCHS = {1: 101, 2: 102, 3: 103, 4: 104}


def leader(
    *,
    replicas: tuple[int, ...] = (1, 2, 3),
    isr: tuple[int, ...] = (1, 2, 3),
    end: int = 0,
    high_watermark: int = 0,
    min_isr: int = 2,
    fenced: frozenset[int] | set[int] = frozenset(),
    now_ms: int = 10_000,
) -> PartitionLeader:
    return PartitionLeader(
        broker_id=1,
        leader_epoch=5,
        partition_epoch=7,
        replicas=replicas,
        isr=frozenset(isr),
        log_end_offset=end,
        high_watermark=high_watermark,
        min_insync_replicas=min_isr,
        lag_max_ms=LAG_MS,
        eligible_epoch=lambda broker: -1 if broker in fenced else EPOCHS[broker],
        now_ms=now_ms,
    )


def fetch(state: PartitionLeader, replica: int, offset: int, now_ms: int, epoch: int | None = None) -> bool:
    return state.follower_fetched(replica, offset, 0, EPOCHS[replica] if epoch is None else epoch, now_ms)


def isr_of(change: IsrChange | None) -> AbstractSet[int] | None:
    return change.isr if change is not None else None


def send_isr_change(state: PartitionLeader, *isr: int) -> IsrChange:
    change = IsrChange(tuple((member, EPOCHS[member]) for member in isr), state.leader_epoch, state.partition_epoch)
    state.isr_change_sent(change)
    return change


def test_high_watermark_is_minimum_log_end_of_isr() -> None:
    state = leader()
    assert not state.appended(10, 10_000)
    assert not fetch(state, 2, 10, 10_001)
    assert state.high_watermark == 0
    assert fetch(state, 3, 6, 10_002)
    assert state.high_watermark == 6
    assert fetch(state, 3, 10, 10_003)
    assert state.high_watermark == 10


def test_single_replica_commits_immediately() -> None:
    state = leader(replicas=(1,), isr=(1,), min_isr=2)
    assert state.min_insync_replicas == 1
    assert state.appended(3, 10_000)
    assert state.high_watermark == 3


def test_high_watermark_stays_below_min_isr() -> None:
    state = leader(isr=(1,))
    assert state.is_under_min_isr
    assert not state.appended(3, 10_000)
    assert state.high_watermark == 0
    assert state.isr_changed((1, 2), 8, 10_000) is False  # replica 2 has not fetched
    assert fetch(state, 2, 3, 10_001)
    assert state.high_watermark == 3


def test_stale_isr_change_is_ignored() -> None:
    state = leader()
    assert not state.isr_changed((1,), 7, 10_000)
    assert state.isr == {1, 2, 3}


def test_pending_isr_member_counts_until_change_is_refused() -> None:
    state = leader(isr=(1, 2))
    fetch(state, 2, 0, 10_000)
    fetch(state, 3, 0, 10_000)
    change = state.isr_to_join(3)
    assert change == IsrChange(((1, 101), (2, 102), (3, 103)), 5, 7)
    state.isr_change_sent(change)
    assert state.isr_to_join(3) is None
    state.appended(5, 20_000)
    fetch(state, 2, 5, 20_000)
    assert state.high_watermark == 0  # replica 3 may have joined the ISR
    state.isr_change_refused()
    fetch(state, 2, 5, 40_000)
    assert state.high_watermark == 5


def test_high_watermark_waits_for_caught_up_unfenced_replica() -> None:
    fenced: set[int] = set()
    state = leader(isr=(1, 2), fenced=fenced)
    fetch(state, 3, 0, 10_000)
    state.appended(5, 10_001)
    fetch(state, 2, 5, 10_002)
    assert state.high_watermark == 0
    fenced.add(3)
    assert state.advance(10_003)
    assert state.high_watermark == 5
    assert state.isr_to_join(3) is None


def test_isr_expansion_needs_high_watermark_and_epoch_start() -> None:
    state = leader(isr=(1, 2), end=8, high_watermark=4)
    assert not state.high_watermark_is_known
    fetch(state, 3, 3, 10_000)
    assert state.isr_to_join(3) is None
    fetch(state, 3, 5, 10_000)
    assert state.isr_to_join(3) is None  # above the high watermark, below the epoch start
    fetch(state, 3, 8, 10_000)
    assert isr_of(state.isr_to_join(3)) == {1, 2, 3}


def test_new_broker_epoch_joins_isr_only_after_its_own_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new registration may have an empty log. Progress of the previous registration does not count."""
    state = leader(isr=(1, 2))
    state.appended(5, 10_000)
    fetch(state, 3, 5, 10_001)
    before = state.isr_to_join(3)
    monkeypatch.setitem(EPOCHS, 3, 199)
    assert state.isr_to_join(3) is None
    assert before is not None
    assert (3, 103) in before.members, "the change names the broker epoch that fetched"
    assert fetch(state, 2, 5, 10_002), "the high watermark does not wait for it"
    fetch(state, 3, 5, 10_003)
    assert isr_of(state.isr_to_join(3)) == {1, 2, 3}


def test_fetch_with_older_broker_epoch_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    state = leader(end=10, high_watermark=4)
    fetch(state, 3, 4, 10_000)
    fetch(state, 2, 10, 10_000)
    monkeypatch.setitem(EPOCHS, 2, 110)
    fetch(state, 2, 4, 10_001)
    fetch(state, 2, 10, 10_002, epoch=102)  # The fetch waited while the broker restarted with a shorter log.
    assert (state.followers[2].log_end_offset, state.followers[2].broker_epoch) == (4, 110)
    assert not fetch(state, 3, 10, 10_003)
    assert state.high_watermark == 4
    # An unregistered future broker epoch does not block the registered one.
    fetch(state, 2, 5, 10_004, epoch=1 << 62)
    fetch(state, 2, 6, 10_005)
    assert (state.followers[2].log_end_offset, state.followers[2].broker_epoch) == (6, 110)


def test_isr_shrinks_by_lagging_but_not_idle_replicas() -> None:
    state = leader()
    fetch(state, 2, 0, 10_000)
    fetch(state, 3, 0, 10_000)
    assert state.isr_without_laggards(99_000) is None  # at the log end, regardless of time
    state.appended(4, 99_000)
    fetch(state, 2, 4, 99_100)
    assert isr_of(state.isr_without_laggards(99_200)) == {1, 2}
    send_isr_change(state, 1, 2)
    assert state.isr_without_laggards(99_300) is None


def test_follower_is_caught_up_at_time_of_previous_fetch() -> None:
    state = leader()
    state.appended(10, 10_000)
    fetch(state, 2, 5, 10_000)
    state.appended(20, 10_500)
    fetch(state, 2, 10, 10_900)
    progress = state.followers[2]
    assert progress.last_caught_up_ms == 10_000
    assert progress.is_caught_up(20, 11_000, LAG_MS)
    assert not progress.is_caught_up(20, 11_001, LAG_MS)


def test_lowering_min_isr_commits_pending_records() -> None:
    state = leader(isr=(1,), min_isr=2)
    state.appended(3, 10_000)
    assert state.replicas_changed((1, 2, 3), 1, 10_000)
    assert state.high_watermark == 3


def test_replica_changes_update_followers() -> None:
    state = leader(isr=(1, 2))
    assert not state.replicas_changed((1, 2, 4), 2, 10_000)
    assert set(state.followers) == {2, 4}


class Oracle:
    """Computes the high watermark by its definition, from the fetch history."""

    def __init__(self) -> None:
        self.ends = {2: -1, 3: -1}
        self.high_watermark = 0

    def step(self, state: PartitionLeader, now_ms: int) -> None:
        if len(state.isr) < 2:
            return
        counted = [state.log_end_offset]
        for replica in (2, 3):
            member = replica in state.isr or (state.pending is not None and replica in state.pending.isr)
            if member or state.followers[replica].is_caught_up(state.log_end_offset, now_ms, LAG_MS):
                counted.append(self.ends[replica])
        self.high_watermark = max(self.high_watermark, min(counted))


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 5)),
        st.tuples(st.just("fetch2"), st.integers(0, 5)),
        st.tuples(st.just("fetch3"), st.integers(0, 5)),
        st.tuples(st.just("wait"), st.integers(1, 2 * LAG_MS)),
        st.tuples(st.just("expand"), st.sampled_from([2, 3])),
        st.tuples(st.just("shrink"), st.just(0)),
        st.tuples(st.just("complete"), st.booleans()),
    ),
    max_size=60,
)


@given(EVENTS)
def test_high_watermark_matches_oracle_and_is_monotonic(events: list[tuple[str, int]]) -> None:
    state, oracle, now_ms, partition_epoch = leader(), Oracle(), 10_000, 7
    for kind, argument in events:
        before = state.high_watermark
        if kind == "append":
            state.appended(state.log_end_offset + argument, now_ms)
        elif kind.startswith("fetch"):
            replica = int(kind[-1])
            offset = min(max(oracle.ends[replica], 0) + argument, state.log_end_offset)
            oracle.ends[replica] = offset
            fetch(state, replica, offset, now_ms)
        elif kind == "wait":
            now_ms += argument
            continue
        elif kind == "expand":
            change = state.isr_to_join(argument)
            if change is not None:
                state.isr_change_sent(change)
        elif kind == "shrink":
            change = state.isr_without_laggards(now_ms)
            if change is not None:
                state.isr_change_sent(change)
        elif kind == "complete" and state.pending is not None:
            if argument:
                partition_epoch += 1
                state.isr_changed(state.pending.isr, partition_epoch, now_ms)
            else:
                state.isr_change_refused()
                continue  # The next event recomputes the high watermark.
        if kind in ("append", "fetch2", "fetch3", "complete"):
            oracle.step(state, now_ms)
        assert state.high_watermark == oracle.high_watermark
        assert before <= state.high_watermark <= state.log_end_offset
        assert (
            all(oracle.ends[r] >= state.high_watermark for r in state.isr - {1})
            or state.is_under_min_isr
            or not state.high_watermark
        )


def test_session_fetch_keeps_caught_up_replica_in_isr() -> None:
    state, session = leader(), FollowerFetches(EPOCHS[2], 10_000)
    state.follower_fetched(2, 0, 0, EPOCHS[2], 10_000, session)
    state.follower_fetched(3, 0, 0, EPOCHS[3], 10_000)
    session.last_fetch_ms = 20_000
    state.appended(1, 20_500)
    assert isr_of(state.isr_without_laggards(20_600)) == {1, 2}, "only replica 2 has fetched recently"
    session.last_fetch_ms = 22_000
    state.appended(2, 22_000)
    assert isr_of(state.isr_without_laggards(22_000)) == {1}, "replica 2 fetches without progress"


def test_session_fetch_does_not_count_for_removed_partition() -> None:
    state, session = leader(replicas=(1, 2), isr=(1, 2)), FollowerFetches(EPOCHS[2], 10_000)
    state.follower_fetched(2, 0, 0, EPOCHS[2], 10_000, session)
    session.last_fetch_ms = 12_000
    state.follower_left(2)
    session.last_fetch_ms = 20_000
    state.appended(1, 20_000)
    assert isr_of(state.isr_without_laggards(20_000)) == {1}
    assert isr_of(state.isr_without_laggards(12_000 + LAG_MS)) is None
    state.follower_left(9)
