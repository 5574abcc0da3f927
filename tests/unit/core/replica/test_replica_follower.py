"""Truncation on divergence: a follower with any history becomes a prefix of the leader's log."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kipmesh.core.replica.follower import follower_high_watermark, has_diverged, truncation_offset
from kipmesh.messages import EpochEndOffset


class ListLog:
    """A log as a list of (epoch, writer) per record. Computes the epoch cache on each call."""

    def __init__(self, records: list[tuple[int, int]]) -> None:
        self.records = records

    @property
    def end(self) -> int:
        return len(self.records)

    @property
    def latest_epoch(self) -> int:
        return self.records[-1][0] if self.records else -1

    def end_offset_for_epoch(self, epoch: int) -> EpochEndOffset:
        epochs = [e for e, _ in self.records]
        if not epochs or epoch > epochs[-1]:
            return EpochEndOffset(-1, -1)
        if epoch == epochs[-1]:
            return EpochEndOffset(epoch, self.end)
        below = [e for e in epochs if e <= epoch]
        first_above = next(i for i, e in enumerate(epochs) if e > epoch)
        return EpochEndOffset(below[-1] if below else epoch, first_above)


def epochs(draw: st.DrawFn, start: int, writer: int, above: int) -> list[tuple[int, int]]:
    records, epoch = [], above
    for _ in range(draw(st.integers(0, 4))):
        epoch += draw(st.integers(1, 3))
        records += [(epoch, writer)] * draw(st.integers(1, 4))
    return records


@st.composite
def histories(draw: st.DrawFn) -> tuple[ListLog, ListLog]:
    """Draw two logs with a common prefix and separate suffixes. Each epoch has one leader."""
    common = epochs(draw, 0, 0, 0)
    top = common[-1][0] if common else 0
    leader, follower = list(common), list(common)
    for epoch, writer in draw(
        st.lists(st.tuples(st.integers(1, 8), st.sampled_from([1, 2])), max_size=6, unique_by=lambda t: t[0])
    ):
        (leader if writer == 1 else follower).extend([(top + epoch, writer)] * draw(st.integers(1, 3)))
    leader.sort(key=lambda r: r[0])
    follower.sort(key=lambda r: r[0])
    newest = max([top, *(e for e, _ in leader + follower)]) + 1
    leader.append((newest, 1))  # The leader has the latest epoch and a record in it.
    return ListLog(leader), ListLog(follower)


@given(histories())
def test_truncation_makes_follower_a_prefix_of_leader(pair: tuple[ListLog, ListLog]) -> None:
    leader, follower = pair
    before, rounds = len(follower.records), 0
    while follower.end:
        at_leader = leader.end_offset_for_epoch(follower.latest_epoch)
        if not has_diverged(follower.end, follower.latest_epoch, at_leader):
            break
        local = follower.end_offset_for_epoch(at_leader.epoch)
        offset = truncation_offset(at_leader, local, follower.end)
        assert offset < follower.end, "each truncation removes records"
        del follower.records[offset:]
        rounds += 1
        assert rounds <= before
    assert follower.records == leader.records[: follower.end]


@given(histories())
def test_truncation_keeps_common_prefix(pair: tuple[ListLog, ListLog]) -> None:
    leader, follower = pair
    same = 0
    while same < min(leader.end, follower.end) and leader.records[same] == follower.records[same]:
        same += 1
    while follower.end:
        at_leader = leader.end_offset_for_epoch(follower.latest_epoch)
        if not has_diverged(follower.end, follower.latest_epoch, at_leader):
            break
        del follower.records[
            truncation_offset(at_leader, follower.end_offset_for_epoch(at_leader.epoch), follower.end) :
        ]
    assert follower.end >= same


def test_truncation_without_common_epoch_uses_leader_offset() -> None:
    assert truncation_offset(EpochEndOffset(-1, 7), EpochEndOffset(3, 10), 10) == 7
    assert truncation_offset(EpochEndOffset(-1, -1), EpochEndOffset(-1, -1), 10) == 0
    assert truncation_offset(EpochEndOffset(4, 6), EpochEndOffset(-1, -1), 10) == 6


def test_follower_high_watermark_is_monotonic_and_bounded_by_log_end() -> None:
    assert follower_high_watermark(10, 7, 3) == 7
    assert follower_high_watermark(5, 7, 3) == 5
    assert follower_high_watermark(2, 7, 3) == 3
