"""Apache Kafka's own classes on a snapshot of ours, in a JVM: what `bench/java/KafkaSnapshot.java` measures."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

from bench.harness import BenchError
from bench.kafka_tools import download_kafka_tools
from kipmesh.messages import SnapshotId

ROOT = Path(__file__).resolve().parent.parent
POM = ROOT / "tests" / "golden" / "kafka-tools" / "pom.xml"
JARS = ROOT / "build" / "kafka-tools"
PROGRAM = ROOT / "bench" / "java" / "KafkaSnapshot.java"

ROUNDS = 3
HEAP = "-Xmx6g"
TIMEOUT_S = 900

Rounds = list[dict[str, Any]]


class KafkaMissingError(BenchError):
    """Apache Kafka's classes cannot be run here; the text says why."""


def prepare() -> None:
    """Download what is needed, so that it does not disturb figures; raises KafkaMissingError."""
    problem = download_kafka_tools(POM, JARS)
    if not problem and shutil.which("javac") is None:
        problem = "java is there, but no JDK (javac) that compiles the benchmark"
    if problem:
        raise KafkaMissingError(problem)


def version() -> str:
    """Of the classes."""
    space = {"m": "http://maven.apache.org/POM/4.0.0"}
    found = ET.parse(POM).find(".//m:dependency/m:version", space)
    return "" if found is None else str(found.text)


def measure(folder: Path, snapshot_id: SnapshotId) -> Rounds:
    """Load the snapshot and write its image again, some rounds in one JVM; raises KafkaMissingError."""
    prepare()
    with tempfile.TemporaryDirectory() as own:
        command = ["java", HEAP, "-cp", f"{JARS}/*", str(PROGRAM), str(folder)]
        command += [str(snapshot_id.end_offset), str(snapshot_id.epoch), own, str(ROUNDS)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise KafkaMissingError(f"not done within {TIMEOUT_S} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise KafkaMissingError(f"the Java program failed: {lines[0][:300]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def compare(ours: Mapping[str, float], rounds: Rounds) -> dict[str, dict[str, float]]:
    """Of each figure: Kafka's first round, which has the cold JVM in it, its median, its best, and ours by each."""
    found = {}
    for key in ("generate_s", "load_s", "bytes", "image_mib"):
        values = [float(each[key]) for each in rounds]
        kafka = {"first": values[0], "median": statistics.median(values), "best": min(values)}
        found[key] = {
            **kafka,
            **{f"ratio_{name}": ours[key] / value if value else nan for name, value in kafka.items()},
        }
    return found


def as_text(compared: Mapping[str, Mapping[str, float]]) -> Sequence[str]:
    """Lines for a terminal."""
    lines = [f"Apache Kafka {version()}'s own classes on the same snapshot, {ROUNDS} rounds in one JVM"]
    for key, label in (("generate_s", "generate"), ("load_s", "load")):
        row = compared[key]
        lines.append(
            f"{label:<18}{row['median']:8.2f} s   (first {row['first']:.2f}, best {row['best']:.2f}); ours takes "
            f"{row['ratio_median']:.1f} times as long (first {row['ratio_first']:.1f}, best {row['ratio_best']:.1f})"
        )
    size = compared["bytes"]
    lines.append(f"{'file':<18}{size['median'] / (1 << 20):8.1f} MiB; ours {size['ratio_median']:.3f} of that")
    image = compared["image_mib"]
    lines.append(
        f"{'image on the heap':<18}{image['median']:8.1f} MiB (best {image['best']:.1f}); ours takes "
        f"{image['ratio_median']:.1f} times as much, resident"
    )
    return lines
