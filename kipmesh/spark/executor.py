"""A Spark executor in a pod: `python -m kipmesh.spark.executor`, the command of Spark's pod template.

The driver creates the pod and describes the executor in environment variables. The image turns them into a JVM. Spark's
images have a shell script for this; pyspark, as installed by pip, does not.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

BACKEND = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
_JAVA_OPTION = re.compile(r"SPARK_JAVA_OPT_(\d+)")
_ARGUMENTS = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}


def command(environment: Mapping[str, str], java: Path, jars: Path) -> list[str]:
    """Return the command line of an executor's JVM.

    `environment`: the variables that the driver set. `java`: path of the `java` executable. `jars`: Spark's directory
    of JAR files. Raises KeyError for a missing variable.
    """
    numbered = {int(found[1]): value for key, value in environment.items() if (found := _JAVA_OPTION.fullmatch(key))}
    memory = environment["SPARK_EXECUTOR_MEMORY"]
    path = [environment.get("SPARK_CLASSPATH", ""), f"{jars}/*"]
    arguments = [word for flag, name in _ARGUMENTS.items() for word in (flag, environment[name])]
    return [
        str(java),
        *(numbered[number] for number in sorted(numbered)),
        f"-Xms{memory}",
        f"-Xmx{memory}",
        "-cp",
        ":".join(filter(None, path)),
        BACKEND,
        *arguments,
    ]


def main() -> None:
    """Replace this process with the JVM of an executor.

    Exits with status 1 and a message if an environment variable set by the driver is missing. Raises JavaMissingError.
    """
    import pyspark

    from kipmesh.spark.java import ensure_java

    home = ensure_java()
    try:
        words = command(os.environ, home / "bin" / "java", Path(pyspark.__file__).parent / "jars")
    except KeyError as error:
        sys.exit(f"kipmesh: {error.args[0]} is not set; only the Spark driver starts this command, in executor pods")
    os.environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
    os.execv(words[0], words)  # noqa: S606 - Spark's own variables


if __name__ == "__main__":
    main()
