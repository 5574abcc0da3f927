"""Responses of replicas to readers: by table, and exhaustively for small numbers."""

from __future__ import annotations

from itertools import product

import pytest

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.replica.follower import FollowerWatermarks
from kipmesh.core.replica.serving import (
    OffsetCase,
    check_fetch,
    check_list_offsets,
    compares_epochs,
    epoch_end_for,
    offset_case,
)
from kipmesh.messages import EpochEndOffset


# A follower with records 10..19 whose leader reported 15, and a follower whose leader is far ahead.
@pytest.mark.parametrize(
    ("offset", "end", "own", "leaders", "case", "code"),
    [
        (9, 20, 15, 15, OffsetCase.TOO_SMALL, 1),
        (10, 20, 15, 15, OffsetCase.READABLE, 0),
        (14, 20, 15, 15, OffsetCase.READABLE, 0),
        (15, 20, 15, 15, OffsetCase.UNCOMMITTED, 0),
        (20, 20, 15, 15, OffsetCase.UNCOMMITTED, 0),
        (21, 20, 15, 15, OffsetCase.TOO_LARGE, 1),
        (20, 20, 20, 20, OffsetCase.CAUGHT_UP, 0),
        (20, 20, 20, 30, OffsetCase.UNCOMMITTED, 0),
        (21, 20, 20, 30, OffsetCase.UNAVAILABLE, 78),
        (30, 20, 20, 30, OffsetCase.UNAVAILABLE, 78),
        (31, 20, 20, 30, OffsetCase.TOO_LARGE, 1),
    ],
)
def test_fetch_offset_cases_map_to_error_codes(
    offset: int, end: int, own: int, leaders: int, case: OffsetCase, code: int
) -> None:
    found = offset_case(
        offset, log_start_offset=10, log_end_offset=end, high_watermark=own, leader_high_watermark=leaders
    )
    assert found is case
    assert found.error_code == code
    assert found.is_counted == (case not in (OffsetCase.READABLE, OffsetCase.CAUGHT_UP))


def test_fetch_offset_cases_match_rules_exhaustively() -> None:
    for start, own, end, leaders, offset in product(range(4), repeat=5):
        if not start <= own <= end or leaders < own:
            continue
        case = offset_case(
            offset, log_start_offset=start, log_end_offset=end, high_watermark=own, leader_high_watermark=leaders
        )
        assert (case is OffsetCase.READABLE) == (start <= offset < own)
        assert (case is OffsetCase.TOO_SMALL) == (offset < start)
        assert (case is OffsetCase.TOO_LARGE) == (offset > end and offset > leaders)
        assert (case is OffsetCase.UNAVAILABLE) == (end < offset <= leaders)
        waits = (own <= offset <= end) or (offset == end < leaders)
        assert (case in (OffsetCase.UNCOMMITTED, OffsetCase.CAUGHT_UP)) == (waits and offset >= start)


@pytest.mark.parametrize(
    ("is_leader", "replica_id", "names_rack", "code"),
    [
        (True, -1, False, 0),
        (True, 5, True, 0),
        (True, -2, False, 0),
        (False, -1, True, 0),
        (False, -2, True, 0),
        (False, -1, False, 6),
        (False, -2, False, 6),
        (False, 5, True, 6),
    ],
)
def test_follower_serves_only_consumers_with_rack(
    is_leader: bool, replica_id: int, names_rack: bool, code: int
) -> None:
    assert check_fetch(is_leader=is_leader, replica_id=replica_id, names_rack=names_rack) == code


def test_follower_lists_offsets_only_for_follower_readers() -> None:
    assert check_list_offsets(is_leader=False, replica_id=-2) == 0
    assert check_list_offsets(is_leader=False, replica_id=-1) == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert check_list_offsets(is_leader=False, replica_id=7) == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert check_list_offsets(is_leader=True, replica_id=-1) == 0


def test_follower_compares_epochs_only_within_its_log() -> None:
    def compares(offset: int, is_leader: bool = False, epoch: int = 3) -> bool:
        return compares_epochs(offset, epoch, is_leader=is_leader, log_start_offset=5, log_end_offset=8)

    assert [compares(offset) for offset in (4, 5, 6, 8, 9)] == [False, False, True, True, False]
    assert all(compares(offset, is_leader=True) for offset in (0, 5, 9))
    assert not compares(6, epoch=-1)


def epoch_end(
    replica_id: int, requested: int, found: tuple[int, int], high_watermark: int, known: bool
) -> tuple[int, int]:
    end = epoch_end_for(
        replica_id,
        requested,
        EpochEndOffset(*found),
        leader_epoch=5,
        high_watermark=high_watermark,
        high_watermark_is_known=known,
    )
    return end.epoch, end.end_offset


def test_epoch_end_for_consumers_is_capped_by_high_watermark() -> None:
    assert epoch_end(-1, 5, (5, 20), 15, True) == (5, 15)
    assert epoch_end(-1, 4, (4, 12), 15, True) == (4, 12)
    assert epoch_end(7, 5, (5, 20), 15, True) == (5, 20)
    assert epoch_end(7, 5, (5, 20), 9, False) == (5, 20)


@pytest.mark.parametrize("requested", [5, 6])
def test_new_leader_withholds_latest_epoch_end(requested: int) -> None:
    with pytest.raises(KafkaError) as raised:
        epoch_end(-1, requested, (5, 20), 9, False)
    assert raised.value.code is ErrorCode.OFFSET_NOT_AVAILABLE


def test_new_leader_withholds_earlier_epoch_end_above_high_watermark() -> None:
    # Epoch 4 ended at 12, fully committed, but this leader's high watermark is 9. 9 would look like a truncation.
    with pytest.raises(KafkaError) as raised:
        epoch_end(-1, 4, (4, 12), 9, False)
    assert raised.value.code is ErrorCode.OFFSET_NOT_AVAILABLE
    assert epoch_end(-1, 3, (3, 9), 9, False) == (3, 9)


def test_follower_tracks_own_and_leader_high_watermark() -> None:
    marks = FollowerWatermarks.start(3, 10)
    assert marks[1:] == (10, 10)
    marks = marks.observe_leader(30, 20)
    assert marks[1:] == (20, 30)
    assert marks.observe_leader(25, 20) is marks  # monotonic within a leader epoch
    assert marks.observe_leader(30, 28)[1:] == (28, 30)
    assert marks.truncated(24) is marks
    assert marks.truncated(15)[1:] == (15, 15)  # truncated below the high watermark
    assert FollowerWatermarks.start(4, marks.own)[1:] == (20, 20)
    assert marks.restarted(50)[1:] == (50, 50)
