"""Checks of the files of this repository. Each function maps text to findings, one line each.

`test_tidy.py` checks all files of the repository. `test_repo_checks.py` checks samples with and without violations.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 700
TEST_LINES_MAX = 700
PACKAGE_MODULES_MAX = 20

# core/ gets time, randomness and ids as arguments and does no IO.
IMPURE_MODULES = frozenset(
    [
        "asyncio",
        "concurrent",
        "ctypes",
        "google",
        "grpc",
        "http",
        "io",
        "multiprocessing",
        "os",
        "pathlib",
        "random",
        "secrets",
        "select",
        "shutil",
        "signal",
        "socket",
        "ssl",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "urllib",
        "uuid",
    ]
)
IMPURE_CALLS = frozenset({"open", "input", "print", "datetime.now", "datetime.utcnow", "date.today", "datetime.today"})

# Written so that this file does not find itself.
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
MACHINE_PATH = re.compile(r"(?<![\w.$}\)/-])/(wo" r"rk|fa" r"rm|tm" r"p|ro" r"ot|ho" r"me)/")
REGISTRY_HOST = re.compile(
    r"\b(pyp"
    r"i\.org|python"
    r"hosted\.org|repo1?\.ma"
    r"ven|search\.ma"
    r"ven|npm"
    r"js\.org|cra"
    r"tes\.io|"
    r"proxy\.gol"
    r"ang|ghc"
    r"r\.io|qua"
    r"y\.io|doc"
    r"ker\.io)"
)
RULE = re.compile(r"\b(?:227|392|526|630|REP|LIM)-\d\d\b")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.*?) *$", re.MULTILINE)
CODE_SPAN = re.compile(r"`([^`]+)`")
OWN_PATH = re.compile(r"(?:kipmesh|services|protos|tests|tools|bench|docs|examples)/[\w./-]*")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Ask git about the repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=False, capture_output=True, text=True)


def repository_files() -> list[Path]:
    """Return tracked and untracked files, relative to the root. Without git, skip build and hidden directories."""
    listed = git("ls-files", "--cached", "--others", "--exclude-standard", "-z")
    if not listed.returncode:
        names = (Path(name) for name in listed.stdout.split("\0") if name)
        return sorted(path for path in names if (ROOT / path).is_file())
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    made = {"build", "dist", "__pycache__"}
    kept = (path for path in found if not made.intersection(path.parts) and not path.parts[0].startswith("."))
    return sorted(path for path in kept if path.parts[:2] != ("kipmesh", "v1"))


def is_test(path: Path) -> bool:
    """Return whether a file belongs to the tests."""
    return path.parts[0] == "tests"


def is_core(path: Path) -> bool:
    """Return whether a file belongs to the layer without IO."""
    return path.parts[:2] == ("kipmesh", "core") or path.parts[:4] == ("kipmesh", "client", "consumer", "rules")


def read_text(path: Path) -> str | None:
    """Return the text of a file, or None if it is binary or was deleted after it was listed."""
    try:
        return (ROOT / path).read_text(encoding="utf-8")
    except (UnicodeDecodeError, FileNotFoundError):
        return None


def long_files(path: Path, text: str) -> Iterator[str]:
    """Find a file with too many lines."""
    limit = TEST_LINES_MAX if is_test(path) else FILE_LINES_MAX
    lines = text.count("\n")
    if lines > limit:
        yield f"{path}: {lines} lines, at most {limit}"


def long_functions(path: Path, text: str) -> Iterator[str]:
    """Find functions with too many lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{path}:{node.lineno}: {node.name}() has {lines} lines, at most {FUNCTION_LINES_MAX}"


def missing_docstring(path: Path, text: str) -> Iterator[str]:
    """Find a module without docstring."""
    if not is_test(path) and not ast.get_docstring(ast.parse(text)):
        yield f"{path}: no module docstring"


def _imported(node: ast.Import | ast.ImportFrom) -> Iterable[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if node.module and not node.level else []


def impurities(path: Path, text: str) -> Iterator[str]:
    """Find uses of clocks, randomness and IO in a module of core/."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module in _imported(node):
                if module.partition(".")[0] in IMPURE_MODULES:
                    yield f"{path}:{node.lineno}: core imports {module}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in IMPURE_CALLS or called.removeprefix("datetime.") in IMPURE_CALLS:
                yield f"{path}:{node.lineno}: core calls {called}()"


def _matches(pattern: re.Pattern[str], path: Path, text: str, what: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        found = pattern.search(line)
        if found:
            yield f"{path}:{number}: {what}: {found.group()}"


def unfinished(path: Path, text: str) -> Iterator[str]:
    """Find marks of unfinished work. Finish it, or open an issue."""
    return _matches(UNFINISHED, path, text, "left unfinished")


def machine_paths(path: Path, text: str) -> Iterator[str]:
    """Find absolute paths of a development machine."""
    return _matches(MACHINE_PATH, path, text, "path of a machine")


def registry_hosts(path: Path, text: str) -> Iterator[str]:
    """Find hosts of package registries. The user configures the source of packages."""
    return _matches(REGISTRY_HOST, path, text, "registry host")


def rules_of(text: str) -> list[str]:
    """Return the ids of the rules that docs/rules.md defines, in order: those at the beginning of a list item."""
    return re.findall(rf"^- \*\*({RULE.pattern})\*\* ", text, re.MULTILINE)


def unknown_rules(path: Path, text: str, known: set[str]) -> Iterator[str]:
    """Find rule ids that docs/rules.md does not define."""
    for number, line in enumerate(text.splitlines(), 1):
        for rule in RULE.findall(line):
            if rule not in known:
                yield f"{path}:{number}: no rule {rule} in docs/rules.md"


def slug(heading: str) -> str:
    """Return the anchor of a heading."""
    plain = re.sub(r"[`*]", "", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def broken_links(path: Path, text: str, root: Path = ROOT) -> Iterator[str]:
    """Find relative links of a Markdown file whose file or anchor does not exist."""
    for groups in LINK.findall(FENCE.sub("", text)):
        target = groups[0] or groups[1]
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (root / path.parent / name) if name else root / path
        if not file.exists():
            yield f"{path}: no {target}"
        elif anchor and file.suffix == ".md":
            headings = HEADING.findall(FENCE.sub("", file.read_text(encoding="utf-8")))
            if anchor not in map(slug, headings):
                yield f"{path}: no heading for #{anchor} in {name or path}"


def table_rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the rule tables of a document."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if RULE.fullmatch(cells[0]):
            yield cells


def broken_paths(path: Path, text: str, root: Path = ROOT) -> Iterator[str]:
    """Find code spans that look like paths of the repository, but whose file or symbol does not exist.

    `kipmesh/file.py::name` is a file and a symbol in it.
    """
    for span in CODE_SPAN.findall(FENCE.sub("", text)):
        name, _, symbol = span.partition("::")
        if not OWN_PATH.fullmatch(name):
            continue
        if not (root / name).exists():
            yield f"{path}: no {name}"
        elif symbol and not re.search(rf"\b{re.escape(symbol)}\b", (root / name).read_text(encoding="utf-8")):
            yield f"{path}: no {symbol} in {name}"


def rows_behind_the_code(table: str, sources: Iterable[str]) -> Iterator[str]:
    """Yield the rules that code cites although their row says that they are planned."""
    cited = {rule for text in sources for rule in RULE.findall(text)}
    for cells in table_rows(table):
        if cells[0] in cited and cells[2] == "planned":
            yield f"{cells[0]}: code cites it, but its row says planned"


def rows_with_other_tests(table: str) -> Iterator[str]:
    """Find rows of rules whose test column cites a file or symbol that pytest does not collect."""
    for cells in table_rows(table):
        for span in CODE_SPAN.findall(cells[3]):
            name, _, symbol = span.partition("::")
            is_one = Path(name).name.startswith("test_") and (not symbol or symbol.lower().startswith("test"))
            if OWN_PATH.fullmatch(name) and not is_one:
                yield f"{cells[0]}: {span} is no test"


def undocumented_targets(makefile: str) -> Iterator[str]:
    """Find phony targets that `make help` does not list. `stale` is internal to the Makefile."""
    phony = re.search(r"^\.PHONY:((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    names = set(phony.group(1).replace("\\\n", " ").split()) if phony else set()
    listed = set(re.findall(r"^([a-z0-9-]+):.*## ", makefile, re.MULTILINE))
    for name in sorted(names - listed - {"stale"}):
        yield f"Makefile: {name} has no ## line"
    for name in sorted(listed - names):
        yield f"Makefile: {name} is not in .PHONY"


def unknown_targets(path: Path, text: str, makefile: str) -> Iterator[str]:
    """Find commands `make X` in a document without a target X in the Makefile."""
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    for name in re.findall(r"(?:`|^)make ([a-z][a-z0-9-]*)", text, re.MULTILINE):
        if name not in targets:
            yield f"{path}: no target {name} in the Makefile"


def loose_lock_lines(lock: str) -> Iterator[str]:
    """Find lines of the lock file that are neither a comment nor an exact version."""
    for number, line in enumerate(lock.splitlines(), 1):
        if not re.fullmatch(r"#.*|[A-Za-z0-9_.\-\[\],]+==[A-Za-z0-9_.+!]+( ; .+)?|", line):
            yield f"requirements.lock:{number}: {line}"
