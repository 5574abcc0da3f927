"""`kipmesh`: the commands, and what is common to them.

Rules: an error is one clear line on stderr and exit code 1, wrong usage 2; a closed pipe, Ctrl-C and SIGTERM end
quietly (141, 130, 143, as shells expect). Command modules import clients, clusters and storage inside their functions
only.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from kipmesh.cli import (
    broker_commands,
    chaos_commands,
    cluster_commands,
    consume_command,
    group_commands,
    job_commands,
    local_commands,
    log_commands,
    produce_command,
    security_commands,
    topic_commands,
)
from kipmesh.cli.common import (
    COMMAND_CONFIG,
    EXIT_OK,
    EXIT_PIPE_CLOSED,
    EXIT_SIGNAL,
    command,
    explain,
    make_app,
)

app = make_app(
    "A Kafka-compatible replicated log made of small services.",
    """
    kipmesh local up
    kipmesh topic create flights --partitions 6 --replication-factor 3
    seq 1000 | kipmesh produce flights
    kipmesh consume flights --from-beginning --max-messages 10
    """,
)
app.add_typer(local_commands.app, name="local")
app.add_typer(topic_commands.app, name="topic")
command(app)(produce_command.produce)
command(app)(consume_command.consume)
app.add_typer(log_commands.app, name="log")
app.add_typer(log_commands.snapshot_app, name="snapshot")
app.add_typer(group_commands.app, name="group")
app.add_typer(broker_commands.sessions_app, name="sessions")
app.add_typer(cluster_commands.quorum_app, name="quorum")
app.add_typer(cluster_commands.cluster_app, name="cluster")
app.add_typer(broker_commands.app, name="broker")
app.add_typer(cluster_commands.config_app, name="config")
app.add_typer(security_commands.user_app, name="user")
app.add_typer(chaos_commands.app, name="chaos")
app.add_typer(security_commands.certs_app, name="certs")
app.add_typer(broker_commands.faults_app, name="faults")
app.add_typer(job_commands.app, name="job")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"kipmesh {version('kipmesh')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    command_config: Annotated[
        Path | None,
        typer.Option(
            "--command-config",
            envvar=COMMAND_CONFIG,
            metavar="FILE",
            help="Properties of clients (security.protocol, ssl.*) for any command. Local clusters need none.",
        ),
    ] = None,
) -> None:
    del version
    if command_config is not None:
        os.environ[COMMAND_CONFIG] = str(command_config)


def _open_streams() -> None:
    """What the caller closed (`>&-`) is None in Python: writing to it is to fail as anywhere; stderr is dropped."""
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def main() -> None:
    """The entry point of the script `kipmesh`."""
    _open_streams()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.exit(_flushed(_run()))


def _run() -> int:
    """Do what the command line says; the exit code."""
    try:
        # Not `app()`: it would turn a closed pipe into exit code 1.
        command = typer.main.get_command(app)
        with command.make_context("kipmesh", sys.argv[1:]) as context:
            command.invoke(context)
        return _flushed(EXIT_OK)
    except typer.Exit as asked:
        return asked.exit_code
    except BrokenPipeError:
        return EXIT_PIPE_CLOSED
    except (KeyboardInterrupt, typer.Abort) as interrupt:
        number: int = getattr(interrupt, "number", signal.SIGINT)
        return EXIT_SIGNAL + number
    except Exception as error:
        return explain(error)


def _flushed(code: int) -> int:
    """Write the rest of the output; the exit code, which is that of an error there when there was none before."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python flushes stdout once more at exit: give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return code or EXIT_PIPE_CLOSED
        return code or explain(OSError(error.errno, error.strerror, "standard output"))
    return code


if __name__ == "__main__":
    main()
