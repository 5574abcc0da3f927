"""PromQL expressions of deploy/prometheus and deploy/grafana, and their transformations for tests."""

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
"""Windows are divided by this: one hour of a rule is 90 s of a test."""

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+)(ms|s|m|h|d)")
_WINDOW = re.compile(r"\[(\w+)\]|\boffset (\w+)")
_COMPARISON = re.compile(r"==|!=|>=|<=|>|<")
_BRACES = re.compile(r"\{(?:[^}\"]|\"[^\"]*\")*\}")
_NO_METRICS = re.compile(r"\b(?:by|on|ignoring|group_right|group_left)\s*\([^)]*\)|\[\w+\]|\boffset \w+")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*(\{(?:[^}\"]|\"[^\"]*\")*\})?(?!\w|\s*\()")
_WORDS = frozenset({"or", "and", "unless", "bool"})


class Rule(NamedTuple):
    """A rule of deploy/prometheus/rules."""

    name: str
    expr: str
    is_alert: bool


class Panel(NamedTuple):
    """An expression of a dashboard panel."""

    dashboard: str
    title: str
    expr: str


def needs_tls(expr: str) -> bool:
    """Return whether only nodes with TLS export the metrics of the expression."""
    return "kipmesh_tls_" in expr


def rules() -> Iterator[Rule]:
    """Yield all recording rules and alerts."""
    for path in RULES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                yield Rule(rule.get("alert") or rule["record"], rule["expr"], "alert" in rule)


def panels() -> Iterator[Panel]:
    """Yield all expressions of all dashboards."""
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield Panel(path.stem, panel["title"], target["expr"])


def shorter(duration: str) -> str:
    """Return a duration divided by TIME_SCALE."""
    match = _DURATION.fullmatch(duration)
    assert match is not None
    number, unit = match.groups()
    return f"{int(number) * _UNITS_MS[unit] // TIME_SCALE}ms"


def with_short_windows(expr: str) -> str:
    """Return the expression with windows and offsets divided by TIME_SCALE."""

    def scale(found: re.Match[str]) -> str:
        window, offset = found.groups()
        return f"[{shorter(window)}]" if window else f"offset {shorter(offset)}"

    return _WINDOW.sub(scale, expr)


def short_rules(path: Path) -> Mapping[str, Any]:
    """Return the rules of a file with windows, offsets and `for` divided by TIME_SCALE."""
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    for group in loaded["groups"]:
        for rule in group["rules"]:
            rule["expr"] = with_short_windows(rule["expr"])
            if "for" in rule:
                rule["for"] = shorter(rule["for"])
    return loaded


def in_grafana(expr: str, rate_interval: str) -> str:
    """Return the expression as Grafana sends it with all values of its variables selected."""
    query = expr.replace("$__rate_interval", rate_interval).replace("$cluster", ".*").replace("$instance", ".*")
    assert "$" not in query, f"unknown variable in {query}"
    return query


def unfiltered(expr: str) -> str:
    """Return an alert's expression with `bool` at each comparison, which returns 0 or 1 for every series."""
    parts, end = [], 0
    for braces in [*_BRACES.finditer(expr), None]:
        start = braces.start() if braces else len(expr)
        parts.append(_COMPARISON.sub(lambda found: f"{found.group()} bool", expr[end:start]))
        if braces:
            parts.append(braces.group())
            end = braces.end()
    return "".join(parts)


def selectors(expr: str) -> list[str]:
    """Return the selectors of an expression, each with its matchers."""
    kept: list[str] = []

    def keep(found: re.Match[str]) -> str:
        kept.append(found.group())
        return f"{{{len(kept) - 1}}}"

    # Replace braces first, because label values may contain any text.
    bare = _NO_METRICS.sub(" ", _BRACES.sub(keep, expr))
    found = []
    for name, braces in _SELECTOR.findall(bare):
        if name not in _WORDS:
            found.append(name + (kept[int(braces[1:-1])] if braces else ""))
    return sorted(set(found))
