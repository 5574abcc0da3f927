"""A local Spark session for jobs and tests: small, logging to a file, closed to the network.

Workers use the current interpreter, the session's time zone is UTC, and listeners bind to the loopback interface only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kipmesh.spark import register
from kipmesh.spark.java import ensure_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SETTINGS: Final[Mapping[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.python.filterPushdown.enabled": "true",
}
_STOP_SECONDS: Final = 15.0
# Short jobs do not profit from the optimising compiler and a concurrent collector. The default code cache of the first
# compiler, 48 MB, overflows in jobs with many queries, which stops compilation.
_JVM_OPTIONS: Final = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=160m"


def local_session(
    name: str, work_dir: Path, *, cores: int = 2, memory: str = "1g", settings: Mapping[str, str] | None = None
) -> SparkSession:
    """Start Spark on this machine, or return the running session.

    `format("kipmesh")` is registered, and streaming queries may start concurrently. `work_dir`: directory for Spark's
    files and `spark.log`. `cores`: default for spark.master. `memory`: driver memory, for example 1g. `settings`: Spark
    settings that take precedence. Installs Java if necessary. Raises JavaMissingError if that fails.
    """
    os.environ["JAVA_HOME"] = str(ensure_java())
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    work_dir.mkdir(parents=True, exist_ok=True)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    chosen = {
        **_SETTINGS,
        "spark.master": f"local[{cores}]",
        "spark.app.name": name,
        "spark.driver.memory": memory,
        "spark.driver.extraJavaOptions": f"{_JVM_OPTIONS} -Dderby.system.home={work_dir.resolve()}",
        "spark.local.dir": str((work_dir / "local").resolve()),
        "spark.sql.warehouse.dir": str((work_dir / "warehouse").resolve()),
        **(settings or {}),
    }
    for key, value in chosen.items():
        builder = builder.config(key, value)
    _launch_jvm(chosen, work_dir)
    session = builder.getOrCreate()
    register(session)
    return session


def _launch_jvm(settings: Mapping[str, str], work_dir: Path) -> None:
    """Start the JVM unless one is running. Its standard error, which Python workers inherit, goes to `spark.log`."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is not None:
        return
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    own_home = "SPARK_HOME" not in os.environ
    if own_home:
        os.environ["SPARK_HOME"] = str(home_without_zip(work_dir / "home"))
    try:
        with (work_dir / "spark.log").open("ab") as file:
            gateway = launch_gateway(conf, {"stderr": file})  # type: ignore[no-untyped-call]
    finally:
        if own_home:
            del os.environ["SPARK_HOME"]
    SparkContext._gateway, SparkContext._jvm = gateway, gateway.jvm


def home_without_zip(home: Path) -> Path:
    """Create and return a SPARK_HOME of links without pyspark's zip file, so that workers import the installed pyspark.

    A zip has no compiled modules, so each worker would compile pyspark, which takes most of its start time. Spark waits
    only ten seconds for a worker.
    """
    import pyspark

    home.mkdir(parents=True, exist_ok=True)
    for part in Path(pyspark.__file__).resolve().parent.iterdir():
        if part.is_dir() and part.name not in ("python", "__pycache__"):
            _link(home / part.name, part)
    return home.resolve()


def _link(link: Path, part: Path) -> None:
    """Create or replace a link to `part` atomically, because a JVM that is starting may read through the link."""
    if link.is_symlink() and link.readlink() == part:
        return
    new = link.with_name(f".{link.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    new.symlink_to(part, target_is_directory=True)
    new.replace(link)


def stop_session(spark: SparkSession) -> None:
    """Stop Spark and its JVM, and wait for the JVM to end. Kills the JVM after 15 seconds."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    spark.stop()
    if gateway is None:
        return
    SparkContext._gateway = SparkContext._jvm = None
    gateway.shutdown()
    process = gateway.proc
    if process is not None:
        # The JVM ends when its standard input is closed.
        process.stdin.close()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_SECONDS)
