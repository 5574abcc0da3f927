"""Entry point of the command `kipmesh`: the command tree, global options and exit codes.

Exit codes: 1 for an error, reported as one line on stderr; 2 for wrong usage; 141, 130 and 143 after a closed pipe,
Ctrl-C and SIGTERM, without a message. Command modules import clients, clusters and storage only inside functions, so
that `--help` is fast.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

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
    make_app,
    option,
    report_error,
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
        bool, option("--version", "Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    command_config: Annotated[
        Path | None,
        option(
            "--command-config",
            "Properties file with client settings (security.protocol, ssl.*). Local clusters do not need it.",
            envvar=COMMAND_CONFIG,
            metavar="FILE",
        ),
    ] = None,
) -> None:
    del version
    if command_config is not None:
        os.environ[COMMAND_CONFIG] = str(command_config)


class _StandardOutput(io.FileIO):
    """A FileIO that names standard output in write errors."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from None


def _open_streams() -> None:
    """Name stdout in write errors, and replace streams that the caller closed (`>&-`), which Python sets to None.

    Writes to a closed stdout fail like other write errors; a closed stderr discards its output.
    """
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(_StandardOutput(os.open(os.devnull, os.O_RDONLY), "w")))
    elif sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):  # tests replace it
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_StandardOutput(sys.stdout.fileno(), "w", closefd=False)),
            encoding=sys.stdout.encoding,
            errors=sys.stdout.errors,
            line_buffering=sys.stdout.line_buffering,
            write_through=sys.stdout.write_through,
        )
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def main() -> None:
    """Run the command line in sys.argv and exit with its exit code."""
    _open_streams()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.exit(_flushed(_run()))


def _run() -> int:
    """Run the command line and return its exit code."""
    try:
        # `app()` would turn a closed pipe into exit code 1.
        command = typer.main.get_command(app)
        with command.make_context("kipmesh", sys.argv[1:]) as context:
            command.invoke(context)
        return _flushed(EXIT_OK)
    except typer.Exit as exit_:
        return exit_.exit_code
    except BrokenPipeError:
        return EXIT_PIPE_CLOSED
    except (KeyboardInterrupt, typer.Abort) as interrupt:
        number: int = getattr(interrupt, "number", signal.SIGINT)
        return EXIT_SIGNAL + number
    except Exception as error:
        return report_error(error)


def _flushed(code: int) -> int:
    """Flush stdout and return `code`, or the exit code of a write error if `code` is 0."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python flushes stdout again at exit; redirect it so that this does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return code or EXIT_PIPE_CLOSED
        return code or report_error(error)
    return code


if __name__ == "__main__":
    main()
