"""A small plan on Spark: figures of the proposals, and samples equal to those of a single process."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import Row, SparkSession

from kipmesh_jobs.frame import JobRun, Settings
from kipmesh_jobs.plan.job import Options, run
from kipmesh_jobs.plan.simulation import CASES, all_tasks, simulate

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]
SMALL = Options(brokers=12, topics=120, topic_partitions=5, producers=1_000, batches_per_s=2_000.0, slots=40, runs=1)


def test_plan_on_spark_equals_the_simulation_in_one_process(spark: SparkSession, tmp_path: Path) -> None:
    job = JobRun("plan", Settings(tmp_path, as_json=True))
    job.use(spark)
    job.directory.begin()
    outcome = run(job, SMALL)
    assert outcome.passed, outcome.lines
    assert outcome.summary["passed"]
    written = {(row.part, row.case, row.run, row.metric): row.value for row in rows(spark, job, "samples")}
    assert {(part, case) for part, case, _, _ in written} == {(part, case) for part in CASES for case in CASES[part]}
    tasks = [task for task in all_tasks(SMALL.sizes(), SMALL.runs, SMALL.seed) if task.part == "fetches"]
    for sample in [sample for task in tasks for sample in simulate(task)]:
        assert written[sample[:4]] == sample.value
    figures = rows(spark, job, "figures")
    assert len(figures) == len(outcome.summary["figures"])
    assert all(row.holds is not False for row in figures)
    statistics = {(row.part, row.case, row.metric): row for row in rows(spark, job, "summary")}
    assert statistics["fetches", "sessions", "mesh_bytes_per_s"].runs == 1


def rows(spark: SparkSession, job: JobRun, name: str) -> list[Row]:
    return spark.read.parquet(str(job.parquet / name)).collect()
