"""Recorded history of a run: client operations on one topic and the final contents of its replicas.

The recorder, one event loop, defines the order of events. The `Invoke` of an operation precedes any effect of it, its
`Ok` follows that effect. `t` is monotonic time in seconds since the start of the run. A history file has one JSON
object per line, with the event's type in `event`, so a run can be checked again later.

A value is a record's value as text. Every `Invoke` has a unique value, which identifies the operation that wrote a
record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, TypeAlias, get_args

from pydantic import TypeAdapter, ValidationError

from kipmesh.core.config.validation import error_text


class HistoryError(Exception):
    """A history file is malformed. The message is one line."""


class ReaderKind(StrEnum):
    """Kind of a reader, which determines the checks that apply to its reads."""

    CONSUMER = "consumer"
    """A consumer with its own positions, which may read from any replica."""
    MEMBER = "member"
    """A consumer group member. `Assigned` resets its positions."""
    REPLICA = "replica"
    """Plain fetches from one replica, each at any offset."""
    FINAL = "final"
    """A consumer that reads the whole topic after all faults have ended."""


class Phase(StrEnum):
    """Phases of a run, in this order."""

    FAULTS = "faults"
    """Workload and faults. The progress limits apply from here until `RECOVERY`."""
    RECOVERY = "recovery"
    """All faults are undone, replicas catch up, producers still write."""
    FINAL = "final"
    """Producers have stopped, consumers catch up, the final read runs."""
    END = "end"


class Kind(StrEnum):
    """Anomalies that the checker detects. docs/chaos.md defines them."""

    LOST = "lost acknowledged write"
    PHANTOM = "phantom record"
    TWO_VALUES = "offset with two values"
    REORDERED = "reordered writes"
    DUPLICATE = "record written twice"
    SKIPPED = "consumer skipped records"
    WENT_BACK = "consumer went back"
    WATERMARK = "high watermark went back"
    ABOVE_WATERMARK = "record read above the high watermark"
    REPLICAS = "replicas differ"
    TWO_OWNERS = "partition with two owners in a generation"
    COMMIT_WENT_BACK = "committed offset went back"
    COMMIT_PHANTOM = "committed offset that nobody committed"
    COMMIT_STALE = "commit of an old generation accepted"
    GROUP_SKIPPED = "group skipped records"
    NO_PROGRESS = "no progress"
    NOT_RECOVERED = "not recovered"
    INCOMPLETE = "incomplete history"


class Limits(NamedTuple):
    """Progress limits of the steady state in seconds; None disables a limit."""

    write_gap_s: float | None = None
    """Longest time without an acknowledged write, per partition."""
    read_delay_s: float | None = None
    """Longest time from the acknowledgement of a write until each consumer has read it."""


class Begin(NamedTuple):
    """First event: the parameters of the run. `consumers` are the names of readers that must read all records."""

    t: float
    name: str
    seed: int
    partitions: int
    limits: Limits
    consumers: Sequence[str] = ()
    nodes: Sequence[str] = ()
    exactly_once: bool = False
    """Whether the producers are idempotent, which makes a duplicate record an anomaly."""


class PhaseBegan(NamedTuple):
    """A phase of the run begins at `t`."""

    t: float
    phase: Phase


class Invoke(NamedTuple):
    """A producer is about to write `value`. Unless producers are idempotent, the producer's previous operation has
    ended.
    """

    t: float
    operation: int
    producer: str
    partition: int
    value: str


class Ok(NamedTuple):
    """A write was acknowledged. `offset` is that of its record."""

    t: float
    operation: int
    offset: int


class Failed(NamedTuple):
    """A write failed, and its record was definitely not appended."""

    t: float
    operation: int
    error: str


class Unknown(NamedTuple):
    """A write failed, but its record may have been appended or may still be."""

    t: float
    operation: int
    error: str


class Read(NamedTuple):
    """One fetch result of a partition. `records` are (offset, value) pairs; `high_watermark` is -1 if unknown;
    `replica` is -1 if any replica may have responded.

    `session` changes when a reader restarts. Within one session and `leader_epoch`, `high_watermark` must not decrease.
    For a consumer, whose `leader_epoch` is -1, this applies to its whole life (392-10).
    """

    t: float
    reader: str
    kind: ReaderKind
    partition: int
    records: Sequence[tuple[int, str]]
    high_watermark: int = -1
    replica: int = -1
    leader_epoch: int = -1
    session: int = 0


class Assigned(NamedTuple):
    """A group member received its assignment: all its partitions in a generation, and which of them are newly added.

    Precedes every record that the member reads from the added partitions.
    """

    t: float
    group: str
    member: str
    generation: int
    partitions: Sequence[int]
    added: Sequence[int]


class Commit(NamedTuple):
    """A group member is about to commit `offsets`, (partition, next offset) pairs, in its generation. `commit` is the
    number of the commit.
    """

    t: float
    commit: int
    group: str
    member: str
    generation: int
    offsets: Sequence[tuple[int, int]]


class CommitOk(NamedTuple):
    """The commit with this number was acknowledged."""

    t: float
    commit: int


class CommitUnknown(NamedTuple):
    """A commit failed, but it may have been applied, or may still be applied until its generation ends."""

    t: float
    commit: int
    error: str


class OffsetsFetched(NamedTuple):
    """Committed offsets of a group as (partition, offset) pairs, -1 for none, fetched by `reader` between `since` and
    `t`.
    """

    t: float
    since: float
    group: str
    reader: str
    offsets: Sequence[tuple[int, int]]


class End(NamedTuple):
    """Final state of a partition: high watermark, node ids of its replicas and ISR."""

    t: float
    partition: int
    high_watermark: int
    replicas: Sequence[int]
    isr: Sequence[int]


class Dump(NamedTuple):
    """Part of a replica's log: records (offset, value) and batches (base offset, last offset, CRC, epoch).

    A log may be split into several dumps, in order. Each has the start and end offset of the whole log.
    """

    t: float
    replica: int
    partition: int
    log_start: int
    log_end: int
    records: Sequence[tuple[int, str]]
    batches: Sequence[tuple[int, int, int, int]]


class FaultBegan(NamedTuple):
    """A fault with the number `fault` is about to be injected into nodes."""

    t: float
    fault: int
    kind: str
    nodes: Sequence[str]
    text: str
    halts: bool
    """Whether writes and reads may stop from now until `settle_s` after the end of the fault."""
    settle_s: float = 0.0


class FaultEnded(NamedTuple):
    """The fault with this number is undone."""

    t: float
    fault: int


class Led(NamedTuple):
    """Change of the leader (-1: none), leader epoch or ISR of a partition, as observed in Metadata responses."""

    t: float
    partition: int
    leader: int
    leader_epoch: int
    isr: Sequence[int]


class Controller(NamedTuple):
    """Change of the active controller, as observed. `node_id` and `epoch` are -1 if unknown."""

    t: float
    node_id: int
    epoch: int


class Note(NamedTuple):
    """Additional information for a person who investigates an anomaly. The checker ignores it."""

    t: float
    text: str


class NotRecovered(NamedTuple):
    """The cluster or a node did not return to its expected state in time, which is an anomaly."""

    t: float
    text: str


Event: TypeAlias = (
    Begin
    | PhaseBegan
    | Invoke
    | Ok
    | Failed
    | Unknown
    | Read
    | Assigned
    | Commit
    | CommitOk
    | CommitUnknown
    | OffsetsFetched
    | End
    | Dump
    | FaultBegan
    | FaultEnded
    | Led
    | Controller
    | Note
    | NotRecovered
)

_NAMES = {
    kind: "phase" if kind is PhaseBegan else re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind.__name__).lower()
    for kind in get_args(Event)
}

_PARSERS = {name: TypeAdapter(kind) for kind, name in _NAMES.items()}


def to_line(event: Event) -> str:
    """Return an event as one line of JSON, without a line feed. `t` is rounded to 0.1 ms."""
    fields = dict(zip(event._fields, event, strict=True))
    fields["t"] = round(event.t, 4)
    if isinstance(event, Begin):
        fields["limits"] = event.limits._asdict()
    return json.dumps({"event": _NAMES[type(event)], **fields}, separators=(",", ":"))


def from_line(line: str) -> Event:
    """Parse one line of a history file into its event. Raises HistoryError for malformed JSON, an unknown event or
    invalid fields.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise HistoryError("the line is not JSON") from None
    name = fields.pop("event", None) if isinstance(fields, dict) else None
    if name is None:
        raise HistoryError("the line is not an event: it has no field `event`")
    parser = _PARSERS.get(name) if isinstance(name, str) else None
    if parser is None:
        raise HistoryError(f"unknown event {name!r}")
    try:
        # Only JSON input has strict numbers and texts together with tuples and enumerations.
        event: Event = parser.validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        faults = (
            error_text(one, ".".join(map(str, one["loc"])), one["input"]) for one in error.errors(include_url=False)
        )
        raise HistoryError(f"event {name!r}: {'; '.join(faults)}") from None
    return event


def read_history(file: Path) -> Iterator[Event]:
    """Yield the events of a history file in order. Raises OSError, and HistoryError with file and line number.

    An incomplete last line, which a killed recorder may leave, is skipped.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield from_line(line.decode())
            except UnicodeDecodeError:
                raise HistoryError(f"{file}:{number}: the line is not UTF-8") from None
            except HistoryError as error:
                raise HistoryError(f"{file}:{number}: {error}") from None


def write_history(file: Path, events: Iterable[Event]) -> None:
    """Write events to a history file, replacing it. Raises OSError."""
    with file.open("w", encoding="utf-8") as output:
        output.writelines(f"{to_line(event)}\n" for event in events)
