"""`python tools/client_suites.py [NAME...]`: test suites that clients of others bring, as they are, on a live mesh.

Each is fetched at a fixed commit or version, and run against a mesh of its own, or against meshes that it starts. The
file NAME.toml in `tests/clients/suites` lists what is not run (`[not-run]`) and what is expected to fail (`[fails]`), a
reason each; a name that ends with `*` stands for all that begin so. The run fails when something else fails, and when
something of the list passes: then the list is to be shrunk. `--list` says what the lists have; `--bootstrap` takes a
cluster that runs.
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
"""What the suites take our brokers for, where they ask."""


class SuiteError(Exception):
    """A suite could not be fetched or did not run; the text says why."""


class Outcome(NamedTuple):
    """How a test ended: passed, failed or skipped."""

    name: str
    outcome: str
    why: str = ""


class Suite(NamedTuple):
    """How to fetch it into a folder, and to run it there on a cluster."""

    fetch: Callable[[Path], None]
    run: Callable[[Path, str, Path], list[Outcome]]
    config: Mapping[str, str]
    """Of the mesh."""
    brokers: int = 3
    """0: it starts what it asks."""


class Lists(NamedTuple):
    """What is not run, and what is expected to fail, with the reasons."""

    not_run: Mapping[str, str]
    fails: Mapping[str, str]

    @staticmethod
    def of(path: Path) -> Lists:
        """Read them."""
        found = tomllib.loads(path.read_text())
        return Lists(found.get("not-run", {}), found.get("fails", {}))


def list_of(name: str) -> Path:
    """The file of a suite's lists."""
    return LISTS / f"{name}.toml"


def is_in(name: str, patterns: Mapping[str, str]) -> bool:
    """Whether one of them is its name or stands for it."""
    return any(name == each or (each.endswith("*") and name.startswith(each[:-1])) for each in patterns)


def _do(what: str, command: Sequence[str], folder: Path) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SuiteError(f"{what}: {error}") from None
    if done.returncode:
        raise SuiteError(f"{what}: {(done.stderr + done.stdout).strip()[-2000:]}")
    return done.stdout


# --- from git: aiokafka and kafka-python


def _from_git(repository: str, commit: str, *unwanted: str) -> Callable[[Path], None]:
    def fetch(folder: Path) -> None:
        folder.mkdir(parents=True)
        for command in (
            ["git", "init", "--quiet"],
            ["git", "fetch", "--quiet", "--depth", "1", f"https://github.com/{repository}", commit],
            ["git", "checkout", "--quiet", "--detach", commit],
        ):
            _do(f"git of {repository}", command, folder)
        for name in unwanted:
            shutil.rmtree(folder / name)

    return fetch


def _pytest(name: str, tests: str, *more: str) -> Callable[[Path, str, Path], list[Outcome]]:
    """One that pytest runs, with the plugin that tells how each test ended."""

    def run(folder: Path, bootstrap: str, log: Path) -> list[Outcome]:
        first = bootstrap.split(",")[0]
        results = log.with_suffix(".jsonl")
        results.unlink(missing_ok=True)
        where = {"KAFKA_URI": f"kafka://{first}", "KAFKA_ROOT": str(folder)}
        if name == "aiokafka":
            where = {"KAFKA_BOOTSTRAP": bootstrap}
        env = {
            **os.environ,
            **where,
            "KAFKA_VERSION": KAFKA_VERSION,
            "PYTHONPATH": f"{folder}:{LISTS}",
            "SUITE_RESULTS": str(results),
            "SUITE_LIST": str(list_of(name)),
        }
        limits = [f"--timeout={TEST_TIMEOUT_S}", "--timeout-method=signal", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", tests, "-p", "suite_plugin", "-q", *limits, *more]
        _logged(command, folder, env, log)
        if not results.exists():
            raise SuiteError(f"{name} ran no test: see {log}")
        return [Outcome(**json.loads(line)) for line in results.read_text().splitlines()]

    return run


def _logged(command: Sequence[str], folder: Path, env: Mapping[str, str], log: Path) -> None:
    with log.open("wb") as output:
        try:
            subprocess.run(
                command, cwd=folder, env=env, stdout=output, stderr=output, timeout=SUITE_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SuiteError(f"{error}: see {log}") from None


# --- franz-go


def _fetch_franz(folder: Path) -> None:
    where = ROOT / "tests" / "clients" / "franz"
    _do("go mod verify", ["go", "mod", "download", FRANZ], where)
    source = _do("go list", ["go", "list", "-m", "-f", "{{.Dir}}", FRANZ], where).strip()
    shutil.copytree(source, folder)
    for each in [folder, *folder.rglob("*")]:
        each.chmod(each.stat().st_mode | 0o200)  # a cache of modules is read-only


def _run_franz(folder: Path, bootstrap: str, log: Path) -> list[Outcome]:
    """Its tests make up to seven partitions a topic, and 50,000 records, a tenth of what they do by themselves."""
    not_run = Lists.of(list_of("franz-go")).not_run
    env = {
        **os.environ,
        "KGO_SEEDS": bootstrap,
        "KGO_TEST_RECORDS": "50000",
        "KGO_TEST_MAX_TOPIC_PARTS": "7",
        "KGO_LOG_LEVEL": "none",
    }
    skip = ["-skip", "|".join(f"^{re.escape(name)}$" for name in not_run)] if not_run else []
    _logged(["go", "test", "-json", "-timeout", "30m", "-count=1", *skip, "./pkg/kgo"], folder, env, log)
    said: dict[str, str] = {}
    found = []
    for line in log.read_text(errors="replace").splitlines():
        event = {}
        with contextlib.suppress(ValueError):
            event = json.loads(line)
        name, action = event.get("Test"), event.get("Action")
        if name is None:
            continue
        if action == "output":
            said[name] = (said.get(name, "") + event["Output"])[-3000:]
        elif action in ("pass", "fail", "skip"):
            outcome = {"pass": "passed", "fail": "failed", "skip": "skipped"}[action]
            found.append(Outcome(name, outcome, said.pop(name, "")))
    if not found:
        raise SuiteError(f"franz-go ran no test: see {log}")
    return found


# --- kafka-tester


PORT = 9092
SHARED = Path("/tmp")
"""Where it makes its files, whatever the system's own folder for such files is."""
MADE = ("server.properties", "kraft-combined-logs")
"""By the suite, in `SHARED`."""
STAGE_TIMEOUT_S = 120
"""Of a stage, which itself gives up after 10 or 15 s."""
_STAGE = re.compile(r"Slug:\s*\"(\w+)\",\s*TestFunc:\s*(\w+),")


class Stage(NamedTuple):
    """One test of kafka-tester: the name that it goes by, and the function."""

    slug: str
    function: str

    @property
    def name(self) -> str:
        """For the lists."""
        return f"{self.slug}:{self.function}"

    @property
    def told(self) -> str:
        """As the suite wants to be told what to run."""
        return json.dumps([{"slug": self.slug, "tester_log_prefix": self.slug, "title": self.function}])


def stages(definition: str) -> list[Stage]:
    """All that its source has, in their order."""
    return [Stage(*found) for found in _STAGE.findall(definition)]


def _fetch_tester(folder: Path) -> None:
    _from_git("codecrafters-io/kafka-tester", "018f9bc8ee3317001e26280c41e4cac916564e34")(folder)
    _do("go build of kafka-tester", ["go", "build", "-o", "tester", "./cmd/tester"], folder)


def _check_nobody_is_there() -> None:
    there = [f"{SHARED / name} is there" for name in MADE if (SHARED / name).exists()]
    if not ports.is_free(PORT):
        there.append(f"port {PORT} is taken")
    if there:
        raise SuiteError(f"kafka-tester needs port {PORT} and makes files of its own: {', '.join(there)}")


def _run_tester(folder: Path, bootstrap: str, log: Path) -> list[Outcome]:
    """Each stage by itself, for it goes no further than the first that fails; the program is one of ours."""
    if bootstrap:
        raise SuiteError("kafka-tester starts its brokers itself")
    _check_nobody_is_there()
    not_run = Lists.of(list_of("kafka-tester")).not_run
    program, home = folder.with_name("kafka-tester-program"), folder.with_name("kafka-tester-mesh")
    program.mkdir(exist_ok=True)
    (program / "codecrafters.yml").write_text("debug: true\n")
    script = program / "your_program.sh"
    ours = [sys.executable, str(ROOT / "tools" / "kafka_folder_mesh.py"), "--home", str(home)]
    script.write_text(f'#!/bin/sh\nexec {shlex.join(ours)} "$@"\n')
    script.chmod(0o755)
    env = {"CODECRAFTERS_RANDOM_SEED": "1", **os.environ, "CODECRAFTERS_REPOSITORY_DIR": str(program)}
    found, said = [], []
    try:
        for stage in stages((folder / "internal" / "tester_definition.go").read_text()):
            if is_in(stage.name, not_run):
                continue
            found.append(_run_stage(stage, folder, env))
            said.append(f"=== {stage.name}: {found[-1].outcome}\n{found[-1].why}\n")
    finally:
        log.write_text("".join(said))
        (SHARED / MADE[0]).unlink(missing_ok=True)
        for each in (SHARED / MADE[1], home):
            shutil.rmtree(each, ignore_errors=True)
    if not found:
        raise SuiteError("kafka-tester has no stages")
    return found


def _run_stage(stage: Stage, folder: Path, env: Mapping[str, str]) -> Outcome:
    command = [str(folder / "tester")]
    try:
        done = subprocess.run(
            command,
            env={**env, "CODECRAFTERS_TEST_CASES_JSON": stage.told},
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
        brokers=1,  # as its own: of several it takes the first answer of a poll for all that there is
    ),
    "aiokafka": Suite(  # its tests, of the client that is installed: of the same version, and built
        _from_git("aio-libs/aiokafka", "672947afe85c91b7d953f0259e69837a711d3246", "aiokafka"),
        _pytest(
            "aiokafka",
            "tests",
            f"--docker-image=kafka:0_{KAFKA_VERSION}",
            "--ignore=tests/coordinator",  # no brokers there, but modules that we do not have
            "--ignore=tests/test_requests.py",
            "--override-ini=asyncio_default_fixture_loop_scope=function",
        ),
        {"num.partitions": "2", "group.initial.rebalance.delay.ms": "0"},
        brokers=1,  # it takes the broker that it asks for the one that leads
    ),
    "kafka-tester": Suite(_fetch_tester, _run_tester, {}, brokers=0),
}


def problems(found: Sequence[Outcome], lists: Lists) -> list[str]:
    """What fails and is not expected to, and what is expected to fail and passes, for people."""
    ended = {each.name: each for each in found}
    failed = [each for each in found if each.outcome == "failed"]
    lines = [f"fails: {each.name}\n{each.why[-1500:]}" for each in failed if not is_in(each.name, lists.fails)]
    for pattern in lists.fails:
        mine = [name for name in ended if is_in(name, {pattern: ""})]
        if not any(ended[name].outcome == "failed" for name in mine):
            lines.append(f"is listed as failing and does not: {pattern}")
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
    """Fetch it if need be, run it, print a line; its problems. Raises SuiteError."""
    suite, folder, lists = SUITES[name], BUILD / name, Lists.of(list_of(name))
    complete = BUILD / f"{name}.complete"
    BUILD.mkdir(parents=True, exist_ok=True)
    if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        suite.fetch(folder)
        complete.touch()
    with _brokers(suite, bootstrap) as there:
        found = suite.run(folder, there, BUILD / f"{name}.log")
    counts = Counter(each.outcome for each in found)
    wrong = problems(found, lists)
    text = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
    expected = sum(each.outcome == "failed" and is_in(each.name, lists.fails) for each in found)
    print(f"{name}: {text} ({expected} as expected); {len(wrong)} problems", flush=True)
    return wrong


def main(given: Sequence[str]) -> int:
    """Run some or all suites; 1 if there is a problem."""
    parser = argparse.ArgumentParser(prog="python tools/client_suites.py", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *SUITES], help="suites (all)")
    parser.add_argument("--bootstrap", help="a cluster that runs already: then one suite")
    parser.add_argument("--list", action="store_true", help="what is not run and what fails, and why")
    options = parser.parse_args(given)
    names = options.names or list(SUITES)
    if options.list:
        for name in names:
            lists = Lists.of(list_of(name))
            for what, entries in (("not run", lists.not_run), ("fails", lists.fails)):
                for test, why in entries.items():
                    print(f"{name}: {what}: {test}: {why}")
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
