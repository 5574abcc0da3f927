"""`kipmesh cluster` (brokers), `kipmesh quorum` (metadata quorum) and `kipmesh config` (dynamic settings)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kipmesh.cli.common import (
    CONNECT_TIMEOUT_S,
    DEFAULT_DIR,
    EXIT_FAILED,
    AdminConnection,
    AsJson,
    Bootstrap,
    Dir,
    check_addresses,
    check_utf8,
    command,
    command_config,
    local_state,
    make_app,
    option,
    parse_pairs,
    print_json,
    print_table,
    print_values,
    run,
    seconds_option,
)
from kipmesh.core.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    from kipmesh.client import AdminClient
    from kipmesh.client.types import (
        ConfigAlteration,
        ConfigResource,
        ConfigValue,
        QuorumDescription,
        QuorumReplica,
    )

PORT_MAX = 65535

cluster_app = make_app("Show the cluster and its brokers.", "kipmesh cluster describe")
quorum_app = make_app("Show the metadata quorum.", "kipmesh quorum describe")
config_app = make_app(
    "Show and change dynamic settings of topics and brokers.",
    """
    kipmesh config describe topic flights
    kipmesh config alter topic flights --set retention.ms=60000
    kipmesh config alter broker all --set follower.replication.throttled.rate=10000000
    """,
)


@command(cluster_app, "describe")
def describe_cluster(*, connection: AdminConnection, as_json: AsJson = False) -> None:
    """Show the cluster id, the active controller and the brokers.

    Examples:
    kipmesh cluster describe
    kipmesh cluster describe --json
    """
    found = connection.run(lambda admin: admin.describe_cluster())
    if as_json:
        brokers = [broker._asdict() for broker in found.brokers]
        print_json({"cluster_id": found.cluster_id, "controller_id": found.controller_id, "brokers": brokers})
        return
    print(f"cluster {found.cluster_id}  controller {found.controller_id}")
    rows = [(broker.node_id, broker.address, broker.rack or "-") for broker in sorted(found.brokers)]
    print_table(("BROKER", "ADDRESS", "RACK"), rows)


def _host_ports(value: str | None) -> str | None:
    """Return the value of an address option unchanged. Raises typer.BadParameter if an address is not host:port."""
    for address in (check_addresses(value) or "").split(","):
        host, _, port = address.strip().rpartition(":")
        if address.strip() and not (host and port.isdecimal() and 1 <= int(port) <= PORT_MAX):
            raise typer.BadParameter(f"{address.strip()!r} is not host:port")
    return value


BootstrapController = Annotated[
    str | None,
    option(
        "--bootstrap-controller",
        "Controllers to query instead of brokers. Default: the controllers of the local cluster in --dir.",
        metavar="HOST:PORT,...",
        callback=_host_ports,
        show_default=False,
    ),
]


@command(quorum_app, "describe")
def describe_quorum(
    bootstrap: Bootstrap = None,
    bootstrap_controller: BootstrapController = None,
    directory: Dir = DEFAULT_DIR,
    timeout_s: Annotated[
        float, seconds_option("--timeout", "Seconds to wait for a response that names a leader.")
    ] = CONNECT_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Show the quorum's leader, epoch and high watermark, and the lag of each voter and observer.

    Exit code 1 if the quorum has no leader.

    Examples:
    kipmesh quorum describe
    kipmesh quorum describe --bootstrap 127.0.0.1:9092 --json
    kipmesh quorum describe --bootstrap-controller 127.0.0.1:9093,127.0.0.1:9094
    """
    if bootstrap and bootstrap_controller:
        raise typer.BadParameter("conflicts with --bootstrap: give only one", param_hint="--bootstrap-controller")
    controllers, config = ((), {}) if bootstrap else _controllers(bootstrap_controller, directory)
    if controllers:
        found = run(lambda: _query_controllers(controllers, config, timeout_s))
    else:
        found = AdminConnection(bootstrap, directory, timeout_s).run(_query_brokers)
    replicas = _replicas(found)
    lags = [one["lag"] for one in replicas if one["status"] == "follower"]
    summary = {
        "state": "led" if found.leader_id >= 0 else "without a leader",
        "leader_id": found.leader_id,
        "leader_epoch": found.leader_epoch,
        "high_watermark": found.high_watermark,
        "max_follower_lag": max(lags, default=0) if found.leader_id >= 0 else None,
    }
    if as_json:
        print_json(
            {
                **summary,
                "current_voters": [one for one in replicas if one["status"] != "observer"],
                "observers": [one for one in replicas if one["status"] == "observer"],
                "nodes": [{"node_id": node.node_id, "host": node.host, "port": node.port} for node in found.nodes],
            }
        )
    else:
        leader = f"leader {found.leader_id}" if found.leader_id >= 0 else "no leader"
        print(f"metadata quorum: {leader}, epoch {found.leader_epoch}, high watermark {found.high_watermark}")
        rows = [
            (
                one["replica_id"],
                one["status"],
                one["log_end_offset"],
                one["lag"],
                _time(one["last_fetch_timestamp"]),
                _time(one["last_caught_up_timestamp"]),
            )
            for one in replicas
        ]
        if rows:
            print_table(("NODE", "STATUS", "LOG END", "LAG", "LAST FETCH", "LAST CAUGHT UP"), rows)
    if found.leader_id < 0:
        raise typer.Exit(EXIT_FAILED)


async def _query_controllers(
    controllers: Sequence[str], config: Mapping[str, str], timeout_s: float
) -> QuorumDescription:
    from kipmesh.client.admin import quorum
    from kipmesh.core.config.security import ClientSslConfig

    return await quorum.describe_quorum(controllers, timeout_s=timeout_s, security=ClientSslConfig.parse(config))


async def _query_brokers(admin: AdminClient) -> QuorumDescription:
    """Describe the quorum through a broker.

    Without an active controller, leader and epoch are -1 and there are no nodes. Raises KafkaErrors other than
    REQUEST_TIMED_OUT.
    """
    from kipmesh.client.types import QuorumDescription

    try:
        return await admin.describe_quorum()
    except KafkaError as error:
        if error.code is not ErrorCode.REQUEST_TIMED_OUT:
            raise
    return QuorumDescription(-1, -1, -1, [], [], ())


def _controllers(given: str | None, directory: Path) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Return the addresses (host:port) of controllers, and client settings for them.

    Raises CommandError if no option names a cluster, InvalidConfigError for an invalid --command-config file.
    """
    config = command_config()
    if given:
        return tuple(filter(None, (address.strip() for address in given.split(",")))), config
    from kipmesh.cluster.certificates import client_config
    from kipmesh.cluster.layout import Role

    state = local_state(directory, "--bootstrap, --bootstrap-controller")
    controllers = tuple(node.grpc for node in state.nodes if node.role is Role.CONTROLLER and node.grpc)
    return controllers, {**client_config(state.nodes), **config}


def _replicas(found: QuorumDescription) -> list[dict[str, Any]]:
    """Return the voters, then the observers, each as described by the leader, with its status and lag in records."""
    leader_end = max((one.log_end_offset for one in found.voters if one.replica_id == found.leader_id), default=-1)

    def described(one: QuorumReplica, status: str) -> dict[str, Any]:
        return {**one._asdict(), "status": status, "lag": max(0, leader_end - max(one.log_end_offset, 0))}

    voters = [described(one, "leader" if one.replica_id == found.leader_id else "follower") for one in found.voters]
    return voters + [described(one, "observer") for one in found.observers]


def _time(timestamp_ms: int) -> str:
    if timestamp_ms < 0:
        return "-"
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# --- kipmesh config


class Kind(StrEnum):
    """Type of a resource of `kipmesh config`. For brokers, only dynamic settings are shown."""

    TOPIC = "topic"
    BROKER = "broker"


ALL_BROKERS = "all"

Of = Annotated[Kind, typer.Argument(metavar="topic|broker")]
Name = Annotated[
    str, typer.Argument(metavar="NAME", callback=check_utf8, help="Name of the topic; id of the broker, or `all`.")
]


def _resource(kind: Kind, name: str) -> ConfigResource:
    from kipmesh.client.types import ConfigResource, ResourceType

    if kind is Kind.BROKER:
        return ConfigResource(ResourceType.BROKER, "" if name == ALL_BROKERS else name)
    return ConfigResource(ResourceType.TOPIC, name)


def alterations(sets: Mapping[str, str], deletes: Sequence[str] | None) -> list[ConfigAlteration]:
    """Return the alterations that set these values and reset the keys in `deletes` to their defaults."""
    from kipmesh.client.types import AlterOperation, ConfigAlteration

    changes = [ConfigAlteration(key, value) for key, value in sets.items()]
    return changes + [ConfigAlteration(key, None, AlterOperation.DELETE) for key in deletes or ()]


@command(config_app)
def describe(kind: Of, name: Name, *, connection: AdminConnection, as_json: AsJson = False) -> None:
    """Show all settings and the source of each value.

    Examples:
    kipmesh config describe topic flights
    kipmesh config describe broker 2 --json
    """

    async def work(admin: AdminClient) -> list[ConfigValue]:
        resource = _resource(kind, name)
        return list((await admin.describe_configs([resource], with_documentation=as_json))[resource].values())

    print_values(
        sorted(connection.run(work)),
        ("KEY", "VALUE", "FROM"),
        lambda value: (value.name, value.value if value.value is not None else "-", _source(value.source)),
        lambda value: {**value._asdict(), "source": _source(value.source)},
        as_json=as_json,
    )


def _source(number: int) -> str:
    from kipmesh.client.types import ConfigSource

    try:
        return ConfigSource(number).name
    except ValueError:
        return str(number)


@command(config_app)
def alter(
    kind: Of,
    name: Name,
    sets: Annotated[list[str] | None, option("--set", "Set a value; repeatable.", metavar="KEY=VALUE")] = None,
    deletes: Annotated[
        list[str] | None, option("--delete", "Reset to the default; repeatable.", metavar="KEY", callback=check_utf8)
    ] = None,
    *,
    connection: AdminConnection,
) -> None:
    """Set or reset settings of a topic, a broker, or all brokers.

    Examples:
    kipmesh config alter topic flights --set retention.ms=60000 --set segment.bytes=1048576
    kipmesh config alter topic flights --delete retention.ms
    """
    changes = parse_pairs(sets, "--set")
    if not changes and not deletes:
        raise typer.BadParameter("nothing to alter: give --set or --delete")
    wanted = alterations(changes, deletes)
    connection.run(lambda admin: admin.alter_configs({_resource(kind, name): wanted}))
    print(f"{kind} {name}: altered")
