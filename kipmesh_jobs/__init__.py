"""Spark jobs over the mesh, a package each, which ``kipmesh job NAME`` runs.

A job is a `frame.Job` called ``JOB`` in its module ``job``; `MODULES` names them. The frame
(`frame`) gives each the same options, folder and progress; `report` and `charts` make its page from `templates/`.
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
"""By name, in the order of help. These modules are imported by every command: they import pyspark when they run."""


def load(name: str) -> Job[Any]:
    """The job of a name in `MODULES`."""
    job: Job[Any] = import_module(MODULES[name]).JOB
    return job
