"""Spark jobs for `kipmesh job NAME`, one package each.

A job is a `frame.Job` named `JOB` in its module `job`; `MODULES` lists them. `frame` gives all jobs the same options,
output directory and progress. `report` and `charts` create the page from `templates/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kipmesh_jobs.frame import Job

MODULES: Final[Mapping[str, str]] = {
    "flights": "kipmesh_jobs.flights.job",
    "kip-report": "kipmesh_jobs.kip_report.job",
    "audit": "kipmesh_jobs.audit.job",
    "plan": "kipmesh_jobs.plan.job",
}
"""Job modules by name, in the order of the help. Every command imports them, so they import pyspark only when they run.
"""


def load(name: str) -> Job[Any]:
    """Import and return the job with the given name in `MODULES`. Raises KeyError for any other name."""
    job: Job[Any] = import_module(MODULES[name]).JOB
    return job
