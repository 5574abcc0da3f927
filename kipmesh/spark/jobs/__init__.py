"""Spark jobs over the mesh, a package each, which ``kipmesh job NAME`` runs.

A job is a `frame.Job` called ``JOB`` in its module ``job``; `MODULES` names them. The frame (`frame`, `folder`,
`screen`, `report`) gives each the same options, folder, progress and page.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kipmesh.spark.jobs.frame import Job

MODULES: Final[Mapping[str, str]] = {
    "flights": "kipmesh.spark.jobs.flights.job",
    "kip-report": "kipmesh.spark.jobs.kip_report.job",
    "audit": "kipmesh.spark.jobs.audit.job",
    "plan": "kipmesh.spark.jobs.plan.job",
}
"""By name, in the order of help. These modules are imported by every command: they import pyspark when they run."""


def load(name: str) -> Job[Any]:
    """The job of a name in `MODULES`."""
    job: Job[Any] = import_module(MODULES[name]).JOB
    return job
