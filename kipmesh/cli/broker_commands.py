"""`kipmesh broker`: which brokers there are, and how one of them is removed without losing anything."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kipmesh.cli.common import (
    ADMIN_TIMEOUT_S,
    DEFAULT_DIR,
    AdminTimeout,
    AsJson,
    Bootstrap,
    BrokerId,
    Dir,
    admin_client,
    bootstrap_of,
    examples,
    make_app,
    print_json,
    print_table,
    run,
)
from kipmesh.cli.logdirs_command import logdirs
from kipmesh.cli.moving import Deadline, Throttle, WaitTimeout, call_timeout_s, moved, stoppable, throttled

if TYPE_CHECKING:
    from kipmesh.client import AdminClient
    from kipmesh.client.reassignments import DrainProgress

POLL_S = 0.5

app = make_app(
    "Show brokers, and remove one without losing anything.",
    """
    kipmesh broker list
    kipmesh broker drain 3
    kipmesh broker decommission 3
    """,
)

app.command(
    "logdirs",
    epilog=examples(
        """
        kipmesh broker logdirs 2
        kipmesh broker logdirs 2 --json
        """
    ),
)(logdirs)


@app.command(name="list", epilog=examples("kipmesh broker list\nkipmesh broker list --json"))
def list_(
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """List the brokers that are there, and those that are not but have replicas."""
    address = bootstrap_of(bootstrap, folder)

    async def work() -> list[dict[str, Any]]:
        async with admin_client(address, timeout_s) as admin:
            return await _brokers(admin)

    found = run(work)
    if as_json:
        for broker in found:
            print_json(broker)
        return
    rows = [
        (
            broker["node_id"],
            f"{broker['host']}:{broker['port']}" if broker["is_available"] else "not there",
            broker["rack"] or "-",
            broker["replicas"],
            broker["leaders"],
            broker["out_of_sync"],
        )
        for broker in found
    ]
    print_table(("BROKER", "ADDRESS", "RACK", "REPLICAS", "LEADS", "OUT OF SYNC"), rows)


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


@app.command(
    epilog=examples(
        """
        kipmesh broker drain 3
        kipmesh broker drain 3 --throttle 10000000
        kipmesh broker drain 3 --no-wait
        """
    )
)
def drain(
    broker_id: BrokerId,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when the broker has no replica.")] = True,
    throttle: Throttle = None,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: WaitTimeout = None,
    as_json: AsJson = False,
) -> None:
    """Move every replica of a broker to the others.

    Each goes to the rack with the fewest of its partition's replicas, and there to the broker with the least. Nothing
    is moved when a partition has more replicas than there would be brokers. Records go on being written and read. An
    interrupted drain goes on by itself. New topics may still be placed on the broker.
    """
    address = bootstrap_of(bootstrap, folder)

    async def work() -> DrainProgress:
        deadline = Deadline(timeout_s)
        async with admin_client(address, call_timeout_s(timeout_s)) as admin:
            return await _drain(admin, broker_id, throttle, deadline, wait=wait)

    found = stoppable(work)
    if as_json:
        print_json({"broker_id": broker_id, **found._asdict()})
    elif found.left:
        print(f"broker {broker_id}: {found.leaving} of {found.left} replicas are being moved")
    else:
        print(f"broker {broker_id}: {found.total} replicas moved, it has none")


async def _drain(
    admin: AdminClient, broker_id: int, throttle: int | None, deadline: Deadline, *, wait: bool
) -> DrainProgress:
    async with throttled(admin, throttle, lift=wait):
        return await moved(
            admin,
            f"replicas of broker {broker_id}",
            lambda _, one: broker_id in one.removing_replicas,
            lambda on_moved: admin.drain_broker(
                broker_id, wait=wait, on_progress=lambda said: on_moved(said.total - said.left, said.total)
            ),
            deadline,
        )


@app.command(
    epilog=examples(
        """
        kipmesh broker decommission 3
        kipmesh broker decommission 3 --throttle 10000000 --timeout 600
        """
    )
)
def decommission(
    broker_id: BrokerId,
    throttle: Throttle = None,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: WaitTimeout = None,
    as_json: AsJson = False,
) -> None:
    """Drain a broker, wait until its process is stopped, and let the cluster forget it.

    The process is yours to stop, as soon as this says that the broker is empty; it waits 30 seconds for that, or what
    is left of --timeout, and may be called again later. A broker that is stopped already, or dead, is drained as well:
    the other in-sync replicas have its records.
    """
    address = bootstrap_of(bootstrap, folder)

    async def work() -> int:
        deadline = Deadline(timeout_s)
        async with admin_client(address, call_timeout_s(timeout_s)) as admin:
            total = (await _drain(admin, broker_id, throttle, deadline, wait=True)).total
            if timeout_s is None:
                deadline = Deadline(ADMIN_TIMEOUT_S)
            return total + await _unregister(admin, broker_id, throttle, deadline)

    total = stoppable(work)
    if as_json:
        print_json({"broker_id": broker_id, "moved": total, "is_registered": False})
    else:
        print(f"broker {broker_id}: {total} replicas moved, unregistered")


async def _unregister(admin: AdminClient, broker_id: int, throttle: int | None, deadline: Deadline) -> int:
    """Until it is stopped and forgotten; gives how many replicas of topics made meanwhile were moved, too."""
    from kipmesh.core.errors import ErrorCode, KafkaError

    total, is_told = 0, False
    while True:
        try:
            await admin.unregister_broker(broker_id)
        except KafkaError as error:
            if error.code is ErrorCode.POLICY_VIOLATION:
                total += (await _drain(admin, broker_id, throttle, deadline, wait=True)).total
                continue
            if error.code is not ErrorCode.INVALID_REQUEST or (is_told and deadline.is_over):
                raise
        else:
            return total
        if not is_told:
            is_told = True
            print(f"broker {broker_id} is empty: stop its process now", file=sys.stderr, flush=True)
        await asyncio.sleep(POLL_S)
