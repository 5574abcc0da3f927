"""Checks and failure summaries of `bench.spark_kills`."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from bench.spark_kills import Load, check_files, gist
from bench.spark_query import FILES, Place

WRITTEN = {number: (number % 2, number // 2) for number in range(6)}


def row(number: int, offset: int | None = None) -> tuple[int, int, bytes]:
    partition, position = WRITTEN[number]
    return partition, position if offset is None else offset, b"%d abc" % number


def write_files(tmp_path: Path, *files: list[tuple[int, int, bytes]], committed: int) -> Place:
    place = Place("nowhere:1", "source", "sink", tmp_path)
    log = place.parquet / "_spark_metadata"
    log.mkdir(parents=True)
    for index, rows in enumerate(files):
        names = dict(zip(("partition", "offset", "value"), zip(*rows, strict=True), strict=True))
        parquet.write_table(
            pa.table({name: list(column) for name, column in names.items()}), place.parquet / f"{index}"
        )
        if index < committed:
            entry = json.dumps({"path": f"file://{place.parquet / str(index)}", "action": "add"})
            (log / f"{index}").write_text(f"v1\n{entry}\n")
    return place


@pytest.fixture
def load() -> Load:
    load = Load("nowhere:1", "source")
    load.written = dict(WRITTEN)
    return load


def test_file_check_passes_complete_files_and_ignores_uncommitted_ones(tmp_path: Path, load: Load) -> None:
    place = write_files(tmp_path, [row(0), row(1), row(2)], [row(3), row(4), row(5)], [row(0)], committed=2)
    assert check_files(place, load) == []


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([row(n) for n in range(5)], "((1, 2), 5) is missing (1 in total)"),
        ([row(n) for n in (0, 1, 2, 3, 3, 4, 5)], "((1, 1), 3) is repeated or unexpected (1 in total)"),
        ([row(n) for n in range(5)] + [row(5, offset=7)], "((1, 7), 5) is repeated or unexpected (1 in total)"),
    ],
)
def test_file_check_names_missing_and_repeated_rows(
    tmp_path: Path, load: Load, rows: list[tuple[int, int, bytes]], text: str
) -> None:
    problems = check_files(write_files(tmp_path, rows, committed=1), load)
    assert f"files: {text}" in problems


def test_file_check_reads_compacted_log_of_committed_files(tmp_path: Path, load: Load) -> None:
    place = write_files(tmp_path, [row(0), row(1), row(2)], [row(3), row(4), row(5)], committed=2)
    log = place.parquet / "_spark_metadata"
    entries = [line for name in ("0", "1") for line in (log / name).read_text().splitlines()[1:]]
    (log / "1.compact").write_text("\n".join(["v1", *entries]) + "\n")
    assert check_files(place, load) == []


def test_committed_batches_are_counted_by_commit_files(tmp_path: Path) -> None:
    place = Place("nowhere:1", "source", "sink", tmp_path)
    assert place.committed(FILES) == 0
    commits = place.checkpoint(FILES) / "commits"
    commits.mkdir(parents=True)
    for name in ("0", "1", ".1.crc", "tmp"):
        (commits / name).touch()
    assert place.committed(FILES) == 2


def test_summary_of_failure_begins_with_exceptions() -> None:
    stack = "".join(f"\tat org.example.Class.method(Class.scala:{line})\n" for line in range(200))
    first = "java.lang.IllegalStateException: Illegal size 5 of collection, expected 6"
    report = gist(f"starting\n{first}\n{stack}Caused by: java.io.IOException: no\n{stack}the end\n")
    lines = report.splitlines()
    assert lines[:2] == [first, "Caused by: java.io.IOException: no"]
    assert lines[-1] == "the end"
    assert len(report) < 2500


def test_summary_of_failure_has_first_and_last_exceptions() -> None:
    lines = gist("".join(f"SomeError: {number}\n" for number in range(1000)) + "x" * 2000).splitlines()
    assert lines[0] == "SomeError: 0"
    assert lines[10] == "... 980 more"
    assert lines[-2] == "SomeError: 999"


def test_summary_of_short_log_is_the_log() -> None:
    assert gist("all of it\n") == "all of it\n"
    assert gist("") == ""
