"""Loads the replica selector that `replica.selector.class` names (392-11, 392-12); each service loads its own.

The value is one of the given selectors (by Kafka's class name or the short one), an entry point of the group
`kipmesh.replica_selectors`, or a dotted path `package.module.Class` (or `package.module:Class`), in this order.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from kipmesh.core.errors import InvalidConfigError
from kipmesh.core.replica.selection import SELECTORS, ReplicaSelector

GROUP: Final = "kipmesh.replica_selectors"
"""The group of entry points."""
KEY: Final = "replica.selector.class"


def selector_names() -> list[str]:
    """What the installed packages offer by entry point."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def load_selector(name: str | None, configs: Mapping[str, Any]) -> ReplicaSelector:
    """The selector of that name, configured; None and empty text mean the leader.

    Raises InvalidConfigError with one line for a name that leads nowhere, and for a plugin that fails to load, is no
    selector, or refuses its configuration.
    """
    found = _find((name or "").strip())
    try:
        selector = found()
    except Exception as error:
        raise _refused(name, f"cannot be made: {_text(error)}") from error
    for method in ("configure", "select", "close"):
        if not callable(getattr(selector, method, None)):
            raise _refused(name, f"has no method {method}")
    try:
        selector.configure(configs)
    except Exception as error:
        raise _refused(name, f"refuses its configuration: {_text(error)}") from error
    return selector  # type: ignore[no-any-return]


def _find(name: str) -> Any:
    if name in SELECTORS:
        return SELECTORS[name]
    entries = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}
    if len(entries) > 1:
        raise _refused(name, f"is offered more than once: {', '.join(sorted(entries))}")
    for entry in entries.values():
        return _load(name, entry)
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if not (module and attribute):
        known = ", ".join([*(known for known in SELECTORS if known and "." not in known), *selector_names()])
        raise _refused(name, f"is neither a dotted path nor one of: {known}")
    return _load(name, EntryPoint(name, f"{module}:{attribute}", GROUP))


def _load(name: str, entry: EntryPoint) -> Any:
    try:
        import_module(entry.module)
        found = entry.load()
    except Exception as error:
        raise _refused(name, f"cannot be loaded: {_text(error)}") from error
    if not callable(found):
        raise _refused(name, "is no class")
    return found


def _refused(name: str | None, why: str) -> InvalidConfigError:
    return InvalidConfigError(f"configuration key {KEY!r}: {name!r} {why}")


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")
