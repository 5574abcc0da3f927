"""Whether the names of a peer's certificate, those of its subject alternative name, are a node's.

A name counts as it stands: DNS names, addresses and URIs alike, DNS names without regard to case. The subject's common
name does not count, nor does a pattern in a peer's own certificate: `*.example.org` there is no node of that domain.
"""

from __future__ import annotations

from collections.abc import Iterable


def is_node(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Whether one of a certificate's names is one of `ssl.node.names`."""
    wanted = [pattern.lower() for pattern in patterns]
    return any(_matches(name.lower(), pattern) for name in names for pattern in wanted)


def _matches(name: str, pattern: str) -> bool:
    if not pattern.startswith("*."):
        return name == pattern
    label, dot, rest = name.partition(".")
    return bool(dot and label and label != "*" and rest == pattern[2:] and "/" not in label)
