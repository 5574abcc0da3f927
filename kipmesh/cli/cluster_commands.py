"""`kipmesh cluster describe` and `kipmesh quorum describe`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kipmesh.cli.common import (
    ADMIN_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    DEFAULT_DIR,
    EXIT_FAILED,
    AdminTimeout,
    AsJson,
    Bootstrap,
    CommandError,
    Dir,
    addresses,
    admin_client,
    bootstrap_of,
    command_config,
    examples,
    make_app,
    print_json,
    print_table,
    run,
    seconds_option,
)

if TYPE_CHECKING:
    from kipmesh.client.types import ClusterDescription, QuorumDescription, QuorumReplica

PORT_MAX = 65535

cluster_app = make_app("Show the cluster.", "kipmesh cluster describe")
quorum_app = make_app("Show the metadata quorum.", "kipmesh quorum describe")


@cluster_app.callback()
def _cluster_group() -> None:
    pass


@quorum_app.callback()
def _quorum_group() -> None:
    pass


@cluster_app.command("describe", epilog=examples("kipmesh cluster describe\nkipmesh cluster describe --json"))
def describe_cluster(
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Show the cluster's id, its active controller and its brokers."""
    address = bootstrap_of(bootstrap, folder)

    async def work() -> ClusterDescription:
        async with admin_client(address, timeout_s) as admin:
            return await admin.describe_cluster()

    found = run(work)
    if as_json:
        brokers = [broker._asdict() for broker in found.brokers]
        print_json({"cluster_id": found.cluster_id, "controller_id": found.controller_id, "brokers": brokers})
        return
    print(f"cluster {found.cluster_id}  controller {found.controller_id}")
    rows = [(broker.node_id, broker.address, broker.rack or "-") for broker in sorted(found.brokers)]
    print_table(("BROKER", "ADDRESS", "RACK"), rows)


def _host_ports(value: str | None) -> str | None:
    """The value of an option with addresses, each host:port; raises typer.BadParameter."""
    for address in (addresses(value) or "").split(","):
        host, _, port = address.strip().rpartition(":")
        if address.strip() and not (host and port.isdecimal() and 1 <= int(port) <= PORT_MAX):
            raise typer.BadParameter(f"{address.strip()!r} is not host:port")
    return value


BootstrapController = Annotated[
    str | None,
    typer.Option(
        "--bootstrap-controller",
        metavar="HOST:PORT,...",
        callback=_host_ports,
        help="Controllers to ask, which needs no broker. With neither option: the controllers in --dir.",
        show_default=False,
    ),
]


@quorum_app.command(
    "describe",
    epilog=examples(
        """
        kipmesh quorum describe
        kipmesh quorum describe --bootstrap 127.0.0.1:9092 --json
        kipmesh quorum describe --bootstrap-controller 127.0.0.1:9093,127.0.0.1:9094
        """
    ),
)
def describe_quorum(
    bootstrap: Bootstrap = None,
    bootstrap_controller: BootstrapController = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: Annotated[float, seconds_option("--timeout", "Seconds to wait for a leader.")] = CONNECT_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Show the quorum's leader, epoch and high watermark, and how far each voter and observer is.

    Exit code 1 when there is no leader.
    """
    if bootstrap and bootstrap_controller:
        raise typer.BadParameter("not together with --bootstrap", param_hint="--bootstrap-controller")
    controllers, config = ((), {}) if bootstrap else _controllers(bootstrap_controller, folder)

    async def work() -> QuorumDescription:
        from kipmesh.client import quorum
        from kipmesh.core.config.security import ClientSslConfig

        if controllers:
            security = ClientSslConfig.parse(config)
            return await quorum.describe_quorum(controllers, timeout_s=timeout_s, security=security)
        return await _by_brokers(bootstrap_of(bootstrap, folder), timeout_s)

    found = run(work)
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
        print(
            f"quorum {summary['state']}  leader {found.leader_id}  epoch {found.leader_epoch}  "
            f"high watermark {found.high_watermark}"
        )
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


async def _by_brokers(address: str, timeout_s: float) -> QuorumDescription:
    """What brokers know: without an active controller not even the epoch."""
    from kipmesh.client.types import QuorumDescription
    from kipmesh.core.errors import ErrorCode, KafkaError

    async with admin_client(address, timeout_s) as admin:
        try:
            return await admin.describe_quorum()
        except KafkaError as error:
            if error.code is not ErrorCode.REQUEST_TIMED_OUT:
                raise
    return QuorumDescription(-1, -1, -1, [], [], ())


def _controllers(given: str | None, folder: Path) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Whom to ask, and what is needed to get there; raises CommandError when nothing says whom."""
    config = command_config()
    if given:
        return tuple(filter(None, (address.strip() for address in given.split(",")))), config
    from kipmesh.cluster.certificates import client_config
    from kipmesh.cluster.layout import Role, read_state

    state = read_state(folder)
    if state is None:
        raise CommandError(
            "which cluster? Give --bootstrap, --bootstrap-controller or --dir (there is no local cluster in "
            f"{folder.absolute()})"
        )
    controllers = tuple(node.grpc for node in state.nodes if node.role is Role.CONTROLLER and node.grpc)
    return controllers, {**client_config(state.nodes), **config}


def _replicas(found: QuorumDescription) -> list[dict[str, Any]]:
    """Voters, then observers: what the leader says of them, their status and how many records they lack."""
    leader_end = max((one.log_end_offset for one in found.voters if one.replica_id == found.leader_id), default=-1)

    def described(one: QuorumReplica, status: str) -> dict[str, Any]:
        return {**one._asdict(), "status": status, "lag": max(0, leader_end - max(one.log_end_offset, 0))}

    voters = [described(one, "leader" if one.replica_id == found.leader_id else "follower") for one in found.voters]
    return voters + [described(one, "observer") for one in found.observers]


def _time(timestamp_ms: int) -> str:
    if timestamp_ms < 0:
        return "-"
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
