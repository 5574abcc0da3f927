"""The client's side: what is sent next after each kind of answer and error (227-04, 227-07, 227-17 to 227-19)."""

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


def asked(number: int, offset: int = 0) -> FetchPartition:
    return FetchPartition(number, fetch_offset=offset)


def response(*numbers: int, session_id: int = 5, topic_id: bytes = ID, records: bytes = b"") -> FetchResponse:
    data = [PartitionData(number, records=records) for number in numbers]
    return FetchResponse(session_id=session_id, responses=[FetchableTopicResponse("t", topic_id, data)] if data else [])


def opened(count: int = 3, session_id: int = 5) -> FetchSessionHandler:
    """In a session with partitions 0 to count - 1 of topic t."""
    handler = FetchSessionHandler()
    for number in range(count):
        handler.want("t", ID, asked(number))
    answer = handler.handle_response(handler.next_request(), response(*range(count), session_id=session_id))
    assert answer.is_accepted
    return handler


def stands(request: SessionRequest) -> tuple[int, int]:
    return request.session_id, request.session_epoch


def test_full_then_incremental() -> None:
    handler = FetchSessionHandler()
    handler.want("t", ID, asked(0))
    handler.want("t", ID, asked(1))
    handler.want("u", OTHER_ID, asked(0))
    first = handler.next_request()
    topics = [FetchTopic("t", ID, [asked(0), asked(1)]), FetchTopic("u", OTHER_ID, [asked(0)])]
    assert first == SessionRequest(0, 0, topics, [])
    both = response(0, 1)
    both = both._replace(responses=[*both.responses, FetchableTopicResponse("", OTHER_ID, [PartitionData(0)])])
    answer = handler.handle_response(first, both)
    assert [(one.topic, one.topic_id, one.requested.partition) for one in answer.partitions] == [
        ("t", ID, 0),
        ("t", ID, 1),
        ("u", OTHER_ID, 0),
    ]
    assert handler.next_request() == (5, 1, [], [])
    assert (handler.full_requests, handler.incremental_requests) == (1, 1)


def test_only_what_changed_is_said() -> None:
    handler = opened(4)
    handler.want("t", ID, asked(0))  # as before
    handler.want("t", ID, asked(1, 7))
    handler.want("t", ID, asked(9))
    handler.unwant("t", ID, 2)
    handler.want("t", ID, asked(3, 1))
    handler.want("t", ID, asked(3))  # and back
    handler.unwant("t", ID, 77)
    request = handler.next_request()
    assert request == (5, 1, [FetchTopic("t", ID, [asked(1, 7), asked(9)])], [ForgottenTopic("t", ID, [2])])
    handler.handle_response(request, response(9))
    assert handler.next_request() == (5, 2, [], [])
    assert len(handler) == 4


def test_a_request_repeats_everything_after_a_failure_from_where_the_client_is_by_then() -> None:
    handler = opened(2)
    request = handler.next_request()
    handler.want("t", ID, asked(0, 3))
    handler.unwant("t", ID, 1)
    handler.handle_error(request)
    assert handler.next_request() == (5, 0, [FetchTopic("t", ID, [asked(0, 3)])], [])


def test_what_is_wanted_meanwhile_waits_for_the_next_request() -> None:
    handler = opened(1)
    request = handler.next_request()
    handler.want("t", ID, asked(0, 3))
    handler.want("t", ID, asked(8))
    handler.unwant("t", ID, 8)
    answer = handler.handle_response(request, response(0))
    assert answer.partitions[0].requested == asked(0)
    assert handler.next_request() == (5, 2, [FetchTopic("t", ID, [asked(0, 3)])], [])


def test_forgotten_and_wanted_again_is_nothing() -> None:
    handler = opened(2)
    handler.unwant("t", ID, 1)
    handler.want("t", ID, asked(1))
    assert handler.next_request() == (5, 1, [], [])


def test_a_topic_made_anew_is_forget_plus_add() -> None:
    handler = opened(1)
    handler.unwant("t", ID, 0)
    handler.want("t", OTHER_ID, asked(0))
    assert handler.next_request() == (
        5,
        1,
        [FetchTopic("t", OTHER_ID, [asked(0)])],
        [ForgottenTopic("t", ID, [0])],
    )


def test_names_for_all_while_one_id_is_not_known() -> None:
    handler = FetchSessionHandler()
    handler.want("t", ID, asked(0))
    handler.want("u", b"", asked(0))
    request = handler.next_request()
    assert request.topics == [FetchTopic("t", b"", [asked(0)]), FetchTopic("u", b"", [asked(0)])]
    named = [FetchableTopicResponse(name, b"", [PartitionData(0)]) for name in ("t", "u")]
    answer = handler.handle_response(request, FetchResponse(session_id=5, responses=named))
    assert [(one.topic, one.topic_id) for one in answer.partitions] == [("t", ID), ("u", b"")]
    # made anew: the same name to the server
    handler.unwant("t", ID, 0)
    handler.want("t", OTHER_ID, asked(0))
    request = handler.next_request()
    assert request == (5, 1, [FetchTopic("t", b"", [asked(0)])], [ForgottenTopic("t", b"", [0])])
    handler.handle_response(request, FetchResponse(session_id=5))
    # the id becomes known: ids from now on, and so a new session
    handler.unwant("u", b"", 0)
    handler.want("u", ID, asked(0))
    request = handler.next_request()
    assert stands(request) == (5, 0)
    assert request.topics == [FetchTopic("t", OTHER_ID, [asked(0)]), FetchTopic("u", ID, [asked(0)])]
    assert not handler.resets


@pytest.mark.parametrize(
    ("error", "after"),
    [
        (ErrorCode.FETCH_SESSION_ID_NOT_FOUND, (0, 0)),
        (ErrorCode.INVALID_FETCH_SESSION_EPOCH, (5, 0)),
        (ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR, (5, 0)),
        (ErrorCode.UNKNOWN_SERVER_ERROR, (5, 0)),
        (ErrorCode.STALE_BROKER_EPOCH, (5, 0)),
    ],
)
def test_after_an_error(error: ErrorCode, after: tuple[int, int]) -> None:
    handler = opened()
    answer = handler.handle_response(handler.next_request(), FetchResponse(error_code=error))
    assert (answer.is_accepted, answer.error, answer.retry_immediately) == (False, error, True)
    assert handler.resets == {error.name: 1}
    request = handler.next_request()
    assert stands(request) == after
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
def test_after_a_malformed_incremental_response(malformed: FetchResponse) -> None:
    handler = opened()
    answer = handler.handle_response(handler.next_request(), malformed)
    assert (answer.is_accepted, answer.retry_immediately, answer.partitions) == (False, True, [])
    assert handler.resets == {MALFORMED: 1}
    assert stands(handler.next_request()) == (5, 0)


@pytest.mark.parametrize(
    ("malformed", "after"),
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
def test_after_a_malformed_full_response(malformed: FetchResponse, after: tuple[int, int]) -> None:
    handler = FetchSessionHandler()
    for number in range(3):
        handler.want("t", ID, asked(number))
    answer = handler.handle_response(handler.next_request(), malformed)
    assert (answer.is_accepted, answer.retry_immediately) == (False, False)
    assert stands(handler.next_request()) == after


def test_a_server_that_slows_us_down_makes_no_error() -> None:
    handler = FetchSessionHandler()
    handler.want("t", ID, asked(0))
    answer = handler.handle_response(handler.next_request(), FetchResponse(throttle_time_ms=100))
    assert not answer.is_accepted
    assert not handler.resets
    assert stands(handler.next_request()) == (0, 0)


def test_without_a_slot_every_request_is_full() -> None:
    handler = opened(3, session_id=0)
    request = handler.next_request()
    assert stands(request) == (0, 0)
    assert handler.handle_response(request, response(0, 1, 2, session_id=0)).is_accepted
    assert handler.full_requests == 2


def test_the_server_closes_a_session_whose_last_partition_was_forgotten() -> None:
    handler = opened(1)
    handler.unwant("t", ID, 0)
    request = handler.next_request()
    assert request.forgotten_topics_data == [ForgottenTopic("t", ID, [0])]
    assert handler.handle_response(request, FetchResponse()).is_accepted
    handler.want("t", ID, asked(0))
    assert stands(handler.next_request()) == (0, 0)
    assert not handler.resets


def test_epochs_wrap() -> None:
    handler = opened()
    handler._epoch = INT_MAX
    request = handler.next_request()
    assert stands(request) == (5, INT_MAX)
    handler.handle_response(request, response())
    assert stands(handler.next_request()) == (5, 1)


def test_answers_count_once_and_only_to_the_request_under_way() -> None:
    handler = opened()
    request = handler.next_request()
    assert handler.handle_response(request, response(0)).is_accepted
    assert not handler.handle_response(request, response(0)).is_accepted
    late = handler.next_request()
    handler.handle_error(late)
    handler.handle_error(late)
    assert not handler.handle_response(late, response(0)).is_accepted
    assert handler.resets == {TRANSPORT: 1}
    assert stands(handler.next_request()) == (5, 0)


def test_a_request_that_nobody_waits_for_counts_as_failed() -> None:
    handler = opened()
    handler.next_request()
    assert handler.is_waiting
    assert stands(handler.next_request()) == (5, 0)
    assert handler.resets == {TRANSPORT: 1}


def test_partitions_with_records_go_to_the_back_of_full_requests() -> None:
    handler = opened(3)
    handler.handle_response(handler.next_request(), response(0, records=b"r"))
    handler.handle_error(handler.next_request())
    assert handler.next_request().topics == [FetchTopic("t", ID, [asked(1), asked(2), asked(0)])]


def test_closing() -> None:
    handler = opened()
    assert handler.close() == (5, -1, [], [])
    assert handler.close() is None
    assert FetchSessionHandler().close() is None
    assert stands(handler.next_request()) == (0, 0)


def test_a_session_that_is_opened_while_the_client_closes_can_be_closed_as_well() -> None:
    handler = FetchSessionHandler()
    handler.want("t", ID, asked(0))
    request = handler.next_request()
    assert handler.close() is None
    assert not handler.handle_response(request, response(0, session_id=8)).is_accepted
    assert handler.close() == (8, -1, [], [])


def test_an_answer_from_before_a_close_is_nothing_to_the_session_after_it() -> None:
    handler = FetchSessionHandler()
    handler.want("t", ID, asked(0))
    before = handler.next_request()
    handler.close()
    handler.want("t", ID, asked(0, 7))
    assert handler.handle_response(handler.next_request(), response(0, session_id=5)).is_accepted
    assert not handler.handle_response(before, response(0, session_id=8)).is_accepted
    assert stands(handler.next_request()) == (5, 1), "the other one was told another offset"


def test_switched_off() -> None:
    handler = FetchSessionHandler(enabled=False)
    handler.want("t", ID, asked(0))
    for _ in range(2):
        request = handler.next_request()
        assert stands(request) == (0, -1)
        assert handler.handle_response(request, response(0, session_id=8)).is_accepted
    handler.handle_error(handler.next_request())
    assert stands(handler.next_request()) == (0, -1)
    assert handler.close() is None


def test_the_other_fields_of_a_request_are_the_users() -> None:
    handler = opened()
    handler.want("t", ID, asked(1, 4))
    request = handler.next_request().fill(FetchRequest(replica_id=3, max_bytes=9))
    assert request == FetchRequest(
        replica_id=3, max_bytes=9, session_id=5, session_epoch=1, topics=[FetchTopic("t", ID, [asked(1, 4)])],
        forgotten_topics_data=[],
    )  # fmt: skip
