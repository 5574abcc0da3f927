"""`kipmesh local`: start, stop and break a cluster of processes on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kipmesh.cli.common import (
    DEFAULT_DIR,
    EXIT_FAILED,
    AsJson,
    Dir,
    command,
    counted,
    make_app,
    option,
    parse_pairs,
    print_json,
    print_table,
    seconds_option,
)
from kipmesh.core.errors import InvalidConfigError

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


def _cluster(directory: Path, **options: Any) -> ProcessCluster:
    from kipmesh.cluster.process_cluster import ProcessCluster

    return ProcessCluster(directory, **options)


@command(app)
def up(
    directory: Dir = DEFAULT_DIR,
    controllers: Annotated[
        int | None, typer.Option(min=1, max=5, help="Voters of the metadata quorum: 1, 3 or 5. New cluster: 3.")
    ] = None,
    leaders: Annotated[int | None, typer.Option(min=0, help="Brokers preferred as leaders. New cluster: 1.")] = None,
    followers: Annotated[
        int | None, typer.Option(min=0, help="Brokers preferred as followers. New cluster: 2.")
    ] = None,
    consumers: Annotated[int | None, typer.Option(min=0, help="HTTP consumer services. New cluster: 0.")] = None,
    config: Annotated[
        list[str] | None,
        option("--config", "A setting of all nodes that know the key; repeatable.", metavar="KEY=VALUE"),
    ] = None,
    tls: Annotated[
        bool | None, option("--tls/--no-tls", "TLS on all listeners, with generated certificates. New cluster: no.")
    ] = None,
    timeout_s: Annotated[
        float, seconds_option("--timeout", "Seconds to wait until all nodes are ready.", least=1)
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Start a cluster and return when all nodes are ready. An existing cluster in --dir is restarted with its data.

    Writes cluster.json and one directory per node (node.properties, data, node.log) to --dir.

    Examples:
    kipmesh local up
    kipmesh local up --dir mesh --leaders 1 --followers 2 --consumers 1
    kipmesh local up --dir mesh --config log.segment.bytes=1048576 --config log.level=debug
    """
    from kipmesh.cluster.layout import LOCAL_UP_COUNTS, Counts

    variables, options = _from_environment(), parse_pairs(config, "--config")
    if controllers not in (None, 1, 3, 5):
        raise typer.BadParameter(f"must be 1, 3 or 5, got {controllers}", param_hint="--controllers")
    begin = time.monotonic()
    with _progress() as on_event:
        cluster = _cluster(directory, defaults=LOCAL_UP_COUNTS, start_timeout_s=timeout_s, on_event=on_event)
        with _stopped_on_signal(), _named_variables({key: variables[key] for key in variables.keys() - options}):
            started = cluster.up(Counts(controllers, leaders, followers, consumers), {**variables, **options}, tls=tls)
        cluster.detach()
    state = cluster.state()
    if as_json:
        for node in state.nodes:
            print_json(asdict(node))
        return
    took = f"ready in {time.monotonic() - begin:.1f} s" if started else "runs already"
    print(f"{counted(len(state.nodes), 'node')} in {cluster.directory}: {took}")
    _print_bootstrap(state, cluster.directory)


def _print_bootstrap(state: ClusterState, directory: Path) -> None:
    print(f"bootstrap: {state.bootstrap}")
    if state.has_tls:
        from kipmesh.cluster.certificates import CLIENT_PROPERTIES

        print(f"for clients: {directory / CLIENT_PROPERTIES}")
    if state.kafka_bootstrap is not None:
        print(f"kafka bootstrap: {state.kafka_bootstrap}")


@contextmanager
def _stopped_on_signal() -> Iterator[None]:
    """Report that Ctrl-C, SIGTERM or SIGHUP stopped the nodes that the block had started."""
    from kipmesh.cluster.signals import signals_as_interrupt

    try:
        with signals_as_interrupt():
            yield
    except KeyboardInterrupt:
        print("kipmesh: interrupted; the nodes that this command had started are stopped", file=sys.stderr)
        raise


def _from_environment() -> dict[str, str]:
    if not any(name.startswith("KIPMESH_CONFIG_") for name in os.environ):
        return {}
    from kipmesh.cluster.settings import from_environment

    return from_environment(os.environ)


@contextmanager
def _named_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Name the environment variable in an InvalidConfigError about one of these values."""
    try:
        yield
    except InvalidConfigError as error:
        if error.key not in values:
            raise
        from kipmesh.node.settings import variable

        raise InvalidConfigError(f"environment variable {variable(error.key)}: {error.message}") from None


@contextmanager
def _progress() -> Iterator[OnEvent | None]:
    """Yield a callback that shows one progress line per node; None if stderr is not a terminal."""
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
    directory: Dir = DEFAULT_DIR,
    timeout_s: Annotated[float, seconds_option("--timeout", "Seconds between SIGTERM and SIGKILL.", least=0)] = 15.0,
) -> None:
    """Stop all nodes (SIGTERM) and kill those that do not stop in time (SIGKILL). The data stays.

    Examples:
    kipmesh local down
    kipmesh local down --dir mesh
    """
    with _progress() as on_event:
        cluster = _cluster(directory, stop_timeout_s=timeout_s, on_event=on_event)
        stopped = cluster.down()
    print(f"{cluster.directory}: {'stopped' if stopped else 'nothing ran'}")


@command(app)
def status(directory: Dir = DEFAULT_DIR, as_json: AsJson = False) -> None:
    """Show the state of every node: ready, not ready, paused or stopped. Exit code 1 unless all are ready.

    Examples:
    kipmesh local status --dir mesh
    kipmesh local status --dir mesh --json
    """
    cluster = _cluster(directory)
    states = cluster.status()
    if as_json:
        for node, state in states:
            print_json({**asdict(node), "state": state})
    else:
        rows = [
            (node.name, state, node.node_id or "-", node.rack, node.pid or "-", node.grpc or "-", node.http or "-")
            for node, state in states
        ]
        print_table(("NODE", "STATE", "ID", "RACK", "PID", "GRPC", "HTTP"), rows)
        _print_bootstrap(cluster.state(), cluster.directory)
    if any(state != "ready" for _, state in states):
        raise typer.Exit(EXIT_FAILED)


@command(app)
def start(name: NodeName, directory: Dir = DEFAULT_DIR) -> None:
    """Start a stopped node with its data and return when it is ready.

    Returns earlier for a controller if too few controllers run to elect a leader of the quorum.

    Examples:
    kipmesh local start follower-1 --dir mesh
    """
    begin = time.monotonic()
    cluster = _cluster(directory)
    with _stopped_on_signal():
        started = cluster.start(name)
    cluster.detach()
    state = f"ready in {time.monotonic() - begin:.1f} s" if started.state == "ready" else "waits for more controllers"
    print(f"{name}: {state} (pid {started.node.pid})")


def _add_signal_command(name: str, done: str, text: str, example_node: str) -> None:
    def send_signal(node: NodeName, directory: Dir = DEFAULT_DIR) -> None:
        getattr(_cluster(directory), name)(node)
        print(f"{node}: {done}")

    send_signal.__doc__ = f"{text}\n\nExamples:\nkipmesh local {name} {example_node} --dir mesh\n"
    command(app, name)(send_signal)


_add_signal_command("stop", "stopped", "Stop one node cleanly (SIGTERM).", "follower-1")
_add_signal_command("kill", "killed", "Kill one node (SIGKILL).", "leader-1")
_add_signal_command(
    "pause", "paused", "Pause one node (SIGSTOP): it keeps its connections but does not respond.", "leader-1"
)
_add_signal_command("resume", "resumed", "Resume a paused node (SIGCONT).", "leader-1")
