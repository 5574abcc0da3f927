"""Client side of fetch sessions: the next request after each response or error (227-04, 227-07, 227-17 to 227-19)."""

from __future__ import annotations

import pytest

from kipmesh.core.errors import ErrorCode
from kipmesh.core.fetch_session import FetchSessionHandler, SessionRequest
from kipmesh.core.fetch_session.handler import MALFORMED, TRANSPORT
from kipmesh.core.fetch_session.types import INT_MAX
from kipmesh.messages import (
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ForgottenTopic,
    PartitionData,
)

ID, OTHER_ID = b"\1" * 16, b"\2" * 16


def partition(number: int, offset: int = 0) -> FetchPartition:
    return FetchPartition(number, fetch_offset=offset)


def response(*numbers: int, session_id: int = 5, topic_id: bytes = ID, records: bytes = b"") -> FetchResponse:
    data = [PartitionData(number, records=records) for number in numbers]
    return FetchResponse(session_id=session_id, responses=[FetchableTopicResponse("t", topic_id, data)] if data else [])


def open_handler(count: int = 3, session_id: int = 5) -> FetchSessionHandler:
    """Return a handler in a session with partitions 0 to count - 1 of topic t."""
    handler = FetchSessionHandler()
    for number in range(count):
        handler.want("t", ID, partition(number))
    result = handler.handle_response(handler.next_request(), response(*range(count), session_id=session_id))
    assert result.is_accepted
    return handler


def session_position(request: SessionRequest) -> tuple[int, int]:
    return request.session_id, request.session_epoch


def test_handler_sends_full_then_incremental_request() -> None:
    handler = FetchSessionHandler()
    handler.want("t", ID, partition(0))
    handler.want("t", ID, partition(1))
    handler.want("u", OTHER_ID, partition(0))
    first = handler.next_request()
    topics = [FetchTopic("t", ID, [partition(0), partition(1)]), FetchTopic("u", OTHER_ID, [partition(0)])]
    assert first == SessionRequest(0, 0, topics, [])
    both = response(0, 1)
    both = both._replace(responses=[*both.responses, FetchableTopicResponse("", OTHER_ID, [PartitionData(0)])])
    result = handler.handle_response(first, both)
    assert [(fetched.topic, fetched.topic_id, fetched.requested.partition) for fetched in result.partitions] == [
        ("t", ID, 0),
        ("t", ID, 1),
        ("u", OTHER_ID, 0),
    ]
    assert handler.next_request() == (5, 1, [], [])
    assert (handler.full_requests, handler.incremental_requests) == (1, 1)


def test_incremental_request_names_changed_partitions_only() -> None:
    handler = open_handler(4)
    handler.want("t", ID, partition(0))  # unchanged
    handler.want("t", ID, partition(1, 7))
    handler.want("t", ID, partition(9))
    handler.unwant("t", ID, 2)
    handler.want("t", ID, partition(3, 1))
    handler.want("t", ID, partition(3))  # restored
    handler.unwant("t", ID, 77)
    request = handler.next_request()
    assert request == (5, 1, [FetchTopic("t", ID, [partition(1, 7), partition(9)])], [ForgottenTopic("t", ID, [2])])
    handler.handle_response(request, response(9))
    assert handler.next_request() == (5, 2, [], [])
    assert len(handler) == 4


def test_request_after_failure_is_full_with_current_positions() -> None:
    handler = open_handler(2)
    request = handler.next_request()
    handler.want("t", ID, partition(0, 3))
    handler.unwant("t", ID, 1)
    handler.handle_error(request)
    assert handler.next_request() == (5, 0, [FetchTopic("t", ID, [partition(0, 3)])], [])


def test_changes_during_a_request_are_sent_in_the_next() -> None:
    handler = open_handler(1)
    request = handler.next_request()
    handler.want("t", ID, partition(0, 3))
    handler.want("t", ID, partition(8))
    handler.unwant("t", ID, 8)
    result = handler.handle_response(request, response(0))
    assert result.partitions[0].requested == partition(0)
    assert handler.next_request() == (5, 2, [FetchTopic("t", ID, [partition(0, 3)])], [])


def test_partition_forgotten_and_wanted_again_is_omitted() -> None:
    handler = open_handler(2)
    handler.unwant("t", ID, 1)
    handler.want("t", ID, partition(1))
    assert handler.next_request() == (5, 1, [], [])


def test_handler_forgets_and_adds_recreated_topic_in_one_request() -> None:
    handler = open_handler(1)
    handler.unwant("t", ID, 0)
    handler.want("t", OTHER_ID, partition(0))
    assert handler.next_request() == (
        5,
        1,
        [FetchTopic("t", OTHER_ID, [partition(0)])],
        [ForgottenTopic("t", ID, [0])],
    )


def test_handler_uses_topic_names_until_all_ids_are_known() -> None:
    handler = FetchSessionHandler()
    handler.want("t", ID, partition(0))
    handler.want("u", b"", partition(0))
    request = handler.next_request()
    assert request.topics == [FetchTopic("t", b"", [partition(0)]), FetchTopic("u", b"", [partition(0)])]
    named = [FetchableTopicResponse(name, b"", [PartitionData(0)]) for name in ("t", "u")]
    result = handler.handle_response(request, FetchResponse(session_id=5, responses=named))
    assert [(fetched.topic, fetched.topic_id) for fetched in result.partitions] == [("t", ID), ("u", b"")]
    # A recreated topic has the same name on the wire.
    handler.unwant("t", ID, 0)
    handler.want("t", OTHER_ID, partition(0))
    request = handler.next_request()
    assert request == (5, 1, [FetchTopic("t", b"", [partition(0)])], [ForgottenTopic("t", b"", [0])])
    handler.handle_response(request, FetchResponse(session_id=5))
    # All ids are known: the handler switches to ids in a new session.
    handler.unwant("u", b"", 0)
    handler.want("u", ID, partition(0))
    request = handler.next_request()
    assert session_position(request) == (5, 0)
    assert request.topics == [FetchTopic("t", OTHER_ID, [partition(0)]), FetchTopic("u", ID, [partition(0)])]
    assert not handler.resets


@pytest.mark.parametrize(
    ("error", "next_session"),
    [
        (ErrorCode.FETCH_SESSION_ID_NOT_FOUND, (0, 0)),
        (ErrorCode.INVALID_FETCH_SESSION_EPOCH, (5, 0)),
        (ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR, (5, 0)),
        (ErrorCode.UNKNOWN_SERVER_ERROR, (5, 0)),
        (ErrorCode.STALE_BROKER_EPOCH, (5, 0)),
    ],
)
def test_session_error_makes_next_request_full(error: ErrorCode, next_session: tuple[int, int]) -> None:
    handler = open_handler()
    result = handler.handle_response(handler.next_request(), FetchResponse(error_code=error))
    assert (result.is_accepted, result.error, result.retry_immediately) == (False, error, True)
    assert handler.resets == {error.name: 1}
    request = handler.next_request()
    assert session_position(request) == next_session
    assert len(request.topics[0].partitions) == 3
    assert not handler.handle_response(request, FetchResponse(error_code=error)).retry_immediately


@pytest.mark.parametrize(
    "malformed",
    [
        response(0, 99),
        response(0, 0),
        response(0, topic_id=OTHER_ID),
        response(0, session_id=6),
        response(0, session_id=-5),
    ],
)
def test_malformed_incremental_response_makes_next_request_full(malformed: FetchResponse) -> None:
    handler = open_handler()
    result = handler.handle_response(handler.next_request(), malformed)
    assert (result.is_accepted, result.retry_immediately, result.partitions) == (False, True, [])
    assert handler.resets == {MALFORMED: 1}
    assert session_position(handler.next_request()) == (5, 0)


@pytest.mark.parametrize(
    ("malformed", "next_session"),
    [
        (response(0, 1), (5, 0)),
        (response(0, 1, 2, 3), (5, 0)),
        (response(0, 1, 1), (5, 0)),
        (response(0, 1, 2, topic_id=OTHER_ID), (5, 0)),
        (response(), (5, 0)),
        (response(0, session_id=0), (0, 0)),
        (response(0, session_id=-9), (0, 0)),
    ],
)
def test_malformed_full_response_is_not_accepted(malformed: FetchResponse, next_session: tuple[int, int]) -> None:
    handler = FetchSessionHandler()
    for number in range(3):
        handler.want("t", ID, partition(number))
    result = handler.handle_response(handler.next_request(), malformed)
    assert (result.is_accepted, result.retry_immediately) == (False, False)
    assert session_position(handler.next_request()) == next_session


def test_throttled_response_is_not_an_error() -> None:
    handler = FetchSessionHandler()
    handler.want("t", ID, partition(0))
    result = handler.handle_response(handler.next_request(), FetchResponse(throttle_time_ms=100))
    assert not result.is_accepted
    assert not handler.resets
    assert session_position(handler.next_request()) == (0, 0)


def test_requests_stay_full_without_session_slot() -> None:
    handler = open_handler(3, session_id=0)
    request = handler.next_request()
    assert session_position(request) == (0, 0)
    assert handler.handle_response(request, response(0, 1, 2, session_id=0)).is_accepted
    assert handler.full_requests == 2


def test_handler_starts_new_session_after_forgetting_last_partition() -> None:
    handler = open_handler(1)
    handler.unwant("t", ID, 0)
    request = handler.next_request()
    assert request.forgotten_topics_data == [ForgottenTopic("t", ID, [0])]
    assert handler.handle_response(request, FetchResponse()).is_accepted
    handler.want("t", ID, partition(0))
    assert session_position(handler.next_request()) == (0, 0)
    assert not handler.resets


def test_session_epoch_wraps_to_1() -> None:
    handler = open_handler()
    handler._epoch = INT_MAX
    request = handler.next_request()
    assert session_position(request) == (5, INT_MAX)
    handler.handle_response(request, response())
    assert session_position(handler.next_request()) == (5, 1)


def test_duplicate_and_late_responses_are_ignored() -> None:
    handler = open_handler()
    request = handler.next_request()
    assert handler.handle_response(request, response(0)).is_accepted
    assert not handler.handle_response(request, response(0)).is_accepted
    late = handler.next_request()
    handler.handle_error(late)
    handler.handle_error(late)
    assert not handler.handle_response(late, response(0)).is_accepted
    assert handler.resets == {TRANSPORT: 1}
    assert session_position(handler.next_request()) == (5, 0)


def test_abandoned_request_counts_as_failed() -> None:
    handler = open_handler()
    handler.next_request()
    assert handler.is_waiting
    assert session_position(handler.next_request()) == (5, 0)
    assert handler.resets == {TRANSPORT: 1}


def test_full_request_names_partitions_with_records_last() -> None:
    handler = open_handler(3)
    handler.handle_response(handler.next_request(), response(0, records=b"r"))
    handler.handle_error(handler.next_request())
    assert handler.next_request().topics == [FetchTopic("t", ID, [partition(1), partition(2), partition(0)])]


def test_close_returns_final_request_once() -> None:
    handler = open_handler()
    assert handler.close() == (5, -1, [], [])
    assert handler.close() is None
    assert FetchSessionHandler().close() is None
    assert session_position(handler.next_request()) == (0, 0)


def test_session_opened_during_close_can_be_closed() -> None:
    handler = FetchSessionHandler()
    handler.want("t", ID, partition(0))
    request = handler.next_request()
    assert handler.close() is None
    assert not handler.handle_response(request, response(0, session_id=8)).is_accepted
    assert handler.close() == (8, -1, [], [])


def test_response_to_request_before_close_is_ignored() -> None:
    handler = FetchSessionHandler()
    handler.want("t", ID, partition(0))
    before = handler.next_request()
    handler.close()
    handler.want("t", ID, partition(0, 7))
    assert handler.handle_response(handler.next_request(), response(0, session_id=5)).is_accepted
    assert not handler.handle_response(before, response(0, session_id=8)).is_accepted
    assert session_position(handler.next_request()) == (5, 1), "the request before the close had another offset"


def test_disabled_handler_sends_sessionless_requests() -> None:
    handler = FetchSessionHandler(enabled=False)
    handler.want("t", ID, partition(0))
    for _ in range(2):
        request = handler.next_request()
        assert session_position(request) == (0, -1)
        assert handler.handle_response(request, response(0, session_id=8)).is_accepted
    handler.handle_error(handler.next_request())
    assert session_position(handler.next_request()) == (0, -1)
    assert handler.close() is None


def test_fill_keeps_other_request_fields() -> None:
    handler = open_handler()
    handler.want("t", ID, partition(1, 4))
    request = handler.next_request().fill(FetchRequest(replica_id=3, max_bytes=9))
    assert request == FetchRequest(
        replica_id=3, max_bytes=9, session_id=5, session_epoch=1, topics=[FetchTopic("t", ID, [partition(1, 4)])],
        forgotten_topics_data=[],
    )  # fmt: skip
