"""Command line of an executor's JVM, from the environment that Spark's driver sets in the pod."""

from __future__ import annotations

from pathlib import Path

import pytest

from kipmesh.spark import executor

ENVIRONMENT = {
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@driver:7078",
    "SPARK_EXECUTOR_ID": "3",
    "SPARK_EXECUTOR_CORES": "2",
    "SPARK_EXECUTOR_MEMORY": "1024m",
    "SPARK_APPLICATION_ID": "spark-app",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.9",
    "SPARK_EXECUTOR_POD_NAME": "job-exec-3",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_JAVA_OPT_10": "-Dlast=1",
    "SPARK_JAVA_OPT_0": "-Dfirst=a b",
    "SPARK_JAVA_OPT_2": "-Dsecond=1",
}


def test_executor_command_has_java_options_in_order_and_arguments() -> None:
    command_line = executor.command(ENVIRONMENT, Path("/jre/bin/java"), Path("/spark/jars"))
    assert command_line[:6] == ["/jre/bin/java", "-Dfirst=a b", "-Dsecond=1", "-Dlast=1", "-Xms1024m", "-Xmx1024m"]
    assert command_line[6:9] == ["-cp", "/spark/jars/*", executor.BACKEND]
    arguments = dict(zip(command_line[9::2], command_line[10::2], strict=True))
    assert arguments == {
        "--driver-url": ENVIRONMENT["SPARK_DRIVER_URL"],
        "--executor-id": "3",
        "--cores": "2",
        "--app-id": "spark-app",
        "--hostname": "10.0.0.9",
        "--resourceProfileId": "0",
        "--podName": "job-exec-3",
    }


def test_class_path_of_driver_precedes_jars_of_spark() -> None:
    command_line = executor.command({**ENVIRONMENT, "SPARK_CLASSPATH": "/more"}, Path("java"), Path("/spark/jars"))
    assert command_line[command_line.index("-cp") + 1] == "/more:/spark/jars/*"


def test_missing_environment_variable_is_named() -> None:
    with pytest.raises(KeyError, match="SPARK_EXECUTOR_MEMORY"):
        executor.command({}, Path("java"), Path("jars"))
