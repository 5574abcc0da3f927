"""Fixtures that several test folders share."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when grpc is imported: no notes of its own between the tests

ROOT = Path(__file__).resolve().parent.parent
POM = ROOT / "tests" / "golden" / "kafka-tools" / "pom.xml"
JARS = ROOT / "build" / "kafka-tools"

KafkaDump = Callable[..., str]


def _download_kafka_tools() -> str:
    """Bring Apache Kafka's tools into build/, once for all workers; gives why that is not possible, or ""."""
    for program in ("java", "mvn"):
        if shutil.which(program) is None:
            return f"Apache Kafka's tools need {program}"
    JARS.parent.mkdir(exist_ok=True)
    complete = JARS / ".complete"
    wanted = hashlib.sha256(POM.read_bytes()).hexdigest()
    with open(JARS.parent / "kafka-tools.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if complete.exists() and complete.read_text() == wanted:
            return ""
        shutil.rmtree(JARS, ignore_errors=True)
        command = ["mvn", "-q", "-B", "-f", str(POM), "dependency:copy-dependencies", f"-DoutputDirectory={JARS}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
            return f"Maven cannot download Apache Kafka's tools: {lines[0][:300]}"
        complete.write_text(wanted)
    return ""


@pytest.fixture(scope="session")
def kafka_dump() -> KafkaDump:
    """`dump(files, *options)`: what Apache Kafka's DumpLogSegments prints; a complaint fails the test."""
    problem = _download_kafka_tools()
    if problem:
        pytest.skip(problem)

    def dump(files: Sequence[Path | str], *options: str) -> str:
        command = ["java", "-Xshare:auto", "-XX:TieredStopAtLevel=1", "-cp", f"{JARS}/*", "kafka.tools.DumpLogSegments"]
        command += ["--files", ",".join(map(str, files)), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        assert done.stderr == ""
        assert "isvalid: false" not in done.stdout
        assert "invalid bytes" not in done.stdout
        return done.stdout

    return dump
