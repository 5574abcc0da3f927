"""A partition leader's numbers: by table, and against an oracle that computes them anew from everything it saw."""

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


def fetch(it: PartitionLeader, replica: int, offset: int, now_ms: int, epoch: int | None = None) -> bool:
    return it.follower_fetched(replica, offset, 0, EPOCHS[replica] if epoch is None else epoch, now_ms)


def isr_of(change: IsrChange | None) -> AbstractSet[int] | None:
    return change.isr if change is not None else None


def ask(it: PartitionLeader, *isr: int) -> IsrChange:
    change = IsrChange(tuple((member, EPOCHS[member]) for member in isr), it.leader_epoch, it.partition_epoch)
    it.isr_change_sent(change)
    return change


def test_high_watermark_is_the_least_log_end_of_the_isr() -> None:
    it = leader()
    assert not it.appended(10, 10_000)
    assert not fetch(it, 2, 10, 10_001)
    assert it.high_watermark == 0
    assert fetch(it, 3, 6, 10_002)
    assert it.high_watermark == 6
    assert fetch(it, 3, 10, 10_003)
    assert it.high_watermark == 10


def test_a_lone_replica_commits_by_itself() -> None:
    it = leader(replicas=(1,), isr=(1,), min_isr=2)
    assert it.min_insync_replicas == 1
    assert it.appended(3, 10_000)
    assert it.high_watermark == 3


def test_below_min_isr_nothing_is_committed() -> None:
    it = leader(isr=(1,))
    assert it.is_under_min_isr
    assert not it.appended(3, 10_000)
    assert it.high_watermark == 0
    assert it.isr_changed((1, 2), 8, 10_000) is False  # 2 has not fetched yet
    assert fetch(it, 2, 3, 10_001)
    assert it.high_watermark == 3


def test_old_news_of_the_isr_is_ignored() -> None:
    it = leader()
    assert not it.isr_changed((1,), 7, 10_000)
    assert it.isr == {1, 2, 3}


def test_a_pending_joiner_counts_until_it_is_certain_that_it_did_not_join() -> None:
    it = leader(isr=(1, 2))
    fetch(it, 2, 0, 10_000)
    fetch(it, 3, 0, 10_000)
    change = it.isr_to_join(3)
    assert change == IsrChange(((1, 101), (2, 102), (3, 103)), 5, 7)
    it.isr_change_sent(change)
    assert it.isr_to_join(3) is None
    it.appended(5, 20_000)
    fetch(it, 2, 5, 20_000)
    assert it.high_watermark == 0  # 3 may be in the ISR by now
    it.isr_change_refused()
    fetch(it, 2, 5, 40_000)
    assert it.high_watermark == 5


def test_a_caught_up_joiner_is_waited_for_unless_it_is_fenced() -> None:
    fenced: set[int] = set()
    it = leader(isr=(1, 2), fenced=fenced)
    fetch(it, 3, 0, 10_000)
    it.appended(5, 10_001)
    fetch(it, 2, 5, 10_002)
    assert it.high_watermark == 0
    fenced.add(3)
    assert it.advance(10_003)
    assert it.high_watermark == 5
    assert it.isr_to_join(3) is None


def test_joining_needs_the_high_watermark_and_the_start_of_the_epoch() -> None:
    it = leader(isr=(1, 2), end=8, high_watermark=4)
    assert not it.high_watermark_is_known
    fetch(it, 3, 3, 10_000)
    assert it.isr_to_join(3) is None
    fetch(it, 3, 5, 10_000)
    assert it.isr_to_join(3) is None  # above the high watermark, below the epoch's start
    fetch(it, 3, 8, 10_000)
    assert isr_of(it.isr_to_join(3)) == {1, 2, 3}


def test_a_registration_that_has_not_fetched_does_not_join_for_an_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have come back empty: what the older one had says nothing of it."""
    it = leader(isr=(1, 2))
    it.appended(5, 10_000)
    fetch(it, 3, 5, 10_001)
    before = it.isr_to_join(3)
    monkeypatch.setitem(EPOCHS, 3, 199)
    assert it.isr_to_join(3) is None
    assert before is not None
    assert (3, 103) in before.members, "what was asked for names the registration that fetched"
    assert fetch(it, 2, 5, 10_002), "nor is it waited for"
    fetch(it, 3, 5, 10_003)
    assert isr_of(it.isr_to_join(3)) == {1, 2, 3}


def test_an_older_registration_s_fetch_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    it = leader(end=10, high_watermark=4)
    fetch(it, 3, 4, 10_000)
    fetch(it, 2, 10, 10_000)
    monkeypatch.setitem(EPOCHS, 2, 110)
    fetch(it, 2, 4, 10_001)
    fetch(it, 2, 10, 10_002, epoch=102)  # waited here while the broker came back without its tail
    assert (it.followers[2].log_end_offset, it.followers[2].broker_epoch) == (4, 110)
    assert not fetch(it, 3, 10, 10_003)
    assert it.high_watermark == 4
    # A number that nobody registered shuts no registration out.
    fetch(it, 2, 5, 10_004, epoch=1 << 62)
    fetch(it, 2, 6, 10_005)
    assert (it.followers[2].log_end_offset, it.followers[2].broker_epoch) == (6, 110)


def test_laggards_leave_and_the_idle_do_not() -> None:
    it = leader()
    fetch(it, 2, 0, 10_000)
    fetch(it, 3, 0, 10_000)
    assert it.isr_without_laggards(99_000) is None  # at the log end, however long ago
    it.appended(4, 99_000)
    fetch(it, 2, 4, 99_100)
    assert isr_of(it.isr_without_laggards(99_200)) == {1, 2}
    ask(it, 1, 2)
    assert it.isr_without_laggards(99_300) is None


def test_a_follower_that_reaches_the_last_fetch_s_end_was_caught_up_then() -> None:
    it = leader()
    it.appended(10, 10_000)
    fetch(it, 2, 5, 10_000)
    it.appended(20, 10_500)
    fetch(it, 2, 10, 10_900)
    progress = it.followers[2]
    assert progress.last_caught_up_ms == 10_000
    assert progress.is_caught_up(20, 11_000, LAG_MS)
    assert not progress.is_caught_up(20, 11_001, LAG_MS)


def test_a_lower_min_isr_commits_what_waited() -> None:
    it = leader(isr=(1,), min_isr=2)
    it.appended(3, 10_000)
    assert it.replicas_changed((1, 2, 3), 1, 10_000)
    assert it.high_watermark == 3


def test_replicas_come_and_go() -> None:
    it = leader(isr=(1, 2))
    assert not it.replicas_changed((1, 2, 4), 2, 10_000)
    assert set(it.followers) == {2, 4}


class Oracle:
    """The definition of the high watermark, written down once more without any state but the history."""

    def __init__(self) -> None:
        self.ends = {2: -1, 3: -1}
        self.high_watermark = 0

    def step(self, it: PartitionLeader, now_ms: int) -> None:
        if len(it.isr) < 2:
            return
        counted = [it.log_end_offset]
        for replica in (2, 3):
            member = replica in it.isr or (it.pending is not None and replica in it.pending.isr)
            if member or it.followers[replica].is_caught_up(it.log_end_offset, now_ms, LAG_MS):
                counted.append(self.ends[replica])
        self.high_watermark = max(self.high_watermark, min(counted))


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 5)),
        st.tuples(st.just("fetch2"), st.integers(0, 5)),
        st.tuples(st.just("fetch3"), st.integers(0, 5)),
        st.tuples(st.just("wait"), st.integers(1, 2 * LAG_MS)),
        st.tuples(st.just("ask"), st.sampled_from([2, 3])),
        st.tuples(st.just("shrink"), st.just(0)),
        st.tuples(st.just("answer"), st.booleans()),
    ),
    max_size=60,
)


@given(EVENTS)
def test_high_watermark_equals_the_oracle_s_and_never_goes_back(events: list[tuple[str, int]]) -> None:
    it, oracle, now_ms, partition_epoch = leader(), Oracle(), 10_000, 7
    for kind, argument in events:
        before = it.high_watermark
        if kind == "append":
            it.appended(it.log_end_offset + argument, now_ms)
        elif kind.startswith("fetch"):
            replica = int(kind[-1])
            offset = min(max(oracle.ends[replica], 0) + argument, it.log_end_offset)
            oracle.ends[replica] = offset
            fetch(it, replica, offset, now_ms)
        elif kind == "wait":
            now_ms += argument
            continue
        elif kind == "ask":
            change = it.isr_to_join(argument)
            if change is not None:
                it.isr_change_sent(change)
        elif kind == "shrink":
            change = it.isr_without_laggards(now_ms)
            if change is not None:
                it.isr_change_sent(change)
        elif kind == "answer" and it.pending is not None:
            if argument:
                partition_epoch += 1
                it.isr_changed(it.pending.isr, partition_epoch, now_ms)
            else:
                it.isr_change_refused()
                continue  # what is committed is decided at the next event
        if kind in ("append", "fetch2", "fetch3", "answer"):
            oracle.step(it, now_ms)
        assert it.high_watermark == oracle.high_watermark
        assert before <= it.high_watermark <= it.log_end_offset
        assert (
            all(oracle.ends[r] >= it.high_watermark for r in it.isr - {1})
            or it.is_under_min_isr
            or not it.high_watermark
        )


def test_fetches_that_do_not_read_a_partition_count_while_the_follower_has_all_of_it() -> None:
    it, session = leader(), FollowerFetches(EPOCHS[2], 10_000)
    it.follower_fetched(2, 0, 0, EPOCHS[2], 10_000, session)
    it.follower_fetched(3, 0, 0, EPOCHS[3], 10_000)
    session.last_fetch_ms = 20_000
    it.appended(1, 20_500)
    assert isr_of(it.isr_without_laggards(20_600)) == {1, 2}, "3 has not fetched for long, 2 has"
    session.last_fetch_ms = 22_000
    it.appended(2, 22_000)
    assert isr_of(it.isr_without_laggards(22_000)) == {1}, "2 fetches on, and gets nowhere"


def test_fetches_do_not_speak_for_a_partition_that_left_the_session() -> None:
    it, session = leader(replicas=(1, 2), isr=(1, 2)), FollowerFetches(EPOCHS[2], 10_000)
    it.follower_fetched(2, 0, 0, EPOCHS[2], 10_000, session)
    session.last_fetch_ms = 12_000
    it.follower_left(2)
    session.last_fetch_ms = 20_000
    it.appended(1, 20_000)
    assert isr_of(it.isr_without_laggards(20_000)) == {1}
    assert isr_of(it.isr_without_laggards(12_000 + LAG_MS)) is None
    it.follower_left(9)
