from __future__ import annotations

import pytest
from kipmesh_consumer.models import error_object, status_of
from kipmesh_consumer.parameters import Edge, Start, StreamFormat, choose_format, choose_partitions, parse_start
from kipmesh_consumer.streams import Delivered, DeliveredPositions

from kipmesh.core.errors import ErrorCode, KafkaError


def test_start_is_parsed_from_edges_and_offsets() -> None:
    assert parse_start("earliest") == Start(edge=Edge.EARLIEST)
    assert parse_start("latest") == Start(edge=Edge.LATEST)
    assert parse_start("0:100, 1:50") == Start(offsets={0: 100, 1: 50})


@pytest.mark.parametrize(
    "text", ["", "first", "0", "0:", ":1", "0:-1", "0:1,0:2", "0:1,", "0:٣", "0:99999999999999999999", "2147483648:0"]
)
def test_invalid_start_is_a_bad_request(text: str) -> None:
    with pytest.raises(KafkaError) as caught:
        parse_start(text)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert status_of(caught.value) == 400


def test_partitions_are_selected_by_parameter_and_start() -> None:
    earliest = Start(edge=Edge.EARLIEST)
    assert choose_partitions([0, 1, 2], [], earliest) == [0, 1, 2]
    assert choose_partitions([0, 1, 2], [2, 0, 2], earliest) == [0, 2]
    assert choose_partitions([0, 1, 2], [], Start(offsets={1: 5})) == [1]
    assert choose_partitions([0, 1, 2], [1], Start(offsets={1: 5})) == [1]
    with pytest.raises(KafkaError, match="the same partitions"):
        choose_partitions([0, 1, 2], [0], Start(offsets={1: 5}))
    with pytest.raises(KafkaError, match="partition 3 does not exist") as caught:
        choose_partitions([0, 1, 2], [3], earliest)
    assert status_of(caught.value) == 404


@pytest.mark.parametrize(
    ("name", "accept", "expected"),
    [
        (None, None, StreamFormat.NDJSON),
        (None, "*/*", StreamFormat.NDJSON),
        (None, "text/event-stream", StreamFormat.SSE),
        (None, "text/html, Text/Event-Stream;q=0.9", StreamFormat.SSE),
        ("ndjson", "text/event-stream", StreamFormat.NDJSON),
        ("sse", None, StreamFormat.SSE),
    ],
)
def test_format_follows_parameter_and_accept_header(
    name: str | None, accept: str | None, expected: StreamFormat
) -> None:
    assert choose_format(name, accept) is expected


def test_unknown_format_is_rejected() -> None:
    with pytest.raises(KafkaError, match="must be ndjson or sse"):
        choose_format("xml", None)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, 404),
        (ErrorCode.OFFSET_OUT_OF_RANGE, 416),
        (ErrorCode.REQUEST_TIMED_OUT, 504),
        (ErrorCode.NOT_LEADER_OR_FOLLOWER, 503),
        (ErrorCode.UNKNOWN_SERVER_ERROR, 500),
    ],
)
def test_errors_have_http_status_and_kafka_code(code: ErrorCode, status: int) -> None:
    error = KafkaError(code, "the reason")
    assert status_of(error) == status
    assert error_object(error) == {"error": {"code": int(code), "name": code.name, "message": "the reason"}}


def test_delivered_positions_are_limited_and_never_decrease() -> None:
    positions = DeliveredPositions(partitions_max=2)
    positions.deliver("a", 0, 10)
    positions.deliver("a", 0, 5)
    positions.deliver("b", 0, 1)
    assert positions.of(None) == [Delivered("a", 0, 10), Delivered("b", 0, 1)]
    assert positions.of("b") == [Delivered("b", 0, 1)]
    positions.deliver("a", 0, 11)
    positions.deliver("c", 0, 1)  # b is least recently used
    assert [position.topic for position in positions.of(None)] == ["a", "c"]
    positions.forget("a", 0)
    positions.forget("a", 0)
    assert len(positions) == 1
