"""`kipmesh job`: the Spark jobs over the mesh. Each is described in `kipmesh_jobs`, its options too."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

import kipmesh_jobs as jobs
from kipmesh.cli.common import (
    AsJson,
    command_config,
    examples,
    make_app,
    parse_pairs,
    print_json,
    with_parameters,
)
from kipmesh_jobs.frame import DEFAULT_MASTER, DEFAULT_MEMORY, Job, Settings, run_job

DEFAULT_OUT = Path("kipmesh-jobs")

Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="For results. Left out: kipmesh-jobs/NAME.", show_default=False),
]
Master = Annotated[str, typer.Option("--master", help="Spark's: local[N], local[*], spark://HOST:PORT.")]
Memory = Annotated[str, typer.Option("--driver-memory", help="Of Spark's driver, for example 2g.")]
SparkConf = Annotated[
    list[str] | None, typer.Option("--spark-conf", metavar="KEY=VALUE", help="A setting of Spark; may be repeated.")
]

app = make_app(
    "Run a Spark job: a report with charts, its tables as Parquet, its figures as JSON.",
    """
    kipmesh job --help
    kipmesh job NAME --help
    """,
)


def _command(job: Job[Any]) -> Callable[..., None]:
    """A typer command whose arguments are the fields of the job's options and those that all jobs have."""

    def run(**given: Any) -> None:
        settings = Settings(
            out=given.pop("out") or DEFAULT_OUT / job.name,
            master=given.pop("master"),
            memory=given.pop("memory"),
            spark=parse_pairs(given.pop("spark_conf") or (), "--spark-conf"),
            as_json=given.pop("as_json"),
            client=command_config(),
        )
        _run(job, job.options(**given), settings)

    hints = get_type_hints(job.options, include_extras=True)
    parameters: list[tuple[str, Any, Any]] = []
    for one in fields(job.options):
        default = one.default if one.default is not MISSING else inspect.Parameter.empty
        if one.default_factory is not MISSING:
            default = one.default_factory()
        parameters.append((one.name, hints[one.name], default))
    parameters += [
        ("out", Out, None),
        ("master", Master, DEFAULT_MASTER),
        ("memory", Memory, DEFAULT_MEMORY),
        ("spark_conf", SparkConf, None),
        ("as_json", AsJson, False),
    ]
    return with_parameters(run, parameters)


def _run(job: Job[Any], options: Any, settings: Settings) -> None:
    from kipmesh.cluster.signals import ending_as_interrupt

    try:
        with ending_as_interrupt():
            outcome = run_job(job, options, settings)
    except KeyboardInterrupt as interrupt:
        left = next(iter(getattr(interrupt, "__notes__", ())), "nothing of this run is left")
        print(f"kipmesh: interrupted; Spark is stopped and {left}", file=sys.stderr)
        raise
    if settings.as_json:
        print_json(outcome.summary)
    if not outcome.passed:
        raise typer.Exit(1)


for _name in jobs.MODULES:
    _job = jobs.load(_name)
    app.command(_name, help=_job.text, short_help=_job.summary, epilog=examples(_job.examples))(_command(_job))
