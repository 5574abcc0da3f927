"""Write docs/configuration.md from the models of `kipmesh.core.config`. `--check` only compares."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from kipmesh.core import config
from kipmesh.messages.schema import MAX_INT64

# Parts of the values of keys, which are no configurations.
PARTS = (config.Endpoint, config.Voter)
TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
NAMES = {int: "integer", str: "text", bool: "true or false", float: "number", tuple: "list", type(None): "none"}
HEADER = """\
# Configuration

Written by `make docs` from the models in `kipmesh/core/config`; do not edit.

Keys are Apache Kafka's, with Kafka's defaults unless a rule says otherwise. Values come, later ones winning, from the
defaults, a file (`--config-file`), the environment (`KIPMESH_CONFIG_` and the key in upper case with dots as
underscores: `KIPMESH_CONFIG_LOG_SEGMENT_BYTES`), and the command line (`--config key=value`). An unknown key or a bad
value stops the process with one line that names the key. An integer without an upper end goes up to
9223372036854775807 (Kafka's LONG).
"""


def _type_name(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _type_name(typing.get_args(annotation)[0])
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(part) for part in typing.get_args(annotation))
    return NAMES.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))


def _bounds(field: FieldInfo) -> str:
    bounds = []
    for constraint in field.metadata:
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            value = getattr(constraint, attribute, None)
            if value is not None and value != MAX_INT64:  # the limit of its type, see HEADER
                bounds.append(f"{sign} {value:,}" if isinstance(value, int) else f"{sign} {value}")
    return ", ".join(bounds)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=False)
    if field.is_required():
        return "required"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"`{','.join(map(str, value))}`" if value else "empty"
    if isinstance(value, int | float):
        return str(value)
    return f"`{value}`" if value != "" else "empty"


def _rows(model: type[config.Config], without: frozenset[str]) -> Iterator[str]:
    for name, field in sorted(model.model_fields.items()):
        if name in without:
            continue
        kind = " ".join(filter(None, [_type_name(field.annotation), _bounds(field)]))
        text = " ".join((field.description or "").split()).replace("|", "\\|")
        yield f"| `{field.alias or name}` | {kind} | {_default(field)} | {text} |"


def models() -> list[type[config.Config]]:
    """Return all configuration classes of the package, base classes first, without Config itself and PARTS."""
    for module in pkgutil.iter_modules(config.__path__, f"{config.__name__}."):
        importlib.import_module(module.name)
    found: set[type[config.Config]] = set()
    pending: list[type[config.Config]] = [config.Config]
    while pending:
        below = [model for model in pending.pop().__subclasses__() if model.__module__.startswith(config.__name__)]
        found.update(below)
        pending += below
    return sorted(found.difference(PARTS), key=lambda model: (len(model.__mro__), model.__name__))


def render() -> str:
    """Return the text of docs/configuration.md, as generated from the models."""
    parts = [HEADER]
    for model in models():
        bases = [base for base in model.__bases__ if issubclass(base, config.Config) and base.model_fields]
        inherited = frozenset(name for base in bases for name in base.model_fields)
        parts.append(f"\n## {model.__name__}\n\n{(model.__doc__ or '').strip().splitlines()[0]}\n")
        if inherited:
            links = " and ".join(f"[{base.__name__}](#{base.__name__.lower()})" for base in bases)
            parts.append(f"\nBeside the keys of {links}:\n")
        parts.append("\n| key | type | default | what |\n|---|---|---|---|\n")
        parts += [row + "\n" for row in _rows(model, inherited)]
    return "".join(parts)


def main(arguments: list[str]) -> int:
    """Write the document, or with `--check` only compare it. Return 1 if `--check` finds it outdated, else 0."""
    text = render()
    if "--check" in arguments:
        current = TARGET.exists() and TARGET.read_text(encoding="utf-8") == text
        if not current:
            sys.stderr.write("docs/configuration.md differs from kipmesh.core.config: make docs\n")
        return 0 if current else 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
