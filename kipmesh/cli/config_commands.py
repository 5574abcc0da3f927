"""`kipmesh config`: settings of topics, and those of brokers that hold without a restart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from kipmesh.cli.common import (
    ADMIN_TIMEOUT_S,
    DEFAULT_DIR,
    AdminTimeout,
    AsJson,
    Bootstrap,
    Dir,
    admin_client,
    bootstrap_of,
    examples,
    make_app,
    parse_pairs,
    plain_text,
    print_json,
    print_table,
    run,
)

if TYPE_CHECKING:
    from kipmesh.client.types import ConfigAlteration, ConfigResource, ConfigValue

app = make_app(
    "Show and change the settings of topics and brokers.",
    """
    kipmesh config describe topic flights
    kipmesh config alter topic flights --set retention.ms=60000
    kipmesh config alter broker all --set follower.replication.throttled.rate=10000000
    """,
)


class Kind(StrEnum):
    """Whose settings; of brokers only those that were changed while they ran."""

    TOPIC = "topic"
    BROKER = "broker"


ALL_BROKERS = "all"

Of = Annotated[Kind, typer.Argument(metavar="topic|broker")]
Name = Annotated[
    str, typer.Argument(metavar="NAME", callback=plain_text, help="Name of the topic; id of the broker, or `all`.")
]


def _resource(kind: Kind, name: str) -> ConfigResource:
    from kipmesh.client.types import ConfigResource, ResourceType

    if kind is Kind.BROKER:
        return ConfigResource(ResourceType.BROKER, "" if name == ALL_BROKERS else name)
    return ConfigResource(ResourceType.TOPIC, name)


def alterations(sets: Mapping[str, str], deletes: Sequence[str]) -> list[ConfigAlteration]:
    """What to change of a configuration."""
    from kipmesh.client.types import AlterOperation, ConfigAlteration

    changes = [ConfigAlteration(key, value) for key, value in sets.items()]
    return changes + [ConfigAlteration(key, None, AlterOperation.DELETE) for key in deletes]


@app.command(epilog=examples("kipmesh config describe topic flights\nkipmesh config describe topic flights --json"))
def describe(
    kind: Of,
    name: Name,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Show all settings, and where each value is from."""
    address = bootstrap_of(bootstrap, folder)

    async def work() -> list[ConfigValue]:
        resource = _resource(kind, name)
        async with admin_client(address, timeout_s) as admin:
            return list((await admin.describe_configs([resource], with_documentation=as_json))[resource].values())

    values = sorted(run(work))
    if as_json:
        for value in values:
            print_json({**value._asdict(), "source": _source(value.source)})
        return
    rows = [(value.name, value.value if value.value is not None else "-", _source(value.source)) for value in values]
    print_table(("KEY", "VALUE", "FROM"), rows)


def _source(number: int) -> str:
    from kipmesh.client.types import ConfigSource

    try:
        return ConfigSource(number).name
    except ValueError:
        return str(number)


@app.command(
    epilog=examples(
        """
        kipmesh config alter topic flights --set retention.ms=60000 --set segment.bytes=1048576
        kipmesh config alter topic flights --delete retention.ms
        """
    )
)
def alter(
    kind: Of,
    name: Name,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Repeatable.")] = None,
    deletes: Annotated[
        list[str] | None,
        typer.Option("--delete", metavar="KEY", callback=plain_text, help="Back to the default; repeatable."),
    ] = None,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
) -> None:
    """Change settings."""
    changes = parse_pairs(sets or (), "--set")
    if not changes and not deletes:
        raise typer.BadParameter("nothing to alter: give --set or --delete")
    address = bootstrap_of(bootstrap, folder)

    async def work() -> None:
        async with admin_client(address, timeout_s) as admin:
            await admin.alter_configs({_resource(kind, name): alterations(changes, deletes or ())})

    run(work)
    print(f"{kind} {name}: altered")
