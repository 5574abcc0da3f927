"""The expressions of deploy/prometheus and deploy/grafana as they are committed, and what the tests turn them into."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARDS = ROOT / "deploy" / "grafana" / "dashboards"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
TIME_SCALE = 40
"""An hour of a rule's windows is one minute and a half of a test."""

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+)(ms|s|m|h|d)")
_WINDOW = re.compile(r"\[(\w+)\]|\boffset (\w+)")
_COMPARISON = re.compile(r"==|!=|>=|<=|>|<")
_BRACES = re.compile(r"\{(?:[^}\"]|\"[^\"]*\")*\}")
_NO_METRICS = re.compile(r"\b(?:by|on|ignoring|group_right|group_left)\s*\([^)]*\)|\[\w+\]|\boffset \w+")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*(\{(?:[^}\"]|\"[^\"]*\")*\})?(?!\w|\s*\()")
_WORDS = frozenset({"or", "and", "unless", "bool"})


class Rule(NamedTuple):
    """One of deploy/prometheus/rules."""

    name: str
    expr: str
    is_alert: bool


class Panel(NamedTuple):
    """One expression of a dashboard, as it is committed."""

    dashboard: str
    title: str
    expr: str


def needs_tls(expr: str) -> bool:
    """Whether only nodes with TLS export what an expression asks for."""
    return "kipmesh_tls_" in expr


def rules() -> Iterator[Rule]:
    """All recording rules and alerts."""
    for path in RULES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                yield Rule(rule.get("alert") or rule["record"], rule["expr"], "alert" in rule)


def panels() -> Iterator[Panel]:
    """All expressions of all dashboards."""
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield Panel(path.stem, panel["title"], target["expr"])


def shorter(duration: str) -> str:
    """A duration of the rules in the time of the tests."""
    match = _DURATION.fullmatch(duration)
    assert match is not None
    number, unit = match.groups()
    return f"{int(number) * _UNITS_MS[unit] // TIME_SCALE}ms"


def with_short_windows(expr: str) -> str:
    """The expression with its windows and offsets in the time of the tests."""

    def scale(found: re.Match[str]) -> str:
        window, offset = found.groups()
        return f"[{shorter(window)}]" if window else f"offset {shorter(offset)}"

    return _WINDOW.sub(scale, expr)


def short_rules(path: Path) -> Mapping[str, Any]:
    """A file of rules in the time of the tests: windows, offsets and `for`."""
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    for group in loaded["groups"]:
        for rule in group["rules"]:
            rule["expr"] = with_short_windows(rule["expr"])
            if "for" in rule:
                rule["for"] = shorter(rule["for"])
    return loaded


def in_grafana(expr: str, rate_interval: str) -> str:
    """What Grafana asks with everything chosen in its variables."""
    asked = expr.replace("$__rate_interval", rate_interval).replace("$cluster", ".*").replace("$instance", ".*")
    assert "$" not in asked, f"a variable that no dashboard has: {asked}"
    return asked


def unfiltered(expr: str) -> str:
    """An alert's expression with `bool` at each comparison: every series that it looks at comes back, as 0 or 1."""
    parts, end = [], 0
    for braces in [*_BRACES.finditer(expr), None]:
        start = braces.start() if braces else len(expr)
        parts.append(_COMPARISON.sub(lambda found: f"{found.group()} bool", expr[end:start]))
        if braces:
            parts.append(braces.group())
            end = braces.end()
    return "".join(parts)


def selectors(expr: str) -> list[str]:
    """The series that an expression reads, each with its own matchers."""
    kept: list[str] = []

    def keep(found: re.Match[str]) -> str:
        kept.append(found.group())
        return f"{{{len(kept) - 1}}}"

    # Braces first: what is in them may look like anything.
    bare = _NO_METRICS.sub(" ", _BRACES.sub(keep, expr))
    found = []
    for name, braces in _SELECTOR.findall(bare):
        if name not in _WORDS:
            found.append(name + (kept[int(braces[1:-1])] if braces else ""))
    return sorted(set(found))
