"""Download of Apache Kafka's jars, for tests and benchmarks that run its code. Needs Java and Maven."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
from pathlib import Path

DOWNLOAD_TIMEOUT_S = 500


def download_kafka_tools(pom: Path, jars: Path) -> str:
    """Download the dependencies of `pom` into the directory `jars`, unless they are there. Concurrent processes wait
    for each other.

    Returns an error message if that fails, otherwise an empty string.
    """
    for program in ("java", "mvn"):
        if shutil.which(program) is None:
            return f"Apache Kafka's tools need {program}, which is not on the PATH"
    jars.parent.mkdir(exist_ok=True)
    complete = jars / ".complete"
    wanted = hashlib.sha256(pom.read_bytes()).hexdigest()
    with open(jars.parent / f"{jars.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if complete.exists() and complete.read_text() == wanted:
            return ""
        shutil.rmtree(jars, ignore_errors=True)
        command = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", f"-DoutputDirectory={jars}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"Maven did not download Apache Kafka's tools within {DOWNLOAD_TIMEOUT_S} s"
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
            return f"Maven cannot download Apache Kafka's tools: {lines[0][:300]}"
        complete.write_text(wanted)
    return ""
