"""Shared parts of all commands: registration and help, options, connections, output as JSON or tables, signals."""

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

from kipmesh.core.errors import ErrorCode, InvalidConfigError, KafkaError
from kipmesh.messages.schema import MAX_INT32

if TYPE_CHECKING:
    from kipmesh.client import AdminClient, TopicPartition
    from kipmesh.cluster.layout import ClusterState

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_PIPE_CLOSED = 141
EXIT_SIGNAL = 128
"""Exit code of a command that a signal ended, minus the number of the signal (shell convention)."""
CONNECT_TIMEOUT_S = 5.0
ADMIN_TIMEOUT_S = 30.0
SECONDS_MAX = MAX_INT32 // 1000
"""Largest timeout. Requests carry timeouts in milliseconds, as int32."""
DEFAULT_DIR = Path("kipmesh-local")
PORT_MAX = 65535

COMMAND_CONFIG = "KIPMESH_COMMAND_CONFIG"
"""Environment variable that holds the path given with `--command-config`."""

T = TypeVar("T")


def check_utf8(value: Any) -> Any:
    """Return an argument or list of arguments unchanged.

    Raises typer.BadParameter if an argument has bytes that are not UTF-8.
    """
    for text in value if isinstance(value, (list, tuple)) else [value]:
        _check_text(str(text))
    return value


def _check_text(text: str, option: str | None = None) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(f"{os.fsencode(text)!r} is not UTF-8", param_hint=option) from None


def check_addresses(value: str | None) -> str | None:
    """Return the value of an address option, which may be None, unchanged.

    Raises typer.BadParameter if it contains no address, one with a port out of range, or bytes that are not UTF-8.
    """
    if value is not None and not value.strip(" ,"):
        raise typer.BadParameter(f"{value!r} contains no address: give HOST:PORT,...")
    check_utf8(value)
    for address in (value or "").split(","):
        port = address.rpartition(":")[2].strip()
        if port.isdecimal() and not (len(port) <= 5 and 1 <= int(port) <= PORT_MAX):
            raise typer.BadParameter(f"{address.strip()!r}: the port must be between 1 and {PORT_MAX}, got {port}")
    return value


def option(name: str, text: str, **settings: Any) -> Any:
    """Return a typer option `name` with the help `text`. `settings` are arguments of typer.Option."""
    return typer.Option(name, help=text, **settings)


def seconds_option(name: str, text: str, *, least: float = 0.1, show_default: bool = True) -> Any:
    """Return a typer option for a duration from `least` to SECONDS_MAX seconds."""
    return option(name, text, min=least, max=SECONDS_MAX, show_default=show_default)


def parse_number(digits: str, option: str | None = None, *, most: int = MAX_INT32) -> int:
    """Convert decimal digits in an argument to a number.

    Raises typer.BadParameter for a number above `most`, naming `option`.
    """
    try:
        number = int(digits)
    except ValueError:  # more digits than int() accepts
        number = most + 1
    if number > most:
        raise typer.BadParameter(f"{digits} is more than {most}", param_hint=option)
    return number


Dir = Annotated[Path, option("--dir", "Directory of the local cluster.", envvar="KIPMESH_DIR")]
Bootstrap = Annotated[
    str | None,
    option(
        "--bootstrap",
        "Brokers to connect to first. Default: the brokers of the local cluster in --dir.",
        envvar="KIPMESH_BOOTSTRAP",
        metavar="HOST:PORT,...",
        callback=check_addresses,
        show_default=False,
    ),
]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", callback=check_utf8)]
AdminTimeout = Annotated[
    float, seconds_option("--timeout", "Seconds to wait for responses of the brokers and the active controller.")
]
ClientConfig = Annotated[
    list[str] | None, option("--config", "A client setting, e.g. acks=1; repeatable.", metavar="KEY=VALUE")
]
AsJson = Annotated[bool, option("--json", "Print one JSON object per line.")]


class CommandError(Exception):
    """A command failed. The message is the one line that the user sees on stderr."""


def examples(text: str) -> str:
    """Return the help epilog of a command with these example lines, which click must not rewrap."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" if line else "" for line in inspect.cleandoc(text).splitlines())


def make_app(summary: str, example_lines: str) -> typer.Typer:
    """Create an empty command group with this help text and these examples."""
    return typer.Typer(
        callback=lambda: None,  # typer would turn a group with a single command into that command
        help=summary,
        epilog=examples(example_lines),
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )


def command_config() -> Mapping[str, str]:
    """Return the client properties in the file of `--command-config`, by key; empty without that option.

    Raises InvalidConfigError if the file is invalid or cannot be read.
    """
    file = os.environ.get(COMMAND_CONFIG)
    if not file:
        return {}
    from kipmesh.node.settings import read_properties

    return read_properties(Path(file))


def _with_source(error: InvalidConfigError) -> str:
    """Return the message of an error, preceded by the `--command-config` file if the value comes from it."""
    try:
        is_from_file = error.key != "" and command_config().get(error.key) == error.value
    except KafkaError:
        is_from_file = False
    return f"configuration file {os.environ[COMMAND_CONFIG]}: {error.message}" if is_from_file else error.message


def local_state(directory: Path, options: str) -> ClusterState:
    """Return the state of the local cluster in `directory`.

    Raises CommandError if the directory has no cluster; the message recommends `options` (option names) or --dir.
    Raises ClusterError if its cluster.json is invalid or cannot be read.
    """
    from kipmesh.cluster.layout import read_state

    state = read_state(directory)
    if state is None or not state.bootstrap:
        raise CommandError(
            f"no local cluster in {directory.absolute()}: give {options} or --dir, or start one with: kipmesh local up"
        )
    return state


class Connection:
    """Addresses and client settings of a command, from --bootstrap, --dir and --command-config. Read on first use."""

    options: ClassVar[Mapping[str, tuple[Any, Any]]] = {
        "bootstrap": (Bootstrap, None),
        "directory": (Dir, DEFAULT_DIR),
    }

    def __init__(self, bootstrap: str | None, directory: Path) -> None:
        self._bootstrap_option = bootstrap
        self._directory = directory

    @cached_property
    def _resolved(self) -> tuple[str, Mapping[str, str]]:
        config = command_config()
        if self._bootstrap_option:
            return self._bootstrap_option, config
        from kipmesh.cluster.certificates import client_config

        state = local_state(self._directory, "--bootstrap")
        return state.bootstrap, {**client_config(state.nodes), **config}

    @property
    def bootstrap(self) -> str:
        """Bootstrap addresses: comma-separated host:port.

        Raises CommandError if there is neither --bootstrap nor a local cluster in --dir, ClusterError if cluster.json
        is invalid, or InvalidConfigError for an invalid --command-config file.
        """
        return self._resolved[0]

    @property
    def config(self) -> Mapping[str, str]:
        """Client settings other than the addresses, by key. Raises the errors of `bootstrap`."""
        return self._resolved[1]

    async def start(self, client: Client, settings: Mapping[str, Any], *, timeout_s: float | None = None) -> None:
        """Start a client. Raises KafkaError (NETWORK_EXCEPTION) if no broker responds in time.

        The limit is the smaller of `timeout_s` and CONNECT_TIMEOUT_S. CONNECT_TIMEOUT_S does not apply if `settings`
        contain `request.timeout.ms`. Other errors of the client's start are raised immediately.
        """
        default_s = None if "request.timeout.ms" in settings else CONNECT_TIMEOUT_S
        limit_s = min((limit for limit in (default_s, timeout_s) if limit is not None), default=None)
        try:
            async with asyncio.timeout(limit_s):
                await client.start()
        except TimeoutError:
            meaning = getattr(client.last_failure, "hint", "")
            why = f" ({meaning})" if meaning else ""
            text = f"no broker responded at {self.bootstrap} within {limit_s:g} s{why}"
            if meaning.startswith("does it "):  # a listener of another protocol, as the Kafka listener
                text += "; give the gRPC address that `kipmesh local up` prints after bootstrap:"
            raise KafkaError(ErrorCode.NETWORK_EXCEPTION, text) from None


class AdminConnection(Connection):
    """A Connection with --timeout, which limits each call of the admin client."""

    options: ClassVar = {**Connection.options, "timeout_s": (AdminTimeout, ADMIN_TIMEOUT_S)}

    def __init__(self, bootstrap: str | None, directory: Path, timeout_s: float | None) -> None:
        super().__init__(bootstrap, directory)
        self._timeout_s = ADMIN_TIMEOUT_S if timeout_s is None else timeout_s

    def run(self, work: Callable[[AdminClient], Awaitable[T]]) -> T:
        """Call `work` with a connected admin client, close the client, and return the result of `work`.

        Raises the errors of `bootstrap`, `start` and `work`.
        """
        return run(lambda: self._run(work))

    def run_stoppable(self, work: Callable[[AdminClient], Awaitable[T]]) -> T:
        """Like `run`, but SIGTERM and SIGHUP cancel `work` as Ctrl-C does; then raises typer.Exit with 128 + signal."""
        results: list[T] = []

        async def store_result() -> None:
            results.append(await self._run(work))

        code = run(lambda: GracefulStop().run(store_result()))
        if code:
            raise typer.Exit(code)
        return results[0]

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
    """A client that can be started: producer, consumer or admin client."""

    @property
    def last_failure(self) -> Exception | None: ...  # noqa: D102
    async def start(self) -> None: ...  # noqa: D102


@contextmanager
def suggest_create(topic: str) -> Iterator[None]:
    """Replace the message of a KafkaError UNKNOWN_TOPIC_OR_PARTITION raised in the block.

    The new message says that `topic` does not exist, and names the command that creates it.
    """
    try:
        yield
    except KafkaError as error:
        if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            raise
        raise KafkaError(error.code, f"topic {topic!r} does not exist; {create_command(topic)}") from None


def create_command(topic: str) -> str:
    """Return the remediation in errors about a missing topic: the command that creates it."""
    return f"create it with: kipmesh topic create {topic} --partitions 6"


def command(app: typer.Typer, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that registers a command with this name (default: the function's).

    The docstring is the help text; the lines after `Examples:` become the epilog. A parameter of type Connection is
    replaced on the command line by the options that the connection needs. The command may declare one of these options
    itself, for example `timeout_s`, and then also receives its value.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        text, _, lines = (inspect.getdoc(function) or "").partition("\n\nExamples:\n")
        app.command(name, help=text, epilog=examples(lines))(_with_connection_options(function))
        return function

    return register


def _with_connection_options(function: Callable[..., None]) -> Callable[..., None]:
    declared = inspect.signature(function, eval_str=True).parameters
    connections = [
        one for one in declared.values() if inspect.isclass(one.annotation) and issubclass(one.annotation, Connection)
    ]
    if not connections:
        return function
    (connection,) = connections
    parameters = []
    for one in declared.values():
        if one is not connection:
            parameters.append((one.name, one.annotation, one.default))
            continue
        options = connection.annotation.options.items()
        parameters += [(key, hint, default) for key, (hint, default) in options if key not in declared]

    def invoke(**given: Any) -> None:
        keys = connection.annotation.options
        options = {key: given[key] if key in declared else given.pop(key) for key in keys}
        function(**given, **{connection.name: connection.annotation(**options)})

    invoke.__name__ = function.__name__
    return with_parameters(invoke, parameters)


def with_parameters(function: Callable[..., None], parameters: Iterable[tuple[str, Any, Any]]) -> Callable[..., None]:
    """Return `function`, changed to have keyword-only parameters (name, annotation, default).

    typer turns them into options.
    """
    replaced = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, annotation, default in parameters
    ]
    function.__signature__ = inspect.Signature(replaced)  # type: ignore[attr-defined]
    function.__annotations__ = {one.name: one.annotation for one in replaced}
    return function


def run(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the coroutine that `make` returns, in a new event loop, and return its result.

    Its clients log to stderr at KIPMESH_LOG_LEVEL (default: error).
    """
    from kipmesh.node import logging

    level = os.environ.get("KIPMESH_LOG_LEVEL", "error").lower()
    logging.configure(level=level if level in logging.LEVELS else "error", form="console", context={})
    return asyncio.run(make())


def report_error(error: Exception) -> int:
    """Print an error on stderr as one line and return the exit code: 2 for a usage error, else 1.

    An unexpected error, or any error when KIPMESH_TRACEBACK is set, is preceded by its traceback.
    """
    show = getattr(error, "show", None)
    if show is not None:  # click's usage errors
        _translate(error)
        show()
        return int(getattr(error, "exit_code", EXIT_FAILED))
    expected = type(error).__module__.startswith(("kipmesh.", "kipmesh_")) or isinstance(error, OSError)
    if not expected or os.environ.get("KIPMESH_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    print(f"kipmesh: {_error_line(error)}", file=sys.stderr)
    return EXIT_FAILED


def _translate(error: Any) -> None:
    """Replace pydantic's message in a usage error, because typer parses options with pydantic."""
    details = getattr(error.__cause__, "errors", None)
    if details is None:
        return
    from kipmesh.core.config.validation import error_text

    error.message = error_text(details()[0], "", details()[0]["input"])


def _error_line(error: Exception) -> str:
    """Return the message of an error, preceded by Kafka's name of its error code if it has one."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    try:
        if isinstance(error, InvalidConfigError):
            message = _with_source(error)
        else:
            message = getattr(error, "message", None) or str(error) or type(error).__name__
    except Exception:  # py4j requests the text from the JVM, which may have exited
        message = f"{type(error).__name__} without a text"
    name = getattr(getattr(error, "code", None), "name", None)
    return message if name is None or name in message else f"{name}: {message}"


def print_json(values: Mapping[str, Any]) -> None:
    """Print an object as one line of JSON."""
    from kipmesh.client.json_form import to_line

    sys.stdout.write(to_line(values) + "\n")


def print_one(values: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Print one result: `values` as a line of JSON, or `text`."""
    if as_json:
        print_json(values)
    else:
        print(text)


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table with columns as wide as their longest cell."""
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
    """Print each value as a line of JSON, or all as a table. `none`, if given, is printed instead of an empty table."""
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
    """Print the result of each partition as a table or lines of JSON.

    The result is the partition's error; for a success, a table has the text that `done` returns. `none` is printed
    instead of an empty table.
    """

    def to_object(where: TopicPartition) -> dict[str, Any]:
        error = results[where]
        code, name, message = (0, "NONE", None) if error is None else (int(error.code), error.code.name, error.message)
        return {**where._asdict(), "error_code": code, "error": name, "message": message}

    def to_row(where: TopicPartition) -> tuple[object, ...]:
        error = results[where]
        return (*where, done(where) if error is None else f"{error.code.name}: {error.message}")

    print_values(sorted(results), ("TOPIC", "PARTITION", "RESULT"), to_row, to_object, as_json=as_json, none=none)


def printable(name: str) -> str:
    """Return a client-chosen name (client id, group id) as one line: "-" if empty, escaped if not printable."""
    text = name or "-"
    return text if text.isprintable() else ascii(text)


def parse_pairs(texts: Sequence[str] | None, option: str) -> dict[str, str]:
    """Return the `key=value` values of a repeatable option as a dict; the last value of a repeated key wins.

    Raises typer.BadParameter (exit code 2) for a value that has no `=`, has no key, or is not UTF-8.
    """
    pairs = {}
    for text in texts or ():
        _check_text(text, option)
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise typer.BadParameter(f"{text!r} is not key=value", param_hint=option)
        pairs[key.strip()] = value.strip()
    return pairs


def separator_bytes(text: str) -> bytes:
    """Return the bytes of `--key-separator`, which need not be UTF-8. Raises typer.BadParameter if it is empty."""
    if not text:
        raise typer.BadParameter("must not be empty", param_hint="--key-separator")
    return os.fsencode(text)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: "1 partition", "2,000 partitions"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def comma_list(values: Iterable[object]) -> str:
    """Join values with commas; "-" if there are none."""
    return ",".join(str(value) for value in values) or "-"


class GracefulStop:
    """Cancels work on SIGTERM and SIGHUP, so that it can close its sessions at the brokers (227-17).

    A signal also interrupts output, because the reader of a pipe may have stopped reading. An ignored signal (SIGHUP
    under nohup) stays ignored. asyncio handles Ctrl-C.
    """

    def __init__(self) -> None:
        self._is_writing = False
        self._number = 0
        self._cancel: Callable[[], object] | None = None

    async def run(self, work: Coroutine[Any, Any, None]) -> int:
        """Await `work` and return the exit code: 0, or 128 + the signal that cancelled it.

        Raises the error of `work`.
        """
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
        for number in numbers:
            signal.signal(number, self._on_signal)
        try:
            await task
        except (asyncio.CancelledError, _WriteInterruptedError):
            if not self._number:
                raise
        finally:
            for number in numbers:
                signal.signal(number, signal.SIG_DFL)
        return EXIT_SIGNAL + self._number if self._number else EXIT_OK

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._number = self._number or number
        if self._is_writing:
            raise _WriteInterruptedError
        if self._cancel is not None:
            self._cancel()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Mark a block that writes to stdout and may block there; a signal interrupts it."""
        self._is_writing = True
        try:
            yield
        except _WriteInterruptedError:
            # Python would flush the buffer at exit and block again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise
        finally:
            self._is_writing = False


class _WriteInterruptedError(Exception):
    """A signal arrived during output."""
