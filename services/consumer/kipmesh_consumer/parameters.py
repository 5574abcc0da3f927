"""What a request for records may ask: `from`, `partition`, `format`, parsed and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages.schema import MAX_INT32, MAX_INT64

PARTITIONS_MAX = 10_000


class Edge(StrEnum):
    """Where to begin in every partition."""

    EARLIEST = "earliest"
    LATEST = "latest"
    COMMITTED = "committed"
    """What the service's group says."""


class StreamFormat(Enum):
    """The form of the answer; the value is its content type."""

    NDJSON = "application/x-ndjson"
    SSE = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Start:
    """Where a stream begins: an edge for all partitions, or an offset for each that is named."""

    edge: Edge | None = None
    offsets: Mapping[int, int] | None = None


def bad_parameter(text: str) -> KafkaError:
    """What a wrong parameter is answered with (HTTP 400)."""
    return KafkaError(ErrorCode.INVALID_REQUEST, text)


def parse_start(text: str) -> Start:
    """From `earliest`, `latest`, `committed` or `0:100,1:50` (partition:offset); raises KafkaError(INVALID_REQUEST)."""
    if text in set(Edge):
        return Start(edge=Edge(text))
    offsets: dict[int, int] = {}
    for part in text.split(","):
        partition, colon, offset = part.strip().partition(":")
        if not (colon and _is_number(partition) and _is_number(offset)):
            raise bad_parameter(f"from={text!r} is not 'earliest', 'latest', 'committed' or partition:offset,...")
        if int(partition) > MAX_INT32 or int(offset) > MAX_INT64:
            raise bad_parameter(f"from={text!r}: {part.strip()!r} is too large")
        if int(partition) in offsets:
            raise bad_parameter(f"from={text!r} names partition {partition} twice")
        offsets[int(partition)] = int(offset)
        if len(offsets) > PARTITIONS_MAX:
            raise bad_parameter(f"from names more than {PARTITIONS_MAX} partitions")
    return Start(offsets=offsets)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def choose_partitions(existing: Sequence[int], asked: Sequence[int], start: Start) -> list[int]:
    """The partitions to read: the asked ones, those with an offset, or all; raises KafkaError."""
    named = list(start.offsets or ())
    if asked and named and set(asked) != set(named):
        raise bad_parameter("partition and from name different partitions")
    wanted = sorted(set(asked or named or existing))
    missing = [partition for partition in wanted if partition not in set(existing)]
    if missing:
        raise KafkaError(
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            f"partition {missing[0]} does not exist; there are {len(existing)} partitions",
        )
    return wanted


def choose_format(name: str | None, accept: str | None) -> StreamFormat:
    """`format=` wins over the Accept header; NDJSON when neither says; raises KafkaError(INVALID_REQUEST)."""
    match name:
        case "ndjson":
            return StreamFormat.NDJSON
        case "sse":
            return StreamFormat.SSE
        case None:
            pass
        case _:
            raise bad_parameter(f"format={name!r} is neither 'ndjson' nor 'sse'")
    types = [part.partition(";")[0].strip().lower() for part in (accept or "").split(",")]
    return StreamFormat.SSE if StreamFormat.SSE.value in types else StreamFormat.NDJSON
