"""The checker finds each injected anomaly of a consumer group and has no findings in clean histories."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kipmesh_chaos.history import (
    Assigned,
    Commit,
    CommitOk,
    CommitUnknown,
    Event,
    Kind,
    OffsetsFetched,
    Read,
    ReaderKind,
    from_line,
    to_line,
)
from kipmesh_chaos.history_checker import check
from tests.unit.chaos.groups_of_tests import GROUP, GROUP_SPOILS, Spoil, group_history


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), partitions=st.integers(1, 4), steps=st.integers(0, 400))
def test_clean_group_history_has_no_findings(seed: int, partitions: int, steps: int) -> None:
    events = group_history(seed, partitions=partitions, steps=steps)
    verdict = check(events)
    assert verdict.findings == ()
    assert verdict.figures.commits == sum(isinstance(event, CommitOk) for event in events)
    assert verdict.figures.generations == max(event.generation for event in events if isinstance(event, Assigned))
    members = [event for event in events if isinstance(event, Read) and event.kind is ReaderKind.MEMBER]
    distinct = {(event.partition, offset) for event in members for offset, _ in event.records}
    assert verdict.figures.read_again == sum(len(event.records) for event in members) - len(distinct)


@pytest.mark.parametrize(("spoil", "kind"), GROUP_SPOILS, ids=[spoil.__name__ for spoil, _ in GROUP_SPOILS])
def test_group_checker_names_each_anomaly(spoil: Spoil, kind: Kind) -> None:
    for seed in range(8):
        events = group_history(seed)
        assert check(events).findings == ()
        spoil(events, random.Random(seed))
        assert kind in {finding.kind for finding in check(events).findings}, f"seed {seed}"


def test_group_events_round_trip_through_lines() -> None:
    for event in group_history(1, steps=100):
        read_back = from_line(to_line(event))
        assert json.loads(to_line(read_back)) == json.loads(to_line(event))
        assert type(read_back) is type(event)


def find(*events: Event) -> list[tuple[Kind, str]]:
    """Return findings on one partition whose first ten records a member has read."""
    begin = [
        Assigned(0, GROUP, "a", 1, [0], [0]),
        Read(0, "a", ReaderKind.MEMBER, 0, [(offset, str(offset)) for offset in range(10)]),
    ]
    kinds = set(Kind) - {Kind.PHANTOM, Kind.INCOMPLETE}
    return [(finding.kind, finding.text) for finding in check([*begin, *events]).findings if finding.kind in kinds]


def commit(number: int, begin: float, end: float | None, offset: int, generation: int = 1) -> list[Event]:
    outcome = CommitUnknown(begin + 0.1, number, "lost") if end is None else CommitOk(end, number)
    return [Commit(begin, number, GROUP, "a", generation, [(0, offset)]), outcome]


def fetch_offset(since: float, t: float, offset: int) -> Event:
    return OffsetsFetched(t, since, GROUP, "observer", [(0, offset)])


@pytest.mark.parametrize("offset", [4, 6])
def test_failed_commit_may_be_applied_late_in_its_generation(offset: int) -> None:
    events = [*commit(1, 1, None, 4), *commit(2, 2, 3, 6)]
    assert find(*events, fetch_offset(4, 5, offset)) == []


def test_failed_commit_is_not_applied_after_next_assignment() -> None:
    late = [*commit(1, 1, None, 4), *commit(2, 2, 3, 6), Assigned(3.5, GROUP, "b", 2, [0], [0])]
    assert find(*late, fetch_offset(4, 5, 4)) == []  # applied before the assignment, and no commit since
    newer = [Commit(3.6, 3, GROUP, "b", 2, [(0, 7)]), CommitOk(3.7, 3)]
    assert find(*late, *newer, fetch_offset(4, 5, 7)) == []
    ((kind, text),) = find(*late, *newer, fetch_offset(4, 5, 4))
    assert kind is Kind.COMMIT_WENT_BACK
    assert "which later commits had replaced" in text


def test_concurrent_commits_and_fetches_may_be_applied_in_any_order() -> None:
    events = [*commit(1, 1, 2, 4), *commit(2, 3, 5, 6)]
    assert find(*events, fetch_offset(4, 6, 4)) == find(*events, fetch_offset(4, 6, 6)) == []
    ((kind, _),) = find(*events, fetch_offset(5.5, 6, 4))
    assert kind is Kind.COMMIT_WENT_BACK


def test_late_commit_is_accepted_only_if_sent_before_next_generation() -> None:
    later = Assigned(3, GROUP, "b", 2, [0], [0])
    invoke, done = commit(1, 2, 4, 5)
    assert find(invoke, later, done) == []
    invoke, done = commit(1, 3.5, 4, 5)
    ((kind, _),) = find(later, invoke, done)
    assert kind is Kind.COMMIT_STALE


def test_partition_may_change_its_owner_between_generations() -> None:
    assert find(Assigned(1, GROUP, "b", 2, [0], [0]), Assigned(2, GROUP, "a", 3, [0], [])) == []


def test_member_starts_at_or_before_committed_offset() -> None:
    committed = [*commit(1, 1, 2, 5), Assigned(3, GROUP, "b", 2, [0], [0])]
    fetched = OffsetsFetched(4, 3.5, GROUP, "b", [(0, 5)])
    for first in (4, 5):
        read = Read(5, "b", ReaderKind.MEMBER, 0, [(first, str(first))])
        assert find(*committed, fetched, read) == []
    read = Read(5, "b", ReaderKind.MEMBER, 0, [(6, "6")])
    assert find(*committed, fetched, read) == [(Kind.GROUP_SKIPPED, "b starts at offset 6, but the group committed 5")]
