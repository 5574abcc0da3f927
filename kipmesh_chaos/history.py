"""A recorded history: what clients of one topic asked for and saw, and what its replicas hold in the end.

Events are in the order in which the recorder, one event loop, noticed them: an operation's `Invoke` comes before it can
have had an effect, its `Ok` after it must have had one. `t` is seconds since the run began, by a clock without jumps.
A history is kept as JSON lines, one event a line with its type in `event`, so that a run can be checked again.

A value is a record's value as text; every `Invoke` has one of its own, so that each record tells whose it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, get_args, get_type_hints


class HistoryError(Exception):
    """A file that is no history; the text is one line."""


class ReaderKind(StrEnum):
    """Who read."""

    CONSUMER = "consumer"
    """A client that goes on where it stopped, from whichever replica."""
    MEMBER = "member"
    """A member of a consumer group, where the group says; `Assigned` says where it begins anew."""
    REPLICA = "replica"
    """A plain fetch from one replica, each at any offset."""
    FINAL = "final"
    """A consumer that reads everything once, after all faults have ended."""


class Phase(StrEnum):
    """Parts of a run."""

    FAULTS = "faults"
    """The workload runs and faults happen: progress counts from here..."""
    RECOVERY = "recovery"
    """... until here: no fault is left, replicas catch up, producers still write."""
    FINAL = "final"
    """Nobody writes any more; consumers catch up, everything is read once more."""
    END = "end"


class Kind(StrEnum):
    """What a checker finds in a history."""

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
    """The steady state that a run keeps; None where nothing is asked for."""

    write_gap_s: float | None = None
    """Longest time without an acknowledged write, in each partition."""
    read_delay_s: float | None = None
    """Longest time from a write's acknowledgement until each consumer has read it."""


class Begin(NamedTuple):
    """The first event: what ran."""

    t: float
    name: str
    seed: int
    partitions: int
    limits: Limits
    consumers: Sequence[str] = ()
    nodes: Sequence[str] = ()
    exactly_once: bool = False
    """Whether the producers are idempotent: then a record that is there twice is an anomaly."""


class PhaseBegan(NamedTuple):
    """A part of the run began."""

    t: float
    phase: Phase


class Invoke(NamedTuple):
    """A producer is about to write `value`. Without `exactly_once` its previous operation has ended."""

    t: float
    operation: int
    producer: str
    partition: int
    value: str


class Ok(NamedTuple):
    """An operation was acknowledged at an offset."""

    t: float
    operation: int
    offset: int


class Failed(NamedTuple):
    """An operation failed and its record was certainly never written."""

    t: float
    operation: int
    error: str


class Unknown(NamedTuple):
    """An operation failed, and its record may be there or come later."""

    t: float
    operation: int
    error: str


class Read(NamedTuple):
    """One answer: records as (offset, value) and the high watermark that came with them, -1 where none is known.

    `session` is another one after a reader began anew; within one leadership of one session `high_watermark` must not
    go back. For a consumer that is its whole life (392-10): its `leader_epoch` is -1.
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
    """A member of a consumer group was told its partitions: all of a generation, and those among them that it takes up.

    Comes before any record that it reads of these.
    """

    t: float
    group: str
    member: str
    generation: int
    partitions: Sequence[int]
    added: Sequence[int]


class Commit(NamedTuple):
    """A member is about to commit (partition, offset of the next record) in its generation."""

    t: float
    commit: int
    group: str
    member: str
    generation: int
    offsets: Sequence[tuple[int, int]]


class CommitOk(NamedTuple):
    """A commit was acknowledged."""

    t: float
    commit: int


class CommitUnknown(NamedTuple):
    """A commit failed, and may have come true all the same, or do so later while its generation lasts."""

    t: float
    commit: int
    error: str


class OffsetsFetched(NamedTuple):
    """A group's committed (partition, offset), -1 for none, as its coordinator told them between `since` and `t`."""

    t: float
    since: float
    group: str
    reader: str
    offsets: Sequence[tuple[int, int]]


class End(NamedTuple):
    """A partition when nobody writes any more: its high watermark and who is in sync, by its leader."""

    t: float
    partition: int
    high_watermark: int
    replicas: Sequence[int]
    isr: Sequence[int]


class Dump(NamedTuple):
    """A part of a stopped replica's log: records as (offset, value), batches as (base offset, last offset, CRC, epoch).

    A log in several parts has them in order; each says the whole log's start and end.
    """

    t: float
    replica: int
    partition: int
    log_start: int
    log_end: int
    records: Sequence[tuple[int, str]]
    batches: Sequence[tuple[int, int, int, int]]


class FaultBegan(NamedTuple):
    """A fault is about to be done to nodes."""

    t: float
    fault: int
    kind: str
    nodes: Sequence[str]
    text: str
    halts: bool
    """Whether writes and reads may stand still from now until `settle_s` after the end."""
    settle_s: float = 0.0


class FaultEnded(NamedTuple):
    """A fault is undone."""

    t: float
    fault: int


class Led(NamedTuple):
    """A partition's leader (-1: none), epoch and in-sync replicas, as metadata said them."""

    t: float
    partition: int
    leader: int
    leader_epoch: int
    isr: Sequence[int]


class Controller(NamedTuple):
    """The active controller (-1: none answers)."""

    t: float
    node_id: int
    epoch: int


class Note(NamedTuple):
    """Something that a person may want to know when something else went wrong."""

    t: float
    text: str


class NotRecovered(NamedTuple):
    """The cluster did not come back to where it should be in time."""

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
_TYPES: Mapping[str, Any] = {name: kind for kind, name in _NAMES.items()}
_FIELD_TYPES = {kind: get_type_hints(kind) for kind in _NAMES}


def to_line(event: Event) -> str:
    """One event as JSON, without a line's end."""
    fields = dict(zip(event._fields, event, strict=True))
    fields["t"] = round(event.t, 4)
    if isinstance(event, Begin):
        fields["limits"] = event.limits._asdict()
    return json.dumps({"event": _NAMES[type(event)], **fields}, separators=(",", ":"))


def from_line(line: str) -> Event:
    """The event of a line; raises HistoryError."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise HistoryError("the line is no JSON") from None
    name = fields.pop("event", None) if isinstance(fields, dict) else None
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise HistoryError("the line is no event" if name is None else f"there is no event {name!r}")
    missing = [one for one in kind._fields if one not in fields and one not in kind._field_defaults]
    unknown = [one for one in fields if one not in kind._fields]
    if missing or unknown:
        what = f"without {', '.join(missing)}" if missing else f"with {', '.join(unknown)}, which it does not have"
        raise HistoryError(f"event {name!r} {what}")
    try:
        if kind is Begin:
            fields["limits"] = _limits(fields["limits"])
        elif kind is PhaseBegan:
            fields["phase"] = Phase(fields["phase"])
        elif kind is Read:
            fields["kind"] = ReaderKind(fields["kind"])
        event: Event = kind(**fields)
        _check(event)
    except (ValueError, TypeError) as error:
        raise HistoryError(f"event {name!r}: {error}") from None
    return event


def _limits(value: Any) -> Limits:
    if not isinstance(value, dict) or not value.keys() <= set(Limits._fields):
        raise TypeError(f"limits is {value!r}")
    return Limits(**value)


_PLAIN = {"float": (int, float), "int": (int,), "str": (str,), "bool": (bool,)}


def _check(event: Event) -> None:
    """Numbers and texts are what they should be, lists are lists, and of pairs where they must be."""
    for name, hint in _FIELD_TYPES[type(event)].items():
        value = getattr(event, name)
        plain = _PLAIN.get(getattr(hint, "__name__", ""))
        if plain is not None:
            if not isinstance(value, plain):
                raise TypeError(f"{name} is {value!r}")
        elif name in ("records", "batches", "offsets"):
            width = 4 if name == "batches" else 2
            if not isinstance(value, list) or not all(isinstance(one, list) and len(one) == width for one in value):
                raise TypeError(f"{name} is no list of lists of {width}")
        elif name in ("nodes", "isr", "replicas", "consumers", "partitions", "added") and not isinstance(value, list):
            raise TypeError(f"{name} is no list")


def read_history(file: Path) -> Iterator[Event]:
    """The events of a file; raises HistoryError with the line's number, OSError.

    A last line without its end, which a killed recorder leaves, is left out.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield from_line(line.decode())
            except UnicodeDecodeError:
                raise HistoryError(f"{file}:{number}: the line is no text (UTF-8)") from None
            except HistoryError as error:
                raise HistoryError(f"{file}:{number}: {error}") from None


def write_history(file: Path, events: Iterable[Event]) -> None:
    """Write a whole history."""
    with file.open("w", encoding="utf-8") as output:
        output.writelines(f"{to_line(event)}\n" for event in events)
