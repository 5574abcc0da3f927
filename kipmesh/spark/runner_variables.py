"""Several streaming queries of one Spark: the map of environment variables that they share is complete beforehand.

Spark has one `PythonFunction` for each Python data source, and with it one map of environment variables for all its
queries. The first streaming query puts four keys into it (`PythonStreamingSourceRunner.init`), and every query writes
the map out with its tasks. Nothing synchronises that: two queries that start side by side may both add a key, after
which the map counts one more than it has, and no task of this source can be written out any more: "Illegal size 5 of
collection, expected 6". A map that has the keys already is only ever given other values, which harms nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RUNNER_VARIABLES: Final[Mapping[str, str]] = {
    "SPARK_LOCAL_DIRS": "",
    "SPARK_AUTH_SOCKET_TIMEOUT": "",
    "SPARK_BUFFER_SIZE": "",
    "SPARK_PYTHON_RUNTIME": "PYTHON_WORKER",
}
"""What Spark 4.1 and 4.2 put into the map when a streaming query starts. Empty is what all who use it set before."""

_log = logging.getLogger(__name__)


def complete_variables(spark: SparkSession, name: str) -> None:
    """Add what is missing of `RUNNER_VARIABLES` to the map of the Python data source `name`, if there is that source.

    To be called before its first query. With Spark Connect the map is out of reach, and nothing happens; so it is,
    with a warning in the log, when Spark's inner classes are not as they were in 4.1 and 4.2.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    try:
        variables = _variables(spark, name)
        for variable, value in RUNNER_VARIABLES.items() if variables is not None else ():
            if variable not in variables:
                variables[variable] = value
    except (AttributeError, TypeError, Py4JError):
        if hasattr(spark, "_jsparkSession"):
            _log.warning("Streaming queries of %s must not start side by side: see docs/spark.md", name, exc_info=True)


def _variables(spark: Any, name: str) -> Any:
    """The map itself, as py4j's view of it; None where there is no such source."""
    manager = spark._jsparkSession.sessionState().dataSourceManager()
    if not manager.dataSourceExists(name):
        return None
    return manager.lookupDataSource(name).dataSourceCls().envVars()
