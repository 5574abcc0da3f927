"""`python -m bench.snapshot`: a snapshot of a large image, made in slices and loaded, by the code that nodes use.

Each figure has a process of its own: one makes the image and its snapshot while a ticker on the same event loop notes
how late it is, another loads the file and says how much memory the image takes. Both stop the garbage collector's full
collections over the image as a node would (`gc.freeze` once it is loaded); `--keep-gc` shows what they cost. With
`--kafka` Apache Kafka's own classes then load the same file and write its image again (a JDK 17 and Maven).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import harness, kafka
from bench.images import PARTITIONS, neighbours_image
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.core.metadata.image_writer import image_values
from kipmesh.storage.fs import RealFileSystem
from kipmesh.storage.quorum.snapshot_file import ImageLoader
from kipmesh.storage.quorum.snapshots import SnapshotStore

MODULE = "bench.snapshot"

TICK_S = 0.001
MIB = 1 << 20


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
        # The state machine goes on: a partition changes for each thousand that are written.
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


def generate(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Make an image and a snapshot of it."""
    gc.disable()
    image = neighbours_image(options.topics)
    gc.enable()
    if not options.keep_gc:
        gc.collect()
        gc.freeze()
    return asyncio.run(_generate(image, SnapshotStore(RealFileSystem(), str(folder)), options.compression))


def load(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Load the snapshot as a starting node does, and measure what it leaves in memory."""
    store = SnapshotStore(RealFileSystem(), str(folder))
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


def _kafka(folder: Path, ours: dict[str, float]) -> dict[str, Any]:
    """Apache Kafka's figures and ours by them; nothing where it cannot be run, which is said."""
    (snapshot_id,) = SnapshotStore(RealFileSystem(), str(folder)).snapshot_ids()
    try:
        rounds = kafka.measure(folder, snapshot_id)
    except kafka.KafkaMissingError as error:
        harness.say(MODULE, f"without Apache Kafka: {error}")
        return {}
    if rounds[-1]["records"] != ours["records"]:
        raise AssertionError(f"Apache Kafka read {rounds[-1]['records']} records of {ours['records']}")
    return {"kafka": kafka.compare(ours, rounds), "kafka_rounds": rounds}


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
        lines += ["", *kafka.as_text(figures["kafka"])]
    return "\n".join(lines)


def main(given: Sequence[str]) -> int:
    """Run both steps and print the figures."""
    parser = harness.parser(MODULE, __doc__)
    parser.add_argument("--topics", type=int, default=100_000, help="with 10 partitions each")
    parser.add_argument("--compression", choices=("none", "gzip", "snappy", "zstd"), default="none")
    parser.add_argument("--keep-gc", action="store_true", help="leave Python's garbage collector as it is")
    parser.add_argument("--kafka", action="store_true", help="compare with Apache Kafka's own classes")
    parser.add_argument("--step", choices=("generate", "load"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if not 1000 <= options.topics <= 1_000_000:
        parser.error("topics from 1,000 to 1,000,000")
    if options.step:
        step = generate if options.step == "generate" else load
        sys.stdout.write(json.dumps(step(options, Path(options.folder))))
        return 0
    found: dict[str, Any] = {"topics": options.topics}

    def measure() -> None:
        with tempfile.TemporaryDirectory() as folder:
            for step in ("generate", "load"):
                found.update(harness.in_process(MODULE, *given, "--step", step, "--folder", folder))
            if options.kafka:
                found.update(_kafka(Path(folder), found))

    return harness.run(MODULE, options, measure, figures=lambda: found, text=lambda: _text(options.topics, found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
