"""`python -m bench.fencing`: what the design of KIP-630 saves, measured with the nodes' code (630-18).

- One broker of 100 fails. Compares one event record with a record for each partition: what the active controller and
  each replica write, what 99 observers receive, and the cost of the leaders' proofs.
- 100 MB of state change at 1 MB/s. Compares what snapshots and log compaction read and write.

Network traffic is computed from the sizes of batches and of Fetch responses. Each part runs in a new process. "Seed"
names the estimates of KIP-630, whose sizes are in KiB and MiB.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from bench import harness
from bench.images import BROKERS, EPOCH, PARTITIONS, balanced_image
from kipmesh import messages as m
from kipmesh.core import record_batch
from kipmesh.core.config import ControllerConfig, TopicConfig
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.controller import MetadataController
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, MetadataDelta, MetadataImage
from kipmesh.core.metadata.image_writer import image_values
from kipmesh.core.snapshot.schedule import SnapshotLimits, SnapshotSchedule
from kipmesh.messages.proto import encode
from kipmesh.storage import LogManager, RealFileSystem
from kipmesh.storage.fs import Buffer, File
from kipmesh.storage.quorum.snapshots import SnapshotStore

OBSERVERS = BROKERS - 1
FAILING = BROKERS // 2

_CONFIG = {
    "node.id": 1001,
    "cluster.id": "bench",
    "controller.quorum.voters": "1001@127.0.0.1:19093",
    "metadata.log.dir": "unused",
}


class _Costs:
    """Encodes decisions and applies them to an image, and counts their bytes and times."""

    def __init__(self, image: MetadataImage) -> None:
        self._image = image
        self.records = self.values_bytes = self.batch_bytes = self.responses_bytes = 0
        self.encode_s = self.apply_s = self.longest_step_s = 0.0

    def apply(self, records: Sequence[r.Record]) -> None:
        """Encode the records as one batch, and apply it in steps, as each replica does."""
        image = self._image
        begin = time.perf_counter()
        values = [r.encode_record(record) for record in records]
        batch = record_batch.build(
            [(None, value) for value in values], base_offset=image.offset + 1, leader_epoch=EPOCH, timestamp_ms=1
        )
        end = time.perf_counter()
        self.encode_s += end - begin
        self.records += len(records)
        self.values_bytes += sum(map(len, values))
        self.batch_bytes += len(batch)
        self.responses_bytes += len(encode(_response(batch, image.offset)))
        last = begin = time.perf_counter()
        for _ in image.replay_steps(batch, MetadataDelta()):
            now = time.perf_counter()
            self.longest_step_s, last = max(self.longest_step_s, now - last), now
        end = time.perf_counter()
        self.longest_step_s = max(self.longest_step_s, end - last)
        self.apply_s += end - begin

    def figures(self) -> dict[str, Any]:
        """Return sizes in bytes and times in ms, by name. `*_sent_*` are bytes sent to all 99 observers."""
        return {
            "records": self.records,
            "record_bytes": self.values_bytes / max(self.records, 1),
            "values_bytes": self.values_bytes,
            "batch_bytes": self.batch_bytes,
            "values_sent_bytes": self.values_bytes * OBSERVERS,
            "batch_sent_bytes": self.batch_bytes * OBSERVERS,
            "responses_sent_bytes": self.responses_bytes * OBSERVERS,
            "apply_ms": self.apply_s * 1e3,
            "longest_step_ms": self.longest_step_s * 1e3,
        }


def _response(batch: bytes, offset: int) -> m.FetchResponse:
    end = offset + 1
    partition = m.PartitionData(0, 0, end, end, 0, records=batch)
    return m.FetchResponse(
        responses=[m.FetchableTopicResponse(CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, [partition])]
    )


def measure_failure(topics: int, *, by_event: bool) -> dict[str, Any]:
    """Fence one broker of 100, let the other brokers' heartbeats confirm that, and return the costs by name. Sizes are
    in bytes, times in ms.

    With `by_event`, one record fences the broker; without it, each partition has a record.
    """
    gc.disable()
    image = balanced_image(topics)
    controller = MetadataController(ControllerConfig.parse(_CONFIG), image, lambda: b"")
    if by_event:
        _Costs(image).apply(controller.activate(0))
    gc.enable()
    gc.collect()
    gc.freeze()
    image.capture()  # worst case: no topic has changed since the last snapshot began
    partitions = len(image.partitions_of_broker(FAILING))
    costs = _Costs(image)
    begin = time.perf_counter()
    records = controller.brokers.fence([FAILING])
    decide_s = time.perf_counter() - begin
    costs.apply(records)
    led = sum(image.topics[key[0]].partitions[key[1]].leader == FAILING for key in image.partitions_of_broker(FAILING))
    assert not led
    proofs = _Costs(image)
    for broker_id, broker in image.brokers.items():
        if broker_id != FAILING:
            heartbeat = m.BrokerHeartbeatRequest(broker_id, broker.broker_epoch, image.offset)
            decided = controller.heartbeat(heartbeat, 1, image.offset + 1).records
            if decided:
                proofs.apply(decided)
    return {
        "all_partitions": image.partition_count,
        "partitions": partitions,
        "decide_ms": (decide_s + costs.encode_s) * 1e3,
        **costs.figures(),
        "proofs": proofs.figures(),
    }


STATE_BYTES = 100_000_000
LIMIT_BYTES = SnapshotLimits().record_bytes_between
TOPIC_BYTES = 1270
"""Size of a topic with ten partitions in a snapshot."""
CHANGES_PER_BATCH = 200
"""Records of a batch: about 10 kB, the changes of 10 ms."""
SNAPSHOTS = 2
"""Number of snapshots made from changes."""
READ_BYTES = 1 << 20


class Traffic(NamedTuple):
    """Numbers of bytes read and written."""

    read: int
    written: int


class _CountedFile:
    """A file that adds its traffic to the file system's counts."""

    def __init__(self, file: File, fs: CountingFileSystem, kind: str) -> None:
        self._file = file
        self._fs = fs
        self._kind = kind

    def read_at(self, size: int, position: int) -> bytes:
        data = self._file.read_at(size, position)
        self._fs.add(self._kind, len(data), 0)
        return data

    def write_at(self, data: Buffer, position: int) -> None:
        self._fs.add(self._kind, 0, len(data))
        self._file.write_at(data, position)

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def size(self) -> int:
        return self._file.size()

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


class CountingFileSystem(RealFileSystem):
    """The real file system, which counts bytes read and written by kind of file: `snapshot`, and `log` for all other
    files.
    """

    def __init__(self) -> None:
        super().__init__()
        self.traffic = {"log": Traffic(0, 0), "snapshot": Traffic(0, 0)}

    def add(self, kind: str, read: int, written: int) -> None:
        """Add bytes read and written to the counts of a kind of file."""
        before = self.traffic[kind]
        self.traffic[kind] = Traffic(before.read + read, before.written + written)

    def open(self, path: str, *, create: bool = False) -> File:
        """Open a file whose traffic is counted. Raises OSError."""
        kind = "snapshot" if ".checkpoint" in Path(path).name else "log"
        return _CountedFile(super().open(path, create=create), self, kind)


class Compaction(NamedTuple):
    """Traffic of log compaction in MB per MB of change, without the MB that every replica reads to apply the change."""

    map_read: float
    copy_read: float
    written: float

    @property
    def read(self) -> float:
        """MB read per MB of change, in total."""
        return self.map_read + self.copy_read


def compaction(clean_bytes: float, dirty_bytes: float) -> Compaction:
    """Compute the traffic of log compaction that starts when `dirty_bytes` of changes follow `clean_bytes`.

    Compaction reads the changes to map keys to offsets, and reads both parts to copy the live records. The size of the
    state does not change.
    """
    return Compaction(1.0, (clean_bytes + dirty_bytes) / dirty_bytes, clean_bytes / dirty_bytes)


def measure_changes(directory: Path, state_bytes: int, limit_bytes: int) -> dict[str, Any]:
    """Change a state of about `state_bytes` until `SNAPSHOTS` more snapshots have become due, and return counts and
    bytes since the first snapshot.

    A snapshot is due after `limit_bytes` of changes, according to the nodes' schedule. Records go through a real log
    and are read from it as a state machine reads them.
    """
    fs = CountingFileSystem()
    config = TopicConfig.parse({"segment.bytes": 64 << 20, "retention.ms": -1, "max.message.bytes": 1 << 24})
    manager = LogManager(fs, [str(directory)], cluster_id="bench", node_id=1, defaults=config)
    manager.load(1)
    log = manager.create(CLUSTER_METADATA_TOPIC, 0, CLUSTER_METADATA_TOPIC_ID, config, 1)
    gc.disable()
    image = balanced_image(max(state_bytes // TOPIC_BYTES // PARTITIONS, 10) * PARTITIONS)
    image.offset = -1  # the log contains changes only
    gc.enable()
    gc.freeze()
    schedule = SnapshotSchedule(SnapshotLimits(record_bytes_between=limit_bytes, interval_ms_max=0), 0)
    store = SnapshotStore(fs, log.dir)
    _write_snapshot(image, schedule, store)
    before, snapshot_bytes, made, records = dict(fs.traffic), 0, 0, 0
    rng, topics = Random(2), list(image.topics)
    while made < SNAPSHOTS:
        offset = log.log_end_offset
        values = [(None, r.encode_record(_change(rng, topics))) for _ in range(CHANGES_PER_BATCH)]
        batch = record_batch.build(values, base_offset=offset, leader_epoch=EPOCH, timestamp_ms=1)
        log.append_as_leader(batch, EPOCH, 1)
        delta = MetadataDelta()
        image.replay(log.read(offset, READ_BYTES, log.log_end_offset, True), delta)
        schedule.applied(delta.outdated, len(batch))
        records += CHANGES_PER_BATCH
        if schedule.due(0):
            snapshot_bytes = _write_snapshot(image, schedule, store)
            made += 1
    after, log_bytes = dict(fs.traffic), log.size_bytes
    manager.close(-1)
    return {
        "records": records,
        "snapshots": made,
        "snapshot_bytes": snapshot_bytes,
        "log_bytes": log_bytes,
        **{
            f"{kind}_{what}_bytes": getattr(after[kind], what) - getattr(before[kind], what)
            for kind in after
            for what in Traffic._fields
        },
    }


def _change(rng: Random, topics: list[bytes]) -> r.PartitionChangeRecord:
    """Return a change of the ISR and the leader of a random partition."""
    first = rng.randrange(BROKERS)
    return r.PartitionChangeRecord(
        rng.randrange(PARTITIONS), rng.choice(topics), isr=(first, (first + 1) % BROKERS), leader=first
    )


def _write_snapshot(image: MetadataImage, schedule: SnapshotSchedule, store: SnapshotStore) -> int:
    """Write a snapshot of the current image and return its size in bytes."""
    schedule.begin()
    captured = image.capture()
    writer = store.create(captured.snapshot_id, last_contained_log_timestamp=1, now_ms=1)
    for _ in writer.write(image_values(captured)):
        pass
    size = writer.freeze()
    schedule.completed(writer.records, 0)
    return size


KIB, MIB, MB = 1 << 10, 1 << 20, 1_000_000
QUICK = 50
"""Divisor of the load with `--quick`."""

STEPS = ("by_event", "by_partition", "changes")

Figures = dict[str, Any]


def size(value: float) -> str:
    """Format a number of bytes in B, KiB or MiB, the units of KIP-630."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if value >= unit or (name == "KiB" and value >= KIB / 2):
            return f"{value / unit:,.2f} {name}"
    return f"{value:,.0f} B"


def seed_of(partitions: int, record_bytes: int) -> Figures:
    """Return the estimate of KIP-630: `partitions` records of `record_bytes`, without batch framing."""
    return {
        "records": partitions,
        "record_bytes": record_bytes,
        "values_bytes": partitions * record_bytes,
        "values_sent_bytes": partitions * record_bytes * OBSERVERS,
    }


def count(value: float) -> str:
    """Format a count with thousands separators."""
    return f"{value:,}"


def milliseconds(value: float) -> str:
    """Format a number of milliseconds, such as `1.5 ms`."""
    return f"{value:,.1f} ms"


def _row(name: str, values: Sequence[str | None]) -> tuple[str, ...]:
    return (name, *["-" if value is None else value for value in values])


def failure_rows(records: Figures, event: Figures) -> list[tuple[str, ...]]:
    """Return the rows of the table for the failure: the estimates of KIP-630 and the measured figures, with a record
    per partition and with one event.
    """
    columns = (seed_of(records["partitions"], 40), records, seed_of(1, 8), event)

    def cells(key: str, form: Callable[[float], str]) -> list[str | None]:
        return [form(column[key]) if key in column else None for column in columns]

    def of_proofs(key: str, form: Callable[[float], str]) -> list[str | None]:
        return [form(column["proofs"][key]) if "proofs" in column else None for column in columns]

    return [
        _row("records", cells("records", count)),
        _row("bytes of a record", cells("record_bytes", lambda value: f"{value:.0f}")),
        _row("a replica writes, records alone", cells("values_bytes", size)),
        _row("a replica writes, with batch framing", cells("batch_bytes", size)),
        _row(f"sent to {OBSERVERS} observers, records alone", cells("values_sent_bytes", size)),
        _row(f"sent to {OBSERVERS} observers, with batch framing", cells("batch_sent_bytes", size)),
        _row(f"sent to {OBSERVERS} observers, as Fetch responses", cells("responses_sent_bytes", size)),
        _row("leaders' proofs: records", of_proofs("records", count)),
        _row("leaders' proofs: with batch framing", of_proofs("batch_bytes", size)),
        _row(f"leaders' proofs: sent to {OBSERVERS} observers", of_proofs("responses_sent_bytes", size)),
        _row("controller: deciding and encoding", cells("decide_ms", milliseconds)),
        _row("each state machine: applying, in total", cells("apply_ms", milliseconds)),
        _row("each state machine: longest step", cells("longest_step_ms", milliseconds)),
    ]


def change_rows(changes: Figures) -> list[tuple[str, ...]]:
    """Return the rows of the table for the changing state, in MB per MB of change."""
    state, change = changes["snapshot_bytes"], changes["log_bytes"]
    measured = (
        changes["log_read_bytes"] / change,
        changes["snapshot_read_bytes"] / change,
        changes["log_written_bytes"] / change,
        changes["snapshot_written_bytes"] / change,
    )
    seed, ratio = compaction(STATE_BYTES, STATE_BYTES / 2), compaction(state, state)

    def rates(values: Sequence[float]) -> list[str]:
        return [f"{value:.2f} MB/s" for value in values]

    return [
        ("read from the head of the log, to apply", *rates([measured[0], 1, 1])),
        ("read to make a snapshot / map of offsets", *rates([measured[1], seed.map_read, ratio.map_read])),
        ("read to copy what lives", *rates([0, seed.copy_read, ratio.copy_read])),
        ("read, in all", *rates([measured[0] + measured[1], 1 + seed.read, 1 + ratio.read])),
        ("written to the log", *rates([measured[2], 1, 1])),
        ("written as snapshot / copied segments", *rates([measured[3], seed.written, ratio.written])),
    ]


FAILURE_HEAD = ("", "by partition: seed", "measured", "by event: seed", "measured")
CHANGE_HEAD = ("at 1 MB/s of change", "snapshots: measured", "compaction: seed's sum", "compaction: computed")


def as_tables(figures: Mapping[str, Figures], *, markdown: bool) -> str:
    """Format both tables, with a sentence before each."""
    failure, changes = figures["by_event"], figures["changes"]
    return "\n\n".join(
        [
            f"{failure['all_partitions']:,} partitions x 3 on {BROKERS} brokers; a broker with "
            f"{failure['partitions']:,} of them fails",
            harness.table(FAILURE_HEAD, failure_rows(figures["by_partition"], failure), markdown=markdown),
            f"{changes['snapshot_bytes'] / MB:.1f} MB of state; {changes['log_bytes'] / MB:.1f} MB of changes in "
            f"{changes['records']:,} records, by which {changes['snapshots']} snapshots were due. Compaction of "
            f"{STATE_BYTES / MB:.0f} MB after {STATE_BYTES / MB / 2:.0f} MB of changes (the seed's sum), and when half "
            "of the log is changes (computed: a min.cleanable.dirty.ratio of 50 %)",
            harness.table(CHANGE_HEAD, change_rows(changes), markdown=markdown),
        ]
    )


def run_step(step: str, options: argparse.Namespace) -> Figures:
    """Measure the part `step`, one of `STEPS`, in this process and return its figures."""
    if step == "changes":
        share = QUICK if options.quick else 1
        with tempfile.TemporaryDirectory() as directory:
            return measure_changes(Path(directory), STATE_BYTES // share, LIMIT_BYTES // share)
    return measure_failure(options.topics, by_event=step == "by_event")


def main(given: Sequence[str]) -> int:
    """Run all parts in new processes, print the figures, and return the exit code of `harness.run`."""
    parser = harness.Parser(
        "bench.fencing",
        __doc__,
        f"run a {QUICK}th of the load: seconds instead of a minute",
        "print tables for docs/benchmarks.md",
    )
    parser.number("--topics", "topics with 10 partitions each", 100_000, 100_000 // QUICK, least=100, most=1_000_000)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse(given)
    if options.step:
        sys.stdout.write(json.dumps(run_step(options.step, options)))
        return 0
    figures: dict[str, Figures] = {}

    def measure() -> None:
        for step in STEPS:
            harness.say(f"{step.replace('_', ' ')} ...")
            figures[step] = harness.in_process("bench.fencing", *given, "--step", step)

    about = {"topics": options.topics, "observers": OBSERVERS, "partitions_of_a_topic": PARTITIONS}
    return harness.run(
        options,
        measure,
        figures=lambda: {**about, **figures},
        text=lambda: as_tables(figures, markdown=options.markdown) if "changes" in figures else "",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
