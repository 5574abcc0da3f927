"""A local Spark session that is quiet, small and closed to the network, for jobs and tests.

Workers run the interpreter that runs this (`PYSPARK_PYTHON`), the session's time zone is UTC whatever the machine's
is, and nothing listens on other interfaces than the loopback one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kipmesh.spark.java import ensure_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG4J: Final = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex{0}
"""
_SETTINGS: Final[Mapping[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.sql.shuffle.partitions": "4",
}


def local_session(
    name: str, work_dir: Path, *, cores: int = 2, memory: str = "1g", settings: Mapping[str, str] | None = None
) -> SparkSession:
    """Start (or get) Spark on `cores` cores of this machine; its own files, `spark.log` too, go to `work_dir`.

    Raises `kipmesh.spark.java.JavaMissingError` when there is no Java and none can be installed.
    """
    os.environ["JAVA_HOME"] = str(ensure_java())
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    work_dir.mkdir(parents=True, exist_ok=True)
    log4j = work_dir / "log4j2.properties"
    log4j.write_text(_LOG4J)
    from pyspark.sql import SparkSession

    # A JVM takes its options when it starts: by the builder they would come too late for logging.
    java_options = f"-Dlog4j2.configurationFile={log4j.resolve().as_uri()} -Dderby.system.home={work_dir.resolve()}"
    builder = SparkSession.builder.master(f"local[{cores}]").appName(name)
    chosen = {
        **_SETTINGS,
        "spark.driver.memory": memory,
        "spark.driver.extraJavaOptions": java_options,
        "spark.local.dir": str((work_dir / "local").resolve()),
        "spark.sql.warehouse.dir": str((work_dir / "warehouse").resolve()),
        **(settings or {}),
    }
    for key, value in chosen.items():
        builder = builder.config(key, value)
    with _stderr_into(work_dir / "spark.log"):
        return builder.getOrCreate()


@contextmanager
def _stderr_into(path: Path) -> Iterator[None]:
    """While Spark starts, so that the JVM and its Python workers inherit the file as their standard error."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
