"""What commands share: the form of help, `--bootstrap`, output as JSON lines or tables, running a client."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141
DEFAULT_DIR = Path("kipmesh-local")

T = TypeVar("T")

Dir = Annotated[
    Path, typer.Option("--dir", envvar="KIPMESH_DIR", help="Folder of the local cluster.", show_default=True)
]
Bootstrap = Annotated[
    str | None,
    typer.Option(
        "--bootstrap",
        envvar="KIPMESH_BOOTSTRAP",
        metavar="HOST:PORT,...",
        help="Brokers to begin with. Left out: those of the local cluster in --dir.",
        show_default=False,
    ),
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


def bootstrap_of(bootstrap: str | None, folder: Path) -> str:
    """The brokers to talk to; raises CommandError when nothing says which."""
    if bootstrap:
        return bootstrap
    from kipmesh.cluster.layout import read_state

    state = read_state(folder)
    if state is None or not state.bootstrap:
        raise CommandError(f"which cluster? Give --bootstrap or --dir (there is no local cluster in {folder})")
    return state.bootstrap


def run(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a client's coroutine; library warnings go to stderr, one a line."""
    from kipmesh.node import logging

    level = os.environ.get("KIPMESH_LOG_LEVEL", "error").lower()
    logging.configure(level=level if level in logging.LEVELS else "error", form="console", context={})
    return asyncio.run(make())


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
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise typer.BadParameter(f"{text!r} is not key=value", param_hint=option)
        pairs[key.strip()] = value.strip()
    return pairs


def comma_list(values: Iterable[object]) -> str:
    """`1,2,3`, or a dash for nothing."""
    return ",".join(str(value) for value in values) or "-"
