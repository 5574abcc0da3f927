"""What commands share: registration and help, options, connections, output as JSON lines or tables, signals."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TypeVar

import typer

from kipmesh.messages.schema import MAX_INT32

if TYPE_CHECKING:
    from kipmesh.client import AdminClient, TopicPartition
    from kipmesh.cluster.layout import ClusterState
    from kipmesh.core.errors import KafkaError

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


def command_config() -> Mapping[str, str]:
    """The properties of `--command-config`; raises InvalidConfigError."""
    file = os.environ.get(COMMAND_CONFIG)
    if not file:
        return {}
    from kipmesh.node.settings import read_properties

    return read_properties(Path(file))


def local_state(folder: Path, options: str) -> ClusterState:
    """The local cluster in `--dir`; raises CommandError that names the options to give instead."""
    from kipmesh.cluster.layout import read_state

    state = read_state(folder)
    if state is None or not state.bootstrap:
        where = folder.absolute()
        raise CommandError(f"which cluster? Give {options} or --dir (there is no local cluster in {where})")
    return state


class Connection:
    """How a command reaches the brokers: --bootstrap, --dir and --command-config, read when first used."""

    options: ClassVar[Mapping[str, tuple[Any, Any]]] = {
        "bootstrap": (Bootstrap, None),
        "folder": (Dir, DEFAULT_DIR),
    }

    def __init__(self, bootstrap: str | None, folder: Path) -> None:
        self._given = bootstrap
        self._folder = folder

    @cached_property
    def _place(self) -> tuple[str, Mapping[str, str]]:
        given = command_config()
        if self._given:
            return self._given, given
        from kipmesh.cluster.certificates import client_config

        state = local_state(self._folder, "--bootstrap")
        return state.bootstrap, {**client_config(state.nodes), **given}

    @property
    def bootstrap(self) -> str:
        """Brokers to begin with; raises CommandError when no option names any, InvalidConfigError for a bad file."""
        return self._place[0]

    @property
    def config(self) -> Mapping[str, str]:
        """What clients need beside the addresses."""
        return self._place[1]

    async def start(self, client: Client, settings: Mapping[str, Any], *, timeout_s: float | None = None) -> None:
        """Start a client, and give up soon when no broker answers, unless `settings` have `request.timeout.ms`."""
        from kipmesh.core.errors import ErrorCode, KafkaError

        longest_s = None if "request.timeout.ms" in settings else CONNECT_TIMEOUT_S
        limit_s = min((one for one in (longest_s, timeout_s) if one is not None), default=None)
        try:
            async with asyncio.timeout(limit_s):
                await client.start()
        except TimeoutError:
            meaning = getattr(client.last_failure, "meaning", "")
            why = f" ({meaning})" if meaning else ""
            text = f"no broker answers at {self.bootstrap} within {limit_s:g} s{why}"
            raise KafkaError(ErrorCode.NETWORK_EXCEPTION, text) from None


class AdminConnection(Connection):
    """The same with --timeout, which limits each call of an administration client."""

    options: ClassVar = {**Connection.options, "timeout_s": (AdminTimeout, ADMIN_TIMEOUT_S)}

    def __init__(self, bootstrap: str | None, folder: Path, timeout_s: float | None) -> None:
        super().__init__(bootstrap, folder)
        self._timeout_s = ADMIN_TIMEOUT_S if timeout_s is None else timeout_s

    def run(self, work: Callable[[AdminClient], Awaitable[T]]) -> T:
        """What the work returns, done with a connected client."""
        return run(lambda: self._run(work))

    def run_stoppable(self, work: Callable[[AdminClient], Awaitable[T]]) -> T:
        """As `run`; SIGTERM and SIGHUP cancel the work as Ctrl-C does, and the exit code is a shell's."""
        found: list[T] = []

        async def done() -> None:
            found.append(await self._run(work))

        code = run(lambda: Ending().run(done()))
        if code:
            raise typer.Exit(code)
        return found[0]

    async def _run(self, work: Callable[[AdminClient], Awaitable[T]]) -> T:
        from kipmesh.client import AdminClient

        limit_ms = max(round(self._timeout_s * 1000), 1)
        request_ms = min(limit_ms, round(ADMIN_TIMEOUT_S * 1000))
        limits = {"default.api.timeout.ms": limit_ms, "request.timeout.ms": request_ms}
        client = AdminClient(self.bootstrap, **{**self.config, **limits})
        await self.start(client, {}, timeout_s=self._timeout_s)
        try:
            return await work(client)
        finally:
            await client.close()


class Client(Protocol):
    """Any client of brokers."""

    @property
    def last_failure(self) -> Exception | None: ...  # noqa: D102
    async def start(self) -> None: ...  # noqa: D102


def command(app: typer.Typer, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command: its docstring is the help text, with examples after a line `Examples:`.

    A parameter that is a Connection takes the place of the options that make one. Of these the command may declare
    `timeout_s` itself, which it then gets as well.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        text, _, lines = (inspect.getdoc(function) or "").partition("\n\nExamples:\n")
        app.command(name, help=text, epilog=examples(lines))(_connecting(function))
        return function

    return register


def _connecting(function: Callable[..., None]) -> Callable[..., None]:
    own = inspect.signature(function, eval_str=True).parameters
    connections = [
        one for one in own.values() if inspect.isclass(one.annotation) and issubclass(one.annotation, Connection)
    ]
    if not connections:
        return function
    (wanted,) = connections
    parameters = []
    for one in own.values():
        if one is not wanted:
            parameters.append((one.name, one.annotation, one.default))
            continue
        options = wanted.annotation.options.items()
        parameters += [(key, hint, default) for key, (hint, default) in options if key not in own]

    def invoke(**given: Any) -> None:
        options = {key: given[key] if key in own else given.pop(key) for key in wanted.annotation.options}
        function(**given, **{wanted.name: wanted.annotation(**options)})

    invoke.__name__ = function.__name__
    return with_parameters(invoke, parameters)


def with_parameters(function: Callable[..., None], parameters: Iterable[tuple[str, Any, Any]]) -> Callable[..., None]:
    """The function with a signature of (name, annotation, default) that typer makes arguments and options of."""
    made = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, annotation, default in parameters
    ]
    function.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
    function.__annotations__ = {one.name: one.annotation for one in made}
    return function


def run(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a client's coroutine; library warnings go to stderr, one a line."""
    from kipmesh.node import logging

    level = os.environ.get("KIPMESH_LOG_LEVEL", "error").lower()
    logging.configure(level=level if level in logging.LEVELS else "error", form="console", context={})
    return asyncio.run(make())


def explain(error: Exception) -> int:
    """Say on stderr what happened; the exit code."""
    show = getattr(error, "show", None)
    if show is not None:  # click's errors of usage
        show()
        return int(getattr(error, "exit_code", EXIT_FAILED))
    expected = type(error).__module__.startswith(("kipmesh.", "kipmesh_")) or isinstance(error, OSError)
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
    from kipmesh.client.json_form import to_line

    sys.stdout.write(to_line(values) + "\n")


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns as wide as they need to be."""
    cells = [list(titles), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(line.rstrip() + "\n")


def print_values(
    values: Iterable[T],
    titles: Sequence[str],
    to_row: Callable[[T], Sequence[object]],
    to_object: Callable[[T], Mapping[str, Any]],
    *,
    as_json: bool,
    none: str | None = None,
) -> None:
    """Print values as JSON lines, or as a table; `none` is the text instead of an empty table."""
    found = list(values)
    if as_json:
        for value in found:
            print_json(to_object(value))
    elif found or none is None:
        print_table(titles, map(to_row, found))
    else:
        print(none)


def print_results(
    results: Mapping[TopicPartition, KafkaError | None],
    done: Callable[[TopicPartition], str],
    *,
    as_json: bool,
    none: str,
) -> None:
    """Print what became of each partition; `done` says it where there was no error."""

    def to_object(where: TopicPartition) -> dict[str, Any]:
        error = results[where]
        code, name, message = (0, "NONE", None) if error is None else (int(error.code), error.code.name, error.message)
        return {**where._asdict(), "error_code": code, "error": name, "message": message}

    def to_row(where: TopicPartition) -> tuple[object, ...]:
        error = results[where]
        return (*where, done(where) if error is None else f"{error.code.name}: {error.message}")

    print_values(sorted(results), ("TOPIC", "PARTITION", "RESULT"), to_row, to_object, as_json=as_json, none=none)


def shown(name: str) -> str:
    """A name on one line: clients may call themselves and their groups anything, what is not printable is escaped."""
    text = name or "-"
    return text if text.isprintable() else ascii(text)


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


class Ending:
    """SIGTERM and SIGHUP cancel the work, which closes what it has at the brokers (227-17).

    While records are written the signal ends that, too: nobody may be reading. A signal that is ignored (SIGHUP under
    nohup) stays so; Ctrl-C is asyncio's.
    """

    def __init__(self) -> None:
        self._is_writing = False
        self._number = 0
        self._cancel: Callable[[], object] | None = None

    async def run(self, work: Coroutine[Any, Any, None]) -> int:
        """Do the work; the exit code."""
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
        numbers = [number for number, handler in before.items() if handler is signal.SIG_DFL]
        for number in numbers:
            signal.signal(number, self._on_signal)
        try:
            await task
        except (asyncio.CancelledError, _StoppedWritingError):
            if not self._number:
                raise
        finally:
            for number in numbers:
                signal.signal(number, signal.SIG_DFL)
        return EXIT_SIGNAL + self._number if self._number else EXIT_OK

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._number = self._number or number
        if self._is_writing:
            raise _StoppedWritingError
        if self._cancel is not None:
            self._cancel()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around what may wait for whoever reads the output."""
        self._is_writing = True
        try:
            yield
        except _StoppedWritingError:
            # What is buffered would be written at the exit, which would wait as well.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise
        finally:
            self._is_writing = False


class _StoppedWritingError(Exception):
    """A signal came while records were written."""
