"""`kipmesh faults`: errors, delays and broken connections for tests of clients, at brokers that allow them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kipmesh.cli.common import (
    ADMIN_TIMEOUT_S,
    DEFAULT_DIR,
    AdminTimeout,
    AsJson,
    Bootstrap,
    Dir,
    OnlyBroker,
    admin_client,
    bootstrap_of,
    examples,
    make_app,
    print_json,
    print_table,
    run,
)
from kipmesh.messages.limits import MAX_INT32

if TYPE_CHECKING:
    from kipmesh.messages import InjectedFault

app = make_app(
    "Inject faults at brokers' listeners of the Kafka protocol (fault.injection.enable).",
    """
    kipmesh local up --config fault.injection.enable=true
    kipmesh faults inject --api Fetch --error OFFSET_NOT_AVAILABLE --times 3
    """,
)


@app.command(
    epilog=examples(
        """
        kipmesh faults inject --api Fetch --error OFFSET_NOT_AVAILABLE --times 3
        kipmesh faults inject --api Produce --delay-ms 2000 --client-id slow-app
        kipmesh faults inject --api Heartbeat --drop-connection --broker 2
        """
    )
)
def inject(
    api: Annotated[str, typer.Option("--api", metavar="NAME", help="Kafka's name of the API, e.g. Fetch.")],
    error: Annotated[
        str, typer.Option("--error", metavar="NAME", help="Answer with this error.", show_default=False)
    ] = "NONE",
    delay_ms: Annotated[int, typer.Option("--delay-ms", min=0, max=MAX_INT32, help="Wait first.")] = 0,
    drop_connection: Annotated[bool, typer.Option("--drop-connection", help="End the connection instead.")] = False,
    times: Annotated[
        int, typer.Option("--times", min=1, max=MAX_INT32, help="For so many requests, at each broker.")
    ] = 1,
    client_id: Annotated[
        str, typer.Option("--client-id", metavar="ID", help="Of this client only.", show_default=False)
    ] = "",
    broker: OnlyBroker = None,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Let the next requests of an API be answered late, with an error, or not at all."""
    from kipmesh.core.errors import ErrorCode
    from kipmesh.messages import InjectedFault

    if error not in ErrorCode.__members__:
        raise typer.BadParameter(f"there is no error {error!r}", param_hint="--error")
    fault = InjectedFault(0, api, int(ErrorCode[error]), delay_ms, drop_connection, times, client_id)
    address = bootstrap_of(bootstrap, folder)

    async def work() -> dict[int, int]:
        async with admin_client(address, timeout_s) as admin:
            return await admin.inject_fault(fault, broker)

    for broker_id, number in run(work).items():
        if as_json:
            print_json({"broker_id": broker_id, "fault_id": number})
        else:
            print(f"broker {broker_id}: fault {number}")


@app.command("list", epilog=examples("kipmesh faults list --json"))
def list_(
    broker: OnlyBroker = None,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Show the faults that are still to act, and on how many requests."""
    address = bootstrap_of(bootstrap, folder)

    async def work() -> dict[int, list[InjectedFault]]:
        async with admin_client(address, timeout_s) as admin:
            return await admin.list_faults(broker)

    found = [(broker_id, fault) for broker_id, faults in run(work).items() for fault in faults]
    if as_json:
        for broker_id, fault in found:
            print_json({"broker_id": broker_id, **fault._asdict(), "error": _error(fault)})
        return
    rows = [
        (
            broker_id,
            one.fault_id,
            one.api_name,
            _error(one),
            one.delay_ms,
            "yes" if one.drops_connection else "no",
            one.times,
            one.client_id or "any",
        )
        for broker_id, one in found
    ]
    print_table(("BROKER", "FAULT", "API", "ERROR", "DELAY MS", "DROPS", "LEFT", "CLIENT"), rows)


@app.command(epilog=examples("kipmesh faults clear"))
def clear(
    broker: OnlyBroker = None,
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
) -> None:
    """Take all faults away."""
    address = bootstrap_of(bootstrap, folder)

    async def work() -> dict[int, int]:
        async with admin_client(address, timeout_s) as admin:
            return await admin.clear_faults(broker)

    for broker_id, number in run(work).items():
        print(f"broker {broker_id}: {number} cleared")


def _error(fault: InjectedFault) -> str:
    from kipmesh.core.errors import ErrorCode

    return ErrorCode.of(fault.fault_error_code).name
