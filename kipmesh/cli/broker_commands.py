"""`kipmesh broker`, `kipmesh sessions` (fetch sessions, KIP-227) and `kipmesh faults` (injected faults)."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kipmesh.cli.common import (
    ADMIN_TIMEOUT_S,
    EXIT_FAILED,
    AdminConnection,
    AsJson,
    command,
    counted,
    make_app,
    option,
    print_json,
    print_one,
    print_table,
    print_values,
    printable,
    report_error,
)
from kipmesh.cli.reassignment import Deadline, Throttle, WaitTimeout, throttled, wait_moved
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages.schema import MAX_INT32

if TYPE_CHECKING:
    from kipmesh.client import AdminClient
    from kipmesh.client.admin.brokers import LogDirDescription
    from kipmesh.client.admin.reassignments import DrainProgress
    from kipmesh.client.types import FetchSessionDescription
    from kipmesh.messages import InjectedFault

POLL_S = 0.5

BrokerId = Annotated[int, typer.Argument(metavar="ID", min=0, max=MAX_INT32, help="The broker's node.id.")]
OnlyBroker = Annotated[
    int | None, option("--broker", "Only this broker.", min=0, max=MAX_INT32, metavar="ID", show_default=False)
]

app = make_app(
    "Show brokers, and remove a broker without losing records.",
    """
    kipmesh broker list
    kipmesh broker drain 3
    kipmesh broker decommission 3
    """,
)
sessions_app = make_app("Show fetch sessions.", "kipmesh sessions list")
faults_app = make_app(
    "Inject faults into brokers' Kafka listeners. Needs fault.injection.enable=true.",
    """
    kipmesh local up --config fault.injection.enable=true
    kipmesh faults inject --api Fetch --error OFFSET_NOT_AVAILABLE --times 3
    """,
)


@command(app)
def logdirs(broker_id: BrokerId, *, connection: AdminConnection, as_json: AsJson = False) -> None:
    """Show a broker's log directories: the size of each partition, or why a directory is offline.

    Examples:
    kipmesh broker logdirs 2
    kipmesh broker logdirs 2 --json
    """
    found = connection.run(lambda admin: admin.describe_log_dirs(broker_id))
    if as_json:
        for one in found:
            print_json(_log_dir_object(broker_id, one))
        return
    for one in found:
        state = f"OFFLINE: {one.error.message}" if one.error else f"{one.usable_bytes} of {one.total_bytes} bytes free"
        print(f"{one.log_dir}  {state}")
    rows = [
        (where.topic, where.partition, info.size_bytes, info.offset_lag, one.log_dir)
        for one in found
        for where, info in one.replicas.items()
    ]
    print_table(("TOPIC", "PARTITION", "BYTES", "LAG", "LOG DIRECTORY"), sorted(rows))


def _log_dir_object(broker_id: int, one: LogDirDescription) -> dict[str, Any]:
    return {
        "broker_id": broker_id,
        "log_dir": one.log_dir,
        "error": one.error.code.name if one.error else None,
        "error_message": one.error.message if one.error else None,
        "total_bytes": one.total_bytes,
        "usable_bytes": one.usable_bytes,
        "partitions": [
            {"topic": where.topic, "partition": where.partition, **info._asdict()}
            for where, info in sorted(one.replicas.items())
        ],
    }


@command(app, "list")
def list_(*, connection: AdminConnection, as_json: AsJson = False) -> None:
    """List the available brokers, and unavailable ones that have replicas.

    Examples:
    kipmesh broker list
    kipmesh broker list --json
    """
    print_values(
        connection.run(_brokers),
        ("BROKER", "ADDRESS", "RACK", "REPLICAS", "LEADS", "OUT OF SYNC"),
        lambda broker: (
            broker["node_id"],
            f"{broker['host']}:{broker['port']}" if broker["is_available"] else "unavailable",
            broker["rack"] or "-",
            broker["replicas"],
            broker["leaders"],
            broker["out_of_sync"],
        ),
        lambda broker: broker,
        as_json=as_json,
    )


async def _brokers(admin: AdminClient) -> list[dict[str, Any]]:
    cluster, topics = await admin.describe_cluster(), await admin.list_topics()
    partitions = [partition for topic in topics for partition in topic.partitions.values()]
    replicas = Counter(broker for one in partitions for broker in one.replicas)
    leaders = Counter(one.leader_id for one in partitions)
    in_sync = Counter(broker for one in partitions for broker in one.isr)
    nodes = {node.node_id: node for node in cluster.brokers}
    found = []
    for broker in sorted({*nodes, *replicas}):
        node = nodes.get(broker)
        found.append(
            {
                "node_id": broker,
                "host": node.host if node else None,
                "port": node.port if node else None,
                "rack": node.rack if node else None,
                "is_available": node is not None,
                "replicas": replicas[broker],
                "leaders": leaders[broker],
                "out_of_sync": replicas[broker] - in_sync[broker],
            }
        )
    return found


@command(app)
def drain(
    broker_id: BrokerId,
    wait: Annotated[bool, option("--wait/--no-wait", "Return when the broker has no replicas.")] = True,
    throttle: Throttle = None,
    *,
    connection: AdminConnection,
    timeout_s: WaitTimeout = None,
    as_json: AsJson = False,
) -> None:
    """Move all replicas of a broker to other brokers, while clients read and write.

    A replica moves to the rack with the fewest replicas of its partition, and there to the broker with the fewest
    replicas. Nothing moves if fewer brokers would remain than a partition has replicas. Interrupting the command does
    not stop the moves. New topics may still be placed on the broker.

    Examples:
    kipmesh broker drain 3
    kipmesh broker drain 3 --throttle 10000000
    kipmesh broker drain 3 --no-wait
    """
    deadline = Deadline(timeout_s)
    found = connection.run_stoppable(lambda admin: _drain(admin, broker_id, throttle, deadline, wait=wait))
    moving = f"{found.leaving} of {counted(found.left, 'replica')} are being moved"
    text = moving if found.left else f"{counted(found.total, 'replica')} moved, it has none"
    print_one({"broker_id": broker_id, **found._asdict()}, f"broker {broker_id}: {text}", as_json=as_json)


async def _drain(
    admin: AdminClient, broker_id: int, throttle: int | None, deadline: Deadline, *, wait: bool
) -> DrainProgress:
    async with throttled(admin, throttle, lift=wait):
        return await wait_moved(
            admin,
            f"replicas of broker {broker_id}",
            lambda _, one: broker_id in one.removing_replicas,
            lambda on_moved: admin.drain_broker(
                broker_id, wait=wait, on_progress=lambda now: on_moved(now.total - now.left, now.total)
            ),
            deadline,
        )


@command(app)
def decommission(
    broker_id: BrokerId,
    throttle: Throttle = None,
    *,
    connection: AdminConnection,
    timeout_s: WaitTimeout = None,
    as_json: AsJson = False,
) -> None:
    """Drain a broker, wait until its process has stopped, and unregister it from the cluster.

    Stop the process when the command reports that the broker is empty. The command waits 30 seconds for this, or the
    rest of --timeout; run it again if that was too short. A stopped broker can be decommissioned too: the other in-sync
    replicas have its records.

    Examples:
    kipmesh broker decommission 3
    kipmesh broker decommission 3 --throttle 10000000 --timeout 600
    """
    deadline = Deadline(timeout_s)

    async def work(admin: AdminClient) -> int:
        total = (await _drain(admin, broker_id, throttle, deadline, wait=True)).total
        until = Deadline(ADMIN_TIMEOUT_S) if timeout_s is None else deadline
        return total + await _unregister(admin, broker_id, throttle, until)

    total = connection.run_stoppable(work)
    values = {"broker_id": broker_id, "moved": total, "is_registered": False}
    print_one(values, f"broker {broker_id}: {counted(total, 'replica')} moved, unregistered", as_json=as_json)


async def _unregister(admin: AdminClient, broker_id: int, throttle: int | None, deadline: Deadline) -> int:
    """Unregister a broker once its process has stopped, and drain replicas of topics that were created meanwhile.

    Returns the number of these replicas. Raises KafkaError if the broker still runs at the deadline (INVALID_REQUEST),
    or immediately for another error; CommandError if draining does not end by the deadline.
    """
    total, is_reported = 0, False
    while True:
        try:
            await admin.unregister_broker(broker_id)
        except KafkaError as error:
            if error.code is ErrorCode.POLICY_VIOLATION:
                total += (await _drain(admin, broker_id, throttle, deadline, wait=True)).total
                continue
            if error.code is not ErrorCode.INVALID_REQUEST or (is_reported and deadline.is_over):
                raise
        else:
            return total
        if not is_reported:
            is_reported = True
            print(f"broker {broker_id} is empty: stop its process now", file=sys.stderr, flush=True)
        await asyncio.sleep(POLL_S)


# --- kipmesh sessions


@command(sessions_app, "list")
def list_sessions(*, connection: AdminConnection, broker: OnlyBroker = None, as_json: AsJson = False) -> None:
    """Show the fetch sessions of all brokers: client, number of partitions, age, last use and next epoch.

    Sessions of followers are privileged. Exit code 1 if a broker does not respond; the others are still shown.

    Examples:
    kipmesh sessions list
    kipmesh sessions list --broker 2
    kipmesh sessions list --bootstrap 127.0.0.1:9092 --json
    """
    found = connection.run(lambda admin: admin.list_fetch_sessions(broker))
    print_values(
        [(each.node_id, session) for each in found for session in each.sessions],
        ("BROKER", "SESSION", "CLIENT", "PRIVILEGED", "PARTITIONS", "AGE", "LAST USED", "EPOCH"),
        lambda listed: (listed[0], *_session_row(listed[1])),
        lambda listed: {"broker_id": listed[0], **listed[1]._asdict()},
        as_json=as_json,
    )
    failures = [each.error for each in found if each.error is not None]
    if failures:
        sys.stdout.flush()
        for failure in failures:
            report_error(failure)
        raise typer.Exit(EXIT_FAILED)


def _session_row(session: FetchSessionDescription) -> tuple[object, ...]:
    return (
        session.session_id,
        printable(session.client_id),
        "yes" if session.privileged else "no",
        session.partitions,
        _duration(session.age_ms),
        "now" if session.is_waiting else f"{_duration(session.idle_ms)} ago",
        session.epoch,
    )


def _duration(milliseconds: int) -> str:
    """Format a duration: hours and minutes, minutes and seconds, or seconds with one decimal below a minute."""
    seconds = milliseconds / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


# --- kipmesh faults


@command(faults_app)
def inject(
    api: Annotated[str, option("--api", "Kafka's name of the API, e.g. Fetch.", metavar="NAME")],
    error: Annotated[
        str, option("--error", "Return this error of Kafka.", metavar="NAME", show_default=False)
    ] = "NONE",
    delay_ms: Annotated[int, option("--delay-ms", "Delay the response.", min=0, max=MAX_INT32)] = 0,
    drop_connection: Annotated[
        bool, option("--drop-connection", "Close the connection instead of responding.")
    ] = False,
    times: Annotated[int, option("--times", "Number of requests to fail, at each broker.", min=1, max=MAX_INT32)] = 1,
    client_id: Annotated[
        str, option("--client-id", "Only requests of this client.", metavar="ID", show_default=False)
    ] = "",
    broker: OnlyBroker = None,
    *,
    connection: AdminConnection,
    as_json: AsJson = False,
) -> None:
    """Delay the next requests of an API, fail them with an error, or close their connections.

    Examples:
    kipmesh faults inject --api Fetch --error OFFSET_NOT_AVAILABLE --times 3
    kipmesh faults inject --api Produce --delay-ms 2000 --client-id slow-app
    kipmesh faults inject --api Heartbeat --drop-connection --broker 2
    """
    from kipmesh.messages import InjectedFault

    if error == "NONE" and not delay_ms and not drop_connection:
        raise typer.BadParameter("the fault has no effect: give --error, --delay-ms or --drop-connection")
    if error not in ErrorCode.__members__:
        raise typer.BadParameter(
            f"{error!r} is not an error of Kafka, e.g. NOT_LEADER_OR_FOLLOWER", param_hint="--error"
        )
    fault = InjectedFault(0, api, int(ErrorCode[error]), delay_ms, drop_connection, times, client_id)
    for broker_id, number in connection.run(lambda admin: admin.inject_fault(fault, broker)).items():
        values = {"broker_id": broker_id, "fault_id": number}
        print_one(values, f"broker {broker_id}: fault {number}", as_json=as_json)


@command(faults_app, "list")
def list_faults(broker: OnlyBroker = None, *, connection: AdminConnection, as_json: AsJson = False) -> None:
    """List pending faults, and how many more requests each will affect.

    Examples:
    kipmesh faults list
    kipmesh faults list --json
    """
    found = connection.run(lambda admin: admin.list_faults(broker))
    print_values(
        [(broker_id, fault) for broker_id, faults in found.items() for fault in faults],
        ("BROKER", "FAULT", "API", "ERROR", "DELAY MS", "DROPS", "LEFT", "CLIENT"),
        lambda listed: (listed[0], *_fault_row(listed[1])),
        lambda listed: {"broker_id": listed[0], **listed[1]._asdict(), "error": _error(listed[1])},
        as_json=as_json,
    )


def _fault_row(fault: InjectedFault) -> tuple[object, ...]:
    return (
        fault.fault_id,
        fault.api_name,
        _error(fault),
        fault.delay_ms,
        "yes" if fault.drops_connection else "no",
        fault.times,
        fault.client_id or "any",
    )


def _error(fault: InjectedFault) -> str:
    return ErrorCode.of(fault.fault_error_code).name


@command(faults_app)
def clear(broker: OnlyBroker = None, *, connection: AdminConnection) -> None:
    """Remove all faults.

    Examples:
    kipmesh faults clear
    kipmesh faults clear --broker 2
    """
    for broker_id, number in connection.run(lambda admin: admin.clear_faults(broker)).items():
        print(f"broker {broker_id}: {number} cleared")
