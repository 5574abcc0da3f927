"""`kipmesh local`: a cluster of processes on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kipmesh.cli.common import (
    DEFAULT_DIR,
    AsJson,
    Dir,
    command,
    make_app,
    parse_pairs,
    print_json,
    print_table,
    seconds_option,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kipmesh.cluster.layout import ClusterState
    from kipmesh.cluster.process_cluster import OnEvent, ProcessCluster

app = make_app(
    "Start, stop and break a cluster of processes on this machine.",
    """
    kipmesh local up --dir mesh --controllers 1 --followers 2 --consumers 1
    kipmesh local status --dir mesh
    kipmesh local kill follower-1 --dir mesh
    kipmesh local start follower-1 --dir mesh
    kipmesh local down --dir mesh
    """,
)

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="Name of the node, for example follower-1.")]


def _cluster(folder: Any, **options: Any) -> ProcessCluster:
    from kipmesh.cluster.process_cluster import ProcessCluster

    return ProcessCluster(folder, **options)


@command(app)
def up(
    folder: Dir = DEFAULT_DIR,
    controllers: Annotated[int | None, typer.Option(min=1, max=5, help="Voters of the metadata quorum (3).")] = None,
    leaders: Annotated[int | None, typer.Option(min=0, help="Brokers preferred as leaders (a new cluster: 1).")] = None,
    followers: Annotated[int | None, typer.Option(min=0, help="Brokers preferred as replicas (2).")] = None,
    consumers: Annotated[int | None, typer.Option(min=0, help="HTTP consumer services (0).")] = None,
    config: Annotated[
        list[str] | None, typer.Option("--config", metavar="KEY=VALUE", help="For every node that knows the key.")
    ] = None,
    tls: Annotated[
        bool | None, typer.Option("--tls/--no-tls", help="TLS for everything, with certificates made for it (no).")
    ] = None,
    timeout_s: Annotated[float, seconds_option("--timeout", "Seconds to wait until all are ready.", least=1)] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Start a cluster, or restart the one in the folder on its data, and return when it is ready.

    The folder then holds cluster.json and a folder a node: node.properties, data, node.log.

    Examples:
    kipmesh local up
    kipmesh local up --dir mesh --leaders 1 --followers 2 --consumers 1
    kipmesh local up --dir mesh --config log.segment.bytes=1048576 --config log.level=debug
    """
    from kipmesh.cluster.layout import LOCAL_UP_COUNTS, Counts

    values = {**_from_environment(), **parse_pairs(config or (), "--config")}
    if controllers not in (None, 1, 3, 5):
        raise typer.BadParameter("1, 3 or 5", param_hint="--controllers")
    begin = time.monotonic()
    with _progress() as on_event:
        cluster = _cluster(folder, defaults=LOCAL_UP_COUNTS, start_timeout_s=timeout_s, on_event=on_event)
        with _undone_when_ended():
            started = cluster.up(Counts(controllers, leaders, followers, consumers), values, tls=tls)
        cluster.detach()
    state = cluster.state()
    if as_json:
        for node in state.nodes:
            print_json(asdict(node))
        return
    took = f"ready in {time.monotonic() - begin:.1f} s" if started else "runs already"
    print(f"{len(state.nodes)} nodes in {cluster.folder}: {took}")
    _print_bootstrap(state, cluster.folder)


def _print_bootstrap(state: ClusterState, folder: Path) -> None:
    print(f"bootstrap: {state.bootstrap}")
    if state.has_tls:
        from kipmesh.cluster.certificates import CLIENT_PROPERTIES

        print(f"for clients: {folder / CLIENT_PROPERTIES}")
    if state.kafka_bootstrap is not None:
        print(f"kafka bootstrap: {state.kafka_bootstrap}")


@contextmanager
def _undone_when_ended() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP stop what the command within had started."""
    from kipmesh.cluster.signals import ending_as_interrupt

    try:
        with ending_as_interrupt():
            yield
    except KeyboardInterrupt:
        print("kipmesh: interrupted; what this command had started is stopped", file=sys.stderr)
        raise


def _from_environment() -> dict[str, str]:
    if not any(name.startswith("KIPMESH_CONFIG_") for name in os.environ):
        return {}
    from kipmesh.cluster.settings import from_environment

    return from_environment(os.environ)


@contextmanager
def _progress() -> Iterator[OnEvent | None]:
    """On a terminal, a line a node that shows what it is doing."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def on_event(name: str, event: str) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=1)
            done = 1 if event in ("ready", "stopped") else 0
            progress.update(tasks[name], description=f"{name:<14} {event}", completed=done)

        yield on_event


@command(app)
def down(
    folder: Dir = DEFAULT_DIR,
    timeout_s: Annotated[float, seconds_option("--timeout", "Seconds before SIGKILL.", least=0)] = 15.0,
) -> None:
    """Stop all nodes cleanly; those that take too long are killed. The data stays.

    Examples:
    kipmesh local down
    kipmesh local down --dir mesh
    """
    with _progress() as on_event:
        cluster = _cluster(folder, stop_timeout_s=timeout_s, on_event=on_event)
        stopped = cluster.down()
    print(f"{cluster.folder}: {'stopped' if stopped else 'nothing ran'}")


@command(app)
def status(folder: Dir = DEFAULT_DIR, as_json: AsJson = False) -> None:
    """Show every node: ready, not ready, paused or stopped. Exit code 0 when all are ready, 1 otherwise.

    Examples:
    kipmesh local status --dir mesh
    kipmesh local status --dir mesh --json
    """
    cluster = _cluster(folder)
    states = cluster.status()
    if as_json:
        for node, how in states:
            print_json({**asdict(node), "state": how})
    else:
        rows = [
            (node.name, how, node.node_id or "-", node.rack, node.pid or "-", node.grpc or "-", node.http or "-")
            for node, how in states
        ]
        print_table(("NODE", "STATE", "ID", "RACK", "PID", "GRPC", "HTTP"), rows)
        _print_bootstrap(cluster.state(), cluster.folder)
    if any(how != "ready" for _node, how in states):
        raise typer.Exit(1)


@command(app)
def start(name: NodeName, folder: Dir = DEFAULT_DIR) -> None:
    """Start a node that does not run, on its data, and return when it is ready.

    A controller is not waited for while too few of them run to elect the active one.

    Examples:
    kipmesh local start follower-1 --dir mesh
    """
    begin = time.monotonic()
    cluster = _cluster(folder)
    with _undone_when_ended():
        started = cluster.start(name)
    cluster.detach()
    how = f"ready in {time.monotonic() - begin:.1f} s" if started.state == "ready" else "waits for more controllers"
    print(f"{name}: {how} (pid {started.node.pid})")


@command(app)
def stop(name: NodeName, folder: Dir = DEFAULT_DIR) -> None:
    """Stop one node cleanly (SIGTERM).

    Examples:
    kipmesh local stop follower-1 --dir mesh
    """
    _cluster(folder).stop(name)
    print(f"{name}: stopped")


@command(app)
def kill(name: NodeName, folder: Dir = DEFAULT_DIR) -> None:
    """Kill one node at once (SIGKILL).

    Examples:
    kipmesh local kill leader-1 --dir mesh
    """
    _cluster(folder).kill(name)
    print(f"{name}: killed")


@command(app)
def pause(name: NodeName, folder: Dir = DEFAULT_DIR) -> None:
    """Hold one node (SIGSTOP): it keeps its connections and answers nothing.

    Examples:
    kipmesh local pause leader-1 --dir mesh
    """
    _cluster(folder).pause(name)
    print(f"{name}: paused")


@command(app)
def resume(name: NodeName, folder: Dir = DEFAULT_DIR) -> None:
    """Let a held node go on (SIGCONT).

    Examples:
    kipmesh local resume leader-1 --dir mesh
    """
    _cluster(folder).resume(name)
    print(f"{name}: resumed")
