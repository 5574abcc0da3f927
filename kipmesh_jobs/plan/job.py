"""The command `kipmesh job plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kipmesh_jobs.frame import Job, JobRun, Outcome
from kipmesh_jobs.report import binary_size, percent

if TYPE_CHECKING:
    from kipmesh_jobs.plan.seeds import Figure
    from kipmesh_jobs.plan.simulation import Statistics
    from kipmesh_jobs.plan.sizes import Sample, Sizes

_SAMPLES: Final = "part string, case string, run int, metric string, value double"
_SUMMARY: Final = (
    "part string, case string, metric string, runs int, mean double, least double, most double, deviation double"
)
_FIGURES: Final = "kip string, what string, seed_says string, computed string, holds boolean, value double"


@dataclass(frozen=True, slots=True)
class Options:
    """Size of the planned cluster, samples per case and random seed. Raises typer.BadParameter for a replication factor
    of at least the number of brokers, fewer partitions than brokers, or more than 300,000 replicas per broker.
    """

    brokers: Annotated[int, typer.Option(min=10, max=10_000, help="Number of brokers.")] = 1_000
    topics: Annotated[int, typer.Option(min=10, max=100_000_000, help="Number of topics.")] = 1_000_000
    topic_partitions: Annotated[int, typer.Option(min=1, max=1_000, help="Partitions per topic.")] = 10
    replication_factor: Annotated[int, typer.Option(min=2, max=9, help="Replicas per partition.")] = 3
    producers: Annotated[int, typer.Option(min=1, max=100_000_000, help="Number of producers.")] = 100_000
    batches_per_s: Annotated[
        float, typer.Option("--batches-per-second", min=0.001, help="Batches produced to the whole cluster.")
    ] = 1_000_000.0
    slots: Annotated[int, typer.Option(min=10, max=100_000, help="Slots of a broker's session cache.")] = 10_000
    runs: Annotated[int, typer.Option(min=1, max=10_000, help="Samples per case.")] = 3
    seed: Annotated[int, typer.Option(min=0, help="Random seed, which determines all figures.")] = 1

    def __post_init__(self) -> None:
        if self.replication_factor >= self.brokers:
            text = f"must be less than the {self.brokers} brokers, got {self.replication_factor}"
            raise typer.BadParameter(text, param_hint="--replication-factor")
        partitions = self.topics * self.topic_partitions
        if partitions < self.brokers:
            text = f"must give at least one partition per broker, got {partitions} for {self.brokers} brokers"
            raise typer.BadParameter(text, param_hint="--topics")
        if partitions * self.replication_factor / self.brokers > 300_000:
            raise typer.BadParameter("must give at most 300,000 replicas per broker", param_hint="--topics")

    def sizes(self) -> Sizes:
        """Return the options that describe the cluster as `Sizes`, without runs and seed."""
        from kipmesh_jobs.plan.sizes import Sizes

        return Sizes(**{name: value for name, value in asdict(self).items() if name in Sizes._fields})


TEXT: Final = """Plan a large cluster by simulation, with the production code of brokers and clients.

A Monte Carlo simulation of fetch bytes with and without sessions (KIP-227), session caches with many clients under
both policies, a broker failure by event and by record (KIP-630), and the metadata of many producers (KIP-526). Each
sample is a Spark task with its own seed. The report compares the results with the figures of the proposals.

Exit code 1 if a figure of a proposal is not reproduced."""


def run(run: JobRun, options: Options) -> Outcome:
    """Simulate all samples as Spark tasks, compare them with the proposals' figures and write the tables. The outcome
    has `passed` False if a figure of a proposal is not reproduced. Raises JavaMissingError.
    """
    from kipmesh_jobs.plan.seeds import figures
    from kipmesh_jobs.plan.simulation import Statistics, all_tasks, make_page, simulate

    sizes = options.sizes()
    tasks = all_tasks(sizes, options.runs, options.seed)
    spark = run.spark
    with run.spark_step("Simulate", len(tasks)):
        context = spark.sparkContext
        samples: list[Sample] = context.parallelize(tasks, len(tasks)).flatMap(simulate).collect()
    with run.step("Figures of the proposals"):
        found = Statistics(samples)
        computed = figures(found.mean)
        for name, rows, schema in (
            ("samples", samples, _SAMPLES),
            ("summary", [tuple(row.values()) for row in found.rows()], _SUMMARY),
            ("figures", computed, _FIGURES),
        ):
            spark.createDataFrame(rows, schema).coalesce(1).write.parquet(str(run.parquet / name))
    summary = summarize(options, found, computed)
    wrong = [one for one in computed if one.holds is False]
    lines = [
        f"{len(tasks)} samples; {sum(one.holds is True for one in computed)} figures of the proposals are reproduced,"
        f" {len(wrong)} are not",
        *(f"KIP-{one.kip}: {one.what}: proposal {one.seed_says}, computed {one.computed}" for one in wrong),
        *_lines(summary),
    ]
    page = make_page(sizes, options.runs, options.seed, found, computed)
    return Outcome(summary, page, tuple(lines), passed=not wrong)


def summarize(options: Options, found: Statistics, computed: Sequence[Figure]) -> dict[str, Any]:
    """Return the contents of summary.json: `passed`, the options, means over all runs of selected metrics, the figures
    of the proposals, and `cases` (mean, minimum, maximum and standard deviation of each metric). Raises KeyError if the
    part `fetches` was not simulated.
    """
    with_sessions = found.mean("fetches", "sessions", "mesh_bytes_per_s")
    without = found.mean("fetches", "without", "mesh_bytes_per_s")
    return {
        "passed": all(one.holds is not False for one in computed),
        **asdict(options),
        "fetch_bytes_per_s": {"sessions": with_sessions, "without": without, "ratio": without / with_sessions},
        "session_hits": {case: round(mean, 4) for case, mean in found.by_case("slots", "hits:all").items()},
        "failover_sent_bytes": found.by_case("failover", "sent_as_responses_bytes"),
        "metadata_bytes_per_s": found.by_case("producers", "bytes_per_s"),
        "figures": [one._asdict() for one in computed],
        "cases": found.rows(),
    }


def _lines(summary: dict[str, Any]) -> list[str]:
    fetch = summary["fetch_bytes_per_s"]
    hits = ", ".join(f"{case} {percent(round(value, 3))}" for case, value in summary["session_hits"].items())
    sent = summary["failover_sent_bytes"]
    return [
        f"fetch overhead of followers: {binary_size(fetch['sessions'])}/s with sessions, "
        f"{binary_size(fetch['without'])}/s without, {fetch['ratio']:.1f} x",
        f"incremental fetches, by policy and consumers per slot: {hits}",
        f"broker failure: {binary_size(sent['event:1'])} to all brokers by event, "
        f"{binary_size(sent['record:1'])} by record",
        "metadata of all producers: "
        + ", ".join(f"{mode} {binary_size(value)}/s" for mode, value in summary["metadata_bytes_per_s"].items()),
    ]


JOB: Final = Job(
    name="plan",
    summary="Plan a large cluster by Monte Carlo simulation of the production code.",
    text=TEXT,
    examples="""
    kipmesh job plan
    kipmesh job plan --brokers 300 --topics 50000 --producers 5000 --runs 10
    kipmesh job plan --master spark://host:7077 --runs 100 --seed 7 --json
    """,
    options=Options,
    run=run,
)
