"""The checker finds each anomaly in a history that has it, and nothing in one that has none."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kipmesh_chaos.history import (
    Begin,
    Dump,
    End,
    Event,
    Failed,
    Invoke,
    Kind,
    Limits,
    NotRecovered,
    Ok,
    PhaseBegan,
    Read,
    ReaderKind,
    Unknown,
)
from kipmesh_chaos.history_checker import FINDINGS_MAX, check
from tests.unit.chaos.groups_of_tests import GROUP_SPOILS
from tests.unit.chaos.histories_of_tests import clean_history, indexes, with_fault

Spoil = Callable[[list[Event], random.Random], None]


def reads(events: list[Event], kind: ReaderKind, at_least: int = 1) -> list[tuple[int, Read]]:
    found = []
    for index in indexes(events, Read):
        event = events[index]
        assert isinstance(event, Read)
        if event.kind is kind and len(event.records) >= at_least:
            found.append((index, event))
    return found


def a_read(events: list[Event], source: random.Random, kind: ReaderKind, at_least: int = 1) -> tuple[int, Read]:
    return source.choice(reads(events, kind, at_least))


def with_values(event: Read, changed: dict[int, str]) -> Read:
    return event._replace(records=[(offset, changed.get(offset, value)) for offset, value in event.records])


def replace_dumps(events: list[Event], replica: int, change: Callable[[Dump], Dump]) -> None:
    for index in indexes(events, Dump):
        event = events[index]
        assert isinstance(event, Dump)
        if event.replica == replica:
            events[index] = change(event)


def lose_the_end(events: list[Event], source: random.Random) -> None:
    """An acknowledged write that no replica has in the end, and that nobody read."""
    partition, offset = _last_acknowledged(events)
    for index in indexes(events, Read):
        event = events[index]
        assert isinstance(event, Read)
        if event.partition == partition:
            kept = [(place, value) for place, value in event.records if place < offset]
            events[index] = event._replace(records=kept, high_watermark=min(event.high_watermark, offset))
    for index in indexes(events, End):
        event = events[index]
        assert isinstance(event, End)
        if event.partition == partition:
            events[index] = event._replace(high_watermark=offset)
    for index in indexes(events, Dump):
        event = events[index]
        assert isinstance(event, Dump)
        if event.partition == partition:
            kept = [(place, value) for place, value in event.records if place < offset]
            events[index] = event._replace(
                records=kept, batches=[one for one in event.batches if one[0] < offset], log_end=offset
            )


def _last_acknowledged(events: list[Event]) -> tuple[int, int]:
    where = {event.operation: event.partition for event in events if isinstance(event, Invoke)}
    last = [event for event in events if isinstance(event, Ok)][-1]
    return where[last.operation], last.offset


def overwrite(events: list[Event], source: random.Random) -> None:
    """An acknowledged write's offset has another record in the final read."""
    partition, offset = _last_acknowledged(events)
    for index, event in reads(events, ReaderKind.FINAL):
        if event.partition == partition:
            events[index] = with_values(event, {offset: "other"})


def phantom_in_final(events: list[Event], source: random.Random) -> None:
    index, event = a_read(events, source, ReaderKind.FINAL, 1)
    events[index] = with_values(event, {source.choice(event.records)[0]: "nobody's"})


def phantom_at_replica(events: list[Event], source: random.Random) -> None:
    index, event = a_read(events, source, ReaderKind.REPLICA, 1)
    events[index] = with_values(event, {source.choice(event.records)[0]: "nobody's"})


def phantom_of_other_partition(events: list[Event], source: random.Random) -> None:
    index, event = a_read(events, source, ReaderKind.CONSUMER, 1)
    value = source.choice([one.value for one in events if isinstance(one, Invoke) and one.partition != event.partition])
    events[index] = with_values(event, {source.choice(event.records)[0]: value})


def failed_write_appears(events: list[Event], source: random.Random) -> None:
    read = {value for _, event in reads(events, ReaderKind.FINAL) for _, value in event.records}
    for index in indexes(events, Unknown):
        event = events[index]
        assert isinstance(event, Unknown)
        if any(one.operation == event.operation and one.value in read for one in events if isinstance(one, Invoke)):
            events[index] = Failed(event.t, event.operation, "MESSAGE_TOO_LARGE")
            return
    raise AssertionError("no unknown write appeared")


def two_values(events: list[Event], source: random.Random) -> None:
    """A consumer saw a record of this partition at an offset that has another one."""
    index, event = a_read(events, source, ReaderKind.CONSUMER, 1)
    offset, value = source.choice(event.records)
    others = [one.value for one in events if isinstance(one, Invoke) and one.partition == event.partition]
    events[index] = with_values(event, {offset: source.choice([one for one in others if one != value])})


def reorder(events: list[Event], source: random.Random) -> None:
    """Two writes of one producer, the second begun after the first was acknowledged, swap their places."""
    begun = {one.operation: one for one in events if isinstance(one, Invoke)}
    done: dict[tuple[str, int], list[int]] = {}
    for index in indexes(events, Ok):
        event = events[index]
        assert isinstance(event, Ok)
        invoke = begun[event.operation]
        done.setdefault((invoke.producer, invoke.partition), []).append(index)
    first, second = source.choice([places[-2:] for places in done.values() if len(places) > 1])
    one, other = events[first], events[second]
    assert isinstance(one, Ok)
    assert isinstance(other, Ok)
    events[first], events[second] = one._replace(offset=other.offset), other._replace(offset=one.offset)


def skip(events: list[Event], source: random.Random) -> None:
    index, event = a_read(events, source, ReaderKind.CONSUMER, 3)
    records = list(event.records)
    del records[1]
    events[index] = event._replace(records=records)


def go_back(events: list[Event], source: random.Random) -> None:
    index, event = a_read(events, source, ReaderKind.CONSUMER, 1)
    events.insert(index + 1, event)


def watermark_back(events: list[Event], source: random.Random) -> None:
    index, event = a_read(events, source, ReaderKind.CONSUMER, 1)
    events.insert(index + 1, event._replace(records=[], high_watermark=event.high_watermark - 1))


def watermark_back_at_replica(events: list[Event], source: random.Random) -> None:
    index, event = a_read(events, source, ReaderKind.REPLICA, 1)
    events.insert(index + 1, event._replace(records=[], high_watermark=event.high_watermark - 1))


def above_watermark(events: list[Event], source: random.Random) -> None:
    index, event = a_read(events, source, ReaderKind.REPLICA, 1)
    events[index] = event._replace(high_watermark=event.records[-1][0], reader="another probe")


def replica_has_other_value(events: list[Event], source: random.Random) -> None:
    value = next(event.value for event in events if isinstance(event, Invoke))
    replace_dumps(events, 2, lambda dump: dump._replace(records=[(offset, value) for offset, _ in dump.records]))


def replica_has_other_epochs(events: list[Event], source: random.Random) -> None:
    replace_dumps(events, 3, lambda dump: dump._replace(batches=[(*one[:3], one[3] + 1) for one in dump.batches]))


def replica_is_short(events: list[Event], source: random.Random) -> None:
    replace_dumps(
        events, 2, lambda dump: dump._replace(records=dump.records[:-1], batches=dump.batches[:-1], log_end=1)
    )


def replica_has_no_log(events: list[Event], source: random.Random) -> None:
    events[:] = [event for event in events if not (isinstance(event, Dump) and event.replica == 1)]


def stalls(events: list[Event], source: random.Random) -> None:
    """Ten seconds without anything, in the middle."""
    for index in range(len(events) // 2, len(events)):
        events[index] = events[index]._replace(t=events[index].t + 10)


def consumer_stops(events: list[Event], source: random.Random) -> None:
    half = len(events) // 2
    events[half:] = [event for event in events[half:] if not (isinstance(event, Read) and "rack-b" in event.reader)]


def no_final_read(events: list[Event], source: random.Random) -> None:
    events[:] = [event for event in events if not (isinstance(event, Read) and event.kind is ReaderKind.FINAL)]


def no_end(events: list[Event], source: random.Random) -> None:
    events[:] = [event for event in events if not isinstance(event, PhaseBegan) or event.phase != "end"]


def final_has_a_hole(events: list[Event], source: random.Random) -> None:
    index, event = a_read(events, source, ReaderKind.FINAL, 3)
    events[index] = event._replace(records=event.records[1:])


def not_recovered(events: list[Event], source: random.Random) -> None:
    events.insert(-1, NotRecovered(1, "broker 2 is not in sync after 30 s"))


def no_beginning(events: list[Event], source: random.Random) -> None:
    del events[0]


def outcome_twice(events: list[Event], source: random.Random) -> None:
    index = source.choice(indexes(events, Ok))
    events.insert(index, events[index])


def promise_more_than_is_kept(events: list[Event], source: random.Random) -> None:
    """The producers were idempotent, it says, and a retry was written again all the same."""
    begin, ok = events[0], events[source.choice(indexes(events, Ok))]
    assert isinstance(begin, Begin)
    assert isinstance(ok, Ok)
    events[0] = begin._replace(exactly_once=True)
    (invoke,) = [each for each in events if isinstance(each, Invoke) and each.operation == ok.operation]
    for index in indexes(events, Read):
        read = events[index]
        if isinstance(read, Read) and read.kind is ReaderKind.FINAL and read.partition == invoke.partition:
            events[index] = read._replace(records=[*read.records, (len(read.records), invoke.value)])


SPOILS: list[tuple[Spoil, Kind]] = [
    (promise_more_than_is_kept, Kind.DUPLICATE),
    (lose_the_end, Kind.LOST),
    (overwrite, Kind.LOST),
    (phantom_in_final, Kind.PHANTOM),
    (phantom_at_replica, Kind.PHANTOM),
    (phantom_of_other_partition, Kind.PHANTOM),
    (failed_write_appears, Kind.PHANTOM),
    (two_values, Kind.TWO_VALUES),
    (reorder, Kind.REORDERED),
    (skip, Kind.SKIPPED),
    (final_has_a_hole, Kind.SKIPPED),
    (go_back, Kind.WENT_BACK),
    (watermark_back, Kind.WATERMARK),
    (watermark_back_at_replica, Kind.WATERMARK),
    (above_watermark, Kind.ABOVE_WATERMARK),
    (replica_has_other_value, Kind.REPLICAS),
    (replica_has_other_epochs, Kind.REPLICAS),
    (replica_is_short, Kind.REPLICAS),
    (replica_has_no_log, Kind.INCOMPLETE),
    (stalls, Kind.NO_PROGRESS),
    (consumer_stops, Kind.NO_PROGRESS),
    (no_final_read, Kind.INCOMPLETE),
    (no_end, Kind.INCOMPLETE),
    (no_beginning, Kind.INCOMPLETE),
    (outcome_twice, Kind.INCOMPLETE),
    (not_recovered, Kind.NOT_RECOVERED),
]


@pytest.mark.parametrize(("spoil", "kind"), SPOILS, ids=[spoil.__name__ for spoil, _ in SPOILS])
def test_each_anomaly_is_found_and_named(spoil: Spoil, kind: Kind) -> None:
    for seed in range(8):
        events = clean_history(seed)
        spoil(events, random.Random(seed))
        verdict = check(events)
        assert not verdict.is_clean, f"seed {seed}"
        assert kind in {finding.kind for finding in verdict.findings}, f"seed {seed}: {verdict.findings}"


def test_every_kind_has_a_history() -> None:
    assert {kind for _, kind in [*SPOILS, *GROUP_SPOILS]} == set(Kind)


def test_what_is_lost_alone_is_nothing_else() -> None:
    events = clean_history(3)
    lose_the_end(events, random.Random(3))
    verdict = check(events)
    assert {finding.kind for finding in verdict.findings} <= {Kind.LOST, Kind.NO_PROGRESS}
    lost = next(finding for finding in verdict.findings if finding.kind is Kind.LOST)
    assert "has no record" in lost.text


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    partitions=st.integers(1, 4),
    producers=st.integers(1, 6),
    steps=st.integers(0, 250),
)
def test_clean_histories_pass(seed: int, partitions: int, producers: int, steps: int) -> None:
    events = clean_history(seed, partitions=partitions, producers=producers, steps=steps)
    begin = events[0]
    assert isinstance(begin, Begin)
    events[0] = begin._replace(limits=Limits())  # of many partitions one may wait long by chance
    verdict = check(events)
    assert verdict.findings == ()
    assert verdict.figures.invoked == len(indexes(events, Invoke))
    assert verdict.figures.acknowledged == len(indexes(events, Ok))


def test_repeats_are_counted_and_allowed() -> None:
    assert any(check(clean_history(seed)).figures.repeated for seed in range(5))


@pytest.mark.parametrize("seed", range(8))
def test_of_idempotent_producers_each_record_is_there_once_and_in_the_order_sent(seed: int) -> None:
    events = clean_history(seed, exactly_once=True)
    assert check(events).findings == ()
    spoiled = list(events)
    promise_more_than_is_kept(spoiled, random.Random(seed))
    found = [one for one in check(spoiled).findings if one.kind is Kind.DUPLICATE]
    assert len(found) == 1
    assert "again at" in found[0].text
    swapped = [_swapped(event) for event in events]
    assert Kind.REORDERED in {one.kind for one in check(swapped).findings}


def _swapped(event: Event) -> Event:
    """The final read with the first and the last record in each other's place."""
    if isinstance(event, Read) and event.kind is ReaderKind.FINAL and len(event.records) > 1:
        records = list(event.records)
        records[0], records[-1] = (records[0][0], records[-1][1]), (records[-1][0], records[0][1])
        return event._replace(records=records)
    return event


def test_a_halting_fault_excuses_a_stall_and_what_settles_after_it() -> None:
    events = clean_history(1)
    middle = events[len(events) // 2].t
    stalls(events, random.Random(1))
    assert not check(events).is_clean
    assert not check(with_fault(events, middle - 0.2, middle + 9, halts=False)).is_clean
    assert check(with_fault(events, middle - 0.2, middle + 9, halts=True)).is_clean
    assert not check(with_fault(events, middle - 0.2, middle + 3, halts=True)).is_clean
    verdict = check(with_fault(events, middle - 0.2, middle + 3, halts=True, settle_s=4))
    assert verdict.is_clean
    assert verdict.figures.faults == 1
    assert verdict.figures.longest_write_gap_s < 5


def test_findings_of_a_kind_are_limited_and_counted() -> None:
    events = clean_history(1)
    for index in indexes(events, Read):
        event = events[index]
        assert isinstance(event, Read)
        events[index] = with_values(event, {offset: "nobody's" for offset, _ in event.records})
    verdict = check(events)
    assert sum(finding.kind is Kind.PHANTOM for finding in verdict.findings) == FINDINGS_MAX
    assert verdict.counts[Kind.PHANTOM] > FINDINGS_MAX


def test_a_watermark_may_be_lower_in_another_leadership_or_session() -> None:
    events = clean_history(2)
    index, event = a_read(events, random.Random(2), ReaderKind.REPLICA, 1)
    events.insert(index + 1, event._replace(records=[], high_watermark=0, leader_epoch=7))
    events.insert(index + 2, event._replace(records=[], high_watermark=0, session=1))
    assert check(events).is_clean
