"""The texts of the repository: plain English, error texts and log events of one form, and a table of both."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.repo.repo_checks import ROOT
from tools import gen_texts, prose_lint

PROPER_NOUNS = {
    "Apache",
    "Docker",
    "Fetch",
    "Java",
    "Kafka",
    "Kubernetes",
    "Linux",
    "Metadata",
    "Produce",
    "Prometheus",
    "Python",
    "Spark",
    "Vote",
}
SAMPLE = '''"""Purpose."""
raise ValueError(f"no {name} is left anew")  # begun here
Option(help="asks for a topic")
NAME = "who is not read"
'''


def _rows(table: str) -> list[tuple[str, str]]:
    """Return (kind, text) of each row of a table."""
    lines = gen_texts.tables()[table].splitlines()
    return [(kind, text) for line in lines if line.startswith("  ") for kind, _, text in [line.strip().partition(": ")]]


def test_tables_of_texts_are_current() -> None:
    result = subprocess.run(
        [sys.executable, "tools/gen_texts.py", "--check"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_error_texts_begin_in_lower_case_and_have_no_full_stop() -> None:
    def is_capitalized(text: str) -> bool:
        word = re.split(r"[^\w]", text, maxsplit=1)[0]
        return word.istitle() and len(word) > 1 and word not in PROPER_NOUNS

    texts = [text for _, text in _rows("errors.txt")]
    assert len(texts) > 500
    assert [text for text in texts if is_capitalized(text) or re.search(r"[^.]\.$", text)] == []


def test_log_events_are_constant_phrases_with_fields() -> None:
    """The servers log with structlog, whose fields are arguments; the client with logging, as `key=%s`."""
    events = [text.partition(" | ")[0] for _, text in _rows("log_events.txt")]
    assert len(events) > 100
    assert [event for event in events if not re.fullmatch(r"[a-z0-9][\w/()', .-]{2,80}(?: \w+=%[sdr])*", event)] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Return the data directory.", False),
        ("Return the folder.", True),
        ("The kind is called `folder`.", False),
        ("What waits for the leader.", True),
        ("What is a voter? A controller.", False),
        ("Who leads the partition.", True),
        ("The broker is told of the leader.", True),
        ("The broker receives the leader.", False),
    ],
)
def test_lint_finds_terms_and_missing_subjects(text: str, found: bool) -> None:
    assert (prose_lint.find(text) is not None) is found


def test_lint_reads_docstrings_messages_help_and_comments(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(SAMPLE)
    assert [(number, prose_lint.find(text) is not None) for number, text in prose_lint.passages(source)] == [
        (1, False),
        (2, True),
        (3, True),
        (2, True),
    ]


def test_lint_reads_markdown_outside_of_code(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nA sentence\nof two lines.\n\n```\nfolder\n```\n\n- item\n- more\n  of it\n")
    assert list(prose_lint.passages(page)) == [
        (1, "Title"),
        (3, "A sentence of two lines."),
        (10, "item"),
        (11, "more of it"),
    ]


@pytest.mark.parametrize(
    ("message", "faults"),
    [
        ("fetch: return 106 when ids and names are mixed", 0),
        ("docs: process the tables", 0),
        ("Tests: who is started again finds its port", 1),
        ("fetch: returned 106", 1),
        ("storage: fix recovery.", 1),
        ("x" * 73, 1),
        ("", 1),
        ("fetch: return 106\n\nNobody asked for it.\n# a comment about a folder", 1),
    ],
)
def test_commit_messages_have_a_short_imperative_subject(message: str, faults: int) -> None:
    assert len(list(prose_lint.commit_findings(message))) == faults, list(prose_lint.commit_findings(message))
