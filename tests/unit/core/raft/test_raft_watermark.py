"""The high watermark, compared with an oracle that counts voters."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kipmesh.core.raft.leadership import Leadership, majority_offset
from tests.unit.core.raft.raft_support import peer


def oracle(ends: list[int]) -> int:
    """Return the largest offset that a majority of voters reached, by trying all offsets."""
    return max(offset for offset in range(-1, max(ends) + 1) if sum(end >= offset for end in ends) > len(ends) / 2)


@given(st.lists(st.integers(-1, 30), min_size=1, max_size=9))
def test_majority_offset_matches_oracle(ends: list[int]) -> None:
    assert majority_offset(ends) == oracle(ends)


@settings(max_examples=200)
@given(
    st.sampled_from([1, 3, 5]),
    st.integers(0, 12),
    st.integers(-1, 20),
    st.lists(st.tuples(st.integers(2, 9), st.integers(0, 20)), max_size=20),
)
def test_committed_offset_counts_voters_in_current_epoch(
    voters: int, epoch_start: int, durable_end: int, fetches: list[tuple[int, int]]
) -> None:
    leadership = Leadership(peer(1, tuple(range(1, voters + 1))), epoch_start, {1}, 0)
    ends = dict.fromkeys(range(2, voters + 1), -1)
    for replica_id, offset in fetches:
        replica = leadership.replica(replica_id, 0)
        assert replica is not None
        replica.record_fetch(offset, 20, 0)
        if replica_id in ends:
            ends[replica_id] = offset
    expected = oracle([durable_end, *ends.values()])
    assert leadership.committed_offset(durable_end) == (expected if expected > epoch_start else -1)


@given(st.lists(st.sampled_from([2, 3, 4, 5, 9]), max_size=12))
def test_leader_keeps_quorum_while_majority_fetches(fetches: list[int]) -> None:
    leadership = Leadership(peer(1, (1, 2, 3, 4, 5)), 0, {1}, 0)
    since_ms, seen = 0, set()
    for number, replica_id in enumerate(fetches, 1):
        leadership.mark_alive(replica_id, number * 100)
        seen |= {replica_id} & {2, 3, 4, 5}
        if len(seen) >= 2:
            since_ms, seen = number * 100, set()
    timeout_ms = leadership.config.check_quorum_timeout_ms
    assert not leadership.has_lost_quorum(since_ms + timeout_ms - 1)
    assert leadership.has_lost_quorum(since_ms + timeout_ms)
