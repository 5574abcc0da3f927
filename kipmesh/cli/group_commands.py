"""`kipmesh group`: consumer groups, how far they are, and putting them somewhere else."""

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
    comma_list,
    command,
    make_app,
    number_of,
    plain_text,
    print_json,
    print_table,
    print_values,
    shown,
)
from kipmesh.messages.schema import MAX_INT64

if TYPE_CHECKING:
    from kipmesh.client import AdminClient, GroupDescription, GroupMemberDescription, ResetTo, TopicPartition

app = make_app(
    "Show consumer groups and their lag, put them somewhere else, delete them.",
    """
    kipmesh group list
    kipmesh group describe readers
    kipmesh group reset readers --topic flights --to-earliest --dry-run
    kipmesh group delete readers
    """,
)


def _group_id(value: str) -> str:
    """Raises typer.BadParameter for the empty one, to which only old clients without a group commit."""
    if not value:
        raise typer.BadParameter("a group's id is not empty")
    plain_text(value)
    return value


def _known_states(values: list[str] | None) -> list[str] | None:
    """Raises typer.BadParameter for what is no state, in any case of letters."""
    from kipmesh.core.group.classic import GroupState

    known = [state.value for state in GroupState]
    for value in values or ():
        if value.lower() not in (state.lower() for state in known):
            raise typer.BadParameter(f"{value!r} is none of {', '.join(known)}")
    return values


Group = Annotated[str, typer.Argument(metavar="GROUP", callback=_group_id)]

_LAG_TITLES = (
    "TOPIC",
    "PARTITION",
    "CURRENT-OFFSET",
    "LOG-END-OFFSET",
    "LAG",
    "CONSUMER-ID",
    "HOST",
    "CLIENT-ID",
)
_RESETTABLE = ("Empty", "Dead")


class _Place(NamedTuple):
    """How far a group is in one partition; None is what is not known."""

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
        typer.Option("--state", metavar="STATE", callback=_known_states, help="Only groups in this state; repeatable."),
    ] = None,
    *,
    connection: AdminConnection,
    as_json: AsJson = False,
) -> None:
    """List the groups of all coordinators, with their states.

    Examples:
    kipmesh group list
    kipmesh group list --state stable --state empty
    kipmesh group list --json
    """
    print_values(
        connection.run(lambda admin: admin.list_groups(states=states or ())),
        ("GROUP", "STATE", "PROTOCOL"),
        lambda one: (shown(one.group_id), one.state, one.protocol_type or "-"),
        lambda one: one._asdict(),
        as_json=as_json,
        none="there are no groups",
    )


@command(app)
def describe(
    group_id: Group,
    *,
    connection: AdminConnection,
    as_json: AsJson = False,
) -> None:
    """Show a group's state and members, and for each partition how far it is.

    A dash stands for what there is not: no committed offset, no member that has the partition, or a partition without
    a leader, whose end nobody can tell.

    Examples:
    kipmesh group describe readers
    kipmesh group describe readers --json
    """

    async def work(admin: AdminClient) -> tuple[GroupDescription, list[_Place]]:
        group = (await admin.describe_groups([group_id]))[group_id]
        if group.state == "Dead":
            from kipmesh.core.errors import ErrorCode, KafkaError

            raise KafkaError(ErrorCode.GROUP_ID_NOT_FOUND, f"there is no group {group_id!r}")
        return group, await _places(admin, group)

    group, places = connection.run(work)
    if as_json:
        print_json(_json_form(group, places))
    else:
        _show(group, places)


async def _places(admin: AdminClient, group: GroupDescription) -> list[_Place]:
    """Of all partitions that have a committed offset or a member."""
    owners = {where: member for member in group.members for where in member.assignment}
    committed = {where: one.offset for where, one in (await admin.list_group_offsets(group.group_id)).items()}
    ends = await _ends(admin, owners.keys() | committed.keys())
    places = []
    for where in sorted(owners.keys() | committed.keys()):
        current, end = committed.get(where), ends.get(where)
        # The end was asked for later than what is committed, but possibly of a leader that knows less.
        lag = None if current is None or end is None else max(end - current, 0)
        places.append(_Place(*where, current, end, lag, owners.get(where)))
    return places


async def _ends(admin: AdminClient, wanted: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """Log ends of the partitions that have a leader."""
    from kipmesh.client import TIMESTAMP_LATEST

    names = {where.topic for where in wanted}
    topics = {topic.name: topic.partitions for topic in await admin.list_topics() if topic.name in names}
    led = [
        where
        for where in wanted
        if where.partition in topics.get(where.topic, {}) and topics[where.topic][where.partition].leader_id >= 0
    ]
    found = await admin.list_offsets(dict.fromkeys(led, TIMESTAMP_LATEST)) if led else {}
    return {where: place.offset for where, place in found.items() if place is not None}


def _show(group: GroupDescription, places: Sequence[_Place]) -> None:
    node = group.coordinator
    count = len(group.members)
    parts = [
        f"group {shown(group.group_id)}: {group.state}",
        *([group.partition_assignor] if group.partition_assignor else []),
        f"coordinator {node.node_id} ({node.address})",
        f"{count} member{'' if count == 1 else 's'}",
    ]
    sys.stdout.write(", ".join(parts) + "\n")
    owners = {place.member.member_id for place in places if place.member is not None}
    rows: list[tuple[object, ...]] = [
        (shown(place.topic), place.partition, *map(_or_dash, place[2:5]), *_who(place.member)) for place in places
    ]
    rows += [(*"-----", *_who(member)) for member in group.members if member.member_id not in owners]
    if rows:
        print_table(_LAG_TITLES, rows)


def _who(member: GroupMemberDescription | None) -> tuple[str, str, str]:
    if member is None:
        return ("-", "-", "-")
    return (shown(member.member_id), shown(member.host), shown(member.client_id))


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _json_form(group: GroupDescription, places: Sequence[_Place]) -> dict[str, Any]:
    members = [{**one._asdict(), "assignment": [where._asdict() for where in one.assignment]} for one in group.members]
    partitions = [
        {**place._asdict(), "member": None if place.member is None else place.member.member_id} for place in places
    ]
    coordinator = {key: getattr(group.coordinator, key) for key in ("node_id", "host", "port")}
    return {**group._asdict(), "coordinator": coordinator, "members": members, "partitions": partitions}


# --- reset ---------------------------------------------------------------------------------------------------------


@command(app)
def reset(
    group_id: Group,
    topics: Annotated[
        list[str],
        typer.Option(
            "--topic",
            metavar="TOPIC[:PARTITION,...]",
            callback=plain_text,
            help="All partitions of a topic, or these; repeatable.",
        ),
    ],
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="To the first record.")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="After the last record.")] = False,
    to_offset: Annotated[
        int | None, typer.Option("--to-offset", metavar="N", min=0, max=MAX_INT64, help="To this offset.")
    ] = None,
    to_datetime: Annotated[
        str | None,
        typer.Option("--to-datetime", metavar="ISO", help="To the first record since; local time, or with a zone."),
    ] = None,
    shift_by: Annotated[
        int | None,
        typer.Option("--shift-by", metavar="N", min=-MAX_INT64, max=MAX_INT64, help="N records on; -N records back."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would become of it.")] = False,
    *,
    connection: AdminConnection,
    as_json: AsJson = False,
) -> None:
    """Let a group go on somewhere else. It must have no members, and need not exist.

    An offset before the first record becomes that one's, one beyond the end the end.

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
            raise CommandError(f"group {group_id!r} is {group.state} with {count} members: stop them first")
        before = await admin.list_group_offsets(group_id, partitions)
        after = await admin.reset_group_offsets(group_id, partitions, to, value, dry_run=dry_run)
        return {where: one.offset for where, one in before.items()}, after

    before, after = connection.run(work)
    print_values(
        sorted(after),
        ("GROUP", "TOPIC", "PARTITION", "CURRENT-OFFSET", "NEW-OFFSET"),
        lambda where: (shown(group_id), *where, _or_dash(before.get(where)), after[where]),
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
        raise typer.BadParameter(f"give one of {names}")
    return given[0]


def _timestamp_ms(text: str) -> int:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not as 2026-11-21T08:00:00", param_hint="--to-datetime") from None
    try:
        return max(round(when.timestamp() * 1000), 0)
    except (ValueError, OverflowError, OSError):  # the first and the last year, where the zone leads out of it
        raise typer.BadParameter(f"{text!r} is out of range", param_hint="--to-datetime") from None


def _parse(text: str) -> tuple[str, list[int] | None]:
    name, colon, numbers = text.partition(":")
    parts = [part.strip() for part in numbers.split(",")] if colon else []
    if not name or not all(part.isascii() and part.isdecimal() for part in parts):
        raise typer.BadParameter(f"{text!r} is not TOPIC[:PARTITION,...]", param_hint="--topic")
    return name, [number_of(part, "--topic") for part in parts] if colon else None


async def _partitions(admin: AdminClient, named: Sequence[tuple[str, list[int] | None]]) -> list[TopicPartition]:
    """All that are named, each once; raises KafkaError for one that there is not."""
    from kipmesh.client import TopicPartition
    from kipmesh.core.errors import ErrorCode, KafkaError

    found = {one.name: one.partitions for one in await admin.describe_topics(dict.fromkeys(name for name, _ in named))}
    wanted: dict[TopicPartition, None] = {}
    for name, numbers in named:
        for number in sorted(found[name]) if numbers is None else numbers:
            if number not in found[name]:
                text = f"topic {name!r} has the partitions {comma_list(sorted(found[name]))}"
                raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, text)
            wanted[TopicPartition(name, number)] = None
    return list(wanted)


# --- delete --------------------------------------------------------------------------------------------------------


@command(app)
def delete(group_id: Group, *, connection: AdminConnection) -> None:
    """Delete a group that has no members, and its committed offsets.

    Examples:
    kipmesh group delete readers
    """

    async def work(admin: AdminClient) -> None:
        from kipmesh.core.errors import ErrorCode, KafkaError

        try:
            await admin.delete_groups([group_id])
        except KafkaError as error:
            if error.code is not ErrorCode.NON_EMPTY_GROUP:
                raise
            raise KafkaError(error.code, f"group {group_id!r} has members: stop them first") from None

    connection.run(work)
    print(f"{shown(group_id)}: deleted")
