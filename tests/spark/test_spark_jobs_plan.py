"""A small plan on Spark: the figures of the proposals come out, and samples are those that one process computes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import Row, SparkSession

from kipmesh_jobs.frame import JobRun, Settings
from kipmesh_jobs.plan.job import Options, run
from kipmesh_jobs.plan.simulation import CASES, all_tasks, simulate

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]
SMALL = Options(brokers=12, topics=120, topic_partitions=5, producers=1_000, batches_per_s=2_000.0, slots=40, runs=1)


def test_a_plan_on_spark_is_the_plan(spark: SparkSession, tmp_path: Path) -> None:
    job = JobRun("plan", Settings(tmp_path, as_json=True))
    job.use(spark)
    job.directory.begin()
    outcome = run(job, SMALL)
    assert outcome.passed, outcome.lines
    assert outcome.summary["passed"]
    written = {(row.part, row.case, row.run, row.metric): row.value for row in rows(spark, job, "samples")}
    assert {(part, case) for part, case, _, _ in written} == {(part, case) for part in CASES for case in CASES[part]}
    tasks = [one for one in all_tasks(SMALL.sizes(), SMALL.runs, SMALL.seed) if one.part == "fetches"]
    for sample in [one for task in tasks for one in simulate(task)]:
        assert written[sample[:4]] == sample.value
    figures = rows(spark, job, "figures")
    assert len(figures) == len(outcome.summary["figures"])
    assert all(row.holds is not False for row in figures)
    statistics = {(row.part, row.case, row.metric): row for row in rows(spark, job, "summary")}
    assert statistics["fetches", "sessions", "mesh_bytes_per_s"].runs == 1


def rows(spark: SparkSession, job: JobRun, name: str) -> list[Row]:
    return spark.read.parquet(str(job.parquet / name)).collect()
