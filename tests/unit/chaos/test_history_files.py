"""History files: events round-trip, and malformed lines are reported with their numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kipmesh_chaos.history import (
    Controller,
    Event,
    Failed,
    HistoryError,
    Led,
    Note,
    NotRecovered,
    from_line,
    read_history,
    to_line,
    write_history,
)
from kipmesh_chaos.history_checker import check
from tests.unit.chaos.histories_of_tests import clean_history, with_fault

OTHER_EVENTS: list[Event] = [
    Failed(1.5, 7, "MESSAGE_TOO_LARGE"),
    Led(2, 0, 1, 3, [1, 2]),
    Controller(2, 1001, 4),
    Note(3, 'a "note"\nof two lines'),
    NotRecovered(4, "late"),
]


def test_history_file_round_trips_events(tmp_path: Path) -> None:
    events = [*with_fault(clean_history(1), 0.1, 0.2, halts=True), *OTHER_EVENTS]
    file = tmp_path / "history.jsonl"
    write_history(file, events)
    read_back = list(read_history(file))
    assert [json.loads(to_line(event)) for event in read_back] == [json.loads(to_line(event)) for event in events]
    assert [type(event) for event in read_back] == [type(event) for event in events]
    assert check(read_back).counts == check(events).counts == {"not recovered": 1, "incomplete history": 1}
    assert check(read_back).findings == check([from_line(to_line(event)) for event in events]).findings


def test_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    write_history(file, clean_history(1))
    whole = list(read_history(file))
    file.write_text(file.read_text()[:-5])
    assert list(read_history(file)) == whole[:-1]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "7",
        "{}",
        '{"event":"other","t":1}',
        '{"event":"ok","t":1,"operation":1}',
        '{"event":"ok","t":"1","operation":1,"offset":1}',
        '{"event":"ok","t":1,"operation":1,"offset":1,"more":1}',
        '{"event":"ok","t":1,"operation":"1","offset":1}',
        '{"event":"phase","t":1,"phase":"lunch"}',
        '{"event":"read","t":1,"reader":"a","kind":"consumer","partition":0,"records":[[1]]}',
        '{"event":"begin","t":1,"name":"a","seed":1,"partitions":1,"limits":{"more":1}}',
        "[" * 100_000,
    ],
)
def test_malformed_line_is_reported_with_its_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "history.jsonl"
    file.write_text(f"{to_line(OTHER_EVENTS[0])}\n{line}\n")
    with pytest.raises(HistoryError, match=r"history\.jsonl:2: "):
        list(read_history(file))


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"\x80\x81", "the line is not UTF-8"),
        (b"duration_s: 5", "the line is not JSON"),
        (b'{"event":["ok"]}', "unknown event ['ok']"),
        (b'{"event":"ok","t":1}', "event 'ok': operation is missing; offset is missing"),
        (b'{"event":"ok","t":1,"operation":1,"offset":1,"more":1}', "event 'ok': more is not a known key"),
        (b'{"event":"begin","t":1,"name":"a","seed":1,"partitions":1,"limits":3}', "event 'begin': limits: "),
    ],
)
def test_error_states_fault_of_malformed_line(tmp_path: Path, line: bytes, error: str) -> None:
    file = tmp_path / "history.jsonl"
    file.write_bytes(line + b"\n")
    with pytest.raises(HistoryError) as caught:
        list(read_history(file))
    assert str(caught.value).startswith(f"{file}:1: {error}")
