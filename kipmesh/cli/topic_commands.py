"""`kipmesh topic`: create, describe, list, delete and alter topics, and elect leaders of their partitions."""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kipmesh.cli import elect_command, reassign_command
from kipmesh.cli.common import (
    ADMIN_TIMEOUT_S,
    DEFAULT_DIR,
    AdminTimeout,
    AsJson,
    Bootstrap,
    Dir,
    admin_client,
    bootstrap_of,
    comma_list,
    examples,
    make_app,
    parse_pairs,
    plain_text,
    print_json,
    print_table,
    run,
)
from kipmesh.messages.limits import MAX_INT32

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kipmesh.client import AdminClient
    from kipmesh.client.reassignments import PartitionReassignment
    from kipmesh.client.types import ConfigValue, CreatedTopic, TopicMetadata, TopicPartition

    Reassignments = Mapping[TopicPartition, PartitionReassignment]

REASSIGNMENTS_TIMEOUT_S = 3.0
"""So long `describe` waits for the active controller."""

app = make_app(
    "Create, describe, list, delete and alter topics.",
    """
    kipmesh topic create flights --partitions 6 --replication-factor 3
    kipmesh topic describe flights
    kipmesh topic delete flights
    """,
)

Name = Annotated[str, typer.Argument(metavar="NAME", callback=plain_text)]
Config = Annotated[list[str] | None, typer.Option("--config", metavar="KEY=VALUE", help="A topic setting; repeatable.")]


def topic_id_text(topic_id: bytes) -> str:
    """As Kafka prints it."""
    return base64.urlsafe_b64encode(topic_id).rstrip(b"=").decode()


@app.command(
    epilog=examples(
        """
        kipmesh topic create flights --partitions 6 --replication-factor 3
        kipmesh topic create events --partitions 1 --config retention.ms=60000 --config min.insync.replicas=2
        """
    )
)
def create(
    name: Name,
    partitions: Annotated[
        int, typer.Option("--partitions", min=-1, max=MAX_INT32, help="-1: the cluster's default.")
    ] = -1,
    replication_factor: Annotated[
        int, typer.Option("--replication-factor", min=-1, max=MAX_INT32, help="-1: the cluster's default.")
    ] = -1,
    config: Config = None,
    if_not_exists: Annotated[bool, typer.Option("--if-not-exists", help="An existing topic is no error.")] = False,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Create a topic."""
    configs = parse_pairs(config or (), "--config")
    address = bootstrap_of(bootstrap, folder)

    async def work() -> tuple[CreatedTopic, bool]:
        from kipmesh.client import NewTopic
        from kipmesh.core.errors import ErrorCode, KafkaError

        async with admin_client(address, timeout_s) as admin:
            try:
                created = await admin.create_topics([NewTopic(name, partitions, replication_factor, configs)])
            except KafkaError as error:
                if not if_not_exists or error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                    raise
                (there,) = await admin.describe_topics([name])
                return _as_created(there), False
            return created[0], True

    topic, is_new = run(work)
    if as_json:
        print_json({**topic._asdict(), "topic_id": topic_id_text(topic.topic_id), "is_new": is_new})
    elif is_new:
        print(f"{name}: {topic.num_partitions} partitions, {topic.replication_factor} replicas each")
    else:
        print(f"{name} exists")


def _as_created(topic: TopicMetadata) -> CreatedTopic:
    """What is said of a new topic, of one that there is."""
    from kipmesh.client.types import CreatedTopic

    replicas = len(topic.partitions[0].replicas) if 0 in topic.partitions else 0
    return CreatedTopic(topic.name, topic.topic_id, len(topic.partitions), replicas)


@app.command(name="list", epilog=examples("kipmesh topic list\nkipmesh topic list --json"))
def list_(
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """List all topics, a name a line."""
    address = bootstrap_of(bootstrap, folder)

    async def work() -> list[TopicMetadata]:
        async with admin_client(address, timeout_s) as admin:
            return sorted(await admin.list_topics(), key=lambda topic: topic.name)

    for topic in run(work):
        if as_json:
            print_json(
                {"name": topic.name, "topic_id": topic_id_text(topic.topic_id), "is_internal": topic.is_internal}
            )
        else:
            print(topic.name)


@app.command(
    epilog=examples("kipmesh topic describe\nkipmesh topic describe flights --json\nkipmesh topic describe flights")
)
def describe(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", callback=plain_text, help="All when left out.")
    ] = None,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Show partitions, leaders, replicas, in-sync replicas, and for whom a partition without a leader waits.

    Where replicas are being moved, also which come and which leave.
    """
    address = bootstrap_of(bootstrap, folder)

    async def work() -> tuple[list[tuple[TopicMetadata, list[ConfigValue]]], Reassignments]:
        from kipmesh.client.types import ConfigResource, ResourceType

        async with admin_client(address, timeout_s) as admin:
            found = await (admin.describe_topics(names) if names else admin.list_topics())
            resources = [ConfigResource(ResourceType.TOPIC, topic.name) for topic in found]
            configs = await admin.describe_configs(resources) if resources else {}
            named = [(topic.name, partition) for topic in found for partition in topic.partitions]
            moving = await _reassignments(admin, named if names else None) if named else {}
            described = zip(found, resources, strict=True)
            return [(topic, list(configs[resource].values())) for topic, resource in described], moving

    topics, moving = run(work)
    for index, (topic, configs) in enumerate(topics):
        own = {value.name: value.value for value in configs if value.source == _topic_source()}
        partitions = list(_partition_objects(topic, moving))
        if as_json:
            print_json(_topic_object(topic, own, partitions))
            continue
        if index:
            print()
        settings = comma_list(f"{key}={value}" for key, value in own.items())
        print(f"topic {topic.name}  id {topic_id_text(topic.topic_id)}  partitions {len(topic.partitions)}  {settings}")
        _show_partitions(partitions)


async def _reassignments(admin: AdminClient, partitions: Collection[tuple[str, int]] | None) -> Reassignments:
    """What is being moved; without an active controller that is not known, and said: the brokers know all the rest."""
    from kipmesh.core.errors import KafkaError

    try:
        async with asyncio.timeout(REASSIGNMENTS_TIMEOUT_S):
            return await admin.list_partition_reassignments(partitions)
    except (KafkaError, TimeoutError):
        print("kipmesh: no active controller says which replicas are being moved", file=sys.stderr)
        return {}


def _show_partitions(partitions: Sequence[Mapping[str, Any]]) -> None:
    titles = ["PARTITION", "LEADER", "EPOCH", "REPLICAS", "ISR", "OFFLINE", "WAITS FOR"]
    lists = ["replica_nodes", "isr_nodes", "offline_replicas", "waits_for"]
    if any("adding_replicas" in one for one in partitions):
        titles += ["ADDING", "REMOVING"]
        lists += ["adding_replicas", "removing_replicas"]
    rows = [
        (
            one["partition_index"],
            one["leader_id"] if one["leader_id"] >= 0 else "none",
            one["leader_epoch"],
            *(comma_list(one.get(key, ())) for key in lists),
        )
        for one in partitions
    ]
    print_table(titles, rows)


def _topic_source() -> int:
    from kipmesh.client.types import ConfigSource

    return ConfigSource.TOPIC


def _topic_object(
    topic: TopicMetadata, configs: Mapping[str, str | None], partitions: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    return {
        "name": topic.name,
        "topic_id": topic_id_text(topic.topic_id),
        "is_internal": topic.is_internal,
        "partitions": partitions,
        "configs": dict(configs),
    }


def _partition_objects(topic: TopicMetadata, moving: Reassignments) -> Iterator[dict[str, Any]]:
    from kipmesh.client.types import TopicPartition

    for number in sorted(topic.partitions):
        one = topic.partitions[number]
        described = {
            "partition_index": one.partition,
            "error_code": one.error_code,
            "leader_id": one.leader_id,
            "leader_epoch": one.leader_epoch,
            "replica_nodes": list(one.replicas),
            "isr_nodes": list(one.isr),
            "offline_replicas": list(one.offline_replicas),
            "last_known_elr": list(one.last_known_elr),
            "waits_for": list(one.waits_for),
        }
        running = moving.get(TopicPartition(topic.name, number))
        if running is not None:
            described["adding_replicas"] = list(running.adding_replicas)
            described["removing_replicas"] = list(running.removing_replicas)
        yield described


@app.command(epilog=examples("kipmesh topic delete flights\nkipmesh topic delete flights events --if-exists"))
def delete(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", callback=plain_text)],
    if_exists: Annotated[bool, typer.Option("--if-exists", help="An unknown topic is no error.")] = False,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
) -> None:
    """Delete topics and all their records."""
    address = bootstrap_of(bootstrap, folder)

    async def work() -> None:
        from kipmesh.core.errors import ErrorCode, KafkaError

        async with admin_client(address, timeout_s) as admin:
            for name in names:
                try:
                    await admin.delete_topics([name])
                except KafkaError as error:
                    if not (if_exists and error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
                        raise
                    sys.stdout.write(f"{name} does not exist\n")
                else:
                    sys.stdout.write(f"{name}: deleted\n")

    run(work)


@app.command(
    epilog=examples(
        """
        kipmesh topic alter flights --partitions 12
        kipmesh topic alter flights --config retention.ms=60000
        kipmesh topic alter flights --delete-config retention.ms
        """
    )
)
def alter(
    name: Name,
    partitions: Annotated[
        int | None, typer.Option("--partitions", min=1, max=MAX_INT32, help="The new, larger number.")
    ] = None,
    config: Config = None,
    delete_config: Annotated[
        list[str] | None,
        typer.Option("--delete-config", metavar="KEY", callback=plain_text, help="Back to the default; repeatable."),
    ] = None,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
) -> None:
    """Add partitions to a topic, or change its settings."""
    sets = parse_pairs(config or (), "--config")
    if partitions is None and not sets and not delete_config:
        raise typer.BadParameter("nothing to alter: give --partitions, --config or --delete-config")
    address = bootstrap_of(bootstrap, folder)

    async def work() -> None:
        from kipmesh.cli.config_commands import alterations
        from kipmesh.client.types import ConfigResource, ResourceType

        async with admin_client(address, timeout_s) as admin:
            if sets or delete_config:
                resource = ConfigResource(ResourceType.TOPIC, name)
                await admin.alter_configs({resource: alterations(sets, delete_config or ())})
            if partitions is not None:
                await admin.create_partitions({name: partitions})

    run(work)
    print(f"{name}: altered")


elect_command.register(app)
reassign_command.register(app)
