"""Lint for plain technical English: `prose_lint.py [PATH...]`, or `prose_lint.py --commit-message FILE`.

Reads docstrings, comments, error messages, log events and help texts of Python files, sentences of Markdown files, and
comments of YAML, protobuf and shell files. Text between backticks and double quotes is not checked: it quotes code,
protocols or other programs. A finding is a phrase with a better standard term, or a sentence without a subject:
rewrite the sentence.

Exit status 1 if anything is found.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATHS = (
    "bench",
    "deploy",
    "examples",
    "helm",
    "kipmesh",
    "kipmesh_chaos",
    "kipmesh_jobs",
    "protos",
    "services",
    "simulation",
    "tests",
    "tools",
    "CONTRIBUTING.md",
    "Makefile",
    "README.md",
    "docs/ARCHITECTURE.md",
    "docs/failures.md",
    "docs/rules.md",
)
SUFFIXES = frozenset({"", ".md", ".proto", ".py", ".sh", ".yaml", ".yml"})

PHRASES: tuple[tuple[str, str], ...] = (
    # --- terms
    (r"folders?", "log directory, data directory"),
    (r"knock(?:s|ed|ing)?", "probe"),
    (r"departures?|departed", "unreachable leader, fenced broker"),
    (r"unborn", "future epoch"),
    (r"anew|begun|made again", "recreated, restarted, again"),
    (r"mend(?:s|ed|ing)?", "fix"),
    (r"answer(?:s|ed|ing)?", "response, responds, returns"),
    (r"ask(?:s|ed|ing)? for", "request"),
    (r"(?:is|are|was|were|been|be) told|as told", "receives, observes, is notified of"),
    (r"hear[sd]? of", "receives, observes"),
    (r"look(?:s|ed|ing)? at", "checks, inspects, polls"),
    (r"stands? (?:for|still|in|as)", "becomes a candidate; represents"),
    (r"the truth", "replication safety, log consistency"),
    (r"way out", "remediation"),
    (r"clients (?:of|that) others(?: wrote)?", "third-party clients"),
    (r"pictures?", "chart"),
    (r"under way", "in flight, in progress"),
    (r"in vain", "without effect"),
    (r"for ever", "forever, without limit"),
    (r"at once", "immediately; at the same time"),
    (r"as long as", "while"),
    (r"any more|anymore", "no longer"),
    (r"go(?:es)? on", "continues, resumes"),
    (r"turns? up", "appears, arrives"),
    (r"comes? (?:of|to) it", "name the event"),
    (r"(?:have|has) no say", "does not apply"),
    (r"please", "state what to do"),
    # --- sentences without a subject
    (r"(?:some|every|no)body", "name the component"),
    (r"who (?:is|are|was|leads?|asks?|has|may|does|holds?|waits?|can|wants?|reads?|writes?)", "name the component"),
    (r"(?:of|by|to|for|from|with) whom", "name the component"),
    (r"what (?:waits?|came|comes|stands?|lies|has)", "pending requests; name the thing"),
    (r"what (?:is|was|are|were) (?:said|told|asked|there|known|held|sent|waiting|written|not)", "name the thing"),
    (r"that there (?:is|are)", "existing"),
    (r"none of (?:its|their|them|others)", "no ..."),
    (r"(?:of|by) (?:its|their|his) own|by (?:itself|themselves)", "own; independently"),
    (r"(?:is|are) (?:not )?to be", "must"),
    (r"since \d+ (?:s|ms|seconds|minutes)", "for ..."),
)
PATTERN = re.compile("|".join(rf"(?P<p{at}>\b(?:{phrase})\b)" for at, (phrase, _) in enumerate(PHRASES)), re.IGNORECASE)
OPENING = re.compile(r"(?:What|Who|That which|Those|One that|Such)\b(?!.*\?)")
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"|https?://\S+|\]\([^)]*\)")
ALLOWED = (
    "SASL/SCRAM, which answers",  # RFC 5802
)
"""Phrases that stay as they are: quotations and names of protocols."""
DOMAIN_TERMS = {"kipmesh_jobs": re.compile(r"\bdepartures?\b")}
"""By directory: words that are terms of its subject, here flights."""

SUBJECT_LENGTH_MAX = 72
_AREA = re.compile(r"[\w./, -]{1,30}: ")
_MOODS = re.compile(r"(?:ed|ing)$|(?<![sui])s$")
_IMPERATIVES = frozenset({"alias", "bring", "embed", "exceed", "feed", "need", "ping", "shed", "speed"})

Passage = tuple[int, str]


def find(text: str) -> str | None:
    """Return the first finding in a passage, with the better term, or None without a finding."""
    for allowed in ALLOWED:
        text = text.replace(allowed, "")
    plain = QUOTED.sub("``", " ".join(text.split()))
    match = PATTERN.search(plain)
    if match is not None:
        return f"{match.group()!r}: {PHRASES[int(str(match.lastgroup)[1:])][1]}"
    opening = OPENING.match(plain)
    return None if opening is None else f"{opening.group()!r} opens a passage: name the subject"


def python_passages(text: str) -> Iterator[Passage]:
    """Yield (line, text) of each docstring, message, help text and comment of Python source.

    Messages and help texts have three words or more. Raises SyntaxError if the source is not valid Python.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
        elif isinstance(node, ast.Call):
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                yield from _strings(argument)
    yield from _comments(text)


def _strings(argument: ast.expr) -> Iterator[Passage]:
    """Yield (line, text) of an argument that is a string of three words or more, else nothing.

    Calls inside it are visited separately.
    """
    if isinstance(argument, ast.JoinedStr):
        literals = [part.value for part in argument.values if isinstance(part, ast.Constant)]
        text = "{}".join(map(str, literals))
    elif isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        text = argument.value
    else:
        return
    if len(text.split()) > 2:
        yield argument.lineno, text


def _comments(text: str) -> Iterator[Passage]:
    start, words = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            start = start or token.start[0]
            words.append(token.string.lstrip("#!: "))
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT) and words:
            yield start, " ".join(words)
            start, words = 0, []


def markdown_passages(text: str) -> Iterator[Passage]:
    """Yield (line, text) of each paragraph, table row and list item of Markdown, without code blocks."""
    start, words, in_code = 0, list[str](), False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        stripped = line.strip()
        is_fence = stripped.startswith("```")
        if words and (is_fence or not stripped or re.match(r"[|#]|[-*] |\d+\. ", stripped)):
            yield start, " ".join(words)
            words = []
        in_code ^= is_fence
        if stripped and not in_code and not is_fence:
            start = start if words else number
            words.append(stripped.lstrip("#-* "))


def line_passages(text: str) -> Iterator[Passage]:
    """Yield (line, text) of the comments, descriptions and titles of another text file, line by line."""
    for number, line in enumerate(text.splitlines(), 1):
        match = re.search(r"(?:^|\s)(?:#|//)+\s*(.+)$|\b(?:description|summary|title):\s*(.+)$", line)
        if match is not None:
            yield number, match[1] or match[2]


def passages(path: Path) -> Iterator[Passage]:
    """Yield (line, text) of the passages of a file, by its suffix. Raises SyntaxError, OSError, UnicodeDecodeError."""
    text = path.read_text(encoding="utf-8")
    by_suffix = {".py": python_passages, ".md": markdown_passages}
    yield from by_suffix.get(path.suffix, line_passages)(text)


def files(paths: Iterable[str]) -> list[Path]:
    """Return the existing files under `paths` that have one of SUFFIXES, sorted.

    Files that git ignores are left out.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return sorted({ROOT / name for name in listed if Path(name).suffix in SUFFIXES and (ROOT / name).is_file()})


def _without_domain_terms(path: Path, text: str) -> str:
    terms = DOMAIN_TERMS.get(path.relative_to(ROOT).parts[0])
    return text if terms is None else terms.sub("", text)


def commit_findings(message: str) -> Iterator[str]:
    """Yield descriptions of the faults of a commit message: length, mood and full stop of its subject, wording.

    Yields nothing for merges, reverts and fixups.
    """
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if subject.startswith(("Merge ", "Revert ", "fixup! ", "squash! ")):
        return
    if not subject:
        yield "the subject is empty"
        return
    if len(subject) > SUBJECT_LENGTH_MAX:
        yield f"the subject has {len(subject)} characters, at most {SUBJECT_LENGTH_MAX}"
    if subject.endswith("."):
        yield "the subject ends with a full stop"
    verb = _AREA.sub("", subject, count=1).partition(" ")[0].lower()
    if _MOODS.search(verb) and verb not in _IMPERATIVES:
        yield f"the subject is not in the imperative mood: {verb!r}"
    for line in lines:
        if (finding := find(line)) is not None:
            yield finding


def main(arguments: list[str] | None = None) -> int:
    """Print the findings. Return 1 if there are any, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=PATHS, help="files and directories (default: all that are checked)")
    parser.add_argument("--commit-message", type=Path, metavar="FILE", help="check a commit message instead")
    options = parser.parse_args(arguments)
    if options.commit_message is not None:
        found = list(commit_findings(options.commit_message.read_text(encoding="utf-8")))
    else:
        found = [
            f"{path.relative_to(ROOT)}:{number}: {finding}"
            for path in files(options.paths)
            for number, text in passages(path)
            if (finding := find(_without_domain_terms(path, text))) is not None
        ]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
