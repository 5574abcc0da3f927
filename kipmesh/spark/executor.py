"""An executor of Spark in a pod: `python -m kipmesh.spark.executor`, the command of Spark's pod template.

Spark's driver makes the pod, says in its environment what the executor is to be, and counts on the image to turn that
into a JVM. Images of Spark have a shell script for it; pyspark, as it is installed by pip, has none.
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
    """The JVM's command line; raises KeyError for a variable that the driver has not set."""
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
    """Become the JVM; exits with 1 and a line when this is no executor's pod."""
    import pyspark

    from kipmesh.spark.java import ensure_java

    home = ensure_java()
    try:
        words = command(os.environ, home / "bin" / "java", Path(pyspark.__file__).parent / "jars")
    except KeyError as error:
        sys.exit(f"kipmesh: {error.args[0]} is not set: Spark's driver starts this in the pods that it makes")
    os.environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
    os.execv(words[0], words)  # noqa: S606 - Spark's own variables


if __name__ == "__main__":
    main()
