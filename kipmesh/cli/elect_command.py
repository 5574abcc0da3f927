"""`kipmesh topic elect`: leaders by hand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kipmesh.cli.common import (
    ADMIN_TIMEOUT_S,
    DEFAULT_DIR,
    EXIT_FAILED,
    AdminTimeout,
    AsJson,
    Bootstrap,
    Dir,
    admin_client,
    bootstrap_of,
    examples,
    number_of,
    plain_text,
    print_json,
    print_table,
    run,
)

if TYPE_CHECKING:
    from kipmesh.client import TopicPartition
    from kipmesh.core.errors import KafkaError

Wanted = tuple[str, int | None]
"""A topic, and one of its partitions or all."""


def register(app: typer.Typer) -> None:
    """Add the command to `kipmesh topic`."""
    app.command(
        epilog=examples(
            """
            kipmesh topic elect --all
            kipmesh topic elect flights
            kipmesh topic elect flights:0 flights:3 --json
            kipmesh topic elect --unclean flights:2
            """
        )
    )(elect)


def elect(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TOPIC[:PARTITION]]...", callback=plain_text, help="Whose leaders are elected."),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every partition that needs it.")] = False,
    unclean: Annotated[
        bool,
        typer.Option(
            "--unclean/--preferred",
            help="Unclean: a partition without a leader gets the one that has the most of its log; records may be "
            "lost. Preferred: back to the first replica, the leader service.",
        ),
    ] = False,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Let partitions be led by their preferred leader again, or by anybody who is left.

    Exit code 1 when a partition could not be elected; one that needs no election is no failure.
    """
    if all_ and names:
        raise typer.BadParameter("is every partition: leave it out, or the names", param_hint="--all")
    if not all_ and not names:
        raise typer.BadParameter("name topics or partitions, or give --all")
    wanted = [_parse(name) for name in names or ()]
    address = bootstrap_of(bootstrap, folder)

    async def work() -> dict[TopicPartition, KafkaError | None]:
        from kipmesh.client import ElectionType, TopicPartition

        election_type = ElectionType.UNCLEAN if unclean else ElectionType.PREFERRED
        async with admin_client(address, timeout_s) as admin:
            if all_:
                return await admin.elect_leaders(election_type)
            whole = list(dict.fromkeys(topic for topic, partition in wanted if partition is None))
            numbers = {topic.name: sorted(topic.partitions) for topic in await admin.describe_topics(whole)}
            partitions = [
                TopicPartition(topic, each)
                for topic, partition in wanted
                for each in (numbers[topic] if partition is None else (partition,))
            ]
            return await admin.elect_leaders(election_type, partitions)

    _show(sorted(run(work).items()), as_json=as_json)


def _parse(text: str) -> Wanted:
    topic, colon, number = text.rpartition(":")
    if not colon:
        return text, None
    if not topic or not number.isdecimal():
        raise typer.BadParameter(f"{text!r} is not TOPIC or TOPIC:PARTITION")
    return topic, number_of(number)


def _show(results: Sequence[tuple[TopicPartition, KafkaError | None]], *, as_json: bool) -> None:
    from kipmesh.core.errors import ErrorCode

    fine = (ErrorCode.NONE, ErrorCode.ELECTION_NOT_NEEDED)
    codes = [error.code if error is not None else ErrorCode.NONE for _, error in results]
    if as_json:
        for ((topic, partition), error), code in zip(results, codes, strict=True):
            message = error.message if error is not None else None
            print_json(
                {
                    "topic": topic,
                    "partition": partition,
                    "error_code": int(code),
                    "error": code.name,
                    "message": message,
                }
            )
    elif results:
        rows = [
            (topic, partition, "elected" if error is None else f"{error.code.name}: {error.message}")
            for (topic, partition), error in results
        ]
        print_table(("TOPIC", "PARTITION", "RESULT"), rows)
    else:
        sys.stdout.write("no partition needs an election\n")
    if any(code not in fine for code in codes):
        raise typer.Exit(EXIT_FAILED)
