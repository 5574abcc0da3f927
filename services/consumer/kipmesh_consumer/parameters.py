"""Parsing and validation of the query parameters `from`, `partition` and `format`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages.schema import MAX_INT32, MAX_INT64

PARTITIONS_MAX = 10_000


class Edge(StrEnum):
    """A start that applies to all partitions of a stream: the value of the parameter `from`."""

    EARLIEST = "earliest"
    LATEST = "latest"
    COMMITTED = "committed"
    """The committed offsets of the service's group."""


class StreamFormat(Enum):
    """Format of a stream. The value is the content type."""

    NDJSON = "application/x-ndjson"
    SSE = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Start:
    """Start of a stream: either `edge` for all partitions, or `offsets` by partition. The other one is None."""

    edge: Edge | None = None
    offsets: Mapping[int, int] | None = None


def bad_parameter(text: str) -> KafkaError:
    """Return, without raising it, a KafkaError(INVALID_REQUEST), which the API converts to HTTP 400."""
    return KafkaError(ErrorCode.INVALID_REQUEST, text)


def parse_start(text: str) -> Start:
    """Parse the parameter `from`: `earliest`, `latest`, `committed` or `0:100,1:50` (partition:offset).

    Raises KafkaError(INVALID_REQUEST) for other text, a partition that occurs twice, or too many partitions.
    """
    if text in set(Edge):
        return Start(edge=Edge(text))
    offsets: dict[int, int] = {}
    for part in text.split(","):
        partition, colon, offset = part.strip().partition(":")
        if not (colon and _is_number(partition) and _is_number(offset)):
            raise bad_parameter(f"from must be earliest, latest, committed or partition:offset,..., got {text!r}")
        if int(partition) > MAX_INT32 or int(offset) > MAX_INT64:
            raise bad_parameter(f"from must have int32 partitions and int64 offsets, got {part.strip()!r}")
        if int(partition) in offsets:
            raise bad_parameter(f"from must name each partition once, got partition {partition} twice")
        offsets[int(partition)] = int(offset)
        if len(offsets) > PARTITIONS_MAX:
            raise bad_parameter(f"from must name at most {PARTITIONS_MAX} partitions")
    return Start(offsets=offsets)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def choose_partitions(existing: Sequence[int], requested: Sequence[int], start: Start) -> list[int]:
    """Return the partitions to stream, sorted: `requested`, else those with a start offset, else all existing ones.

    Raises KafkaError: INVALID_REQUEST if `requested` and the start offsets name different partitions,
    UNKNOWN_TOPIC_OR_PARTITION if one of them does not exist.
    """
    named = list(start.offsets or ())
    if requested and named and set(requested) != set(named):
        raise bad_parameter("partition and from must name the same partitions")
    wanted = sorted(set(requested or named or existing))
    missing = [partition for partition in wanted if partition not in set(existing)]
    if missing:
        raise KafkaError(
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            f"partition {missing[0]} does not exist; the topic has {len(existing)} partitions",
        )
    return wanted


def choose_format(name: str | None, accept: str | None) -> StreamFormat:
    """Return the format that the parameter `format` names (ndjson, sse).

    Without it, returns SSE if the Accept header lists text/event-stream, otherwise NDJSON. Raises
    KafkaError(INVALID_REQUEST) for an unknown `format`.
    """
    match name:
        case "ndjson":
            return StreamFormat.NDJSON
        case "sse":
            return StreamFormat.SSE
        case None:
            pass
        case _:
            raise bad_parameter(f"format must be ndjson or sse, got {name!r}")
    types = [part.partition(";")[0].strip().lower() for part in (accept or "").split(",")]
    return StreamFormat.SSE if StreamFormat.SSE.value in types else StreamFormat.NDJSON
