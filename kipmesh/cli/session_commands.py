"""`kipmesh sessions list`: the fetch sessions of the brokers (KIP-227)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from kipmesh.cli.common import (
    ADMIN_TIMEOUT_S,
    DEFAULT_DIR,
    EXIT_FAILED,
    AdminTimeout,
    AsJson,
    Bootstrap,
    Dir,
    OnlyBroker,
    admin_client,
    bootstrap_of,
    examples,
    explain,
    make_app,
    print_json,
    print_table,
    run,
)

if TYPE_CHECKING:
    from kipmesh.client.types import BrokerSessions, FetchSessionDescription

app = make_app("Show fetch sessions.", "kipmesh sessions list")

_TITLES = ("BROKER", "SESSION", "CLIENT", "PRIVILEGED", "PARTITIONS", "AGE", "LAST USED", "EPOCH")


@app.callback()
def _group() -> None:
    pass


@app.command(
    "list",
    epilog=examples(
        """
        kipmesh sessions list
        kipmesh sessions list --broker 2
        kipmesh sessions list --bootstrap 127.0.0.1:9092 --json
        """
    ),
)
def list_sessions(
    bootstrap: Bootstrap = None,
    folder: Dir = DEFAULT_DIR,
    timeout_s: AdminTimeout = ADMIN_TIMEOUT_S,
    broker: OnlyBroker = None,
    as_json: AsJson = False,
) -> None:
    """Show the fetch sessions of all brokers: whose they are, their partitions, age, last use and next epoch.

    Privileged are those of followers. Exit code 1 when a broker does not answer; the others are shown.
    """
    address = bootstrap_of(bootstrap, folder)

    async def work() -> list[BrokerSessions]:
        async with admin_client(address, timeout_s) as admin:
            return await admin.list_fetch_sessions(broker)

    found = run(work)
    listed = [(each.node_id, session) for each in found for session in each.sessions]
    if as_json:
        for node_id, session in listed:
            print_json({"broker_id": node_id, **session._asdict()})
    else:
        print_table(_TITLES, [_row(node_id, session) for node_id, session in listed])
    failures = [each.error for each in found if each.error is not None]
    if failures:
        sys.stdout.flush()
        for failure in failures:
            explain(failure)
        raise typer.Exit(EXIT_FAILED)


def _row(node_id: int, session: FetchSessionDescription) -> tuple[object, ...]:
    return (
        node_id,
        session.session_id,
        _name(session),
        "yes" if session.privileged else "no",
        session.partitions,
        _duration(session.age_ms),
        "now" if session.is_waiting else f"{_duration(session.idle_ms)} ago",
        session.epoch,
    )


def _name(session: FetchSessionDescription) -> str:
    """A client may call itself anything: what would not stay on its line is shown escaped."""
    name = session.client_id or "-"
    return name if name.isprintable() else ascii(name)


def _duration(milliseconds: int) -> str:
    """With its largest two units."""
    seconds = milliseconds / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
