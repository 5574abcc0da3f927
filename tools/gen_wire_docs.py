"""Write the table of APIs in docs/wire.md from the registry and the modules' headers; `--check` compares."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from pathlib import Path

from kipmesh.wire.api import API_VERSIONS_KEY
from kipmesh.wire.registry import make_registry

from kipmesh.wire import apis

TARGET = Path(__file__).resolve().parent.parent / "docs" / "wire.md"
BEGIN, END = "<!-- APIs: made by `make docs` -->\n", "<!-- end of APIs -->\n"


def _headers() -> dict[int, str]:
    found = {}
    for info in pkgutil.iter_modules(apis.__path__):
        module = importlib.import_module(f"{apis.__name__}.{info.name}")
        api = getattr(module, "API", None)
        found[API_VERSIONS_KEY if api is None else api.key] = module.__doc__ or ""
    return found


def _not_implemented(header: str) -> str:
    match = re.search(r"^Not implemented: (.*?)(?:\n\n|\Z)", header, re.MULTILINE | re.DOTALL)
    text = " ".join(match[1].split()) if match else "?"
    return "" if text == "nothing." else text.removesuffix(".").replace("|", "\\|")


def table() -> str:
    """In the order of the keys."""
    headers = _headers()
    rows = ["| key | API | versions | not implemented |\n", "|---|---|---|---|\n"]
    for key, api in sorted(make_registry().items()):
        first, last = api.supported
        versions = str(first) if first == last else f"{first} to {last}"
        rows.append(f"| {key} | {api.name} | {versions} | {_not_implemented(headers[key])} |\n")
    return "".join(rows)


def render(text: str) -> str:
    """The document with the table of now."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{TARGET.name} has no place for the table: {BEGIN.strip()} ... {END.strip()}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Write, or compare; 1 when the document is not current."""
    text = TARGET.read_text(encoding="utf-8")
    current = render(text)
    if "--check" in arguments:
        if text != current:
            sys.stderr.write("docs/wire.md is not what kipmesh.wire says: make docs\n")
        return int(text != current)
    TARGET.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
