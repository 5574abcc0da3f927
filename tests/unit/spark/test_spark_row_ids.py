"""Names of written rows: equal in a retried task, distinct within one run."""

from __future__ import annotations

import itertools
import random

from kipmesh.spark.row_ids import BATCH_HEADER, ROW_HEADER, Row, RowNames, record_id, row_hash, without_names


def row(number: int) -> Row:
    return ("t", b"k%d" % (number % 7), b"v%d" % number, None, None, [])


def names(rows: list[Row], *, task: int = 3, parts: int = 1) -> list[bytes]:
    """Name the rows in `parts` calls of about equal size."""
    row_names = RowNames(task)
    edges = [len(rows) * i // parts for i in range(parts + 1)]
    return [name for low, high in itertools.pairwise(edges) for name in row_names.take(rows[low:high])]


def test_row_names_depend_on_content_and_not_on_order() -> None:
    rng = random.Random(5)
    rows = [row(rng.randrange(40)) for _ in range(2000)]
    first = names(rows, parts=9)
    assert len(set(first)) == len(rows)
    shuffled = rng.sample(rows, len(rows))
    assert sorted(names(shuffled, parts=31)) == sorted(first)
    by_row = {(r[2], name) for r, name in zip(rows, first, strict=True)}
    pairs = zip(shuffled, names(shuffled), strict=True)
    assert {(r[2], name) for r, name in pairs} == by_row


def test_equal_rows_are_numbered_across_calls() -> None:
    row_names = RowNames(0)
    endings = [name.rsplit(b"-", 1)[1] for _ in range(3) for name in row_names.take([row(1), row(2), row(1)])]
    assert endings == [b"0", b"0", b"1", b"2", b"1", b"3", b"4", b"2", b"5"]
    assert row_names.take([]) == []


def test_row_names_keep_few_arrays() -> None:
    row_names = RowNames(0)
    for i in range(200):
        row_names.take([row(i * 10 + j) for j in range(10)])
    assert len(row_names._seen) <= 10
    assert sum(map(len, row_names._seen)) == 2000


def test_row_names_differ_between_tasks() -> None:
    assert names([row(1)], task=1) != names([row(1)], task=2)


def test_row_hash_depends_on_each_field() -> None:
    base: Row = ("t", b"k", b"v", 0, 0, [("h", b"x")])
    others: list[Row] = [
        ("u", b"k", b"v", 0, 0, [("h", b"x")]),
        ("t", None, b"v", 0, 0, [("h", b"x")]),
        ("t", b"", b"v", 0, 0, [("h", b"x")]),
        ("t", b"kv", b"", 0, 0, [("h", b"x")]),
        ("t", b"k", None, 0, 0, [("h", b"x")]),
        ("t", b"k", b"v", None, 0, [("h", b"x")]),
        ("t", b"k", b"v", 0, 1, [("h", b"x")]),
        ("t", b"k", b"v", 0, 0, [("h", None)]),
        ("t", b"k", b"v", 0, 0, []),
    ]
    hashes = [row_hash(candidate) for candidate in (base, *others)]
    assert len(set(hashes)) == len(hashes)
    assert row_hash(base) == row_hash(("t", b"k", b"v", 0, 0, (("h", b"x"),)))
    assert f"{row_hash(base):016x}" == "e76b2b3418176775"  # stored in topics: must not change


def test_record_id_without_row_name_is_the_position() -> None:
    assert record_id("t", 1, 7, []) == "t-1-7"
    assert record_id("t", 1, 7, [(BATCH_HEADER, b"q/1"), ("other", b"x")]) == "t-1-7"
    named = [("own", None), (BATCH_HEADER, b"q/1"), (ROW_HEADER, b"0-ab-0")]
    assert record_id("t", 1, 7, named) == record_id("t", 2, 9, named) == "t/q/1/0-ab-0"
    assert without_names(named) == [("own", None)]
