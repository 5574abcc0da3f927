"""The benchmark's simulated part, small."""

from __future__ import annotations

from bench import metadata


def test_steady_state_as_a_table_and_a_picture() -> None:
    found = metadata.steady(100, 1)
    lines = metadata._steady_text(found, 100, 1)
    assert lines[-2].startswith("| `paced` |")
    assert lines[-1].startswith("| `literal` |")
    drawn = metadata._draw(found, 1)
    assert drawn.startswith("<svg")
    assert drawn.count("<path") == 4


def test_a_day_of_each_pattern() -> None:
    assert len(metadata.day(200, 1)) == 5
