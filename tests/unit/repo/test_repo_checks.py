"""Each check in `repo_checks.py` finds violations in samples and passes valid text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.repo import repo_checks

SOURCE = Path("kipmesh/core/sample.py")
PAGE = Path("docs/page.md")


def test_long_files_and_functions_are_found() -> None:
    body = "def f() -> None:\n" + "    pass\n" * 70
    assert list(repo_checks.long_functions(SOURCE, body)) == [f"{SOURCE}:1: f() has 71 lines, at most 70"]
    assert not list(repo_checks.long_functions(SOURCE, body.replace("    pass\n", "", 1)))
    nested = "class A:\n    async def g(self) -> None:\n" + "        pass\n" * 80
    assert list(repo_checks.long_functions(SOURCE, nested))
    assert list(repo_checks.long_files(SOURCE, "\n" * 701))
    assert not list(repo_checks.long_files(SOURCE, "\n" * 700))
    assert not list(repo_checks.long_files(Path("tests/unit/test_x.py"), "\n" * 700))
    assert list(repo_checks.long_files(Path("tests/unit/test_x.py"), "\n" * 701))


def test_missing_docstrings_are_found() -> None:
    assert list(repo_checks.missing_docstring(SOURCE, "x = 1\n"))
    assert list(repo_checks.missing_docstring(SOURCE, ""))
    assert not list(repo_checks.missing_docstring(SOURCE, '"""Purpose."""\n'))


@pytest.mark.parametrize(
    "text",
    [
        "import time\n",
        "import os.path\n",
        "from random import randrange\n",
        "def f():\n    import threading\n",
        "from datetime import datetime\nnow = datetime.now()\n",
        "import datetime\nnow = datetime.datetime.now(datetime.UTC)\n",
        "import datetime\nday = datetime.date.today()\n",
        "data = open('x').read()\n",
        "from google.protobuf import message\n",
    ],
)
def test_impure_imports_and_calls_are_found(text: str) -> None:
    assert list(repo_checks.impurities(SOURCE, text))


def test_pure_imports_and_calls_pass() -> None:
    text = "from __future__ import annotations\nimport struct\nfrom . import time\nfrom kipmesh.core import errors\n"
    assert not list(repo_checks.impurities(SOURCE, text + "x = errors.now(1)\n"))


@pytest.mark.parametrize("mark", ["TO" + "DO", "FIX" + "ME", "XX" + "X"])
def test_unfinished_work_is_found(mark: str) -> None:
    assert list(repo_checks.unfinished(SOURCE, f"x = 1\n# {mark}: later\n")) == [f"{SOURCE}:2: left unfinished: {mark}"]


@pytest.mark.parametrize("directory", ["wo" + "rk", "tm" + "p", "ro" + "ot", "ho" + "me"])
def test_machine_paths_are_found(directory: str) -> None:
    assert list(repo_checks.machine_paths(PAGE, f"see `/{directory}/x`"))
    assert not list(repo_checks.machine_paths(PAGE, f"see `build/{directory}/x` and ../{directory}/x and {directory}/"))


@pytest.mark.parametrize("host", ["https://pyp" + "i.org/simple", "repo1.ma" + "ven.org", "ghc" + "r.io/x/y"])
def test_registry_hosts_are_found(host: str) -> None:
    assert list(repo_checks.registry_hosts(PAGE, f"from {host}"))


def test_unknown_rules_are_found() -> None:
    known = set(repo_checks.rules_of("## 1. Rules\n\n- **227-01** a\n- **630-02** b, see 227-07 and **REP-01**\n"))
    assert known == {"227-01", "630-02"}
    assert list(repo_checks.unknown_rules(SOURCE, "227-01 and 227-99", known)) == [
        f"{SOURCE}:1: no rule 227-99 in docs/rules.md"
    ]


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/other.md").write_text("# A `big` heading\n\n```\n# not a heading\n```\n")
    good = "[a](other.md) [b](other.md#a-big-heading) [c](https://example.org) [d](#here)\n\n# Here\n"
    (tmp_path / "docs/page.md").write_text(good)
    assert not list(repo_checks.broken_links(PAGE, good, tmp_path))
    bad = "[a](none.md) [b](other.md#not-a-heading) ![c](none.svg)"
    assert len(list(repo_checks.broken_links(PAGE, bad, tmp_path))) == 3


def test_broken_paths_are_found(tmp_path: Path) -> None:
    (tmp_path / "kipmesh").mkdir()
    (tmp_path / "kipmesh/log.py").write_text("def append(): ...\n")
    good = "`kipmesh/log.py` `kipmesh/log.py::append` `kipmesh local up` `kipmesh/` `a/b`\n```\n`kipmesh/none`\n```\n"
    assert not list(repo_checks.broken_paths(PAGE, good, tmp_path))
    assert list(repo_checks.broken_paths(PAGE, "in `kipmesh/none.py`", tmp_path)) == [f"{PAGE}: no kipmesh/none.py"]
    assert list(repo_checks.broken_paths(PAGE, "`kipmesh/log.py::appen`", tmp_path)) == [
        f"{PAGE}: no appen in kipmesh/log.py"
    ]


def test_planned_rows_of_implemented_rules_are_found() -> None:
    table = "| 227-01 | ids | planned | planned | planned |\n| 227-02 | who | `kipmesh/log.py` | planned | planned |\n"
    assert not list(repo_checks.rows_behind_the_code(table, ["# 227-02 and 227-03"]))
    assert list(repo_checks.rows_behind_the_code(table, ["# keeps 227-01"]))


def test_rows_that_cite_other_files_than_tests_are_found() -> None:
    row = "| 227-01 | ids | `kipmesh/log.py` | {} | - |"
    good = "`tests/unit/test_a.py`, `tests/unit/test_a.py::test_b`; `tests/unit/test_a.py::TestModel`"
    assert not list(repo_checks.rows_with_other_tests(row.format(good)))
    for bad in ("tests/unit/test_a.py::compare", "kipmesh/testing/day.py::_check", "tests/unit/support.py"):
        assert list(repo_checks.rows_with_other_tests(row.format(f"{good}, `{bad}`"))) == [f"227-01: {bad} is no test"]


def test_undocumented_targets_are_found() -> None:
    makefile = ".PHONY: a b \\\n  c\na: b ## says\nb:\nc: ## says\nd: ## says\n"
    assert list(repo_checks.undocumented_targets(makefile)) == [
        "Makefile: b has no ## line",
        "Makefile: d is not in .PHONY",
    ]
    text = "`make a` and\nmake e\nto make clear"
    assert list(repo_checks.unknown_targets(PAGE, text, makefile)) == [f"{PAGE}: no target e in the Makefile"]


def test_inexact_lines_of_lock_are_found() -> None:
    good = "# made\na==1.0\nb-c==2.0.post1 ; python_version < '3.12'\n"
    assert not list(repo_checks.loose_lock_lines(good))
    for bad in ["a>=1.0", "--index-url x", "a @ file:x", "-e ."]:
        assert list(repo_checks.loose_lock_lines(bad)), bad
