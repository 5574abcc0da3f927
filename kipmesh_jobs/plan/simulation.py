"""Tasks of a plan, the function that simulates one of them in Spark, statistics over all samples, and the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pandas as pd

from kipmesh_jobs.plan import failover, fetches, producers, slots
from kipmesh_jobs.plan.seeds import Figure
from kipmesh_jobs.plan.sizes import Sample, Sizes, Task
from kipmesh_jobs.report import Page, percent

_PARTS: Final[Mapping[str, Callable[[Task], dict[str, float]]]] = {
    "slots": slots.sample,
    "sizes": fetches.sample_sizes,
    "failover": failover.sample,
    "seed": failover.sample_seed,
    "producers": producers.sample,
    "fetches": fetches.sample,
}
"""Slowest parts first, so that tasks end at about the same time."""
CASES: Final[Mapping[str, tuple[str, ...]]] = {
    "slots": tuple(slots.case_of(policy, load) for policy in slots.POLICIES for load in slots.LOADS),
    "sizes": fetches.CHANGED_CASES,
    "failover": tuple(failover.case_of(way, many) for way in failover.WAYS for many in failover.FAILURES),
    "seed": failover.WAYS,
    "producers": tuple(producers.MODES),
    "fetches": fetches.CASES,
}
_ONCE: Final = ("sizes", "seed")
"""Parts without randomness."""


def all_tasks(sizes: Sizes, runs: int, seed: int) -> list[Task]:
    """Return a task for every case of every part, `runs` times if the part is random.

    Failover cases are omitted unless more brokers than the replication factor would remain.
    """
    return [
        Task(part, case, run, seed, sizes)
        for part, cases in CASES.items()
        for run in range(1 if part in _ONCE else runs)
        for case in cases
        if part != "failover" or int(case.partition(":")[2]) < sizes.brokers - sizes.replication_factor
    ]


def simulate(task: Task) -> list[Sample]:
    """Simulate one task; return a sample for each of its metrics."""
    figures = _PARTS[task.part](task)
    return [Sample(task.part, task.case, task.run, metric, float(value)) for metric, value in figures.items()]


class Statistics:
    """Number of samples, mean, minimum, maximum and population standard deviation of each metric over all runs, by part
    and case.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        values = pd.DataFrame(sorted(samples)).groupby(["part", "case", "metric"])["value"]
        found = values.agg(runs="count", mean="mean", least="min", most="max")
        self._table = found.assign(deviation=values.std(ddof=0))

    def mean(self, part: str, case: str, metric: str) -> float:
        """Return the mean of a metric over all runs. Raises KeyError if it was not simulated."""
        return float(self._table.at[(part, case, metric), "mean"])

    def case(self, part: str, case: str) -> dict[str, float]:
        """Return the mean of each metric of a case, by metric. Empty if the case was not simulated."""
        return {key[2]: mean for key, mean in self._table["mean"].items() if key[:2] == (part, case)}

    def by_case(self, part: str, metric: str) -> dict[str, float]:
        """Return the mean of a metric for each case of a part, by case. Empty if the metric was not simulated."""
        return {key[1]: mean for key, mean in self._table["mean"].items() if (key[0], key[2]) == (part, metric)}

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per part, case and metric, in that order, with `runs`, `mean`, `least`, `most` and
        `deviation`.
        """
        found: list[dict[str, Any]] = self._table.reset_index().to_dict("records")
        return found


_KINDS: Final = ("follower", "large consumer", "small consumer", "slow consumer", "all")
_FAILURE: Final = (
    *("partitions", "records", "record_bytes", "batch_bytes", "sent_as_responses_bytes"),
    *("proof_records", "proof_sent_bytes"),
)


def make_page(sizes: Sizes, runs: int, seed: int, found: Statistics, computed: Sequence[Figure]) -> Page:
    """Return the page `plan.html` with charts and tables of all parts, and the figures of the proposals."""
    failures = {
        (many, way): found.case("failover", failover.case_of(way, many))
        for many in failover.FAILURES
        for way in failover.WAYS
    }
    simulated = {key: metrics for key, metrics in failures.items() if metrics}
    values = {
        "sizes": sizes,
        "runs": runs,
        "seed": seed,
        "mean": found.mean,
        "figures": computed,
        "modes": list(producers.MODES),
        "fetch_sizes": {
            f"{label}, {case} changed": _by_size(found.case("sizes", case), name)
            for case in fetches.CHANGED_CASES
            for name, label in zip(fetches.CASES, ("with", "without"), strict=True)
        },
        "hits": {
            f"{policy}: {kind}s": [(load, _hits(found, policy, load).get(kind)) for load in slots.LOADS]
            for policy in slots.POLICIES
            for kind in _KINDS[:3]
        },
        "slot_rows": [_slots_row(sizes, found, policy, load) for load in slots.LOADS for policy in slots.POLICIES],
        "sent": [
            (f"{many} failed, by {way}", metrics["sent_as_responses_bytes"], "", failover.WAYS.index(way))
            for (many, way), metrics in simulated.items()
        ],
        "failures": [
            (f"{many}, by {way}", *(round(metrics[name], 1) for name in _FAILURE))
            for (many, way), metrics in simulated.items()
        ],
        "asked": [
            (f"{mode}, {when}", found.mean("producers", mode, metric), "", place)
            for place, (metric, when) in enumerate(
                (("topics_per_s", "on average"), ("start_topics_per_s", "at the start"))
            )
            for mode in producers.MODES
        ],
    }
    return Page("plan.html", values)


def _by_size(metrics: Mapping[str, float], name: str) -> list[tuple[int, float]]:
    split = ((metric.split(":"), mean) for metric, mean in metrics.items())
    return sorted((int(partitions), mean) for (way, partitions), mean in split if way == name)


def _hits(found: Statistics, policy: str, load: float) -> dict[str, float]:
    metrics = found.case("slots", slots.case_of(policy, load))
    return {name.removeprefix("hits:"): mean for name, mean in metrics.items() if name.startswith("hits:")}


def _slots_row(sizes: Sizes, found: Statistics, policy: str, load: float) -> tuple[Any, ...]:
    hits = _hits(found, policy, load)
    shares = [percent(round(hits[kind], 3)) if kind in hits else None for kind in _KINDS]
    evictions = round(found.mean("slots", slots.case_of(policy, load), "evictions"))
    return (policy, round(sizes.slots * load), *shares, evictions)
