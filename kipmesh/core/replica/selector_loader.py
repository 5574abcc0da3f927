"""Loads the replica selector named by `replica.selector.class` (392-11, 392-12).

The value is, in this order: the name of an included selector (short or Kafka's class name), an entry point in the group
`kipmesh.replica_selectors`, or a dotted path `package.module.Class` (or `package.module:Class`).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from kipmesh.core.errors import InvalidConfigError
from kipmesh.core.replica.selection import SELECTORS, ReplicaSelector

GROUP: Final = "kipmesh.replica_selectors"
"""Entry point group of replica selectors."""
KEY: Final = "replica.selector.class"


def selector_names() -> list[str]:
    """Return the names of all installed selectors (entry points), sorted."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def load_selector(name: str | None, configs: Mapping[str, Any]) -> ReplicaSelector:
    """Return the configured selector named `name`; None or an empty name selects the leader.

    Raises InvalidConfigError with a one-line message if the name is unknown, or if the plugin cannot be loaded, lacks a
    method, or fails in its constructor or in `configure`.
    """
    factory = _find((name or "").strip())
    try:
        selector = factory()
    except Exception as error:
        raise _error(name, f"failed in its constructor: {_text(error)}") from error
    for method in ("configure", "select", "close"):
        if not callable(getattr(selector, method, None)):
            raise _error(name, f"has no method {method}(), which a replica selector must have")
    try:
        selector.configure(configs)
    except Exception as error:
        raise _error(name, f"failed in configure(): {_text(error)}") from error
    return selector  # type: ignore[no-any-return]


def _find(name: str) -> Any:
    if name in SELECTORS:
        return SELECTORS[name]
    entries = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}
    if len(entries) > 1:
        raise _error(name, f"is an ambiguous entry point, uninstall all but one of: {', '.join(sorted(entries))}")
    for entry in entries.values():
        return _load(name, entry)
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if not (module and attribute):
        known = ", ".join([*(known for known in SELECTORS if known and "." not in known), *selector_names()])
        raise _error(name, f"is neither a dotted path package.module.Class nor one of: {known}")
    return _load(name, EntryPoint(name, f"{module}:{attribute}", GROUP))


def _load(name: str, entry: EntryPoint) -> Any:
    try:
        import_module(entry.module)
        factory = entry.load()
    except Exception as error:
        raise _error(name, f"cannot be loaded: {_text(error)}") from error
    if not callable(factory):
        raise _error(name, "is not a class")
    return factory


def _error(name: str | None, problem: str) -> InvalidConfigError:
    return InvalidConfigError(f"configuration key {KEY!r}: {name!r} {problem}")


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")
