"""Which samples a plan has, and the function that a Spark task runs for one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kipmesh.spark.jobs.plan import failover, fetches, producers, slots
from kipmesh.spark.jobs.plan.sizes import Sample, Sizes, Task, samples

_PARTS: Final[Mapping[str, Callable[[Task], dict[str, float]]]] = {
    "slots": slots.sample,
    "sizes": fetches.sample_sizes,
    "failover": failover.sample,
    "seed": failover.sample_seed,
    "producers": producers.sample,
    "fetches": fetches.sample,
}
"""The longest first, so that no task is left over at the end."""
CASES: Final[Mapping[str, tuple[str, ...]]] = {
    "slots": tuple(slots.case_of(policy, load) for policy in slots.POLICIES for load in slots.LOADS),
    "sizes": fetches.CHANGED_CASES,
    "failover": tuple(failover.case_of(way, many) for way in failover.WAYS for many in failover.FAILURES),
    "seed": failover.WAYS,
    "producers": tuple(producers.MODES),
    "fetches": fetches.CASES,
}
_ONCE: Final = ("sizes", "seed")
"""Nothing in them is left to chance."""


def all_tasks(sizes: Sizes, runs: int, seed: int) -> list[Task]:
    """Every case of every part, `runs` times each where there is chance in it."""
    return [
        Task(part, case, run, seed, sizes)
        for part, cases in CASES.items()
        for run in range(1 if part in _ONCE else runs)
        for case in cases
        if part != "failover" or int(case.partition(":")[2]) < sizes.brokers - sizes.replication_factor
    ]


def simulate(task: Task) -> list[Sample]:
    """One sample."""
    return samples(task, _PARTS[task.part](task))
