"""Reactions of PartitionReader to each response, by table (392-08, 392-10, 392-13 to 392-17)."""

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
METADATA = c.PartitionView(1, 5, (1, 2, 3), (1, 2, 3))
MAX_AGE_MS = 60_000


class Driver:
    """Drives a reader at offset 10, after records of epoch 5, that reads from follower 2."""

    def __init__(self, *, near: bool = True, policy: int | None = -2, epoch: int = 5, **config: Any) -> None:
        self.now_ms = 1000
        limits = {"has_rack": True, "metadata_max_age_ms": MAX_AGE_MS, **config}
        self.reader = PartitionReader(c.ReaderConfig(policy, **limits), lambda attempts: 100 * attempts)
        self.effects: list[c.Effect] = []
        self.reader.metadata(METADATA, self.now_ms)
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
        response = PartitionData(
            high_watermark=high_watermark, log_start_offset=data.pop("log_start_offset", 0), **data
        )
        return self.reader.fetched(self.send(), response, spans, self.now_ms)

    def failed(self, code: ErrorCode) -> c.Effects:
        return self.fetched(error_code=code)

    def ended(self, epoch: int, end: int) -> c.Effects:
        return self.reader.epoch_ended(self.send(), EpochEndOffset(epoch, end))

    def listed(self, offset: int) -> c.Effects:
        return self.reader.listed(self.send(), offset)

    def update_metadata(self, **changes: Any) -> c.Effects:
        return self.reader.metadata(METADATA._replace(**changes), self.now_ms)


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
def test_reader_reacts_to_follower_errors(
    code: ErrorCode, leaves: bool, refreshes: bool, backs_off: bool, raises: bool
) -> None:
    driver = Driver()
    assert driver.node == 2
    effects = driver.failed(code)
    assert (c.LeftFollower(2, c.LeaveCause.FAILED) in effects) == leaves
    assert (REFRESH in effects) == refreshes
    assert (c.RaiseError(code) in effects) == raises
    assert isinstance(driver.wants, c.BackOff) == backs_off
    driver.now_ms += 100
    assert driver.node == (1 if leaves else 2)
    assert driver.reader.position == 10


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
def test_reader_retries_leader_errors_with_backoff(code: ErrorCode, refreshes: bool, raises: bool) -> None:
    driver = Driver(near=False)
    assert driver.failed(code) == (*([REFRESH] if refreshes else []), *([c.RaiseError(code)] if raises else []))
    assert driver.wants == c.BackOff(1100)
    assert driver.reader.deadline_ms(driver.now_ms) == 1100
    driver.now_ms = 1100
    assert driver.node == 1
    assert driver.reader.deadline_ms(driver.now_ms) is None
    driver.failed(code)
    assert driver.wants == c.BackOff(1300)


def test_reader_leaves_follower_that_stays_behind() -> None:
    driver = Driver()
    for _ in range(STALLS_MAX - 1):
        assert driver.failed(E.OFFSET_NOT_AVAILABLE) == (REFRESH,)
        driver.now_ms += 1000
    assert driver.failed(E.OFFSET_NOT_AVAILABLE) == (c.LeftFollower(2, c.LeaveCause.STUCK), REFRESH)
    assert driver.node == 1


def test_reader_leaves_lagging_follower_outside_isr_immediately() -> None:
    driver = Driver()
    driver.update_metadata(isr=(1, 3))
    assert driver.node == 2  # while it serves
    assert driver.failed(E.OFFSET_NOT_AVAILABLE) == (c.LeftFollower(2, c.LeaveCause.STUCK), REFRESH)


# --- out of range (392-08)


@pytest.mark.parametrize(
    ("reported", "bound", "leader_offset", "is_reset"),
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
def test_reader_confirms_out_of_range_with_leader(
    epoch: int, reported: dict[str, int], bound: int, leader_offset: int, is_reset: bool
) -> None:
    driver = Driver(epoch=epoch)
    assert driver.fetched(error_code=E.OFFSET_OUT_OF_RANGE, **reported) == (
        c.LeftFollower(2, c.LeaveCause.OUT_OF_RANGE),
    )
    if epoch >= 0:
        assert driver.wants == c.EndOfEpochAtLeader(1, 5, 5)
        assert driver.ended(5, 20) == ()
    assert driver.wants == c.ListOffsetsAtLeader(1, 5, bound)
    effects = driver.listed(leader_offset)
    if is_reset:
        start, high_watermark = (leader_offset, 0) if bound == -2 else (0, leader_offset)
        assert effects == (c.OffsetReset(10, -2, start, high_watermark), c.MoveTo(None))
        assert driver.wants == c.ListOffsetsAtLeader(1, 5, -2)
        assert driver.listed(15) == (c.MoveTo(15),)
        assert driver.reader.position == 15
    else:
        assert effects == ()
        assert driver.node == 1
        assert driver.reader.position == 10


def test_reader_retries_lookup_while_offset_is_not_available() -> None:
    driver = Driver()
    driver.failed(E.OFFSET_OUT_OF_RANGE)
    assert driver.reader.failed(driver.send(), E.OFFSET_NOT_AVAILABLE, driver.now_ms) == (REFRESH,)
    assert isinstance(driver.wants, c.BackOff)
    driver.now_ms += 100
    assert isinstance(driver.wants, c.EndOfEpochAtLeader)


@pytest.mark.parametrize(("policy", "is_fatal"), [(-2, False), (-1, False), (None, True)])
def test_out_of_range_at_leader_resets_or_halts_by_policy(policy: int | None, is_fatal: bool) -> None:
    driver = Driver(near=False, policy=policy)
    effects = driver.fetched(error_code=E.OFFSET_OUT_OF_RANGE, log_start_offset=12, high_watermark=40)
    if policy is None:
        problem = c.RaiseError(E.OFFSET_OUT_OF_RANGE, 10, 12, 40)
        assert effects == (problem,)
        assert driver.wants == c.AwaitApplication()
        assert driver.reader.unresolved_problem() == driver.reader.unresolved_problem() == problem
        driver.reader.seek(12)
        assert driver.reader.unresolved_problem() is None
        assert driver.node == 1
    else:
        assert effects == (c.OffsetReset(10, policy, 12, 40), c.MoveTo(None))
        assert driver.wants == c.ListOffsetsAtLeader(1, 5, policy)


def test_reset_waits_for_buffered_records() -> None:
    driver = Driver(near=False)
    driver.fetched(spans=[c.EpochSpan(10, 13, 5)])
    assert driver.fetched(error_code=E.OFFSET_OUT_OF_RANGE, log_start_offset=20) == ()
    assert driver.wants == c.AwaitApplication()
    assert driver.reader.delivered(12) == ()
    assert driver.reader.delivered(13) == (c.OffsetReset(13, -2, 20, 0), c.MoveTo(None))


def test_offset_above_leader_high_watermark_checks_for_truncation() -> None:
    driver = Driver(near=False)
    assert driver.fetched(error_code=E.OFFSET_OUT_OF_RANGE, high_watermark=7) == ()
    assert driver.ended(5, 7) == (c.TruncationFound(10, 7, 5, False), c.MoveTo(7))
    assert driver.node == 1
    assert driver.reader.position == 7


# --- truncation


def test_reader_validates_position_with_new_leader() -> None:
    driver = Driver(near=False)
    assert driver.update_metadata(leader_id=3, leader_epoch=6) == ()
    assert driver.wants == c.EndOfEpochAtLeader(3, 6, 5)
    assert driver.ended(5, 10) == ()
    assert driver.node == 3


def test_new_leader_epoch_abandons_request_in_flight() -> None:
    driver = Driver()
    number = driver.send()
    assert driver.update_metadata(leader_id=3, leader_epoch=6) == (c.Abandon(number),)
    assert driver.reader.fetched(number, PartitionData(), [c.EpochSpan(10, 20, 5)], driver.now_ms) == ()
    assert driver.reader.fetch_offset == 10


@pytest.mark.parametrize(
    ("position", "end", "effects"),
    [
        (10, 8, (c.TruncationFound(10, 8, 5, False), c.MoveTo(8))),
        (10, 10, (c.MoveTo(10),)),
        (10, 12, (c.MoveTo(10),)),
        (13, 12, (c.TruncationFound(13, 12, 5, False), c.MoveTo(12))),
    ],
)
def test_truncation_counts_only_delivered_records(position: int, end: int, effects: c.Effects) -> None:
    driver = Driver(near=False)
    driver.fetched(spans=[c.EpochSpan(10, 15, 5)], high_watermark=15)
    driver.reader.delivered(position)
    driver.update_metadata(leader_id=3, leader_epoch=6)
    assert driver.ended(5, end) == effects
    assert driver.reader.fetch_offset == min(position, end)
    assert driver.reader.high_watermark == (end if isinstance(effects[0], c.TruncationFound) else 15)


def test_truncation_is_found_in_older_epoch() -> None:
    driver = Driver(near=False, epoch=3)  # 3 from 5, 4 from 10, 5 from 12
    driver.fetched(spans=[c.EpochSpan(10, 12, 4), c.EpochSpan(12, 15, 5)])
    driver.reader.delivered(15)
    driver.update_metadata(leader_id=3, leader_epoch=9)
    assert driver.wants == c.EndOfEpochAtLeader(3, 9, 5)
    assert driver.ended(2, 30) == (c.TruncationFound(15, 5, 2, False), c.MoveTo(5))


def test_reader_requests_its_own_epoch_below_returned_epoch() -> None:
    driver = Driver(near=False, epoch=2)
    driver.fetched(spans=[c.EpochSpan(10, 15, 5)])
    driver.reader.delivered(15)
    driver.update_metadata(leader_id=3, leader_epoch=9)
    assert driver.ended(4, 30) == ()
    assert driver.wants == c.EndOfEpochAtLeader(3, 9, 2)
    assert driver.ended(2, 8) == (c.TruncationFound(15, 8, 2, False), c.MoveTo(8))


def test_truncation_without_reset_policy_waits_for_application() -> None:
    driver = Driver(near=False, policy=None)
    driver.update_metadata(leader_id=3, leader_epoch=6)
    report = c.TruncationFound(10, 8, 5, True)
    assert driver.ended(5, 8) == (report, c.MoveTo(10))
    assert driver.reader.unresolved_problem() == report
    assert driver.update_metadata(leader_id=1, leader_epoch=7) == ()
    assert driver.wants == c.AwaitApplication()
    driver.reader.seek(8)
    assert driver.node == 1


def test_log_without_common_epoch_resets_reader() -> None:
    driver = Driver(near=False)
    driver.update_metadata(leader_id=3, leader_epoch=6)
    assert driver.ended(-1, -1) == (c.TruncationFound(10, None, -1, False), c.MoveTo(None))
    assert driver.wants == c.ListOffsetsAtLeader(3, 6, -2)


def test_divergence_at_follower_is_validated_with_leader() -> None:
    driver = Driver()
    assert driver.fetched(diverging_epoch=EpochEndOffset(4, 7)) == (c.LeftFollower(2, c.LeaveCause.DIVERGED),)
    assert driver.ended(5, 10) == ()
    assert driver.node == 1
    leader = Driver(near=False)
    assert leader.fetched(diverging_epoch=EpochEndOffset(5, 7))[0] == c.TruncationFound(10, 7, 5, False)


def test_records_with_decreasing_epochs_are_discarded() -> None:
    driver = Driver()
    assert driver.fetched(spans=[c.EpochSpan(10, 12, 4)]) == (c.LeftFollower(2, c.LeaveCause.DIVERGED),)
    assert driver.reader.fetch_offset == 10
    assert driver.reader.state is State.VALIDATING


# --- replica selection (392-13 to 392-17)


def test_preferred_replica_is_renewed_after_lease() -> None:
    driver = Driver()
    driver.now_ms += MAX_AGE_MS - 1
    assert driver.node == 2
    driver.now_ms += 1
    assert driver.wants == c.FetchFrom(1, True, -1, True, 10, 5, 5)
    assert driver.fetched(preferred_read_replica=3) == (c.Redirected(3),)
    assert driver.node == 3


def test_reader_leaves_fenced_replica_and_abandons_fetch() -> None:
    driver = Driver()
    number = driver.send()
    assert driver.update_metadata(offline_replicas=(2,)) == (c.LeftFollower(2, c.LeaveCause.FENCED), c.Abandon(number))
    assert driver.node == 1


def test_reader_leaves_silent_follower() -> None:
    driver = Driver()
    number = driver.send()
    assert driver.reader.deadline_ms(driver.now_ms) == driver.now_ms + 1500
    assert driver.reader.tick(driver.now_ms + 1499) == ()
    driver.now_ms += 1500
    assert driver.reader.tick(driver.now_ms) == (c.Abandon(number), c.LeftFollower(2, c.LeaveCause.SILENT), REFRESH)
    assert driver.node == 1
    leader = Driver(near=False)
    leader.send()
    assert leader.reader.tick(leader.now_ms + 100_000) == ()


def test_repeated_redirect_to_failed_replica_omits_rack() -> None:
    driver = Driver()
    driver.failed(E.NETWORK_EXCEPTION)
    assert driver.fetched(preferred_read_replica=2) == (REFRESH,)
    assert driver.wants == c.FetchFrom(1, True, -1, False, 10, 5, 5)
    driver.now_ms += 1000
    assert driver.wants == c.FetchFrom(1, True, -1, True, 10, 5, 5)
    assert driver.fetched(preferred_read_replica=2) == (c.Redirected(2),)


def test_redirect_to_another_replica_of_rack_is_followed() -> None:
    driver = Driver()
    driver.failed(E.NETWORK_EXCEPTION)
    assert driver.fetched(preferred_read_replica=3) == (c.Redirected(3),)
    assert driver.node == 3


def test_failing_replica_is_retried_with_exponential_backoff() -> None:
    driver, tries = Driver(), []
    end_ms = driver.now_ms + 10 * MAX_AGE_MS
    while driver.now_ms < end_ms:
        wants = driver.wants
        assert isinstance(wants, c.FetchFrom)
        if wants.node_id == 2:
            tries.append(driver.now_ms)
            driver.failed(E.NETWORK_EXCEPTION)
        else:
            driver.fetched(preferred_read_replica=2 if wants.offers_rack else -1)
        driver.now_ms += 10
    gaps = [(after - before) // 1000 for before, after in pairwise(tries)]
    assert gaps[:6] == [1, 2, 4, 8, 16, 32]
    assert set(gaps[6:]) == {60}


def test_only_leader_redirects_to_other_replica() -> None:
    driver = Driver()
    assert driver.fetched(preferred_read_replica=3) == (c.LeftFollower(2, c.LeaveCause.FAILED), REFRESH)
    assert driver.fetched(preferred_read_replica=1) == (REFRESH,)
    assert isinstance(driver.wants, c.BackOff)


def test_redirect_to_offline_replica_waits_for_metadata() -> None:
    driver = Driver(near=False)
    driver.update_metadata(offline_replicas=(2,))
    assert driver.fetched(preferred_read_replica=2) == (REFRESH,)
    assert driver.wants == c.FetchFrom(1, True, -1, False, 10, 5, 5)
    driver.update_metadata()
    driver.now_ms += 1000
    assert driver.fetched(preferred_read_replica=2) == (c.Redirected(2),)


def test_reader_without_rack_offers_no_rack() -> None:
    driver = Driver(near=False, has_rack=False)
    assert driver.wants == c.FetchFrom(1, True, -1, False, 10, 5, 5)


@pytest.mark.parametrize("mode", [c.SelectionMode.METADATA, c.SelectionMode.CONSUMER])
def test_draft_modes_follow_metadata_with_preferred_policy(mode: c.SelectionMode) -> None:
    driver = Driver(near=False, mode=mode, prefers_replicas=True)
    driver.update_metadata(preferred_read_replica=2)
    assert driver.wants == c.FetchFrom(2, False, -2, True, 10, 5, 5)
    driver.update_metadata(preferred_read_replica=3)
    assert driver.node == 3
    driver.failed(E.NOT_LEADER_OR_FOLLOWER)  # the follower does not serve consumers
    assert driver.wants == c.FetchFrom(1, True, -1, False, 10, 5, 5)
    driver.now_ms += 1000
    assert driver.node == 3
    by_leader = Driver(near=False, mode=mode)
    by_leader.update_metadata(preferred_read_replica=2)
    assert by_leader.node == 1


def test_high_watermark_is_monotonic_across_replicas() -> None:
    driver = Driver()
    driver.fetched(high_watermark=50)
    driver.failed(E.NETWORK_EXCEPTION)
    driver.fetched(high_watermark=40)
    assert driver.reader.high_watermark == 50
    driver.fetched(high_watermark=60)
    assert driver.reader.high_watermark == 60


# --- other reactions


def test_corrupt_records_are_fetched_from_leader() -> None:
    driver = Driver()
    driver.fetched(spans=[c.EpochSpan(10, 15, 5)])
    assert driver.reader.corrupt(2, driver.now_ms) == (c.MoveTo(10), c.LeftFollower(2, c.LeaveCause.FAILED))
    assert driver.wants == c.FetchFrom(1, True, -1, True, 10, 5, 5)
    driver.fetched(spans=[c.EpochSpan(10, 15, 5)])
    assert driver.reader.corrupt(1, driver.now_ms) == (c.MoveTo(10), c.RaiseError(E.CORRUPT_MESSAGE))
    assert isinstance(driver.wants, c.BackOff)


def test_reader_starts_at_reset_policy_or_waits_for_application() -> None:
    reader = PartitionReader(c.ReaderConfig(-1), lambda attempts: 1)
    assert reader.next(0) == c.AwaitMetadata()
    reader.metadata(METADATA, 0)
    assert reader.next(0) == c.ListOffsetsAtLeader(1, 5, -1)
    without_policy = PartitionReader(c.ReaderConfig(None), lambda attempts: 1)
    without_policy.metadata(METADATA, 0)
    assert without_policy.next(0) == c.AwaitApplication()
    assert without_policy.unresolved_problem() == c.RaiseError(E.OFFSET_OUT_OF_RANGE)
    assert without_policy.reset(-2) == (c.MoveTo(None),)
    assert without_policy.next(0) == c.ListOffsetsAtLeader(1, 5, -2)


def test_recreated_topic_restarts_reader() -> None:
    driver = Driver()
    driver.reader.recreated()
    assert driver.reader.next(driver.now_ms) == c.AwaitMetadata()
    driver.update_metadata(leader_epoch=0)
    assert driver.wants == c.ListOffsetsAtLeader(1, 0, -2)
    assert driver.reader.high_watermark == -1


def test_stale_metadata_is_ignored() -> None:
    driver = Driver()
    assert driver.update_metadata(leader_id=3, leader_epoch=4) == ()
    driver.update_metadata(leader_id=-1, leader_epoch=6)
    assert driver.wants == c.AwaitMetadata()


def test_transition_table_has_one_row_per_state_and_cause() -> None:
    keys = [(row.source, row.cause) for row in TRANSITIONS]
    assert len(keys) == len(set(keys))
    assert {row.source for row in TRANSITIONS} | {State.HALTED} == set(State)
    assert {row.cause for row in TRANSITIONS} | set(FROM_ANYWHERE) == set(Cause)
    with pytest.raises(IllegalTransitionError):
        next_state(State.HALTED, Cause.VALID)


def test_document_diagram_matches_transition_table() -> None:
    document = Path(__file__).resolve().parents[4] / "docs" / "closest_replica.md"
    assert f"```mermaid\n{diagram()}```" in document.read_text(encoding="utf-8")
