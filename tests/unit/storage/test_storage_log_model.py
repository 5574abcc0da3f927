"""The log compared with a list of batches, through clean stops, kills and power failures."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kipmesh.core import record_batch
from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import CorruptRecordError, KafkaError
from kipmesh.messages import EpochEndOffset
from kipmesh.storage import Log, OpenFiles, open_log
from kipmesh.testing import produced_batch
from simulation.faulty_fs import FaultyFileSystem

DIRECTORY = "/data/t-0"
NOW = 1_700_000_000_000
CONFIG = TopicConfig.parse(
    {"segment.bytes": 1000, "index.interval.bytes": 150, "retention.bytes": 2000, "segment.ms": 100_000}
)


class Batch:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.header = record_batch.parse_header(data)

    @property
    def base(self) -> int:
        return self.header.base_offset

    @property
    def end(self) -> int:
        return self.header.next_offset


class LogMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.fs = FaultyFileSystem()
        self.fs.make_dirs("/data")
        self.fs.sync_dir("/")
        self.files = OpenFiles(self.fs, 4)
        self.batches: list[Batch] = []
        self.ever: set[bytes] = set()
        self.start = self.end = 0
        self.epoch = 0
        self.now = NOW
        self.durable_end = 0
        self.recovery_checkpoint = 0
        self.open(clean=False)

    def open(self, *, clean: bool) -> None:
        self.log: Log = open_log(
            self.files,
            DIRECTORY,
            "t",
            0,
            CONFIG,
            self.now,
            topic_id=b"i" * 16,
            clean=clean,
            recovery_point=self.recovery_checkpoint,
            log_start_offset=self.start,
            checkpoint_recovery_point=self.checkpoint,
        )

    def make(self, sizes: list[int], jump_ms: int) -> bytes:
        self.now += jump_ms
        return produced_batch([b"v" * size for size in sizes], timestamp_ms=self.now)

    # -- appends

    @rule(
        sizes=st.lists(st.integers(0, 150), min_size=1, max_size=4),
        jump=st.integers(-50, 500),
        epochs=st.integers(0, 1),
    )
    def append_as_leader(self, sizes: list[int], jump: int, epochs: int) -> None:
        self.epoch = max(self.epoch, self.log.latest_epoch) + epochs
        batch = self.make(sizes, jump)
        info = self.log.append_as_leader(batch, self.epoch, self.now)
        assert (info.first_offset, info.last_offset) == (self.end, self.end + len(sizes) - 1)
        self.add(record_batch.assign(batch, self.end, self.epoch))

    @rule(
        counts=st.lists(st.integers(1, 5), min_size=1, max_size=8),
        cut=st.integers(0, 100),
        epochs=st.integers(0, 1),
    )
    def append_as_follower(self, counts: list[int], cut: int, epochs: int) -> None:
        self.epoch = max(self.epoch, self.log.latest_epoch)
        data, offset, made = b"", self.end, []
        for number, count in enumerate(counts):
            epoch = self.epoch + (epochs if number else 0)
            batch = record_batch.assign(self.make([20 * count] * count, 10), offset, epoch)
            data += batch
            offset += count
            made.append(batch)
        whole = made[:-1] if cut else made
        cut = min(cut, len(made[-1]))
        info = self.log.append_as_follower(data[: len(data) - cut], self.now)
        assert (info is None) == (not whole)
        for batch in whole:
            self.add(batch)
        assert info is None or (info.last_offset == self.end - 1 and info.size_bytes == sum(map(len, whole)))
        self.epoch += epochs

    @rule(shift=st.sampled_from([-1, 1, 7]))
    def append_that_does_not_continue(self, shift: int) -> None:
        if self.end + shift < 0:
            return
        batch = record_batch.assign(self.make([10], 0), self.end + shift, self.epoch + 5)
        with pytest.raises(CorruptRecordError):
            self.log.append_as_follower(batch, self.now)

    def add(self, data: bytes) -> None:
        batch = Batch(data)
        self.batches.append(batch)
        self.ever.add(data)
        self.end = batch.end

    # -- reads

    @rule(data=st.data(), max_bytes=st.integers(0, 1500), one=st.booleans())
    def read(self, data: st.DataObject, max_bytes: int, one: bool) -> None:
        offset = data.draw(st.integers(max(0, self.start - 2), self.end + 2))
        max_offset = data.draw(st.integers(self.start, self.end + 2))
        if not self.start <= offset <= self.end:
            with pytest.raises(KafkaError):
                self.log.read(offset, max_bytes, max_offset, one)
            return
        got = self.log.read(offset, max_bytes, max_offset, one)
        if offset >= min(max_offset, self.end):
            assert got == b""
            return
        first = next(i for i, batch in enumerate(self.batches) if batch.end > offset)
        readable = [batch for batch in self.batches[first:] if batch.end <= max_offset]
        expected: list[bytes] = []
        size = 0
        for batch in readable:
            is_next_segment = expected and batch.base in self.log.segment_base_offsets
            fits = size + len(batch.data) <= max_bytes or (one and not expected)
            if is_next_segment or not fits:
                break
            expected.append(batch.data)
            size += len(batch.data)
        assert got == b"".join(expected)

    @rule(data=st.data())
    def search_timestamp(self, data: st.DataObject) -> None:
        wanted = data.draw(st.integers(NOW - 100, self.now + 10))
        limit = data.draw(st.integers(self.start, self.end))
        records = [
            (record.timestamp, record.offset, batch.header.partition_leader_epoch)
            for batch in self.batches
            for record in record_batch.read_records(batch.data, 0, batch.header)
            if self.start <= record.offset < limit
        ]
        expected = next((record for record in records if record[0] >= wanted), None)
        assert self.log.offset_for_timestamp(wanted, limit) == expected
        largest = max(records, key=lambda record: (record[0], -record[1]), default=None)
        assert (self.log.max_timestamp_offset(limit) or (None,))[0] == (largest or (None,))[0]

    @rule(epoch=st.integers(-1, 12))
    def ask_epoch_end(self, epoch: int) -> None:
        known = self.known_epochs()
        if not known or epoch < 0 or epoch > known[-1][0]:
            expected = EpochEndOffset(-1, -1)
        elif epoch == known[-1][0]:
            expected = EpochEndOffset(epoch, self.end)
        else:
            above = next(entry for entry in known if entry[0] > epoch)
            below = [entry for entry in known if entry[0] <= epoch]
            expected = EpochEndOffset(below[-1][0] if below else epoch, above[1])
        if self.start < self.end:
            assert self.log.end_offset_for_epoch(epoch) == expected

    def known_epochs(self) -> list[tuple[int, int]]:
        known: list[tuple[int, int]] = []
        for batch in self.batches:
            if batch.end > self.start and (not known or batch.header.partition_leader_epoch > known[-1][0]):
                known.append((batch.header.partition_leader_epoch, max(batch.base, self.start)))
        return known

    # -- truncations

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(self.start, self.end))
        self.log.truncate_to(offset)
        if offset < self.end:
            if offset < self.first_base:
                self.batches, self.end = [], offset
            else:
                removed = [batch for batch in self.batches if batch.end > offset]
                self.batches = self.batches[: len(self.batches) - len(removed)]
                self.end = removed[0].base
            self.start = min(self.start, self.end)
            self.durable_end = min(self.durable_end, self.end)

    @property
    def first_base(self) -> int:
        return self.log.segment_base_offsets[0]

    @rule(ahead=st.integers(-3, 50))
    def truncate_fully(self, ahead: int) -> None:
        offset = max(0, self.end + ahead)
        self.log.truncate_fully_and_start_at(offset)
        self.batches, self.start, self.end = [], offset, offset
        self.durable_end = min(self.durable_end, offset)
        self.epoch += 1

    @rule()
    def roll(self) -> None:
        self.log.roll(self.now)

    @rule(ms=st.integers(0, 200_000))
    def maybe_roll(self, ms: int) -> None:
        self.now += ms
        self.log.maybe_roll(self.now)

    @rule(data=st.data())
    def raise_start(self, data: st.DataObject) -> None:
        self.start = data.draw(st.integers(self.start, self.end))
        self.log.increment_log_start_offset(self.start)

    @rule(data=st.data(), days=st.integers(0, 8))
    def retain(self, data: st.DataObject, days: int) -> None:
        high_watermark = data.draw(st.integers(self.start, self.end))
        self.log.run_retention(self.now + days * 86_400_000, high_watermark)
        assert self.log.log_start_offset <= max(high_watermark, self.start)
        self.start = self.log.log_start_offset
        self.log.remove_deleted(1 << 60)
        self.batches = [batch for batch in self.batches if batch.end > self.first_base]
        if high_watermark == self.end and self.first_base < self.end:
            assert self.log.size_bytes <= 2000 + 1000

    # -- stops

    @rule()
    def flush(self) -> None:
        self.log.flush()
        assert self.log.recovery_point == self.end
        self.durable_end = self.end

    @rule()
    def checkpoint(self) -> None:
        self.recovery_checkpoint = self.log.recovery_point

    @rule(
        damage=st.sampled_from(["none", "missing", "odd", "garbage"]), suffix=st.sampled_from([".index", ".timeindex"])
    )
    def restart(self, damage: str, suffix: str) -> None:
        self.log.close()
        self.checkpoint()
        self.durable_end = self.end
        for name in self.fs.list_dir(DIRECTORY):
            if name.endswith(suffix) and damage != "none":
                path = f"{DIRECTORY}/{name}"
                if damage == "missing":
                    self.fs.remove(path)
                    continue
                file = self.fs.open(path)
                file.write_at(b"\xff" * (5 if damage == "odd" else 24), file.size())
        self.open(clean=True)
        assert self.log.recovery_point == self.end

    @rule(torn=st.integers(0, 300), garbage=st.integers(0, 100))
    def kill(self, torn: int, garbage: int) -> None:
        """Kill the process, which keeps the page cache, then damage the last file above the recovery point."""
        self.log.abandon()
        size = 0
        if self.batches and self.log.size_bytes:
            path = f"{DIRECTORY}/{self.log.segment_base_offsets[-1]:020d}.log"
            file = self.fs.open(path)
            size = file.size()
            torn = min(torn, size)
            file.truncate(size - torn)
            file.write_at(b"\xa5" * garbage, size - torn)
        else:
            torn = 0
        while torn > 0:
            lost = self.batches.pop()
            torn -= len(lost.data)
            self.end = lost.base
        if self.end < self.start:  # torn below the log start
            self.end, self.batches = self.start, []
        self.durable_end = min(self.durable_end, self.end)
        self.recovery_checkpoint = min(self.recovery_checkpoint, self.log.segment_base_offsets[-1])
        self.open(clean=False)
        self.durable_end = min(self.durable_end, self.log.recovery_point)

    @rule(seed=st.none() | st.integers(0, 1 << 30))
    def power_cut(self, seed: int | None) -> None:
        before = [batch for batch in self.batches if batch.end <= self.durable_end]
        self.log.abandon()
        self.files.close()
        self.fs.crash(None if seed is None else Random(seed))
        self.open(clean=False)
        self.start, self.end = self.log.log_start_offset, self.log.log_end_offset
        after = []
        offset = self.first_base
        while offset < self.end:
            if offset < self.start:  # stored, but not readable
                segment, position = self.log.segments.locate(offset)
                data = segment.read_at(1 << 20, position)
            else:
                data = self.log.read(offset, 1 << 20, self.end, True)
            after += [
                Batch(data[position : position + header.size_bytes])
                for position, header in record_batch.iterate(data)
                if header.base_offset >= offset
            ]
            offset = after[-1].end
        assert all(batch.data in self.ever for batch in after)
        epochs = [batch.header.partition_leader_epoch for batch in after]
        assert epochs == sorted(epochs)
        kept = {batch.data for batch in after}
        assert all(batch.data in kept for batch in before if batch.end > self.start), (before, after)
        self.batches = after
        self.recovery_checkpoint = min(self.recovery_checkpoint, self.log.recovery_point)
        self.epoch = max([self.epoch, *epochs]) + 1

    @invariant()
    def agrees(self) -> None:
        log = self.log
        assert (log.log_start_offset, log.log_end_offset) == (self.start, self.end)
        assert log.size_bytes == sum(len(batch.data) for batch in self.batches if batch.end > self.first_base)
        assert log.recovery_point <= log.log_end_offset
        assert len(self.files) <= 4
        assert self.fs.open_files <= 5
        if self.start < self.end:
            assert list(log.epochs.entries) == self.known_epochs()
        names = {name for name in self.fs.list_dir(DIRECTORY) if name.endswith(".log")}
        assert all(size.size_bytes <= CONFIG.segment_bytes for name, size in self.fs.list_dir(DIRECTORY).items())
        assert len(names) <= len(log.segment_base_offsets)


LogMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLogAgainstList = LogMachine.TestCase
