"""`kipmesh chaos`: run fault experiments on a cluster under load, and check the recorded histories for anomalies."""

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
    EXIT_FAILED,
    EXIT_SIGNAL,
    AsJson,
    CommandError,
    command,
    command_config,
    counted,
    make_app,
    option,
    print_json,
    report_error,
    seconds_option,
)

if TYPE_CHECKING:
    from kipmesh_chaos.experiment import Experiment
    from kipmesh_chaos.history_checker import Figures, Verdict
    from kipmesh_chaos.recorder import Recorder
    from kipmesh_chaos.runner import OnProgress, Result
    from kipmesh_chaos.target_cluster import MakeCluster

EXIT_SKIPPED = 77
"""Exit code when this machine cannot run an experiment."""
DEFAULT_RESULTS = Path("kipmesh-chaos")

app = make_app(
    "Inject faults into a cluster under load, and check that no record is lost.",
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
    directory: Annotated[
        Path, option("--dir", "Directory of the results. Each run creates NAME-SEED (or NAME-SEED-2) in it.")
    ] = DEFAULT_RESULTS,
    runs: Annotated[int, typer.Option(min=1, max=10_000, help="Runs of each experiment; the seed grows by one.")] = 1,
    seed: Annotated[int | None, typer.Option(min=0, help="Random seed of the first run. Default: random.")] = None,
    duration_s: Annotated[float | None, seconds_option("--duration", "Seconds with faults.")] = None,
    compose: Annotated[
        str | None, option("--compose", "Target: the containers of a running Compose project.", metavar="PROJECT")
    ] = None,
    inside: Annotated[bool, option("--inside", "With --compose: run inside the containers' network.")] = False,
    kube: Annotated[
        str | None,
        typer.Option(
            metavar="NAMESPACE/RELEASE",
            envvar="KIPMESH_KUBE",
            help="Target: a release of the Helm chart. Must run in one of its pods.",
        ),
    ] = None,
) -> None:
    """Run experiments one after the other, by default on new local clusters, and check their histories.

    Each run writes report.html, summary.json and history.jsonl, and keeps the cluster's files after an anomaly. Exit
    code 1 if a run failed or had an anomaly, 77 if this machine cannot run one of the experiments.

    Examples:
    kipmesh chaos run deploy/chaos/kill-leader.yaml --runs 10
    kipmesh chaos run deploy/chaos/*.yaml
    kipmesh chaos run deploy/chaos/random.yaml --duration 1800 --seed 7 --dir build/chaos
    kipmesh chaos run deploy/chaos/compose/kill-each.yaml --compose kipmesh
    """
    if inside and compose is None:
        raise typer.BadParameter("--inside needs --compose")
    try:
        import kipmesh_chaos.runner  # noqa: F401 - fails if a dependency is missing
        from kipmesh_chaos.disk import NotPossibleError, enter_namespace
        from kipmesh_chaos.experiment import load
    except ImportError as error:
        raise CommandError(f"package {error.name!r} is not installed; run: pip install 'kipmesh[chaos]'") from None
    experiments = [load(file, duration_s=duration_s) for file in files]
    is_local = compose is None and kube is None
    client = {} if is_local else command_config()
    make = _cluster_factory(compose, inside, kube, client)
    first = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    if is_local and any(experiment.needs_disks for experiment in experiments):
        with suppress(NotPossibleError):  # reported by the runs that need disks
            enter_namespace([sys.executable, "-P", "-m", "kipmesh.cli.main", *sys.argv[1:]])
    results: list[Result] = []
    skipped = failed = 0
    for experiment in experiments:
        for number in range(runs):
            try:
                results.append(_run_one(experiment, make, directory, first + number, f"{number + 1}/{runs}", client))
            except NotPossibleError as error:
                skipped += 1
                print(f"{experiment.name}: skipped: {error}", flush=True)
                break
            except typer.Exit:
                raise
            except Exception as error:
                failed += 1
                report_error(error)
                print(f"{experiment.name} (seed {first + number}): could not be run", flush=True)
    _summarize(results, failed, skipped)


def _summarize(results: Sequence[Result], failed: int, skipped: int) -> None:
    """Print a summary of several runs. Returns normally if none failed, was skipped or had an anomaly.

    Raises typer.Exit with 1 if a run failed or had an anomaly, else with 77 if one was skipped.
    """
    clean = sum(result.verdict.is_clean for result in results)
    if len(results) + skipped + failed > 1:
        runs = counted(len(results), "run")
        print(f"{runs}, {clean} without an anomaly; {failed} could not be run, {skipped} skipped")
    if failed or clean < len(results):
        raise typer.Exit(EXIT_FAILED)
    if skipped:
        raise typer.Exit(EXIT_SKIPPED)


@command(app)
def check(
    file: Annotated[Path, typer.Argument(metavar="HISTORY", help="history.jsonl of a run.")], as_json: AsJson = False
) -> None:
    """Check the history of a run again. Exit code 1 if it has an anomaly.

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
        raise typer.Exit(EXIT_FAILED)


def _group_figures(figures: Figures) -> str:
    if not figures.generations:
        return ""
    return f"; {figures.generations} generations, {figures.commits} commits, {figures.read_again} read again"


def _print_verdict(name: str, verdict: Verdict) -> None:
    figures = verdict.figures
    anomalies = "no anomaly" if verdict.is_clean else counted(sum(verdict.counts.values()), "anomaly", "anomalies")
    print(
        f"{name}: {anomalies}; {counted(figures.faults, 'fault')}, {figures.acknowledged} acknowledged, "
        f"{figures.unknown} unknown, "
        f"{figures.read} read, longest gap {figures.longest_write_gap_s:.2f} s, longest read delay "
        f"{figures.longest_read_delay_s:.2f} s{_group_figures(figures)}"
    )
    for kind, count in sorted(verdict.counts.items()):
        first = next(one for one in verdict.findings if one.kind.value == kind)
        where = f"partition {first.partition}, " if first.partition >= 0 else ""
        print(f"  {kind}: {count}, first: {where}{first.t:.2f} s: {first.text}")


def _cluster_factory(compose: str | None, inside: bool, kube: str | None, client: Mapping[str, str]) -> MakeCluster:
    """Return the factory of each run's cluster. Raises CommandError for an invalid --kube."""
    if kube is not None:
        return _on_kubernetes(kube)
    if compose is None:
        from kipmesh.cli.chaos_clusters import LocalCluster

        return LocalCluster
    from kipmesh_chaos import containers
    from kipmesh_chaos.runner import TOPIC

    return containers.maker(compose, TOPIC, inside=inside, client=client)


def _run_one(
    experiment: Experiment, make: MakeCluster, directory: Path, seed: int, count: str, client: Mapping[str, str]
) -> Result:
    from kipmesh.node import logging
    from kipmesh_chaos import runner

    logging.configure(level="error", form="console", context={})
    home = _new_directory(directory.absolute(), f"{experiment.name}-{seed}")
    with _progress(f"{experiment.name} {count}") as on_progress:
        result = _interruptible(lambda: runner.run_once(experiment, make, home, seed, on_progress, client))
    _print_verdict(f"{experiment.name} (seed {seed})", result.verdict)
    print(f"  {home / 'report.html'}", flush=True)
    return result


def _new_directory(parent: Path, name: str) -> Path:
    """Create and return parent/name, or name-2 and so on if it exists. Safe for concurrent runs."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        home = parent / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            home.mkdir()
            break
    return home


def _interruptible(make: Any) -> Result:
    """Run the coroutine that `make` returns. SIGINT, SIGTERM and SIGHUP cancel it.

    Raises the coroutine's error, or typer.Exit with 128 + signal after a signal, once the coroutine has cleaned up.
    Errors during the cleanup are reported.
    """
    received: list[signal.Signals] = []
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup the run continues
        signals.append(signal.SIGHUP)

    async def work() -> Result:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()

        def stop(number: signal.Signals) -> None:
            if not received:
                task.cancel()
            received.append(number)

        for number in signals:
            loop.add_signal_handler(number, stop, number)
        result: Result = await make()
        return result

    try:
        return asyncio.run(work())
    except (asyncio.CancelledError, Exception) as error:
        first = _first(error) if isinstance(error, ExceptionGroup) else error
        if isinstance(first, Exception) and not received:
            raise first from None
        with suppress(OSError):  # the terminal may be closed
            if isinstance(first, Exception):
                report_error(first)
                print("kipmesh: interrupted", file=sys.stderr)
            else:
                print("kipmesh: interrupted; the cluster is stopped or restored", file=sys.stderr)
        raise typer.Exit(EXIT_SIGNAL + (received[0] if received else signal.SIGINT)) from None


def _first(group: ExceptionGroup[Exception]) -> Exception:
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def _progress(name: str) -> Iterator[OnProgress]:
    """Yield a callback that shows a progress bar, or one line per phase if stderr is not a terminal."""
    if not sys.stderr.isatty():
        last = ""

        def print_phase(phase: str, share: float, recorder: Recorder) -> None:
            nonlocal last
            if phase != last:
                last = phase
                print(f"{name}: {recorder.now:.1f} s: {phase}", file=sys.stderr, flush=True)

        yield print_phase
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(name, total=1)

        def show(phase: str, share: float, recorder: Recorder) -> None:
            counts = f"{recorder.acknowledged} acknowledged, {recorder.read} read"
            progress.update(bar, description=f"{name}: {phase} ({counts})", completed=share)

        yield show


def _on_kubernetes(target: str) -> MakeCluster:
    """Return the factory for a release. Raises CommandError unless `target` is NAMESPACE/RELEASE."""
    namespace, slash, release = target.partition("/")
    if not (namespace and slash and release) or "/" in release:
        raise CommandError(f"--kube must be NAMESPACE/RELEASE, got {target!r}")
    from kipmesh.cli.chaos_clusters import KubeCluster

    return lambda _directory, _part, _hook: KubeCluster(namespace, release)
