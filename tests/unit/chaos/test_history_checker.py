"""The checker finds each injected anomaly and has no findings in clean histories."""

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
    matches = []
    for index in indexes(events, Read):
        event = events[index]
        assert isinstance(event, Read)
        if event.kind is kind and len(event.records) >= at_least:
            matches.append((index, event))
    return matches


def random_read(events: list[Event], source: random.Random, kind: ReaderKind, at_least: int = 1) -> tuple[int, Read]:
    return source.choice(reads(events, kind, at_least))


def with_values(event: Read, changed: dict[int, str]) -> Read:
    return event._replace(records=[(offset, changed.get(offset, value)) for offset, value in event.records])


def replace_dumps(events: list[Event], replica: int, change: Callable[[Dump], Dump]) -> None:
    for index in indexes(events, Dump):
        event = events[index]
        assert isinstance(event, Dump)
        if event.replica == replica:
            events[index] = change(event)


def lose_last_acknowledged_write(events: list[Event], source: random.Random) -> None:
    """Remove the last acknowledged write from all reads and replicas."""
    partition, offset = _last_acknowledged(events)
    for index in indexes(events, Read):
        event = events[index]
        assert isinstance(event, Read)
        if event.partition == partition:
            kept = [(position, value) for position, value in event.records if position < offset]
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
            kept = [(position, value) for position, value in event.records if position < offset]
            events[index] = event._replace(
                records=kept, batches=[batch for batch in event.batches if batch[0] < offset], log_end=offset
            )


def _last_acknowledged(events: list[Event]) -> tuple[int, int]:
    partitions = {event.operation: event.partition for event in events if isinstance(event, Invoke)}
    last = [event for event in events if isinstance(event, Ok)][-1]
    return partitions[last.operation], last.offset


def overwrite(events: list[Event], source: random.Random) -> None:
    """Replace an acknowledged record in the final read."""
    partition, offset = _last_acknowledged(events)
    for index, event in reads(events, ReaderKind.FINAL):
        if event.partition == partition:
            events[index] = with_values(event, {offset: "other"})


def phantom_in_final_read(events: list[Event], source: random.Random) -> None:
    index, event = random_read(events, source, ReaderKind.FINAL, 1)
    events[index] = with_values(event, {source.choice(event.records)[0]: "unknown"})


def phantom_at_replica(events: list[Event], source: random.Random) -> None:
    index, event = random_read(events, source, ReaderKind.REPLICA, 1)
    events[index] = with_values(event, {source.choice(event.records)[0]: "unknown"})


def phantom_of_other_partition(events: list[Event], source: random.Random) -> None:
    index, event = random_read(events, source, ReaderKind.CONSUMER, 1)
    value = source.choice(
        [other.value for other in events if isinstance(other, Invoke) and other.partition != event.partition]
    )
    events[index] = with_values(event, {source.choice(event.records)[0]: value})


def failed_write_appears(events: list[Event], source: random.Random) -> None:
    read = {value for _, event in reads(events, ReaderKind.FINAL) for _, value in event.records}
    for index in indexes(events, Unknown):
        event = events[index]
        assert isinstance(event, Unknown)
        if any(
            invoke.operation == event.operation and invoke.value in read
            for invoke in events
            if isinstance(invoke, Invoke)
        ):
            events[index] = Failed(event.t, event.operation, "MESSAGE_TOO_LARGE")
            return
    raise AssertionError("no unknown write appeared")


def replace_consumed_record(events: list[Event], source: random.Random) -> None:
    """Replace a record that a consumer read by another record of the partition."""
    index, event = random_read(events, source, ReaderKind.CONSUMER, 1)
    offset, value = source.choice(event.records)
    others = [other.value for other in events if isinstance(other, Invoke) and other.partition == event.partition]
    events[index] = with_values(event, {offset: source.choice([other for other in others if other != value])})


def reorder(events: list[Event], source: random.Random) -> None:
    """Swap the offsets of two sequential writes of one producer."""
    invokes = {event.operation: event for event in events if isinstance(event, Invoke)}
    done: dict[tuple[str, int], list[int]] = {}
    for index in indexes(events, Ok):
        event = events[index]
        assert isinstance(event, Ok)
        invoke = invokes[event.operation]
        done.setdefault((invoke.producer, invoke.partition), []).append(index)
    first, second = source.choice(
        [indexes_of_producer[-2:] for indexes_of_producer in done.values() if len(indexes_of_producer) > 1]
    )
    earlier, later = events[first], events[second]
    assert isinstance(earlier, Ok)
    assert isinstance(later, Ok)
    events[first], events[second] = earlier._replace(offset=later.offset), later._replace(offset=earlier.offset)


def skip(events: list[Event], source: random.Random) -> None:
    index, event = random_read(events, source, ReaderKind.CONSUMER, 3)
    records = list(event.records)
    del records[1]
    events[index] = event._replace(records=records)


def go_back(events: list[Event], source: random.Random) -> None:
    index, event = random_read(events, source, ReaderKind.CONSUMER, 1)
    events.insert(index + 1, event)


def watermark_back(events: list[Event], source: random.Random) -> None:
    index, event = random_read(events, source, ReaderKind.CONSUMER, 1)
    events.insert(index + 1, event._replace(records=[], high_watermark=event.high_watermark - 1))


def watermark_back_at_replica(events: list[Event], source: random.Random) -> None:
    index, event = random_read(events, source, ReaderKind.REPLICA, 1)
    events.insert(index + 1, event._replace(records=[], high_watermark=event.high_watermark - 1))


def above_watermark(events: list[Event], source: random.Random) -> None:
    index, event = random_read(events, source, ReaderKind.REPLICA, 1)
    events[index] = event._replace(high_watermark=event.records[-1][0], reader="another probe")


def replica_has_other_value(events: list[Event], source: random.Random) -> None:
    value = next(event.value for event in events if isinstance(event, Invoke))
    replace_dumps(events, 2, lambda dump: dump._replace(records=[(offset, value) for offset, _ in dump.records]))


def replica_has_other_epochs(events: list[Event], source: random.Random) -> None:
    replace_dumps(events, 3, lambda dump: dump._replace(batches=[(*batch[:3], batch[3] + 1) for batch in dump.batches]))


def replica_is_short(events: list[Event], source: random.Random) -> None:
    replace_dumps(
        events, 2, lambda dump: dump._replace(records=dump.records[:-1], batches=dump.batches[:-1], log_end=1)
    )


def replica_has_no_log(events: list[Event], source: random.Random) -> None:
    events[:] = [event for event in events if not (isinstance(event, Dump) and event.replica == 1)]


def stall(events: list[Event], source: random.Random) -> None:
    """Insert ten seconds without events in the middle."""
    for index in range(len(events) // 2, len(events)):
        events[index] = events[index]._replace(t=events[index].t + 10)


def stop_consumer(events: list[Event], source: random.Random) -> None:
    half = len(events) // 2
    events[half:] = [event for event in events[half:] if not (isinstance(event, Read) and "rack-b" in event.reader)]


def remove_final_read(events: list[Event], source: random.Random) -> None:
    events[:] = [event for event in events if not (isinstance(event, Read) and event.kind is ReaderKind.FINAL)]


def remove_end(events: list[Event], source: random.Random) -> None:
    events[:] = [event for event in events if not isinstance(event, PhaseBegan) or event.phase != "end"]


def final_has_a_hole(events: list[Event], source: random.Random) -> None:
    index, event = random_read(events, source, ReaderKind.FINAL, 3)
    events[index] = event._replace(records=event.records[1:])


def not_recovered(events: list[Event], source: random.Random) -> None:
    events.insert(-1, NotRecovered(1, "broker 2 is not in sync after 30 s"))


def remove_begin(events: list[Event], source: random.Random) -> None:
    del events[0]


def outcome_twice(events: list[Event], source: random.Random) -> None:
    index = source.choice(indexes(events, Ok))
    events.insert(index, events[index])


def claim_exactly_once(events: list[Event], source: random.Random) -> None:
    """Claim idempotent producers although a retry was appended twice."""
    begin, ok = events[0], events[source.choice(indexes(events, Ok))]
    assert isinstance(begin, Begin)
    assert isinstance(ok, Ok)
    events[0] = begin._replace(exactly_once=True)
    (invoke,) = [event for event in events if isinstance(event, Invoke) and event.operation == ok.operation]
    for index in indexes(events, Read):
        read = events[index]
        if isinstance(read, Read) and read.kind is ReaderKind.FINAL and read.partition == invoke.partition:
            events[index] = read._replace(records=[*read.records, (len(read.records), invoke.value)])


SPOILS: list[tuple[Spoil, Kind]] = [
    (claim_exactly_once, Kind.DUPLICATE),
    (lose_last_acknowledged_write, Kind.LOST),
    (overwrite, Kind.LOST),
    (phantom_in_final_read, Kind.PHANTOM),
    (phantom_at_replica, Kind.PHANTOM),
    (phantom_of_other_partition, Kind.PHANTOM),
    (failed_write_appears, Kind.PHANTOM),
    (replace_consumed_record, Kind.TWO_VALUES),
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
    (stall, Kind.NO_PROGRESS),
    (stop_consumer, Kind.NO_PROGRESS),
    (remove_final_read, Kind.INCOMPLETE),
    (remove_end, Kind.INCOMPLETE),
    (remove_begin, Kind.INCOMPLETE),
    (outcome_twice, Kind.INCOMPLETE),
    (not_recovered, Kind.NOT_RECOVERED),
]


@pytest.mark.parametrize(("spoil", "kind"), SPOILS, ids=[spoil.__name__ for spoil, _ in SPOILS])
def test_checker_names_each_anomaly(spoil: Spoil, kind: Kind) -> None:
    for seed in range(8):
        events = clean_history(seed)
        spoil(events, random.Random(seed))
        verdict = check(events)
        assert not verdict.is_clean, f"seed {seed}"
        assert kind in {finding.kind for finding in verdict.findings}, f"seed {seed}: {verdict.findings}"


def test_each_kind_of_finding_has_a_history() -> None:
    assert {kind for _, kind in [*SPOILS, *GROUP_SPOILS]} == set(Kind)


def test_lost_write_causes_no_other_findings() -> None:
    events = clean_history(3)
    lose_last_acknowledged_write(events, random.Random(3))
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
def test_clean_history_has_no_findings(seed: int, partitions: int, producers: int, steps: int) -> None:
    events = clean_history(seed, partitions=partitions, producers=producers, steps=steps)
    begin = events[0]
    assert isinstance(begin, Begin)
    events[0] = begin._replace(limits=Limits())  # one of many partitions may exceed tight limits by chance
    verdict = check(events)
    assert verdict.findings == ()
    assert verdict.figures.invoked == len(indexes(events, Invoke))
    assert verdict.figures.acknowledged == len(indexes(events, Ok))


def test_checker_counts_and_allows_repeated_records() -> None:
    assert any(check(clean_history(seed)).figures.repeated for seed in range(5))


@pytest.mark.parametrize("seed", range(8))
def test_exactly_once_history_requires_each_record_once_and_in_order(seed: int) -> None:
    events = clean_history(seed, exactly_once=True)
    assert check(events).findings == ()
    spoiled = list(events)
    claim_exactly_once(spoiled, random.Random(seed))
    matches = [finding for finding in check(spoiled).findings if finding.kind is Kind.DUPLICATE]
    assert len(matches) == 1
    assert "again at" in matches[0].text
    swapped = [_swapped(event) for event in events]
    assert Kind.REORDERED in {finding.kind for finding in check(swapped).findings}


def _swapped(event: Event) -> Event:
    """Swap the first and the last record of the final read."""
    if isinstance(event, Read) and event.kind is ReaderKind.FINAL and len(event.records) > 1:
        records = list(event.records)
        records[0], records[-1] = (records[0][0], records[-1][1]), (records[-1][0], records[0][1])
        return event._replace(records=records)
    return event


def test_halting_fault_excuses_stall_until_it_settles() -> None:
    events = clean_history(1)
    middle = events[len(events) // 2].t
    stall(events, random.Random(1))
    assert not check(events).is_clean
    assert not check(with_fault(events, middle - 0.2, middle + 9, halts=False)).is_clean
    assert check(with_fault(events, middle - 0.2, middle + 9, halts=True)).is_clean
    assert not check(with_fault(events, middle - 0.2, middle + 3, halts=True)).is_clean
    verdict = check(with_fault(events, middle - 0.2, middle + 3, halts=True, settle_s=4))
    assert verdict.is_clean
    assert verdict.figures.faults == 1
    assert verdict.figures.longest_write_gap_s < 5


def test_findings_per_kind_are_limited_but_all_are_counted() -> None:
    events = clean_history(1)
    for index in indexes(events, Read):
        event = events[index]
        assert isinstance(event, Read)
        events[index] = with_values(event, {offset: "unknown" for offset, _ in event.records})
    verdict = check(events)
    assert sum(finding.kind is Kind.PHANTOM for finding in verdict.findings) == FINDINGS_MAX
    assert verdict.counts[Kind.PHANTOM] > FINDINGS_MAX


def test_watermark_may_decrease_with_new_leader_epoch_or_session() -> None:
    events = clean_history(2)
    index, event = random_read(events, random.Random(2), ReaderKind.REPLICA, 1)
    events.insert(index + 1, event._replace(records=[], high_watermark=0, leader_epoch=7))
    events.insert(index + 2, event._replace(records=[], high_watermark=0, session=1))
    assert check(events).is_clean
