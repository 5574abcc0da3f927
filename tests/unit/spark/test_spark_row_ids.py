"""Names of rows that are written: equal for a task that is run again, different within one run."""

from __future__ import annotations

import itertools
import random

from kipmesh.spark.row_ids import BATCH_HEADER, ROW_HEADER, Row, RowNames, record_id, row_hash, without_names


def row(number: int) -> Row:
    return ("t", b"k%d" % (number % 7), b"v%d" % number, None, None, [])


def names(rows: list[Row], *, task: int = 3, parts: int = 1) -> list[bytes]:
    """In calls of about equal size."""
    of_task = RowNames(task)
    edges = [len(rows) * i // parts for i in range(parts + 1)]
    return [name for low, high in itertools.pairwise(edges) for name in of_task.take(rows[low:high])]


def test_rows_are_named_by_what_is_in_them_whatever_their_order() -> None:
    rng = random.Random(5)
    rows = [row(rng.randrange(40)) for _ in range(2000)]
    first = names(rows, parts=9)
    assert len(set(first)) == len(rows)
    shuffled = rng.sample(rows, len(rows))
    assert sorted(names(shuffled, parts=31)) == sorted(first)
    by_row = {(r[2], name) for r, name in zip(rows, first, strict=True)}
    again = zip(shuffled, names(shuffled), strict=True)
    assert {(r[2], name) for r, name in again} == by_row


def test_equal_rows_are_counted_over_calls() -> None:
    of_task = RowNames(0)
    endings = [name.rsplit(b"-", 1)[1] for _ in range(3) for name in of_task.take([row(1), row(2), row(1)])]
    assert endings == [b"0", b"0", b"1", b"2", b"1", b"3", b"4", b"2", b"5"]
    assert of_task.take([]) == []


def test_what_is_kept_is_few_arrays() -> None:
    of_task = RowNames(0)
    for i in range(200):
        of_task.take([row(i * 10 + j) for j in range(10)])
    assert len(of_task._seen) <= 10
    assert sum(map(len, of_task._seen)) == 2000


def test_other_tasks_have_other_names() -> None:
    assert names([row(1)], task=1) != names([row(1)], task=2)


def test_everything_in_a_row_counts() -> None:
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
    hashes = [row_hash(each) for each in (base, *others)]
    assert len(set(hashes)) == len(hashes)
    assert row_hash(base) == row_hash(("t", b"k", b"v", 0, 0, (("h", b"x"),)))
    assert f"{row_hash(base):016x}" == "e76b2b3418176775"  # it is written to topics: it must not change


def test_a_record_without_a_name_is_known_by_its_place() -> None:
    assert record_id("t", 1, 7, []) == "t-1-7"
    assert record_id("t", 1, 7, [(BATCH_HEADER, b"q/1"), ("other", b"x")]) == "t-1-7"
    named = [("own", None), (BATCH_HEADER, b"q/1"), (ROW_HEADER, b"0-ab-0")]
    assert record_id("t", 1, 7, named) == record_id("t", 2, 9, named) == "t/q/1/0-ab-0"
    assert without_names(named) == [("own", None)]
