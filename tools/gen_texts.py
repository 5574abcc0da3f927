"""Write the tables of error texts and log events, which make a change to one visible in review (`--check` compares).

The tables are `tests/golden/texts/errors.txt` and `tests/golden/texts/log_events.txt`: one line for each distinct text,
by module. An error text is a literal that an exception's constructor receives, or a function named in `REFUSALS`.
Values appear as the expressions that they come from.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "tests/golden/texts"
PACKAGES = ("kipmesh", "kipmesh_chaos", "kipmesh_jobs", "services")
ERRORS = re.compile(r"(?:Error|Exception|Refused|Invalid|Unavailable|Aborted|BadParameter|Warning|Interrupted)$")
REFUSALS = frozenset({"error_response", "fail", "refuse", "refused"})
LEVELS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
LOGGERS = frozenset({"log", "logger", "_log"})


def literal(node: ast.expr) -> str | None:
    """Return the text of a string literal or f-string, each value as `{expression}`.

    In a sum, an operand that is not a string becomes `{...}`. None for another expression.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else str(ast.literal_eval(part))
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = literal(node.left), literal(node.right)
        return "".join(side or "{...}" for side in sides) if any(sides) else None
    return None


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def error_texts(tree: ast.Module) -> Iterator[str]:
    """Yield `Constructor: text` for each error text of two words or more."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (ERRORS.search(_name(node.func)) or _name(node.func) in REFUSALS):
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                text = literal(argument)
                if text is not None and " " in text.strip():
                    yield f"{_name(node.func)}: {' '.join(text.split())}"


def log_events(tree: ast.Module) -> Iterator[str]:
    """Yield `level: event key, key` for each call of a logger; an event that is not a literal is `(not constant)`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        if node.func.attr in LEVELS and _name(node.func.value) in LOGGERS:
            event = node.args[0]
            text = (literal(event) if isinstance(event, ast.Constant) else None) or "(not constant)"
            keys = ", ".join(sorted(keyword.arg or "**" for keyword in node.keywords))
            yield f"{node.func.attr}: {text}{' | ' + keys if keys else ''}"


def tables() -> dict[str, str]:
    """Return the content of each table ("errors.txt", "log_events.txt") by its file name."""
    rows: dict[str, list[str]] = {"errors.txt": [], "log_events.txt": []}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name, found in (("errors.txt", error_texts(tree)), ("log_events.txt", log_events(tree))):
            lines = sorted(set(found))
            if lines:
                rows[name] += [str(path.relative_to(ROOT)), *(f"  {line}" for line in lines)]
    return {name: "\n".join(lines) + "\n" for name, lines in rows.items()}


def main() -> int:
    """Write the tables, or with `--check` only compare them. Return 1 if `--check` finds a difference, else 0."""
    status = 0
    for name, text in tables().items():
        path = TABLES / name
        if "--check" not in sys.argv[1:]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            continue
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old != text:
            difference = difflib.unified_diff(old.splitlines(), text.splitlines(), name, "code", lineterm="", n=0)
            print(*difference, "run: make docs", sep="\n", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
