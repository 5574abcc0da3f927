"""What a partition's reader does about each answer, by table (392-08, 392-10, 392-13 to 392-17)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kipmesh.client.consumer.rules import values as c
from kipmesh.client.consumer.rules.reader import STALLS_MAX, PartitionReader
from kipmesh.client.consumer.rules.states import (
    FROM_ANYWHERE,
    TRANSITIONS,
    Cause,
    IllegalTransitionError,
    State,
    diagram,
    next_state,
)
from kipmesh.core.errors import ErrorCode
from kipmesh.messages import EpochEndOffset, PartitionData

E = ErrorCode
NEWS = c.PartitionView(1, 5, (1, 2, 3), (1, 2, 3))
MAX_AGE_MS = 60_000


class Driver:
    """A reader at offset 10 after records of epoch 5, sent to follower 2."""

    def __init__(self, *, near: bool = True, policy: int | None = -2, epoch: int = 5, **config: Any) -> None:
        self.now_ms = 1000
        limits = {"has_rack": True, "metadata_max_age_ms": MAX_AGE_MS, **config}
        self.reader = PartitionReader(c.ReaderConfig(policy, **limits), lambda attempts: 100 * attempts)
        self.effects: list[c.Effect] = []
        self.reader.metadata(NEWS, self.now_ms)
        self.reader.seek(5)
        if near:
            self.fetched(preferred_read_replica=2)
        if epoch >= 0:
            self.fetched(spans=[c.EpochSpan(5, 10, epoch)], high_watermark=10)
            self.reader.delivered(10)
        else:
            self.reader.seek(10)
            if near and self.node != 2:
                self.fetched(preferred_read_replica=2)

    @property
    def wants(self) -> c.Action:
        return self.reader.next(self.now_ms)

    @property
    def node(self) -> int:
        wants = self.wants
        assert isinstance(wants, c.FetchFrom), wants
        return wants.node_id

    def send(self) -> int:
        wants = self.wants
        assert isinstance(wants, c.FetchFrom | c.ListOffsetsAtLeader | c.EndOfEpochAtLeader), wants
        return self.reader.sent(wants, self.now_ms)

    def fetched(self, *, spans: Any = (), high_watermark: int = 0, **data: Any) -> c.Effects:
        answer = PartitionData(high_watermark=high_watermark, log_start_offset=data.pop("log_start_offset", 0), **data)
        return self.reader.fetched(self.send(), answer, spans, self.now_ms)

    def failed(self, code: ErrorCode) -> c.Effects:
        return self.fetched(error_code=code)

    def ended(self, epoch: int, end: int) -> c.Effects:
        return self.reader.epoch_ended(self.send(), EpochEndOffset(epoch, end))

    def listed(self, offset: int) -> c.Effects:
        return self.reader.listed(self.send(), offset)

    def news(self, **changes: Any) -> c.Effects:
        return self.reader.metadata(NEWS._replace(**changes), self.now_ms)


REFRESH = c.RefreshMetadata()


@pytest.mark.parametrize(
    ("code", "leaves", "refreshes", "backs_off", "raises"),
    [
        (E.OFFSET_NOT_AVAILABLE, False, True, True, False),
        (E.NOT_LEADER_OR_FOLLOWER, True, True, False, False),
        (E.FENCED_LEADER_EPOCH, False, True, True, False),
        (E.UNKNOWN_LEADER_EPOCH, False, True, True, False),
        (E.UNSUPPORTED_COMPRESSION_TYPE, False, False, True, True),
        (E.NETWORK_EXCEPTION, True, True, False, False),
        (E.KAFKA_STORAGE_ERROR, True, True, False, False),
        (E.REPLICA_NOT_AVAILABLE, True, True, False, False),
        (E.UNKNOWN_TOPIC_OR_PARTITION, True, True, False, False),
        (E.CORRUPT_MESSAGE, True, False, False, False),
        (E.UNKNOWN_SERVER_ERROR, True, False, False, False),
        (E.REQUEST_TIMED_OUT, True, False, False, False),
        (E.THROTTLING_QUOTA_EXCEEDED, False, False, True, False),
        (E.FETCH_SESSION_ID_NOT_FOUND, False, False, False, False),
    ],
)
def test_follower_errors_leave_refresh_back_off_or_raise(
    code: ErrorCode, leaves: bool, refreshes: bool, backs_off: bool, raises: bool
) -> None:
    it = Driver()
    assert it.node == 2
    effects = it.failed(code)
    assert (c.LeftFollower(2, c.LeaveCause.FAILED) in effects) == leaves
    assert (REFRESH in effects) == refreshes
    assert (c.RaiseError(code) in effects) == raises
    assert isinstance(it.wants, c.BackOff) == backs_off
    it.now_ms += 100
    assert it.node == (1 if leaves else 2)
    assert it.reader.position == 10


@pytest.mark.parametrize(
    ("code", "refreshes", "raises"),
    [
        (E.OFFSET_NOT_AVAILABLE, True, False),
        (E.NOT_LEADER_OR_FOLLOWER, True, False),
        (E.FENCED_LEADER_EPOCH, True, False),
        (E.UNKNOWN_LEADER_EPOCH, True, False),
        (E.NETWORK_EXCEPTION, True, False),
        (E.CORRUPT_MESSAGE, False, True),
        (E.UNSUPPORTED_COMPRESSION_TYPE, False, True),
        (E.UNKNOWN_SERVER_ERROR, False, True),
        (E.REQUEST_TIMED_OUT, False, False),
    ],
)
def test_errors_of_the_leader_are_retried_after_a_while(code: ErrorCode, refreshes: bool, raises: bool) -> None:
    it = Driver(near=False)
    assert it.failed(code) == (*([REFRESH] if refreshes else []), *([c.RaiseError(code)] if raises else []))
    assert it.wants == c.BackOff(1100)
    assert it.reader.deadline_ms(it.now_ms) == 1100
    it.now_ms = 1100
    assert it.node == 1
    assert it.reader.deadline_ms(it.now_ms) is None
    it.failed(code)
    assert it.wants == c.BackOff(1300)


def test_a_follower_that_stays_behind_is_left() -> None:
    it = Driver()
    for _ in range(STALLS_MAX - 1):
        assert it.failed(E.OFFSET_NOT_AVAILABLE) == (REFRESH,)
        it.now_ms += 1000
    assert it.failed(E.OFFSET_NOT_AVAILABLE) == (c.LeftFollower(2, c.LeaveCause.STUCK), REFRESH)
    assert it.node == 1


def test_a_follower_that_is_behind_and_out_of_the_isr_is_left_at_once() -> None:
    it = Driver()
    it.news(isr=(1, 3))
    assert it.node == 2  # as long as it serves
    assert it.failed(E.OFFSET_NOT_AVAILABLE) == (c.LeftFollower(2, c.LeaveCause.STUCK), REFRESH)


# --- out of range (392-08)


@pytest.mark.parametrize(
    ("told", "bound", "leader_says", "is_reset"),
    [
        ({"log_start_offset": 12}, -2, 8, False),
        ({"log_start_offset": 12}, -2, 10, False),
        ({"log_start_offset": 12}, -2, 11, True),
        ({"log_start_offset": 0, "high_watermark": 7}, -1, 10, False),
        ({"log_start_offset": 0, "high_watermark": 7}, -1, 30, False),
        ({"log_start_offset": 0, "high_watermark": 7}, -1, 9, True),
        ({"log_start_offset": -1}, -2, 0, False),
    ],
)
@pytest.mark.parametrize("epoch", [5, -1])
def test_a_follower_s_out_of_range_is_asked_of_the_leader(
    epoch: int, told: dict[str, int], bound: int, leader_says: int, is_reset: bool
) -> None:
    it = Driver(epoch=epoch)
    assert it.fetched(error_code=E.OFFSET_OUT_OF_RANGE, **told) == (c.LeftFollower(2, c.LeaveCause.OUT_OF_RANGE),)
    if epoch >= 0:
        assert it.wants == c.EndOfEpochAtLeader(1, 5, 5)
        assert it.ended(5, 20) == ()
    assert it.wants == c.ListOffsetsAtLeader(1, 5, bound)
    effects = it.listed(leader_says)
    if is_reset:
        start, high_watermark = (leader_says, 0) if bound == -2 else (0, leader_says)
        assert effects == (c.OffsetReset(10, -2, start, high_watermark), c.MoveTo(None))
        assert it.wants == c.ListOffsetsAtLeader(1, 5, -2)
        assert it.listed(15) == (c.MoveTo(15),)
        assert it.reader.position == 15
    else:
        assert effects == ()
        assert it.node == 1
        assert it.reader.position == 10


def test_lookups_are_retried_while_a_new_leader_withholds() -> None:
    it = Driver()
    it.failed(E.OFFSET_OUT_OF_RANGE)
    assert it.reader.failed(it.send(), E.OFFSET_NOT_AVAILABLE, it.now_ms) == (REFRESH,)
    assert isinstance(it.wants, c.BackOff)
    it.now_ms += 100
    assert isinstance(it.wants, c.EndOfEpochAtLeader)


@pytest.mark.parametrize(("policy", "is_fatal"), [(-2, False), (-1, False), (None, True)])
def test_the_leader_s_word_resets_or_halts(policy: int | None, is_fatal: bool) -> None:
    it = Driver(near=False, policy=policy)
    effects = it.fetched(error_code=E.OFFSET_OUT_OF_RANGE, log_start_offset=12, high_watermark=40)
    if policy is None:
        problem = c.RaiseError(E.OFFSET_OUT_OF_RANGE, 10, 12, 40)
        assert effects == (problem,)
        assert it.wants == c.AwaitApplication()
        assert it.reader.unresolved_problem() == it.reader.unresolved_problem() == problem
        it.reader.seek(12)
        assert it.reader.unresolved_problem() is None
        assert it.node == 1
    else:
        assert effects == (c.OffsetReset(10, policy, 12, 40), c.MoveTo(None))
        assert it.wants == c.ListOffsetsAtLeader(1, 5, policy)


def test_what_is_buffered_is_read_before_a_reset() -> None:
    it = Driver(near=False)
    it.fetched(spans=[c.EpochSpan(10, 13, 5)])
    assert it.fetched(error_code=E.OFFSET_OUT_OF_RANGE, log_start_offset=20) == ()
    assert it.wants == c.AwaitApplication()
    assert it.reader.delivered(12) == ()
    assert it.reader.delivered(13) == (c.OffsetReset(13, -2, 20, 0), c.MoveTo(None))


def test_too_large_at_the_leader_looks_for_a_truncation_first() -> None:
    it = Driver(near=False)
    assert it.fetched(error_code=E.OFFSET_OUT_OF_RANGE, high_watermark=7) == ()
    assert it.ended(5, 7) == (c.TruncationFound(10, 7, 5, False), c.MoveTo(7))
    assert it.node == 1
    assert it.reader.position == 7


# --- truncation


def test_a_new_leader_is_asked_before_it_is_fetched_from() -> None:
    it = Driver(near=False)
    assert it.news(leader_id=3, leader_epoch=6) == ()
    assert it.wants == c.EndOfEpochAtLeader(3, 6, 5)
    assert it.ended(5, 10) == ()
    assert it.node == 3


def test_what_is_under_way_is_void_in_a_new_epoch() -> None:
    it = Driver()
    number = it.send()
    assert it.news(leader_id=3, leader_epoch=6) == (c.Abandon(number),)
    assert it.reader.fetched(number, PartitionData(), [c.EpochSpan(10, 20, 5)], it.now_ms) == ()
    assert it.reader.fetch_offset == 10


@pytest.mark.parametrize(
    ("position", "end", "effects"),
    [
        (10, 8, (c.TruncationFound(10, 8, 5, False), c.MoveTo(8))),
        (10, 10, (c.MoveTo(10),)),
        (10, 12, (c.MoveTo(10),)),
        (13, 12, (c.TruncationFound(13, 12, 5, False), c.MoveTo(12))),
    ],
)
def test_only_what_was_read_counts_as_truncated(position: int, end: int, effects: c.Effects) -> None:
    it = Driver(near=False)
    it.fetched(spans=[c.EpochSpan(10, 15, 5)], high_watermark=15)
    it.reader.delivered(position)
    it.news(leader_id=3, leader_epoch=6)
    assert it.ended(5, end) == effects
    assert it.reader.fetch_offset == min(position, end)
    assert it.reader.high_watermark == (end if isinstance(effects[0], c.TruncationFound) else 15)


def test_a_truncation_is_followed_back_epoch_by_epoch() -> None:
    it = Driver(near=False, epoch=3)  # 3 from 5, 4 from 10, 5 from 12
    it.fetched(spans=[c.EpochSpan(10, 12, 4), c.EpochSpan(12, 15, 5)])
    it.reader.delivered(15)
    it.news(leader_id=3, leader_epoch=9)
    assert it.wants == c.EndOfEpochAtLeader(3, 9, 5)
    assert it.ended(2, 30) == (c.TruncationFound(15, 5, 2, False), c.MoveTo(5))


def test_an_epoch_between_ours_asks_once_more() -> None:
    it = Driver(near=False, epoch=2)
    it.fetched(spans=[c.EpochSpan(10, 15, 5)])
    it.reader.delivered(15)
    it.news(leader_id=3, leader_epoch=9)
    assert it.ended(4, 30) == ()
    assert it.wants == c.EndOfEpochAtLeader(3, 9, 2)
    assert it.ended(2, 8) == (c.TruncationFound(15, 8, 2, False), c.MoveTo(8))


def test_without_a_policy_the_user_decides_about_a_truncation() -> None:
    it = Driver(near=False, policy=None)
    it.news(leader_id=3, leader_epoch=6)
    report = c.TruncationFound(10, 8, 5, True)
    assert it.ended(5, 8) == (report, c.MoveTo(10))
    assert it.reader.unresolved_problem() == report
    assert it.news(leader_id=1, leader_epoch=7) == ()
    assert it.wants == c.AwaitApplication()
    it.reader.seek(8)
    assert it.node == 1


def test_nothing_in_common_resets() -> None:
    it = Driver(near=False)
    it.news(leader_id=3, leader_epoch=6)
    assert it.ended(-1, -1) == (c.TruncationFound(10, None, -1, False), c.MoveTo(None))
    assert it.wants == c.ListOffsetsAtLeader(3, 6, -2)


def test_a_follower_s_divergence_is_only_a_doubt() -> None:
    it = Driver()
    assert it.fetched(diverging_epoch=EpochEndOffset(4, 7)) == (c.LeftFollower(2, c.LeaveCause.DIVERGED),)
    assert it.ended(5, 10) == ()
    assert it.node == 1
    leader = Driver(near=False)
    assert leader.fetched(diverging_epoch=EpochEndOffset(5, 7))[0] == c.TruncationFound(10, 7, 5, False)


def test_epochs_that_go_back_in_an_answer_are_not_taken() -> None:
    it = Driver()
    assert it.fetched(spans=[c.EpochSpan(10, 12, 4)]) == (c.LeftFollower(2, c.LeaveCause.DIVERGED),)
    assert it.reader.fetch_offset == 10
    assert it.reader.state is State.VALIDATING


# --- which replica (392-13 to 392-17)


def test_a_preferred_replica_is_kept_for_its_lease_and_asked_for_again() -> None:
    it = Driver()
    it.now_ms += MAX_AGE_MS - 1
    assert it.node == 2
    it.now_ms += 1
    assert it.wants == c.FetchFrom(1, True, -1, True, 10, 5, 5)
    assert it.fetched(preferred_read_replica=3) == (c.Redirected(3),)
    assert it.node == 3


def test_a_fenced_replica_is_left_and_its_fetch_given_up() -> None:
    it = Driver()
    number = it.send()
    assert it.news(offline_replicas=(2,)) == (c.LeftFollower(2, c.LeaveCause.FENCED), c.Abandon(number))
    assert it.node == 1


def test_a_silent_follower_is_left() -> None:
    it = Driver()
    number = it.send()
    assert it.reader.deadline_ms(it.now_ms) == it.now_ms + 1500
    assert it.reader.tick(it.now_ms + 1499) == ()
    it.now_ms += 1500
    assert it.reader.tick(it.now_ms) == (c.Abandon(number), c.LeftFollower(2, c.LeaveCause.SILENT), REFRESH)
    assert it.node == 1
    leader = Driver(near=False)
    leader.send()
    assert leader.reader.tick(leader.now_ms + 100_000) == ()


def test_a_leader_that_insists_on_a_failed_replica_is_fetched_from_without_the_rack() -> None:
    it = Driver()
    it.failed(E.NETWORK_EXCEPTION)
    assert it.fetched(preferred_read_replica=2) == (REFRESH,)
    assert it.wants == c.FetchFrom(1, True, -1, False, 10, 5, 5)
    it.now_ms += 1000
    assert it.wants == c.FetchFrom(1, True, -1, True, 10, 5, 5)
    assert it.fetched(preferred_read_replica=2) == (c.Redirected(2),)


def test_another_replica_of_the_rack_is_taken_at_once() -> None:
    it = Driver()
    it.failed(E.NETWORK_EXCEPTION)
    assert it.fetched(preferred_read_replica=3) == (c.Redirected(3),)
    assert it.node == 3


def test_a_replica_that_fails_again_and_again_is_tried_ever_more_rarely() -> None:
    it, tries = Driver(), []
    end_ms = it.now_ms + 10 * MAX_AGE_MS
    while it.now_ms < end_ms:
        wants = it.wants
        assert isinstance(wants, c.FetchFrom)
        if wants.node_id == 2:
            tries.append(it.now_ms)
            it.failed(E.NETWORK_EXCEPTION)
        else:
            it.fetched(preferred_read_replica=2 if wants.offers_rack else -1)
        it.now_ms += 10
    gaps = [(after - before) // 1000 for before, after in pairwise(tries)]
    assert gaps[:6] == [1, 2, 4, 8, 16, 32]
    assert set(gaps[6:]) == {60}


def test_nobody_redirects_but_a_leader_to_another() -> None:
    it = Driver()
    assert it.fetched(preferred_read_replica=3) == (c.LeftFollower(2, c.LeaveCause.FAILED), REFRESH)
    assert it.fetched(preferred_read_replica=1) == (REFRESH,)
    assert isinstance(it.wants, c.BackOff)


def test_a_redirect_that_metadata_does_not_know_waits_for_metadata() -> None:
    it = Driver(near=False)
    it.news(offline_replicas=(2,))
    assert it.fetched(preferred_read_replica=2) == (REFRESH,)
    assert it.wants == c.FetchFrom(1, True, -1, False, 10, 5, 5)
    it.news()
    it.now_ms += 1000
    assert it.fetched(preferred_read_replica=2) == (c.Redirected(2),)


def test_without_a_rack_nothing_is_offered() -> None:
    it = Driver(near=False, has_rack=False)
    assert it.wants == c.FetchFrom(1, True, -1, False, 10, 5, 5)


@pytest.mark.parametrize("mode", [c.SelectionMode.METADATA, c.SelectionMode.CONSUMER])
def test_the_draft_s_modes_follow_metadata_if_the_policy_says_so(mode: c.SelectionMode) -> None:
    it = Driver(near=False, mode=mode, prefers_replicas=True)
    it.news(preferred_read_replica=2)
    assert it.wants == c.FetchFrom(2, False, -2, True, 10, 5, 5)
    it.news(preferred_read_replica=3)
    assert it.node == 3
    it.failed(E.NOT_LEADER_OR_FOLLOWER)  # it does not serve consumers
    assert it.wants == c.FetchFrom(1, True, -1, False, 10, 5, 5)
    it.now_ms += 1000
    assert it.node == 3
    by_leader = Driver(near=False, mode=mode)
    by_leader.news(preferred_read_replica=2)
    assert by_leader.node == 1


def test_the_high_watermark_never_goes_back_across_replicas() -> None:
    it = Driver()
    it.fetched(high_watermark=50)
    it.failed(E.NETWORK_EXCEPTION)
    it.fetched(high_watermark=40)
    assert it.reader.high_watermark == 50
    it.fetched(high_watermark=60)
    assert it.reader.high_watermark == 60


# --- the rest


def test_what_cannot_be_decoded_is_read_from_the_leader() -> None:
    it = Driver()
    it.fetched(spans=[c.EpochSpan(10, 15, 5)])
    assert it.reader.corrupt(2, it.now_ms) == (c.MoveTo(10), c.LeftFollower(2, c.LeaveCause.FAILED))
    assert it.wants == c.FetchFrom(1, True, -1, True, 10, 5, 5)
    it.fetched(spans=[c.EpochSpan(10, 15, 5)])
    assert it.reader.corrupt(1, it.now_ms) == (c.MoveTo(10), c.RaiseError(E.CORRUPT_MESSAGE))
    assert isinstance(it.wants, c.BackOff)


def test_a_reader_begins_with_its_policy_and_without_one_asks_the_user() -> None:
    reader = PartitionReader(c.ReaderConfig(-1), lambda attempts: 1)
    assert reader.next(0) == c.AwaitMetadata()
    reader.metadata(NEWS, 0)
    assert reader.next(0) == c.ListOffsetsAtLeader(1, 5, -1)
    none = PartitionReader(c.ReaderConfig(None), lambda attempts: 1)
    none.metadata(NEWS, 0)
    assert none.next(0) == c.AwaitApplication()
    assert none.unresolved_problem() == c.RaiseError(E.OFFSET_OUT_OF_RANGE)
    assert none.reset(-2) == (c.MoveTo(None),)
    assert none.next(0) == c.ListOffsetsAtLeader(1, 5, -2)


def test_a_recreated_topic_begins_anew() -> None:
    it = Driver()
    it.reader.recreated()
    assert it.reader.next(it.now_ms) == c.AwaitMetadata()
    it.news(leader_epoch=0)
    assert it.wants == c.ListOffsetsAtLeader(1, 0, -2)
    assert it.reader.high_watermark == -1


def test_old_news_is_ignored() -> None:
    it = Driver()
    assert it.news(leader_id=3, leader_epoch=4) == ()
    it.news(leader_id=-1, leader_epoch=6)
    assert it.wants == c.AwaitMetadata()


def test_transitions_are_one_a_state_and_cause() -> None:
    keys = [(row.source, row.cause) for row in TRANSITIONS]
    assert len(keys) == len(set(keys))
    assert {row.source for row in TRANSITIONS} | {State.HALTED} == set(State)
    assert {row.cause for row in TRANSITIONS} | set(FROM_ANYWHERE) == set(Cause)
    with pytest.raises(IllegalTransitionError):
        next_state(State.HALTED, Cause.VALID)


def test_the_document_s_diagram_is_the_table() -> None:
    document = Path(__file__).resolve().parents[4] / "docs" / "closest_replica.md"
    assert f"```mermaid\n{diagram()}```" in document.read_text(encoding="utf-8")
