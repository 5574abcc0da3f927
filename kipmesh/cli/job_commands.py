"""`kipmesh job`: run the Spark jobs of `kipmesh_jobs`, which also defines their options and help."""

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
    option,
    parse_pairs,
    print_json,
    with_parameters,
)
from kipmesh_jobs.frame import DEFAULT_MASTER, DEFAULT_MEMORY, Job, Settings, run_job

DEFAULT_OUT = Path("kipmesh-jobs")

Out = Annotated[
    Path | None,
    option("--out", "Directory of the results. Default: kipmesh-jobs/NAME.", metavar="DIR", show_default=False),
]
Master = Annotated[str, option("--master", "Spark master: local[N], local[*] or spark://HOST:PORT.")]
Memory = Annotated[str, option("--driver-memory", "Memory of the Spark driver, e.g. 2g.")]
SparkConf = Annotated[list[str] | None, option("--spark-conf", "A Spark setting; repeatable.", metavar="KEY=VALUE")]

app = make_app(
    "Run a Spark job. It writes a report with charts, Parquet tables and a JSON summary.",
    """
    kipmesh job --help
    kipmesh job flights --help
    """,
)


def _command(job: Job[Any]) -> Callable[..., None]:
    """Return a typer command whose options are the fields of the job's options and those that all jobs share."""

    def run(**given: Any) -> None:
        settings = Settings(
            out=given.pop("out") or DEFAULT_OUT / job.name,
            master=given.pop("master"),
            memory=given.pop("memory"),
            spark=parse_pairs(given.pop("spark_conf"), "--spark-conf"),
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
    from kipmesh.cluster.signals import signals_as_interrupt

    try:
        with signals_as_interrupt():
            outcome = run_job(job, options, settings)
    except KeyboardInterrupt as interrupt:
        result = next(iter(getattr(interrupt, "__notes__", ())), "this run left no files")
        print(f"kipmesh: interrupted; Spark is stopped and {result}", file=sys.stderr)
        raise
    if settings.as_json:
        print_json(outcome.summary)
    if not outcome.passed:
        raise typer.Exit(1)


for _name in jobs.MODULES:
    _job = jobs.load(_name)
    app.command(_name, help=_job.text, short_help=_job.summary, epilog=examples(_job.examples))(_command(_job))
