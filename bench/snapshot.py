"""`python -m bench.snapshot`: time and memory to write and load a snapshot of a large image, with the nodes' code.

One process creates the image and writes its snapshot in slices, while a task on the same event loop measures the delay
of its timer. Another process loads the file and measures the memory of the image. Both exclude the image from full
garbage collections, as a node does (`gc.freeze`); `--keep-gc` shows what those cost. With `--kafka`, Apache Kafka's own
classes load the same file and write its image again, which needs JDK 17 and Maven.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

from bench import harness, kafka
from bench.images import PARTITIONS, neighbours_image
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.core.metadata.image_writer import image_values
from kipmesh.messages import SnapshotId
from kipmesh.storage.fs import RealFileSystem
from kipmesh.storage.quorum.snapshot_file import ImageLoader
from kipmesh.storage.quorum.snapshots import SnapshotStore

TICK_S = 0.001
MIB = 1 << 20
KAFKA_ROUNDS = 3
KAFKA_HEAP = "-Xmx6g"
KAFKA_TIMEOUT_S = 900


async def _tick(pauses: list[float]) -> None:
    before = time.perf_counter()
    while True:
        await asyncio.sleep(TICK_S)
        now = time.perf_counter()
        pauses.append(now - before - TICK_S)
        before = now


async def _generate(image: MetadataImage, store: SnapshotStore, compression: str) -> dict[str, float]:
    pauses: list[float] = []
    ticker = asyncio.create_task(_tick(pauses))
    await asyncio.sleep(0.05)
    pauses.clear()
    begin = time.perf_counter()
    captured = image.capture()
    capture_s = time.perf_counter() - begin
    cpu_begin, slice_s = time.process_time(), 0.0
    writer = store.create(captured.snapshot_id, last_contained_log_timestamp=1, now_ms=1, compression=compression)
    change = MetadataDelta()
    changed = iter(list(image.topics))
    slice_begin = time.thread_time()
    for _ in writer.write(image_values(captured)):
        # As on a node, the state machine applies records while the snapshot is written.
        image.apply(r.PartitionChangeRecord(0, next(changed), leader=1), change)
        slice_s = max(slice_s, time.thread_time() - slice_begin)
        await asyncio.sleep(0)
        slice_begin = time.thread_time()
    size = await asyncio.to_thread(writer.freeze)
    generate_s = time.perf_counter() - begin
    cpu_s = time.process_time() - cpu_begin
    await asyncio.sleep(2 * TICK_S)
    ticker.cancel()
    return {
        "capture_ms": capture_s * 1e3,
        "generate_s": generate_s,
        "generate_cpu_s": cpu_s,
        "slice_cpu_ms_max": slice_s * 1e3,
        "bytes": size,
        "records": writer.records,
        "pause_ms_max": max(pauses) * 1e3,
    }


def generate(options: argparse.Namespace, directory: Path) -> dict[str, float]:
    """Create an image and its snapshot in the directory. Returns times, sizes and the longest pause of the event loop
    by name.
    """
    gc.disable()
    image = neighbours_image(options.topics)
    gc.enable()
    if not options.keep_gc:
        gc.collect()
        gc.freeze()
    return asyncio.run(_generate(image, SnapshotStore(RealFileSystem(), str(directory)), options.compression))


def load(options: argparse.Namespace, directory: Path) -> dict[str, float]:
    """Load the only snapshot in the directory as a starting node does. Returns the times and the memory of the image by
    name.
    """
    store = SnapshotStore(RealFileSystem(), str(directory))
    (snapshot_id,) = store.snapshot_ids()
    gc.collect()
    before = _resident_bytes()
    if not options.keep_gc:
        gc.disable()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    loader = ImageLoader(store.open(snapshot_id), snapshot_id)
    for _ in loader.steps():
        pass
    load_s, load_cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
    assert loader.image.partition_count == options.topics * PARTITIONS
    collect_begin = time.perf_counter()
    gc.collect()
    collect_s = time.perf_counter() - collect_begin
    return {
        "load_s": load_s,
        "load_cpu_s": load_cpu_s,
        "full_gc_ms": collect_s * 1e3,
        "image_mib": (_resident_bytes() - before) / MIB,
    }


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- Apache Kafka


def measure_kafka(directory: Path, snapshot_id: SnapshotId) -> list[dict[str, Any]]:
    """Let Apache Kafka load the snapshot and write its image `KAFKA_ROUNDS` times in one JVM. Returns the figures of
    each round. Raises KafkaMissingError.
    """
    kafka.prepare()
    program = kafka.ROOT / "bench" / "java" / "KafkaSnapshot.java"
    with tempfile.TemporaryDirectory() as output:
        command = ["java", KAFKA_HEAP, str(program), str(directory)]
        command += [str(snapshot_id.end_offset), str(snapshot_id.epoch), output, str(KAFKA_ROUNDS)]
        return [json.loads(line) for line in kafka.run_java("KafkaSnapshot", command, KAFKA_TIMEOUT_S).splitlines()]


def compare(ours: Mapping[str, float], rounds: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return for each figure Kafka's first round (cold JVM), median and best, and the ratio of our figure to each of
    these (nan for 0).
    """
    found = {}
    for key in ("generate_s", "load_s", "bytes", "image_mib"):
        values = [float(each[key]) for each in rounds]
        theirs = {"first": values[0], "median": statistics.median(values), "best": min(values)}
        ratios = {f"ratio_{name}": ours[key] / value if value else nan for name, value in theirs.items()}
        found[key] = {**theirs, **ratios}
    return found


def comparison_lines(compared: Mapping[str, Mapping[str, float]]) -> Sequence[str]:
    """Return the result of `compare` as lines for a terminal."""
    lines = [f"Apache Kafka {kafka.version()}'s own classes on the same snapshot, {KAFKA_ROUNDS} rounds in one JVM"]
    for key, label in (("generate_s", "generate"), ("load_s", "load")):
        row = compared[key]
        lines.append(
            f"{label:<18}{row['median']:8.2f} s   (first {row['first']:.2f}, best {row['best']:.2f}); ours takes "
            f"{row['ratio_median']:.1f} times as long (first {row['ratio_first']:.1f}, best {row['ratio_best']:.1f})"
        )
    size, image = compared["bytes"], compared["image_mib"]
    return [
        *lines,
        f"{'file':<18}{size['median'] / MIB:8.1f} MiB; ours {size['ratio_median']:.3f} of that",
        f"{'image on the heap':<18}{image['median']:8.1f} MiB (best {image['best']:.1f}); ours takes "
        f"{image['ratio_median']:.1f} times as much, resident",
    ]


def _compare_with_kafka(directory: Path, ours: dict[str, float]) -> dict[str, Any]:
    (snapshot_id,) = SnapshotStore(RealFileSystem(), str(directory)).snapshot_ids()
    try:
        rounds = measure_kafka(directory, snapshot_id)
    except kafka.KafkaMissingError as error:
        harness.say(f"without Apache Kafka: {error}")
        return {}
    if rounds[-1]["records"] != ours["records"]:
        raise AssertionError(f"Apache Kafka read {rounds[-1]['records']} records of {ours['records']}")
    return {"kafka": compare(ours, rounds), "kafka_rounds": rounds}


# -- command line


def _text(topics: int, figures: dict[str, Any]) -> str:
    lines = [
        f"{topics:,} topics x {PARTITIONS} partitions x 3 replicas, {figures['records']:,} records",
        f"generate          {figures['generate_s']:8.2f} s, {figures['generate_cpu_s']:.2f} s of CPU",
        f"  capture         {figures['capture_ms']:8.1f} ms",
        f"  longest slice   {figures['slice_cpu_ms_max']:8.1f} ms of CPU",
        f"longest pause     {figures['pause_ms_max']:8.1f} ms",
        f"load              {figures['load_s']:8.2f} s, {figures['load_cpu_s']:.2f} s of CPU",
        f"file              {figures['bytes'] / MIB:8.1f} MiB",
        f"image in memory   {figures['image_mib']:8.1f} MiB",
        f"full collection   {figures['full_gc_ms']:8.1f} ms",
    ]
    if "kafka" in figures:
        lines += ["", *comparison_lines(figures["kafka"])]
    return "\n".join(lines)


def main(given: Sequence[str]) -> int:
    """Run both steps in new processes, print the figures, and return the exit code of `harness.run`."""
    parser = harness.Parser("bench.snapshot", __doc__)
    parser.number("--topics", "topics with 10 partitions each", 100_000, least=1000, most=1_000_000)
    parser.add_argument("--compression", choices=("none", "gzip", "snappy", "zstd"), default="none")
    parser.add_argument("--keep-gc", action="store_true", help="leave Python's garbage collector as it is")
    parser.add_argument("--kafka", action="store_true", help="compare with Apache Kafka's own classes")
    parser.add_argument("--step", choices=("generate", "load"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse(given)
    if options.step:
        step = generate if options.step == "generate" else load
        sys.stdout.write(json.dumps(step(options, Path(options.directory))))
        return 0
    found: dict[str, Any] = {"topics": options.topics}

    def measure() -> None:
        with tempfile.TemporaryDirectory() as directory:
            for step in ("generate", "load"):
                found.update(harness.in_process("bench.snapshot", *given, "--step", step, "--directory", directory))
            if options.kafka:
                found.update(_compare_with_kafka(Path(directory), found))

    return harness.run(options, measure, figures=lambda: found, text=lambda: _text(options.topics, found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
