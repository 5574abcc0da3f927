"""`kipmesh chaos`: faults on a cluster of processes under a workload, and a checker of what happened."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kipmesh.cli.common import (
    EXIT_SIGNAL,
    AsJson,
    CommandError,
    command,
    command_config,
    explain,
    make_app,
    print_json,
    seconds_option,
)

if TYPE_CHECKING:
    from kipmesh_chaos.experiment import Experiment
    from kipmesh_chaos.history_checker import Figures, Verdict
    from kipmesh_chaos.recorder import Recorder
    from kipmesh_chaos.runner import OnProgress, Result
    from kipmesh_chaos.target_cluster import MakeCluster

EXIT_SKIPPED = 77
"""This machine cannot do what an experiment needs."""
DEFAULT_RESULTS = Path("kipmesh-chaos")

app = make_app(
    "Break a cluster under load, and check that nothing is lost.",
    """
    kipmesh chaos run deploy/chaos/kill-leader.yaml
    kipmesh chaos run deploy/chaos/random.yaml --duration 1800 --seed 7
    kipmesh chaos run deploy/chaos/kubernetes/*.yaml --kube default/mesh
    kipmesh chaos check kipmesh-chaos/kill-leader-1/history.jsonl
    """,
)


@command(app)
def run(
    files: Annotated[list[Path], typer.Argument(metavar="EXPERIMENT.yaml...")],
    folder: Annotated[
        Path,
        typer.Option(
            "--dir", help="Each run gets a folder of its own in this one: NAME-SEED, or NAME-SEED-2.", show_default=True
        ),
    ] = DEFAULT_RESULTS,
    runs: Annotated[int, typer.Option(min=1, max=10_000, help="How often, each with the next seed.")] = 1,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the first run's choices; by chance.")] = None,
    duration_s: Annotated[float | None, seconds_option("--duration", "Seconds under faults.")] = None,
    compose: Annotated[
        str | None,
        typer.Option(
            "--compose", metavar="PROJECT", help="On the containers of a project of docker-compose that runs."
        ),
    ] = None,
    inside: Annotated[bool, typer.Option("--inside", help="With --compose: within the containers' network.")] = False,
    kube: Annotated[
        str | None,
        typer.Option(
            metavar="NAMESPACE/RELEASE",
            envvar="KIPMESH_KUBE",
            help="Break a release of the Helm chart, from within one of its pods, instead of a local cluster.",
        ),
    ] = None,
) -> None:
    """Run experiments, one after the other, and check their histories.

    A run's folder has report.html, summary.json and history.jsonl; after an anomaly the cluster's files too.
    Exit code 1 when there is an anomaly, 77 when this machine cannot run one of the experiments.

    Examples:
    kipmesh chaos run deploy/chaos/kill-leader.yaml --runs 10
    kipmesh chaos run deploy/chaos/*.yaml
    kipmesh chaos run deploy/chaos/random.yaml --duration 1800 --seed 7 --dir build/chaos
    kipmesh chaos run deploy/chaos/compose/kill-each.yaml --compose kipmesh
    """
    try:
        import kipmesh_chaos.runner  # noqa: F401 - with all that it needs
        from kipmesh_chaos.disk import NotPossibleError, enter_namespace
        from kipmesh_chaos.experiment import load
    except ImportError as error:
        raise CommandError(f"the package {error.name!r} is missing: install kipmesh[chaos]") from None
    experiments = [load(file, duration_s=duration_s) for file in files]
    # A local cluster is the run's own, and how it is reached is known.
    client = {} if compose is None and kube is None else command_config()
    make = _maker(compose, inside, kube, client)
    first = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    if compose is None and kube is None and any(experiment.needs_disks for experiment in experiments):
        with suppress(NotPossibleError):  # told by those runs that need it
            enter_namespace([sys.executable, "-P", "-m", "kipmesh.cli.main", *sys.argv[1:]])
    results: list[Result] = []
    skipped = broken = 0
    for experiment in experiments:
        for number in range(runs):
            try:
                results.append(_run_one(experiment, make, folder, first + number, f"{number + 1}/{runs}", client))
            except NotPossibleError as error:
                skipped += 1
                print(f"{experiment.name}: skipped: {error}", flush=True)
                break
            except typer.Exit:
                raise
            except Exception as error:
                broken += 1
                explain(error)
                print(f"{experiment.name} (seed {first + number}): could not be run", flush=True)
    _summarize(results, broken, skipped)


def _summarize(results: Sequence[Result], broken: int, skipped: int) -> None:
    """The last line, and the exit code."""
    clean = sum(result.verdict.is_clean for result in results)
    if len(results) + skipped + broken > 1:
        print(f"{len(results)} runs, {clean} without an anomaly; {broken} could not be run, {skipped} skipped")
    if broken or clean < len(results):
        raise typer.Exit(1)
    if skipped:
        raise typer.Exit(EXIT_SKIPPED)


@command(app)
def check(
    file: Annotated[Path, typer.Argument(metavar="HISTORY", help="history.jsonl of a run.")], as_json: AsJson = False
) -> None:
    """Check the history of a run again. Exit code 1 when there is an anomaly.

    Examples:
    kipmesh chaos check kipmesh-chaos/kill-leader-1/history.jsonl --json
    """
    from kipmesh_chaos import history_checker
    from kipmesh_chaos.history import read_history

    verdict = history_checker.check(read_history(file))
    if as_json:
        for one in verdict.findings:
            print_json({**one._asdict(), "kind": one.kind.value})
        print_json({"clean": verdict.is_clean, "anomalies": verdict.counts, **verdict.figures._asdict()})
    else:
        _print_verdict(str(file), verdict)
    if not verdict.is_clean:
        raise typer.Exit(1)


def _told_of_groups(figures: Figures) -> str:
    if not figures.generations:
        return ""
    return f"; {figures.generations} generations, {figures.commits} commits, {figures.read_again} read again"


def _print_verdict(name: str, verdict: Verdict) -> None:
    figures = verdict.figures
    told = "no anomaly" if verdict.is_clean else f"{sum(verdict.counts.values())} anomalies"
    print(
        f"{name}: {told}; {figures.faults} faults, {figures.acknowledged} acknowledged, {figures.unknown} unknown, "
        f"{figures.read} read, longest gap {figures.longest_write_gap_s:.2f} s, longest read delay "
        f"{figures.longest_read_delay_s:.2f} s{_told_of_groups(figures)}"
    )
    for kind, count in sorted(verdict.counts.items()):
        first = next(one for one in verdict.findings if one.kind.value == kind)
        where = f"partition {first.partition}, " if first.partition >= 0 else ""
        print(f"  {kind}: {count}, first: {where}{first.t:.2f} s: {first.text}")


def _maker(compose: str | None, inside: bool, kube: str | None, client: Mapping[str, str]) -> MakeCluster:
    """What makes each run's cluster."""
    if kube is not None:
        return _on_kubernetes(kube)
    if compose is None:
        from kipmesh.cli.chaos_clusters import LocalCluster

        return LocalCluster
    from kipmesh_chaos import containers
    from kipmesh_chaos.runner import TOPIC

    return containers.maker(compose, TOPIC, inside=inside, client=client)


def _run_one(
    experiment: Experiment, make: MakeCluster, folder: Path, seed: int, which: str, client: Mapping[str, str]
) -> Result:
    from kipmesh.node import logging
    from kipmesh_chaos import runner

    logging.configure(level="error", form="console", context={})
    home = _new_folder(folder.absolute(), f"{experiment.name}-{seed}")
    with _progress(f"{experiment.name} {which}") as on_progress:
        result = _interruptible(lambda: runner.run_once(experiment, make, home, seed, on_progress, client))
    _print_verdict(f"{experiment.name} (seed {seed})", result.verdict)
    print(f"  {home / 'report.html'}", flush=True)
    return result


def _new_folder(place: Path, name: str) -> Path:
    """One of this name, or of name-2 and so on where that is there: of two runs at a time, each makes its own."""
    place.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        home = place / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            home.mkdir()
            break
    return home


def _interruptible(make: Any) -> Result:
    """Run a coroutine; SIGINT, SIGTERM and a terminal's end cancel it, it cleans up, and the exit code is a shell's."""
    got: list[signal.Signals] = []
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` is for a run that is to go on
        signals.append(signal.SIGHUP)

    async def work() -> Result:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()

        def stop(number: signal.Signals) -> None:
            if not got:
                task.cancel()
            got.append(number)

        for number in signals:
            loop.add_signal_handler(number, stop, number)
        result: Result = await make()
        return result

    try:
        return asyncio.run(work())
    except (asyncio.CancelledError, Exception) as error:
        first = _first(error) if isinstance(error, ExceptionGroup) else error
        if isinstance(first, Exception) and not got:
            raise first from None
        with suppress(OSError):  # nobody reads it at a terminal that is gone
            if isinstance(first, Exception):
                explain(first)
                print("kipmesh: interrupted", file=sys.stderr)
            else:
                print("kipmesh: interrupted; the cluster is stopped, or as it was", file=sys.stderr)
        raise typer.Exit(EXIT_SIGNAL + (got[0] if got else signal.SIGINT)) from None


def _first(group: ExceptionGroup[Exception]) -> Exception:
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def _progress(name: str) -> Iterator[OnProgress]:
    """A bar on a terminal; elsewhere a line when something else begins."""
    if not sys.stderr.isatty():
        told = [""]

        def say(what: str, share: float, recorder: Recorder) -> None:
            if what != told[0]:
                told[0] = what
                print(f"{name}: {recorder.now:.1f} s: {what}", file=sys.stderr, flush=True)

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(name, total=1)

        def show(what: str, share: float, recorder: Recorder) -> None:
            counts = f"{recorder.acknowledged} acknowledged, {recorder.read} read"
            progress.update(bar, description=f"{name}: {what} ({counts})", completed=share)

        yield show


def _on_kubernetes(place: str) -> MakeCluster:
    """Raises CommandError for what is no NAMESPACE/RELEASE."""
    namespace, slash, release = place.partition("/")
    if not (namespace and slash and release) or "/" in release:
        raise CommandError(f"--kube {place!r} is not NAMESPACE/RELEASE")
    from kipmesh.cli.chaos_clusters import KubeCluster

    return lambda folder, part, hook: KubeCluster(namespace, release)
