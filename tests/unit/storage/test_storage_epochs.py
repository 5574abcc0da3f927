"""Semantics of Kafka's LeaderEpochFileCache, in tables."""

from __future__ import annotations

import pytest

from kipmesh.messages import EpochEndOffset
from kipmesh.storage.log.epochs import LeaderEpochs

ENTRIES = ((2, 10), (4, 20), (7, 35))


@pytest.mark.parametrize(
    ("assigned", "expected"),
    [
        ([(0, 0)], ((0, 0),)),
        ([(0, 0), (0, 5)], ((0, 0),)),
        ([(0, 5), (0, 3)], ((0, 3),)),
        ([(0, 0), (2, 10), (4, 20)], ((0, 0), (2, 10), (4, 20))),
        ([(1, 10), (2, 10)], ((2, 10),)),
        ([(1, 10), (3, 20), (2, 15)], ((1, 10), (2, 15))),
        ([(1, 10), (3, 20), (5, 8)], ((5, 8),)),
        ([(1, 10), (3, 20), (3, 15)], ((1, 10), (3, 15))),
    ],
)
def test_assign(assigned: list[tuple[int, int]], expected: tuple[tuple[int, int], ...]) -> None:
    epochs = LeaderEpochs()
    for epoch, offset in assigned:
        epochs.assign(epoch, offset)
    assert epochs.entries == expected
    assert epochs.latest_epoch == expected[-1][0]


@pytest.mark.parametrize("entry", [(-1, 0), (0, -1)])
def test_negative_epoch_or_offset_is_rejected(entry: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="leader epoch"):
        LeaderEpochs().assign(*entry)


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [(-1, (-1, -1)), (0, (0, 10)), (2, (2, 20)), (3, (2, 20)), (4, (4, 35)), (6, (4, 35)), (7, (7, 50)), (8, (-1, -1))],
)
def test_end_offset_for(epoch: int, expected: tuple[int, int]) -> None:
    assert LeaderEpochs(ENTRIES).end_offset_for(epoch, 50) == EpochEndOffset(*expected)
    assert LeaderEpochs().end_offset_for(epoch, 50) == EpochEndOffset(-1, -1)


@pytest.mark.parametrize(
    ("end", "expected"), [(50, ENTRIES), (36, ENTRIES), (35, ENTRIES[:2]), (11, ENTRIES[:1]), (10, ()), (0, ())]
)
def test_truncate_from_end(end: int, expected: tuple[tuple[int, int], ...]) -> None:
    epochs = LeaderEpochs(ENTRIES)
    epochs.truncate_from_end(end)
    assert epochs.entries == expected
    assert epochs.is_dirty == (expected != ENTRIES)


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (9, ENTRIES),
        (10, ENTRIES),
        (11, ((2, 11), (4, 20), (7, 35))),
        (20, ((4, 20), (7, 35))),
        (34, ((4, 34), (7, 35))),
        (40, ((7, 40),)),
    ],
)
def test_truncate_from_start(start: int, expected: tuple[tuple[int, int], ...]) -> None:
    epochs = LeaderEpochs(ENTRIES)
    epochs.truncate_from_start(start)
    assert epochs.entries == expected


@pytest.mark.parametrize(("offset", "epoch"), [(9, -1), (10, 2), (19, 2), (20, 4), (35, 7), (1000, 7)])
def test_epoch_of(offset: int, epoch: int) -> None:
    assert LeaderEpochs(ENTRIES).epoch_of(offset) == epoch
