"""`kipmesh group`: list consumer groups, show their lag, reset their offsets, delete them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from kipmesh.cli.common import (
    AdminConnection,
    AsJson,
    CommandError,
    check_utf8,
    comma_list,
    command,
    counted,
    make_app,
    option,
    parse_number,
    print_json,
    print_table,
    print_values,
    printable,
)
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages.schema import MAX_INT64

if TYPE_CHECKING:
    from kipmesh.client import AdminClient, GroupDescription, GroupMemberDescription, ResetTo, TopicPartition

app = make_app(
    "Show consumer groups and their lag, reset their offsets, delete them.",
    """
    kipmesh group list
    kipmesh group describe readers
    kipmesh group reset readers --topic flights --to-earliest --dry-run
    kipmesh group delete readers
    """,
)


def _group_id(value: str) -> str:
    """Return a group id unchanged. Raises typer.BadParameter for the empty id, which only simple consumers use."""
    if not value:
        raise typer.BadParameter("the group id must not be empty")
    check_utf8(value)
    return value


def _known_states(values: list[str] | None) -> list[str] | None:
    """Return group states unchanged. Raises typer.BadParameter for an unknown state; case does not matter."""
    from kipmesh.core.group.classic import GroupState

    known = [state.value for state in GroupState]
    for value in values or ():
        if value.lower() not in (state.lower() for state in known):
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}")
    return values


Group = Annotated[str, typer.Argument(metavar="GROUP", callback=_group_id)]
Topics = Annotated[
    list[str],
    option(
        "--topic", "A topic, or partitions of it; repeatable.", metavar="TOPIC[:PARTITION,...]", callback=check_utf8
    ),
]
ShiftBy = Annotated[
    int | None, option("--shift-by", "Add N, or -N, to the current offset.", metavar="N", min=-MAX_INT64, max=MAX_INT64)
]

_LAG_TITLES = ["TOPIC", "PARTITION", "CURRENT-OFFSET", "LOG-END-OFFSET", "LAG", "CONSUMER-ID", "HOST", "CLIENT-ID"]
_RESETTABLE = ("Empty", "Dead")


class _Progress(NamedTuple):
    """Position of a group in one partition. Unknown values are None."""

    topic: str
    partition: int
    current_offset: int | None
    log_end_offset: int | None
    lag: int | None
    member: GroupMemberDescription | None


@command(app, "list")
def list_(
    states: Annotated[
        list[str] | None,
        option("--state", "Only groups in this state; repeatable.", metavar="STATE", callback=_known_states),
    ] = None,
    *,
    connection: AdminConnection,
    as_json: AsJson = False,
) -> None:
    """List the groups of all coordinators and their states.

    Examples:
    kipmesh group list
    kipmesh group list --state stable --state empty
    kipmesh group list --json
    """
    print_values(
        connection.run(lambda admin: admin.list_groups(states=states or ())),
        ("GROUP", "STATE", "PROTOCOL"),
        lambda one: (printable(one.group_id), one.state, one.protocol_type or "-"),
        lambda one: one._asdict(),
        as_json=as_json,
        none="no groups",
    )


@command(app)
def describe(group_id: Group, *, connection: AdminConnection, as_json: AsJson = False) -> None:
    """Show the state and members of a group, and its offset and lag in each partition.

    A dash means: no committed offset, no member assigned, or an unknown log end offset because the partition has no
    leader.

    Examples:
    kipmesh group describe readers
    kipmesh group describe readers --json
    """

    async def work(admin: AdminClient) -> tuple[GroupDescription, list[_Progress]]:
        group = (await admin.describe_groups([group_id]))[group_id]
        if group.state == "Dead":
            raise _no_group(group_id)
        return group, await _partition_progress(admin, group)

    group, partitions = connection.run(work)
    if as_json:
        print_json(_json_form(group, partitions))
    else:
        _print_group(group, partitions)


def _no_group(group_id: str) -> KafkaError:
    text = f"group {group_id!r} does not exist; list groups with: kipmesh group list"
    return KafkaError(ErrorCode.GROUP_ID_NOT_FOUND, text)


async def _partition_progress(admin: AdminClient, group: GroupDescription) -> list[_Progress]:
    """Return the progress in all partitions that have a committed offset or an assigned member."""
    owners = {where: member for member in group.members for where in member.assignment}
    committed = {where: one.offset for where, one in (await admin.list_group_offsets(group.group_id)).items()}
    ends = await _ends(admin, owners.keys() | committed.keys())
    found = []
    for where in sorted(owners.keys() | committed.keys()):
        current, end = committed.get(where), ends.get(where)
        # The end offset is read after the committed one, but a new leader may report a lower end.
        lag = None if current is None or end is None else max(end - current, 0)
        found.append(_Progress(*where, current, end, lag, owners.get(where)))
    return found


async def _ends(admin: AdminClient, wanted: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """Return the log end offsets of the partitions that have a leader. All others are left out."""
    from kipmesh.client import TIMESTAMP_LATEST

    names = {where.topic for where in wanted}
    topics = {topic.name: topic.partitions for topic in await admin.list_topics() if topic.name in names}
    led = [
        where
        for where in wanted
        if where.partition in topics.get(where.topic, {}) and topics[where.topic][where.partition].leader_id >= 0
    ]
    found = await admin.list_offsets(dict.fromkeys(led, TIMESTAMP_LATEST)) if led else {}
    return {where: end.offset for where, end in found.items() if end is not None}


def _print_group(group: GroupDescription, partitions: Sequence[_Progress]) -> None:
    node = group.coordinator
    parts = [
        f"group {printable(group.group_id)}: {group.state}",
        *([group.partition_assignor] if group.partition_assignor else []),
        f"coordinator {node.node_id} ({node.address})",
        counted(len(group.members), "member"),
    ]
    sys.stdout.write(", ".join(parts) + "\n")
    owners = {one.member.member_id for one in partitions if one.member is not None}
    rows: list[tuple[object, ...]] = [
        (printable(one.topic), one.partition, *map(_or_dash, one[2:5]), *_member_cells(one.member))
        for one in partitions
    ]
    rows += [(*"-----", *_member_cells(member)) for member in group.members if member.member_id not in owners]
    if rows:
        print_table(_LAG_TITLES, rows)


def _member_cells(member: GroupMemberDescription | None) -> tuple[str, str, str]:
    if member is None:
        return ("-", "-", "-")
    return (printable(member.member_id), printable(member.host), printable(member.client_id))


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _json_form(group: GroupDescription, progress: Sequence[_Progress]) -> dict[str, Any]:
    members = [{**one._asdict(), "assignment": [where._asdict() for where in one.assignment]} for one in group.members]
    partitions = [{**one._asdict(), "member": None if one.member is None else one.member.member_id} for one in progress]
    coordinator = {key: getattr(group.coordinator, key) for key in ("node_id", "host", "port")}
    return {**group._asdict(), "coordinator": coordinator, "members": members, "partitions": partitions}


# --- reset ---------------------------------------------------------------------------------------------------------


@command(app)
def reset(
    group_id: Group,
    topics: Topics,
    to_earliest: Annotated[bool, option("--to-earliest", "Reset to the first record.")] = False,
    to_latest: Annotated[bool, option("--to-latest", "Reset to the end of the log.")] = False,
    to_offset: Annotated[
        int | None, option("--to-offset", "Reset to this offset.", metavar="N", min=0, max=MAX_INT64)
    ] = None,
    to_datetime: Annotated[
        str | None, option("--to-datetime", "Reset to the first record at or after this time.", metavar="ISO")
    ] = None,
    shift_by: ShiftBy = None,
    dry_run: Annotated[bool, option("--dry-run", "Show the new offsets without changing them.")] = False,
    *,
    connection: AdminConnection,
    as_json: AsJson = False,
) -> None:
    """Reset the committed offsets of a group. The group must have no members and need not exist.

    An offset outside the log becomes the offset of the first record or the log end offset.

    Examples:
    kipmesh group reset readers --topic flights --to-earliest --dry-run
    kipmesh group reset readers --topic flights:0 --topic flights:3 --to-offset 1000
    kipmesh group reset readers --topic flights --to-datetime 2026-11-21T08:00:00+00:00
    kipmesh group reset readers --topic flights --shift-by -100 --json
    """
    to, value = _target(
        to_earliest=to_earliest, to_latest=to_latest, offset=to_offset, when=to_datetime, shift=shift_by
    )
    named = [_parse(text) for text in topics]

    async def work(admin: AdminClient) -> tuple[Mapping[TopicPartition, int], Mapping[TopicPartition, int]]:
        partitions = await _partitions(admin, named)
        group = (await admin.describe_groups([group_id]))[group_id]
        if group.state not in _RESETTABLE:
            count = len(group.members)
            raise CommandError(
                f"cannot reset offsets of group {group_id!r} in state {group.state} (members: {count}); "
                "stop the members first"
            )
        before = await admin.list_group_offsets(group_id, partitions)
        after = await admin.reset_group_offsets(group_id, partitions, to, value, dry_run=dry_run)
        return {where: one.offset for where, one in before.items()}, after

    before, after = connection.run(work)
    print_values(
        sorted(after),
        ("GROUP", "TOPIC", "PARTITION", "CURRENT-OFFSET", "NEW-OFFSET"),
        lambda where: (printable(group_id), *where, _or_dash(before.get(where)), after[where]),
        lambda where: {
            "group_id": group_id,
            **where._asdict(),
            "current_offset": before.get(where),
            "new_offset": after[where],
            "dry_run": dry_run,
        },
        as_json=as_json,
    )
    if dry_run and not as_json:
        print("nothing was changed (--dry-run)", file=sys.stderr)


def _target(
    *, to_earliest: bool, to_latest: bool, offset: int | None, when: str | None, shift: int | None
) -> tuple[ResetTo, int]:
    from kipmesh.client import ResetTo

    wanted: Mapping[ResetTo, int | None] = {
        ResetTo.EARLIEST: 0 if to_earliest else None,
        ResetTo.LATEST: 0 if to_latest else None,
        ResetTo.OFFSET: offset,
        ResetTo.TIMESTAMP: None if when is None else _timestamp_ms(when),
        ResetTo.SHIFT_BY: shift,
    }
    given = [(to, value) for to, value in wanted.items() if value is not None]
    if len(given) != 1:
        names = "--to-earliest, --to-latest, --to-offset, --to-datetime, --shift-by"
        raise typer.BadParameter(f"give exactly one of {names}")
    return given[0]


def _timestamp_ms(text: str) -> int:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not an ISO time such as 2026-11-21T08:00:00", param_hint="--to-datetime"
        ) from None
    try:
        return max(round(when.timestamp() * 1000), 0)
    except (ValueError, OverflowError, OSError):  # in the first or last year, a time zone can exceed the range
        raise typer.BadParameter(f"{text!r} is out of range", param_hint="--to-datetime") from None


def _parse(text: str) -> tuple[str, list[int] | None]:
    name, colon, numbers = text.partition(":")
    parts = [part.strip() for part in numbers.split(",")] if colon else []
    if not name or not all(part.isascii() and part.isdecimal() for part in parts):
        raise typer.BadParameter(f"{text!r} is not TOPIC[:PARTITION,...]", param_hint="--topic")
    return name, [parse_number(part, "--topic") for part in parts] if colon else None


async def _partitions(admin: AdminClient, named: Sequence[tuple[str, list[int] | None]]) -> list[TopicPartition]:
    """Return the named partitions without duplicates. None instead of a list means all partitions of the topic.

    Raises KafkaError (UNKNOWN_TOPIC_OR_PARTITION) for an unknown topic or partition.
    """
    from kipmesh.client import TopicPartition

    found = {one.name: one.partitions for one in await admin.describe_topics(dict.fromkeys(name for name, _ in named))}
    wanted: dict[TopicPartition, None] = {}
    for name, numbers in named:
        for number in sorted(found[name]) if numbers is None else numbers:
            if number not in found[name]:
                text = f"topic {name!r} has no partition {number}; it has {comma_list(sorted(found[name]))}"
                raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, text)
            wanted[TopicPartition(name, number)] = None
    return list(wanted)


# --- delete --------------------------------------------------------------------------------------------------------


@command(app)
def delete(group_id: Group, *, connection: AdminConnection) -> None:
    """Delete a group without members, and its committed offsets.

    Examples:
    kipmesh group delete readers
    """

    async def work(admin: AdminClient) -> None:
        try:
            await admin.delete_groups([group_id])
        except KafkaError as error:
            if error.code is ErrorCode.GROUP_ID_NOT_FOUND:
                raise _no_group(group_id) from None
            if error.code is not ErrorCode.NON_EMPTY_GROUP:
                raise
            raise KafkaError(error.code, f"group {group_id!r} has members; stop the members first") from None

    connection.run(work)
    print(f"{printable(group_id)}: deleted")
