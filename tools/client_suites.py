"""`python tools/client_suites.py [NAME...]`: run the test suites of third-party clients, unchanged, on a live cluster.

Each suite is fetched at a fixed commit or version and runs on its own cluster, or on brokers that it starts. The file
NAME.toml in `tests/clients/suites` lists tests that are not run (`[not-run]`) or expected to fail (`[fails]`), with
reasons; a name that ends in `*` is a prefix. The run fails if another test fails, or if a listed one passes and must be
removed from the list. `--list` prints the lists. `--bootstrap` uses a running cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kipmesh.cluster import LocalCluster, ports

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tests" / "clients" / "suites"
BUILD = ROOT / "build" / "client-suites"
FETCH_TIMEOUT_S = 500
SUITE_TIMEOUT_S = 2400
TEST_TIMEOUT_S = 120
FRANZ = "github.com/twmb/franz-go"
KAFKA_VERSION = "4.1.0"
"""Version of Apache Kafka that the suites expect."""


class SuiteError(Exception):
    """A suite could not be fetched or run. The message states the reason."""


class Outcome(NamedTuple):
    """Result of a test: `outcome` is "passed", "failed" or "skipped", `why` its output."""

    name: str
    outcome: str
    why: str = ""


class Suite(NamedTuple):
    """A test suite. `fetch` downloads it into a directory.

    `run` runs it there and returns its outcomes. Its arguments are the directory, the bootstrap addresses and the log
    file to write.
    """

    fetch: Callable[[Path], None]
    run: Callable[[Path, str, Path], list[Outcome]]
    config: Mapping[str, str]
    """Configuration of the cluster."""
    brokers: int = 3
    """Number of brokers; 0 if the suite starts them."""


class Lists(NamedTuple):
    """The tests that are not run, and those that are expected to fail: the reason by name or prefix with `*`."""

    not_run: Mapping[str, str]
    fails: Mapping[str, str]

    @staticmethod
    def of(path: Path) -> Lists:
        """Read the lists from a TOML file. Raises OSError or TOMLDecodeError."""
        found = tomllib.loads(path.read_text())
        return Lists(found.get("not-run", {}), found.get("fails", {}))


def list_of(name: str) -> Path:
    """Return the path of the TOML file with the lists of a suite."""
    return LISTS / f"{name}.toml"


def is_in(name: str, patterns: Mapping[str, str]) -> bool:
    """Return whether a pattern is equal to the name, or a prefix of it that ends in `*`."""
    return any(name == each or (each.endswith("*") and name.startswith(each[:-1])) for each in patterns)


def _run(step: str, command: Sequence[str], directory: Path) -> str:
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SuiteError(f"{step}: {error}") from None
    if done.returncode:
        raise SuiteError(f"{step}: {(done.stderr + done.stdout).strip()[-2000:]}")
    return done.stdout


# --- from git: aiokafka and kafka-python


def _from_git(repository: str, commit: str, *unwanted: str) -> Callable[[Path], None]:
    def fetch(directory: Path) -> None:
        directory.mkdir(parents=True)
        for command in (
            ["git", "init", "--quiet"],
            ["git", "fetch", "--quiet", "--depth", "1", f"https://github.com/{repository}", commit],
            ["git", "checkout", "--quiet", "--detach", commit],
        ):
            _run(f"git of {repository}", command, directory)
        for name in unwanted:
            shutil.rmtree(directory / name)

    return fetch


def _pytest(name: str, tests: str, *more: str) -> Callable[[Path, str, Path], list[Outcome]]:
    """Return a function that runs a suite with pytest, and with the plugin that records outcomes.

    That function raises SuiteError if no test runs or after SUITE_TIMEOUT_S.
    """

    def run(directory: Path, bootstrap: str, log: Path) -> list[Outcome]:
        first = bootstrap.split(",")[0]
        results = log.with_suffix(".jsonl")
        results.unlink(missing_ok=True)
        address = {"KAFKA_URI": f"kafka://{first}", "KAFKA_ROOT": str(directory)}
        if name == "aiokafka":
            address = {"KAFKA_BOOTSTRAP": bootstrap}
        env = {
            **os.environ,
            **address,
            "KAFKA_VERSION": KAFKA_VERSION,
            "PYTHONPATH": f"{directory}:{LISTS}",
            "SUITE_RESULTS": str(results),
            "SUITE_LIST": str(list_of(name)),
        }
        limits = [f"--timeout={TEST_TIMEOUT_S}", "--timeout-method=signal", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", tests, "-p", "suite_plugin", "-q", *limits, *more]
        _run_logged(command, directory, env, log)
        if not results.exists():
            raise SuiteError(f"{name} ran no tests; see {log}")
        return [Outcome(**json.loads(line)) for line in results.read_text().splitlines()]

    return run


def _run_logged(command: Sequence[str], directory: Path, env: Mapping[str, str], log: Path) -> None:
    with log.open("wb") as output:
        try:
            subprocess.run(
                command, cwd=directory, env=env, stdout=output, stderr=output, timeout=SUITE_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SuiteError(f"{error}; see {log}") from None


# --- franz-go


def _fetch_franz(directory: Path) -> None:
    module = ROOT / "tests" / "clients" / "franz"
    _run("go mod verify", ["go", "mod", "download", FRANZ], module)
    source = _run("go list", ["go", "list", "-m", "-f", "{{.Dir}}", FRANZ], module).strip()
    shutil.copytree(source, directory)
    for each in [directory, *directory.rglob("*")]:
        each.chmod(each.stat().st_mode | 0o200)  # the module cache is read-only


def _run_franz(directory: Path, bootstrap: str, log: Path) -> list[Outcome]:
    """Run the suite with up to seven partitions per topic, and 50,000 records, a tenth of the default."""
    not_run = Lists.of(list_of("franz-go")).not_run
    env = {
        **os.environ,
        "KGO_SEEDS": bootstrap,
        "KGO_TEST_RECORDS": "50000",
        "KGO_TEST_MAX_TOPIC_PARTS": "7",
        "KGO_LOG_LEVEL": "none",
    }
    skip = ["-skip", "|".join(f"^{re.escape(name)}$" for name in not_run)] if not_run else []
    _run_logged(["go", "test", "-json", "-timeout", "30m", "-count=1", *skip, "./pkg/kgo"], directory, env, log)
    output: dict[str, str] = {}
    found = []
    for line in log.read_text(errors="replace").splitlines():
        event = {}
        with contextlib.suppress(ValueError):
            event = json.loads(line)
        name, action = event.get("Test"), event.get("Action")
        if name is None:
            continue
        if action == "output":
            output[name] = (output.get(name, "") + event["Output"])[-3000:]
        elif action in ("pass", "fail", "skip"):
            outcome = {"pass": "passed", "fail": "failed", "skip": "skipped"}[action]
            found.append(Outcome(name, outcome, output.pop(name, "")))
    if not found:
        raise SuiteError(f"franz-go ran no tests; see {log}")
    return found


# --- kafka-tester


PORT = 9092
SHARED = Path("/tmp")
"""Directory in which the suite creates its files, on all systems."""
SUITE_FILES = ("server.properties", "kraft-combined-logs")
"""Files that the suite creates in `SHARED`."""
STAGE_TIMEOUT_S = 120
"""Time limit of a stage. The stage itself has a limit of 10 or 15 s."""
_STAGE = re.compile(r"Slug:\s*\"(\w+)\",\s*TestFunc:\s*(\w+),")


class Stage(NamedTuple):
    """One test of kafka-tester: its slug and its function."""

    slug: str
    function: str

    @property
    def name(self) -> str:
        """Name of the stage in the lists."""
        return f"{self.slug}:{self.function}"

    @property
    def selection(self) -> str:
        """Selection of this stage, as JSON for the suite."""
        return json.dumps([{"slug": self.slug, "tester_log_prefix": self.slug, "title": self.function}])


def stages(definition: str) -> list[Stage]:
    """Return all stages in the suite's source text `definition`, in order."""
    return [Stage(*found) for found in _STAGE.findall(definition)]


def _fetch_tester(directory: Path) -> None:
    _from_git("codecrafters-io/kafka-tester", "018f9bc8ee3317001e26280c41e4cac916564e34")(directory)
    _run("go build of kafka-tester", ["go", "build", "-o", "tester", "./cmd/tester"], directory)


def _check_unused() -> None:
    conflicts = [f"{SHARED / name} exists" for name in SUITE_FILES if (SHARED / name).exists()]
    if not ports.is_free(PORT):
        conflicts.append(f"port {PORT} is in use")
    if conflicts:
        raise SuiteError(f"kafka-tester needs port {PORT} and its own files: {', '.join(conflicts)}")


def _run_tester(directory: Path, bootstrap: str, log: Path) -> list[Outcome]:
    """Run each stage separately with `kafka_log_dir_cluster`, because the suite stops at the first failure.

    Raises SuiteError if `bootstrap` is not empty, or if the suite's port or files are in use.
    """
    if bootstrap:
        raise SuiteError("kafka-tester starts its own brokers; omit --bootstrap")
    _check_unused()
    not_run = Lists.of(list_of("kafka-tester")).not_run
    program, home = directory.with_name("kafka-tester-program"), directory.with_name("kafka-tester-cluster")
    program.mkdir(exist_ok=True)
    (program / "codecrafters.yml").write_text("debug: true\n")
    script = program / "your_program.sh"
    ours = [sys.executable, str(ROOT / "tools" / "kafka_log_dir_cluster.py"), "--home", str(home)]
    script.write_text(f'#!/bin/sh\nexec {shlex.join(ours)} "$@"\n')
    script.chmod(0o755)
    env = {"CODECRAFTERS_RANDOM_SEED": "1", **os.environ, "CODECRAFTERS_REPOSITORY_DIR": str(program)}
    found, output = [], []
    try:
        for stage in stages((directory / "internal" / "tester_definition.go").read_text()):
            if is_in(stage.name, not_run):
                continue
            found.append(_run_stage(stage, directory, env))
            output.append(f"=== {stage.name}: {found[-1].outcome}\n{found[-1].why}\n")
    finally:
        log.write_text("".join(output))
        (SHARED / SUITE_FILES[0]).unlink(missing_ok=True)
        for each in (SHARED / SUITE_FILES[1], home):
            shutil.rmtree(each, ignore_errors=True)
    if not found:
        raise SuiteError("kafka-tester has no stages")
    return found


def _run_stage(stage: Stage, directory: Path, env: Mapping[str, str]) -> Outcome:
    command = [str(directory / "tester")]
    try:
        done = subprocess.run(
            command,
            env={**env, "CODECRAFTERS_TEST_CASES_JSON": stage.selection},
            capture_output=True,
            text=True,
            timeout=STAGE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SuiteError(f"{stage.name}: {error}") from None
    return Outcome(stage.name, "failed" if done.returncode else "passed", done.stdout + done.stderr)


SUITES: Mapping[str, Suite] = {
    "franz-go": Suite(_fetch_franz, _run_franz, {}),
    "kafka-python": Suite(
        _from_git("dpkp/kafka-python", "a3b3836ff3a4b34ebaa42fd93500bfcb16c1e9b7"),
        _pytest("kafka-python", "test/integration"),
        {"num.partitions": "4", "group.min.session.timeout.ms": "1000", "group.initial.rebalance.delay.ms": "0"},
        brokers=1,  # as in its own setup: with several it reads the response of one broker only
    ),
    "aiokafka": Suite(  # tests the installed client, which has the same version and is built
        _from_git("aio-libs/aiokafka", "672947afe85c91b7d953f0259e69837a711d3246", "aiokafka"),
        _pytest(
            "aiokafka",
            "tests",
            f"--docker-image=kafka:0_{KAFKA_VERSION}",
            "--ignore=tests/coordinator",  # needs modules that are not installed, and no broker
            "--ignore=tests/test_requests.py",
            "--override-ini=asyncio_default_fixture_loop_scope=function",
        ),
        {"num.partitions": "2", "group.initial.rebalance.delay.ms": "0"},
        brokers=1,  # assumes that the bootstrap broker is the leader
    ),
    "kafka-tester": Suite(_fetch_tester, _run_tester, {}, brokers=0),
}


def problems(found: Sequence[Outcome], lists: Lists) -> list[str]:
    """Return descriptions of unexpected failures, and of tests listed in [fails] that did not fail; empty if none."""
    ended = {each.name: each for each in found}
    failed = [each for each in found if each.outcome == "failed"]
    lines = [f"fails: {each.name}\n{each.why[-1500:]}" for each in failed if not is_in(each.name, lists.fails)]
    for pattern in lists.fails:
        matching = [name for name in ended if is_in(name, {pattern: ""})]
        if not any(ended[name].outcome == "failed" for name in matching):
            lines.append(f"listed in [fails] but does not fail: {pattern}")
    return lines


@contextlib.contextmanager
def _brokers(suite: Suite, bootstrap: str | None) -> Iterator[str]:
    if bootstrap is not None or not suite.brokers:
        yield bootstrap or ""
        return
    with LocalCluster(
        mode="processes", controllers=1, leaders=suite.brokers, followers=0, config=suite.config
    ) as cluster:
        found = cluster.kafka_bootstrap
        assert found is not None
        yield found


def run(name: str, bootstrap: str | None) -> list[str]:
    """Fetch a suite if necessary, run it, print a summary and return its problems (empty: as expected).

    `bootstrap` None starts a cluster for the suite. Raises KeyError for an unknown suite, SuiteError, or ClusterError
    if the cluster does not start.
    """
    suite, directory, lists = SUITES[name], BUILD / name, Lists.of(list_of(name))
    complete = BUILD / f"{name}.complete"
    BUILD.mkdir(parents=True, exist_ok=True)
    if not complete.exists():
        shutil.rmtree(directory, ignore_errors=True)
        suite.fetch(directory)
        complete.touch()
    with _brokers(suite, bootstrap) as address:
        found = suite.run(directory, address, BUILD / f"{name}.log")
    counts = Counter(each.outcome for each in found)
    unexpected = problems(found, lists)
    text = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
    expected = sum(each.outcome == "failed" and is_in(each.name, lists.fails) for each in found)
    print(f"{name}: {text} ({expected} as expected); {len(unexpected)} problems", flush=True)
    return unexpected


def main(given: Sequence[str]) -> int:
    """Run the named suites, or all, and print their problems. Return 1 if there is a problem, else 0.

    With `--list` only print the lists.
    """
    parser = argparse.ArgumentParser(prog="python tools/client_suites.py", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *SUITES], help="suites (default: all)")
    parser.add_argument("--bootstrap", help="bootstrap address of a running cluster, for one suite")
    parser.add_argument("--list", action="store_true", help="print the lists with their reasons")
    options = parser.parse_args(given)
    names = options.names or list(SUITES)
    if options.list:
        for name in names:
            lists = Lists.of(list_of(name))
            for kind, entries in (("not run", lists.not_run), ("fails", lists.fails)):
                for test, why in entries.items():
                    print(f"{name}: {kind}: {test}: {why}")
        return 0
    wrong = []
    for name in names:
        try:
            wrong += [f"{name}: {each}" for each in run(name, options.bootstrap)]
        except SuiteError as error:
            wrong.append(f"{name}: {error}")
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
