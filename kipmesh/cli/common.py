"""What commands share: the form of help, `--bootstrap`, output as JSON lines or tables, running a client."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import typer

from kipmesh.messages.limits import MAX_INT32

if TYPE_CHECKING:
    from kipmesh.client import AdminClient

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_PIPE_CLOSED = 141
EXIT_SIGNAL = 128
"""What shells add to the number of a signal."""
CONNECT_TIMEOUT_S = 5.0
ADMIN_TIMEOUT_S = 30.0
SECONDS_MAX = MAX_INT32 // 1000
"""Timeouts are sent in milliseconds, as int32."""
DEFAULT_DIR = Path("kipmesh-local")

COMMAND_CONFIG = "KIPMESH_COMMAND_CONFIG"
"""The environment variable with the file of `--command-config`."""

T = TypeVar("T")


class Mesh(str):
    """Addresses of brokers, and what clients need beside them to get there."""

    __slots__ = ("config",)
    config: Mapping[str, str]

    @classmethod
    def at(cls, bootstrap: str, config: Mapping[str, str]) -> Mesh:
        """At these addresses."""
        mesh = cls(bootstrap)
        mesh.config = config
        return mesh


def plain_text(value: Any) -> Any:
    """The value of an argument, or a list of them; raises typer.BadParameter for bytes that are not UTF-8."""
    for text in value if isinstance(value, (list, tuple)) else [value]:
        try:
            str(text).encode()
        except UnicodeEncodeError:
            raise typer.BadParameter(f"{os.fsencode(text)!r} is not UTF-8") from None
    return value


def addresses(value: str | None) -> str | None:
    """The value of an option with addresses; raises typer.BadParameter when there is none in it."""
    if value is not None and not value.strip(" ,"):
        raise typer.BadParameter("no address")
    plain_text(value)
    return value


def seconds_option(name: str, text: str, *, least: float = 0.1, show_default: bool = True) -> Any:
    """An option that is a duration, no longer than a message can say."""
    return typer.Option(name, min=least, max=SECONDS_MAX, help=text, show_default=show_default)


def number_of(text: str, option: str | None = None, *, most: int = MAX_INT32) -> int:
    """The number of these digits, a part of an argument; raises typer.BadParameter as for an argument out of range."""
    try:
        number = int(text)
    except ValueError:  # more digits than Python reads
        number = most + 1
    if number > most:
        raise typer.BadParameter(f"{text} is more than {most}", param_hint=option)
    return number


Dir = Annotated[
    Path, typer.Option("--dir", envvar="KIPMESH_DIR", help="Folder of the local cluster.", show_default=True)
]
Bootstrap = Annotated[
    str | None,
    typer.Option(
        "--bootstrap",
        envvar="KIPMESH_BOOTSTRAP",
        metavar="HOST:PORT,...",
        callback=addresses,
        help="Brokers to begin with. Left out: those of the local cluster in --dir.",
        show_default=False,
    ),
]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", callback=plain_text)]
AdminTimeout = Annotated[float, seconds_option("--timeout", "Seconds to wait for brokers and the active controller.")]
BrokerId = Annotated[int, typer.Argument(metavar="ID", min=0, max=MAX_INT32, help="node.id of the broker.")]
OnlyBroker = Annotated[
    int | None,
    typer.Option("--broker", min=0, max=MAX_INT32, metavar="ID", help="Only this broker.", show_default=False),
]
ClientConfig = Annotated[
    list[str] | None, typer.Option("--config", metavar="KEY=VALUE", help="A client setting, for example acks=1.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]


class CommandError(Exception):
    """A command cannot be done; the text is the one line that the user sees."""


def examples(text: str) -> str:
    """A command's epilog: click must not rewrap it."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" if line else "" for line in inspect.cleandoc(text).splitlines())


def make_app(summary: str, example_lines: str) -> typer.Typer:
    """A group of commands."""
    return typer.Typer(
        help=summary,
        epilog=examples(example_lines),
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )


def client_config_of(bootstrap: str) -> Mapping[str, str]:
    """What clients need to get there beside the addresses: of what `bootstrap_of` gave."""
    return bootstrap.config if isinstance(bootstrap, Mesh) else {}


def command_config() -> Mapping[str, str]:
    """The properties of `--command-config`; raises InvalidConfigError."""
    file = os.environ.get(COMMAND_CONFIG)
    if not file:
        return {}
    from kipmesh.node.settings import read_properties

    return read_properties(Path(file))


def bootstrap_of(bootstrap: str | None, folder: Path) -> Mesh:
    """The brokers to talk to; raises CommandError when nothing says which, InvalidConfigError for a bad file."""
    given = command_config()
    if bootstrap:
        return Mesh.at(bootstrap, given)
    from kipmesh.cluster.certificates import client_config
    from kipmesh.cluster.layout import read_state

    state = read_state(folder)
    if state is None or not state.bootstrap:
        where = folder.absolute()
        raise CommandError(f"which cluster? Give --bootstrap or --dir (there is no local cluster in {where})")
    return Mesh.at(state.bootstrap, {**client_config(state.nodes), **given})


def run(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a client's coroutine; library warnings go to stderr, one a line."""
    from kipmesh.node import logging

    level = os.environ.get("KIPMESH_LOG_LEVEL", "error").lower()
    logging.configure(level=level if level in logging.LEVELS else "error", form="console", context={})
    return asyncio.run(make())


class _Client(Protocol):
    @property
    def last_failure(self) -> Exception | None: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


C = TypeVar("C", bound=_Client)


async def connect(
    client: _Client, bootstrap: str, config: Mapping[str, Any], *, timeout_s: float | None = None
) -> None:
    """Start a client, and give up soon when nobody is there, unless the user set `request.timeout.ms`."""
    from kipmesh.core.errors import ErrorCode, KafkaError

    longest_s = None if "request.timeout.ms" in config else CONNECT_TIMEOUT_S
    limit_s = min((one for one in (longest_s, timeout_s) if one is not None), default=None)
    try:
        async with asyncio.timeout(limit_s):
            await client.start()
    except TimeoutError:
        meaning = getattr(client.last_failure, "meaning", "")
        why = f" ({meaning})" if meaning else ""
        text = f"no broker answers at {bootstrap} within {limit_s:g} s{why}"
        raise KafkaError(ErrorCode.NETWORK_EXCEPTION, text) from None


@asynccontextmanager
async def connected(
    client: C, bootstrap: str, config: Mapping[str, Any], *, timeout_s: float | None = None
) -> AsyncIterator[C]:
    """`connect`, and close it at the end."""
    await connect(client, bootstrap, config, timeout_s=timeout_s)
    try:
        yield client
    finally:
        await client.close()


def admin_client(bootstrap: str, timeout_s: float) -> AbstractAsyncContextManager[AdminClient]:
    """A connected administration client, each call of which takes `timeout_s` at most."""
    from kipmesh.client import AdminClient

    limit_ms = max(round(timeout_s * 1000), 1)
    request_ms = min(limit_ms, round(ADMIN_TIMEOUT_S * 1000))
    limits = {"default.api.timeout.ms": limit_ms, "request.timeout.ms": request_ms}
    client = AdminClient(bootstrap, **{**client_config_of(bootstrap), **limits})
    return connected(client, bootstrap, {}, timeout_s=timeout_s)


def explain(error: Exception) -> int:
    """Say on stderr what happened; the exit code."""
    show = getattr(error, "show", None)
    if show is not None:  # click's errors of usage
        show()
        return int(getattr(error, "exit_code", EXIT_FAILED))
    expected = type(error).__module__.startswith("kipmesh.") or isinstance(error, OSError)
    if not expected or os.environ.get("KIPMESH_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    print(f"kipmesh: {_line(error)}", file=sys.stderr)
    return EXIT_FAILED


def _line(error: Exception) -> str:
    """What happened, with Kafka's name of it where there is one."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    try:
        message = getattr(error, "message", None) or str(error) or type(error).__name__
    except Exception:  # py4j asks the JVM for the text, and that may be gone
        message = f"{type(error).__name__} without a text"
    name = getattr(getattr(error, "code", None), "name", None)
    return message if name is None or name in message else f"{name}: {message}"


def print_json(values: Mapping[str, Any]) -> None:
    """One object a line."""
    from kipmesh.core.json_form import to_line

    sys.stdout.write(to_line(values) + "\n")


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns as wide as they need to be."""
    cells = [list(titles), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(line.rstrip() + "\n")


def parse_pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    """`key=value` texts of an option; raises typer.BadParameter (exit code 2)."""
    pairs = {}
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise typer.BadParameter(f"{os.fsencode(text)!r} is not UTF-8", param_hint=option) from None
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise typer.BadParameter(f"{text!r} is not key=value", param_hint=option)
        pairs[key.strip()] = value.strip()
    return pairs


def separator_bytes(text: str) -> bytes:
    """The bytes of `--key-separator`, which need not be UTF-8; raises typer.BadParameter."""
    if not text:
        raise typer.BadParameter("a separator is not empty", param_hint="--key-separator")
    return os.fsencode(text)


def comma_list(values: Iterable[object]) -> str:
    """`1,2,3`, or a dash for nothing."""
    return ",".join(str(value) for value in values) or "-"
