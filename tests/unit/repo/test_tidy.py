"""The files of the repository pass all checks of `repo_checks.py`."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement

from tests.unit.repo import repo_checks
from tests.unit.repo.repo_checks import ROOT

FILES = repo_checks.repository_files()
PYTHON = [path for path in FILES if path.suffix == ".py"]
MARKDOWN = [path for path in FILES if path.suffix == ".md"]
KIPS = [path for path in MARKDOWN if path.parts[:2] == ("docs", "kips")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

Check = Callable[[Path, str], Iterable[str]]


def _assert_no_findings(paths: Iterable[Path], check: Check) -> None:
    findings: list[str] = []
    for path in paths:
        text = repo_checks.read_text(path)
        if text is not None:
            findings += check(path, text)
    if findings:
        pytest.fail("\n".join(findings), pytrace=False)


@pytest.mark.parametrize(
    "check",
    [repo_checks.long_files, repo_checks.long_functions, repo_checks.missing_docstring],
    ids=lambda check: check.__name__,
)
def test_python_files_have_docstrings_and_limited_length(check: Check) -> None:
    _assert_no_findings(PYTHON, check)


def test_core_uses_no_clock_randomness_or_io() -> None:
    _assert_no_findings(filter(repo_checks.is_core, PYTHON), repo_checks.impurities)


@pytest.mark.parametrize(
    "check",
    [repo_checks.unfinished, repo_checks.machine_paths, repo_checks.registry_hosts],
    ids=lambda check: check.__name__,
)
def test_files_have_no_unfinished_work_machine_paths_or_registries(check: Check) -> None:
    _assert_no_findings((path for path in FILES if path.name != "LICENSE"), check)


def _known_rules() -> list[str]:
    return repo_checks.rules_of((ROOT / "docs/rules.md").read_text())


def test_cited_rules_exist() -> None:
    known = set(_known_rules())

    def unknown(path: Path, text: str) -> Iterator[str]:
        return repo_checks.unknown_rules(path, text, known)

    _assert_no_findings((path for path in FILES if path.name not in SAMPLES), unknown)


def test_rules_are_numbered_without_gaps() -> None:
    counts = Counter(rule.partition("-")[0] for rule in _known_rules())
    expected = [f"{group}-{number:02}" for group, count in counts.items() for number in range(1, count + 1)]
    assert _known_rules() == expected
    assert set(counts) == {"227", "392", "526", "630", "REP", "LIM"}


def test_each_rule_has_one_row_in_its_kip_document() -> None:
    rows = [cells[0] for path in KIPS for cells in repo_checks.table_rows((ROOT / path).read_text())]
    assert sorted(rows) == sorted(_known_rules())
    for path in KIPS:
        group = path.stem.removeprefix("kip_").upper()
        for cells in repo_checks.table_rows((ROOT / path).read_text()):
            assert cells[0].startswith(group), f"{cells[0]} in {path}"
            assert len(cells) == 5, (
                f"{path}: {cells[0]}: the columns must be rule, subject, code, test, metric, got {cells}"
            )


def test_rows_of_implemented_rules_are_not_planned() -> None:
    sources = [(ROOT / path).read_text() for path in PYTHON if path.parts[0] in {*SHIPPED, "services"}]
    for path in KIPS:
        assert not list(repo_checks.rows_behind_the_code((ROOT / path).read_text(), sources))


def test_rows_of_rules_cite_tests() -> None:
    for path in KIPS:
        assert not list(repo_checks.rows_with_other_tests((ROOT / path).read_text()))


def test_links_in_documents_resolve() -> None:
    _assert_no_findings(MARKDOWN, repo_checks.broken_links)


def test_paths_in_documents_exist() -> None:
    _assert_no_findings(MARKDOWN, repo_checks.broken_paths)


def test_makefile_describes_each_target() -> None:
    assert not list(repo_checks.undocumented_targets((ROOT / "Makefile").read_text()))


def test_make_targets_in_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()

    def unknown(path: Path, text: str) -> Iterator[str]:
        return repo_checks.unknown_targets(path, text, makefile)

    _assert_no_findings(MARKDOWN, unknown)


def test_changelog_has_section_of_current_version() -> None:
    version = PROJECT["project"]["version"]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_lock_pins_exact_versions_within_bounds() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert not list(repo_checks.loose_lock_lines(lock))
    locked: dict[str, list[str]] = {}
    for line in lock.splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition(" ;")[0].partition("==")
            locked.setdefault(name.lower().replace("_", "-"), []).append(version)
    bounds = [
        *PROJECT["project"]["dependencies"],
        *PROJECT["dependency-groups"]["dev"],
        *PROJECT["build-system"]["requires"],
    ]
    for extra in PROJECT["project"]["optional-dependencies"].values():
        bounds += [bound for bound in extra if not bound.startswith("kipmesh")]
    for bound in map(Requirement, bounds):
        versions = locked.get(bound.name.lower().replace("_", "-"), [])
        assert versions, f"{bound} is not in requirements.lock: make lock"
        assert all(bound.specifier.contains(version) for version in versions), f"{bound}: locked {versions}: make lock"
    assert locked["pyspark"] == ["4.2.0"]


def test_configuration_document_is_current() -> None:
    result = subprocess.run(
        [sys.executable, "tools/gen_config_docs.py", "--check"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_names_of_test_files_are_unique() -> None:
    names = Counter(path.name for path in PYTHON if repo_checks.is_test(path) and path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
    assert "__init__.py" not in names


def test_each_package_has_a_layer() -> None:
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    named = {name.strip() for layer in layers for name in layer.split("|")}
    packages = {f"kipmesh.{path.parts[1]}" for path in PYTHON if path.parts[0] == "kipmesh" and len(path.parts) > 2}
    services = {path.parts[2] for path in PYTHON if path.parts[0] == "services"}
    assert named == packages | services | {"pyspark_kipmesh", "kipmesh_chaos", "kipmesh_jobs", "simulation"}
    assert set(PROJECT["tool"]["importlinter"]["root_packages"]) == services | {
        "kipmesh",
        "kipmesh_chaos",
        "kipmesh_jobs",
        "pyspark_kipmesh",
        "simulation",
    }


def test_modules_have_no_import_cycles() -> None:
    """Imports in functions and under TYPE_CHECKING count. Merge modules that import each other."""
    graph = grimp.build_graph(*PROJECT["tool"]["importlinter"]["root_packages"], cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])), pytrace=False)


def test_packages_have_limited_number_of_modules() -> None:
    modules = Counter(path.parent for path in PYTHON if path.parts[0] in SHIPPED and path.name != "__init__.py")
    assert {str(package): count for package, count in modules.items() if count > repo_checks.PACKAGE_MODULES_MAX} == {}


SHIPPED = {"kipmesh", "kipmesh_chaos", "kipmesh_jobs", "simulation"}
SAMPLES = {"test_repo_checks.py"}
