"""`kipmesh topic`: create, describe, list, delete and alter topics, elect leaders, and reassign partitions."""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kipmesh.cli import reassignment
from kipmesh.cli.common import (
    EXIT_FAILED,
    AdminConnection,
    AsJson,
    check_utf8,
    comma_list,
    command,
    counted,
    make_app,
    option,
    parse_number,
    parse_pairs,
    print_json,
    print_one,
    print_results,
    print_table,
    suggest_create,
)
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages.schema import MAX_INT32

if TYPE_CHECKING:
    from kipmesh.client import AdminClient
    from kipmesh.client.admin.reassignments import PartitionReassignment
    from kipmesh.client.types import ConfigValue, CreatedTopic, TopicMetadata, TopicPartition

    Reassignments = Mapping[TopicPartition, PartitionReassignment]

REASSIGNMENTS_TIMEOUT_S = 3.0
"""Time that `describe` waits for the active controller."""

app = make_app(
    "Create, describe, list, delete and alter topics.",
    """
    kipmesh topic create flights --partitions 6 --replication-factor 3
    kipmesh topic describe flights
    kipmesh topic delete flights
    """,
)

Name = Annotated[str, typer.Argument(metavar="NAME", callback=check_utf8)]
Config = Annotated[
    list[str] | None, option("--config", "A topic setting, e.g. retention.ms=60000; repeatable.", metavar="KEY=VALUE")
]


def topic_id_text(topic_id: bytes) -> str:
    """Return a topic id in Kafka's text form: URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(topic_id).rstrip(b"=").decode()


@command(app)
def create(
    name: Name,
    partitions: Annotated[
        int, option("--partitions", "Number of partitions. -1: num.partitions.", min=-1, max=MAX_INT32)
    ] = -1,
    replication_factor: Annotated[
        int,
        option(
            "--replication-factor", "Replicas of each partition. -1: default.replication.factor.", min=-1, max=MAX_INT32
        ),
    ] = -1,
    config: Config = None,
    if_not_exists: Annotated[bool, option("--if-not-exists", "Do not fail if the topic exists.")] = False,
    *,
    connection: AdminConnection,
    as_json: AsJson = False,
) -> None:
    """Create a topic.

    Examples:
    kipmesh topic create flights --partitions 6 --replication-factor 3
    kipmesh topic create events --partitions 1 --config retention.ms=60000 --config min.insync.replicas=2
    """
    configs = parse_pairs(config, "--config")

    async def work(admin: AdminClient) -> tuple[CreatedTopic, bool]:
        from kipmesh.client import NewTopic
        from kipmesh.client.types import CreatedTopic

        try:
            created = await admin.create_topics([NewTopic(name, partitions, replication_factor, configs)])
        except KafkaError as error:
            if not if_not_exists or error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                raise
            (topic,) = await admin.describe_topics([name])
            replicas = len(topic.partitions[0].replicas) if 0 in topic.partitions else 0
            return CreatedTopic(topic.name, topic.topic_id, len(topic.partitions), replicas), False
        return created[0], True

    topic, is_new = connection.run(work)
    replicas = counted(topic.replication_factor, "replica")
    created = f"{name}: {counted(topic.num_partitions, 'partition')}, {replicas} each"
    values = {**topic._asdict(), "topic_id": topic_id_text(topic.topic_id), "is_new": is_new}
    print_one(values, created if is_new else f"{name} exists", as_json=as_json)


@command(app, "list")
def list_(*, connection: AdminConnection, as_json: AsJson = False) -> None:
    """List all topics, one name per line.

    Examples:
    kipmesh topic list
    kipmesh topic list --json
    """
    for topic in sorted(connection.run(lambda admin: admin.list_topics()), key=lambda topic: topic.name):
        values = {"name": topic.name, "topic_id": topic_id_text(topic.topic_id), "is_internal": topic.is_internal}
        print_one(values, topic.name, as_json=as_json)


@command(app)
def describe(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", callback=check_utf8, help="Default: all topics.")
    ] = None,
    *,
    connection: AdminConnection,
    as_json: AsJson = False,
) -> None:
    """Show settings, leaders, replicas and in-sync replicas (ISR) of topics.

    WAITS FOR appears for a partition without a leader. It names brokers, one of which must restart to elect a leader.
    ADDING and REMOVING appear while replicas are being moved.

    Examples:
    kipmesh topic describe
    kipmesh topic describe flights
    kipmesh topic describe flights --json
    """

    async def work(admin: AdminClient) -> tuple[list[tuple[TopicMetadata, list[ConfigValue]]], Reassignments]:
        from kipmesh.client.types import ConfigResource, ResourceType

        found = await (admin.describe_topics(names) if names else admin.list_topics())
        resources = [ConfigResource(ResourceType.TOPIC, topic.name) for topic in found]
        configs = await admin.describe_configs(resources) if resources else {}
        named = [(topic.name, partition) for topic in found for partition in topic.partitions]
        moving = await _reassignments(admin, named if names else None) if named else {}
        described = zip(found, resources, strict=True)
        return [(topic, list(configs[resource].values())) for topic, resource in described], moving

    topics, moving = connection.run(work)
    from kipmesh.client.types import ConfigSource

    for index, (topic, configs) in enumerate(topics):
        own = {value.name: value.value for value in configs if value.source == ConfigSource.TOPIC}
        partitions = list(_partition_objects(topic, moving))
        topic_id = topic_id_text(topic.topic_id)
        if as_json:
            print_json(
                {
                    "name": topic.name,
                    "topic_id": topic_id,
                    "is_internal": topic.is_internal,
                    "partitions": partitions,
                    "configs": own,
                }
            )
            continue
        if index:
            print()
        settings = f"  {comma_list(f'{key}={value}' for key, value in own.items())}" if own else ""
        print(f"topic {topic.name}  id {topic_id}  partitions {len(topic.partitions)}{settings}")
        _show_partitions(partitions)


async def _reassignments(admin: AdminClient, partitions: Collection[tuple[str, int]] | None) -> Reassignments:
    """Return the reassignments of these partitions (None: all); warn and return none without an active controller."""
    try:
        async with asyncio.timeout(REASSIGNMENTS_TIMEOUT_S):
            return await admin.list_partition_reassignments(partitions)
    except (KafkaError, TimeoutError):
        print("kipmesh: no active controller: reassignments are not shown", file=sys.stderr)
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


@command(app)
def delete(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", callback=check_utf8)],
    if_exists: Annotated[bool, option("--if-exists", "Do not fail if a topic does not exist.")] = False,
    *,
    connection: AdminConnection,
) -> None:
    """Delete topics and all their records.

    Examples:
    kipmesh topic delete flights
    kipmesh topic delete flights events --if-exists
    """

    async def work(admin: AdminClient) -> None:
        for name in names:
            try:
                await admin.delete_topics([name])
            except KafkaError as error:
                if not (if_exists and error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
                    raise
                print(f"{name} does not exist")
            else:
                print(f"{name}: deleted")

    connection.run(work)


@command(app)
def alter(
    name: Name,
    partitions: Annotated[
        int | None, option("--partitions", "New number of partitions; must be larger.", min=1, max=MAX_INT32)
    ] = None,
    config: Config = None,
    delete_config: Annotated[
        list[str] | None,
        option("--delete-config", "Reset a setting to its default; repeatable.", metavar="KEY", callback=check_utf8),
    ] = None,
    *,
    connection: AdminConnection,
) -> None:
    """Add partitions to a topic, or change its settings.

    Examples:
    kipmesh topic alter flights --partitions 12
    kipmesh topic alter flights --config retention.ms=60000
    kipmesh topic alter flights --delete-config retention.ms
    """
    sets = parse_pairs(config, "--config")
    if partitions is None and not sets and not delete_config:
        raise typer.BadParameter("nothing to alter: give --partitions, --config or --delete-config")

    async def work(admin: AdminClient) -> None:
        from kipmesh.cli.cluster_commands import alterations
        from kipmesh.client.types import ConfigResource, ResourceType

        if sets or delete_config:
            resource = ConfigResource(ResourceType.TOPIC, name)
            await admin.alter_configs({resource: alterations(sets, delete_config)})
        if partitions is not None:
            await admin.create_partitions({name: partitions})

    with suggest_create(name):
        connection.run(work)
    print(f"{name}: altered")


@command(app)
def elect(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TOPIC[:PARTITION]]...", callback=check_utf8, help="Partitions to elect a leader for."),
    ] = None,
    all_: Annotated[bool, option("--all", "All partitions that need an election.")] = False,
    unclean: Annotated[
        bool,
        option(
            "--unclean/--preferred",
            "Unclean: a partition without a leader gets the available replica with the longest log, and may lose "
            "records. Preferred: the first replica becomes the leader.",
        ),
    ] = False,
    *,
    connection: AdminConnection,
    as_json: AsJson = False,
) -> None:
    """Elect the preferred leaders of partitions, or any available leader with --unclean.

    Exit code 1 if an election failed. A partition that needs no election is not a failure.

    Examples:
    kipmesh topic elect --all
    kipmesh topic elect flights
    kipmesh topic elect flights:0 flights:3 --json
    kipmesh topic elect --unclean flights:2
    """
    if all_ and names:
        raise typer.BadParameter("conflicts with the names of topics: give only one of them", param_hint="--all")
    if not all_ and not names:
        raise typer.BadParameter("no partitions to elect a leader for: name topics or partitions, or give --all")
    wanted = [_topic_and_partition(name) for name in names or ()]

    async def work(admin: AdminClient) -> dict[TopicPartition, KafkaError | None]:
        from kipmesh.client import ElectionType, TopicPartition

        election_type = ElectionType.UNCLEAN if unclean else ElectionType.PREFERRED
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

    results = connection.run(work)
    print_results(results, lambda _: "elected", as_json=as_json, none="no partition needs an election")
    if any(error is not None and error.code is not ErrorCode.ELECTION_NOT_NEEDED for error in results.values()):
        raise typer.Exit(EXIT_FAILED)


def _topic_and_partition(text: str) -> tuple[str, int | None]:
    """Parse TOPIC[:PARTITION]; the partition is None if all are meant. Raises typer.BadParameter."""
    topic, colon, number = text.rpartition(":")
    if not colon:
        return text, None
    if not topic or not number.isdecimal():
        raise typer.BadParameter(f"{text!r} is not TOPIC or TOPIC:PARTITION")
    return topic, parse_number(number)


command(app)(reassignment.reassign)
