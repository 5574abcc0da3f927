"""Write the diagrams in docs/raft.md from the table in `kipmesh.core.raft.elections`. `--check` only compares."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from kipmesh.core.raft.elections import diagram

TARGET = Path(__file__).resolve().parent.parent / "docs" / "raft.md"
_DRAWN = re.compile(r"(<!-- diagram: (voters|observers) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(text: str) -> str:
    """Return the document `text` with current diagrams.

    Raises ValueError if it does not have the markers of both diagrams.
    """

    def draw(found: re.Match[str]) -> str:
        return f"{found[1]}\n```mermaid\n{diagram(observers=found[2] == 'observers')}```\n\n{found[3]}"

    if len(_DRAWN.findall(text)) != 2:
        raise ValueError("docs/raft.md must have markers for two diagrams")
    return _DRAWN.sub(draw, text)


def main(arguments: list[str]) -> int:
    """Write the document, or with `--check` only compare it. Return 1 if `--check` finds it outdated, else 0.

    Raises ValueError if it does not have the markers of both diagrams.
    """
    before = TARGET.read_text(encoding="utf-8")
    text = render(before)
    if "--check" in arguments:
        if before != text:
            sys.stderr.write("docs/raft.md differs from kipmesh.core.raft.elections: make docs\n")
        return int(before != text)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
