"""Compaction of one log: kept records, readers, followers, and power failures at every step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kipmesh.core import record_batch
from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import ErrorCode, InvalidConfigError, KafkaError
from kipmesh.storage import Log, StorageError, open_log
from kipmesh.storage.log.compaction import build_offset_map, compact, compact_now, group_segments, plan_compaction
from kipmesh.storage.log.compaction_records import DELETE_HORIZON, locate_records, records_of
from kipmesh.testing import produced_batch
from simulation.faulty_fs import FaultyFileSystem

NOW = 1_700_000_000_000
DIRECTORY = "/data/t-0"
KEYS = {"cleanup.policy": "compact", "segment.bytes": 500, "index.interval.bytes": 100, "file.delete.delay.ms": 0}
HOUR = 3_600_000
ReadRecord = tuple[int, bytes | None, bytes | None, int]


@pytest.fixture
def fs() -> FaultyFileSystem:
    fs = FaultyFileSystem()
    fs.make_dirs("/data")
    fs.sync_dir("/")
    return fs


def make_log(
    fs: FaultyFileSystem, directory: str = DIRECTORY, *, config: Mapping[str, object] | None = None, **options: Any
) -> Log:
    parsed = TopicConfig.parse({**KEYS, **(config or {})})
    return open_log(fs, directory, "t", 0, parsed, NOW, topic_id=bytes(16), **options)


def append(log: Log, key: bytes | None, *values: bytes | None, now_ms: int = NOW, **options: Any) -> None:
    log.append_as_leader(produced_batch(values, key=key, timestamp_ms=now_ms, **options), 0, now_ms)


def read_records(log: Log, start: int | None = None) -> list[ReadRecord]:
    """Return offset, key, value and timestamp of the records from `start`. Asserts that batches have no gaps."""
    found, offset = [], log.log_start_offset if start is None else start
    is_first = True
    while offset < log.log_end_offset:
        data = log.read(offset, 1 << 20, log.log_end_offset, True)
        assert data, (offset, log)
        for position, header in record_batch.iterate(data):
            record_batch.check_crc(data, position, header)
            assert header.base_offset == offset or (is_first and header.base_offset <= offset < header.next_offset)
            is_first, offset = False, header.next_offset
            batch = data[position : position + header.size_bytes]
            records = records_of(batch, header)
            plain = header.with_records(len(records), 0)
            found += [
                (record.offset, record.key, record.value, record.timestamp)
                for record in record_batch.read_records(record_batch.join(plain, records), 0, plain)
            ]
    return found


def last_values(records: list[ReadRecord]) -> dict[bytes | None, ReadRecord]:
    return {record[1]: record for record in records}


def settle(log: Log, now_ms: int = NOW) -> None:
    """Roll the active segment and flush, so that all batches can be compacted."""
    log.roll(now_ms)
    log.flush()


def test_compaction_keeps_last_record_of_each_key_at_its_offset(fs: FaultyFileSystem) -> None:
    log = make_log(fs)
    for number in range(30):
        append(log, b"key-%d" % (number % 3), b"value-%d" % number, now_ms=NOW + number)
    settle(log)
    before, size = read_records(log), log.size_bytes
    assert compact_now(log, NOW, log.log_end_offset)
    assert read_records(log) == before[-3:]
    assert log.size_bytes < size / 4
    assert (log.log_start_offset, log.log_end_offset, log.first_dirty_offset) == (0, 30, 30)
    assert not compact_now(log, NOW, log.log_end_offset), "there is nothing new"
    for start in range(30):
        assert read_records(log, start) == before[-3:] or start > 27
    log.close()
    assert read_records(make_log(fs, clean=True)) == before[-3:]


def test_compacts_only_inactive_segments_below_high_watermark_and_recovery_point(fs: FaultyFileSystem) -> None:
    log = make_log(fs)
    for _ in range(20):
        append(log, b"key", b"v" * 100)
    assert plan_compaction(log, NOW, 20) is None, "nothing is durable"
    log.flush()
    plan = plan_compaction(log, NOW, 20)
    assert plan is not None
    assert plan.end_offset == log.segment_base_offsets[-1]
    bases = log.segment_base_offsets
    plan = plan_compaction(log, NOW, bases[2] + 1)
    assert plan is not None
    assert plan.end_offset == bases[2]
    assert compact_now(log, NOW, bases[2] + 1)
    assert [record[0] for record in read_records(log)] == [bases[2] - 1, *range(bases[2], 20)]


def test_compaction_lags_and_dirty_ratio_decide_when_to_compact(fs: FaultyFileSystem) -> None:
    log = make_log(fs, config={"min.compaction.lag.ms": 1000, "max.compaction.lag.ms": 5000})
    for number in range(12):
        append(log, b"key", b"v" * 100, now_ms=NOW + number * 300)
    settle(log, NOW + 4000)
    plan = plan_compaction(log, NOW + 2500, 12)
    assert plan is not None
    assert plan.end_offset < 8
    assert plan_compaction(log, NOW + 100, 12) is None
    assert compact_now(log, NOW + 2500, 12)
    plan = plan_compaction(log, NOW + 9000, 12)
    assert plan is not None
    assert plan.is_overdue
    assert plan.is_due
    log.update_config(log.config.model_copy(update={"max_compaction_lag_ms": HOUR}))
    plan = plan_compaction(log, NOW + 9000, 12)
    assert plan is not None
    assert not plan.is_overdue
    assert 0.5 < plan.dirty_ratio < 1


def test_tombstone_is_kept_until_delete_horizon(fs: FaultyFileSystem) -> None:
    log = make_log(fs, config={"delete.retention.ms": HOUR})
    append(log, b"gone", b"value")
    append(log, b"stays", b"value")
    append(log, b"gone", None, None)
    settle(log)
    assert compact_now(log, NOW + 5, 4)
    assert read_records(log) == [(1, b"stays", b"value", NOW), (3, b"gone", None, NOW + 1)]
    headers = [header for _, header in record_batch.iterate(log.read(2, 1 << 20, 4, True))]
    assert headers[-1].attributes & DELETE_HORIZON
    assert headers[-1].base_timestamp == NOW + 5 + HOUR
    found = log.offset_for_timestamp(NOW + 1, 4)
    assert found is not None
    assert found[:2] == (NOW + 1, 3)
    append(log, b"other", b"value")
    settle(log)
    assert compact_now(log, NOW + HOUR, 5)
    assert last_values(read_records(log))[b"gone"][2] is None
    append(log, b"other", b"value")
    settle(log)
    assert compact_now(log, NOW + 5 + HOUR, 6)
    assert set(last_values(read_records(log))) == {b"stays", b"other"}


@pytest.mark.parametrize("compression", range(5))
def test_compacted_batches_keep_codec_offsets_and_header(fs: FaultyFileSystem, compression: int) -> None:
    log = make_log(fs, config={"segment.bytes": 100_000})
    values = [b"%d" % number * 50 for number in range(20)]
    append(log, b"a", *values, compression=compression, headers=[("h", b"1")])
    append(log, b"b", None, b"x", compression=compression)
    append(log, b"b", None, compression=compression)
    settle(log)
    before = read_records(log)
    assert compact_now(log, NOW, log.log_end_offset)
    data = log.read(0, 1 << 20, log.log_end_offset, True)
    headers = [header for _, header in record_batch.iterate(data)]
    assert [(h.base_offset, h.last_offset, h.record_count) for h in headers] == [(0, 19, 1), (20, 21, 0), (22, 22, 1)]
    assert headers[0].compression == headers[2].compression == compression
    assert read_records(log) == [before[19], before[22]]
    records = records_of(data[: headers[0].size_bytes], headers[0])
    assert len(locate_records(records, headers[0])) == 1
    assert b"h" in records


def test_records_without_key_are_rejected_and_never_removed(fs: FaultyFileSystem) -> None:
    log = make_log(fs, config={"cleanup.policy": "delete"})
    append(log, None, b"one", b"two")
    append(log, b"key", b"one", b"two")
    append(log, b"key", b"three")
    log.update_config(TopicConfig.parse(KEYS))
    for compression in range(5):
        with pytest.raises(KafkaError) as caught:
            append(log, None, b"no", compression=compression)
        assert caught.value.code == ErrorCode.INVALID_RECORD
    settle(log)
    assert compact_now(log, NOW, 5)
    assert [record[2] for record in read_records(log)] == [b"one", b"two", b"three"]


def test_last_batch_of_producer_is_kept_without_records(fs: FaultyFileSystem) -> None:
    log = make_log(fs)
    for sequence in range(5):
        append(log, b"key", b"v" * 100, producer=(7, 0, sequence))
    append(log, b"key", b"last")
    settle(log)
    assert compact_now(log, NOW, 6)
    assert [record[2] for record in read_records(log)] == [b"last"]
    log.close()
    for name in fs.list_dir(DIRECTORY):
        if name.endswith(".snapshot"):
            fs.remove(f"{DIRECTORY}/{name}")
    log = make_log(fs)
    info = log.append_as_leader(produced_batch([b"v" * 100], key=b"key", producer=(7, 0, 4)), 0, NOW)
    assert (info.first_offset, info.size_bytes) == (4, 0), "it is known as a duplicate"
    with pytest.raises(KafkaError):
        append(log, b"key", b"v", producer=(7, 0, 6))
    append(log, b"key", b"v", producer=(7, 0, 5))


def test_follower_catches_up_with_compacted_leader(fs: FaultyFileSystem) -> None:
    log, follower = make_log(fs), make_log(fs, "/data/f-0")
    for number in range(40):
        log.append_as_leader(produced_batch([b"v" * 50], key=b"%d" % (number % 2)), number // 15, NOW)
        if number == 6:
            follower.append_as_follower(log.read(0, 1 << 20, 99, True), NOW)
    assert 0 < follower.log_end_offset <= 7
    settle(log)
    assert compact_now(log, NOW, 40)
    while follower.log_end_offset < 40:
        follower.append_as_follower(log.read(follower.log_end_offset, 300, 99, True), NOW)
    assert follower.epochs.entries == log.epochs.entries
    assert last_values(read_records(follower)) == last_values(read_records(log))
    settle(follower)
    assert compact_now(follower, NOW, 40)
    assert read_records(follower) == read_records(log)


def test_offset_gap_is_corruption(fs: FaultyFileSystem) -> None:
    log = make_log(fs)
    append(log, b"key", b"value")
    batch = record_batch.assign(produced_batch([b"v"], key=b"key"), 5, 0)
    with pytest.raises(KafkaError):
        log.append_as_follower(batch, NOW)
    assert log.log_end_offset == 1


def test_retention_applies_to_compacted_log_only_with_both_policies(fs: FaultyFileSystem) -> None:
    for policy, kept in (("compact", True), ("compact,delete", False)):
        directory = f"/data/{'a' if kept else 'b'}-0"
        log = make_log(fs, directory, config={"cleanup.policy": policy, "retention.ms": 1000})
        append(log, b"key", b"value")
        settle(log)
        assert (log.run_retention(NOW + 5000, 1) == 0) == kept
    with pytest.raises(InvalidConfigError):
        TopicConfig.parse({"cleanup.policy": "compact", "min.compaction.lag.ms": 5, "max.compaction.lag.ms": 4})


def test_full_offset_map_needs_several_compactions(fs: FaultyFileSystem) -> None:
    log = make_log(fs)
    for number in range(60):
        append(log, b"key-%d" % (number % 20), b"v%d" % number)
    settle(log)
    expected = last_values(read_records(log))
    passes = 0
    while compact_now(log, NOW, 60, memory_bytes=500):
        assert last_values(read_records(log)) == expected
        passes += 1
    assert passes > 3
    assert read_records(log) == list(expected.values())


# -- power failures and truncations at every step


def steps(log: Log) -> Iterator[str]:
    """Compact one group after the other. Yield the name of each step."""
    plan = plan_compaction(log, NOW, log.log_end_offset)
    if plan is None:
        return
    offset_map = build_offset_map(plan, 1 << 20, lambda _: None)
    for group in group_segments(plan, offset_map.end_offset):
        swap = compact(plan, group, offset_map, NOW, lambda _: None)
        yield "written"
        if swap is None:
            continue
        for step in (swap.begin, swap.sync, lambda swap=swap: swap.take_over(NOW), swap.sync, swap.finish):
            if step() is False:
                break
            yield "step"
        swap.discard()
        plan.generation = swap.generation


def filled(fs: FaultyFileSystem) -> Log:
    log = make_log(fs)
    for number in range(40):
        append(log, b"%d" % (number % 4), b"v" * 60 + b"%d" % number)
    settle(log)
    append(log, b"tail", b"tail")
    log.flush()
    return log


STEPS = 12


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("after", range(STEPS))
def test_power_failure_at_any_step_of_compaction_loses_nothing(
    fs: FaultyFileSystem, after: int, seed: int | None
) -> None:
    log = filled(fs)
    expected = last_values(read_records(log))
    for _ in zip(range(after), steps(log), strict=False):
        assert last_values(read_records(log)) == expected
    point = log.recovery_point
    fs.crash(None if seed is None else Random(seed))
    log = make_log(fs, recovery_point=point)
    assert log.log_end_offset == 41
    assert last_values(read_records(log)) == expected
    assert not [name for name in fs.list_dir(DIRECTORY) if name.endswith((".swap", ".cleaned"))]
    while compact_now(log, NOW, 41):
        pass
    assert last_values(read_records(log)) == expected
    assert len(read_records(log)) == 5


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("end", [3, 21])
@pytest.mark.parametrize("after", range(STEPS))
def test_truncation_at_any_step_cancels_compaction(
    fs: FaultyFileSystem, after: int, end: int, seed: int | None
) -> None:
    log = filled(fs)
    ran = steps(log)
    for _ in zip(range(after), ran, strict=False):
        pass
    log.truncate_to(end)
    end = log.log_end_offset
    append(log, b"new", b"new")
    expected = read_records(log)
    with contextlib.suppress(KafkaError, FileNotFoundError):
        for _ in ran:
            pass
    assert last_values(read_records(log)) == last_values(expected)
    log.flush()
    fs.crash(None if seed is None else Random(seed))
    log = make_log(fs, recovery_point=end)
    assert last_values(read_records(log)) == last_values(expected)
    assert log.log_end_offset == end + 1


@pytest.mark.parametrize("skip", range(0, 12, 2))
@pytest.mark.parametrize("operation", ["write", "sync", "rename", "sync_dir", "remove"])
def test_disk_failure_during_compaction_loses_nothing(fs: FaultyFileSystem, operation: str, skip: int) -> None:
    log = filled(fs)
    expected = last_values(read_records(log))
    fs.fail(operation, skip=skip)
    with contextlib.suppress(StorageError, OSError):
        compact_now(log, NOW, 41)
    if not log.failed:
        assert last_values(read_records(log)) == expected
    log.abandon()
    fs.crash(Random(skip))
    fs.faults.clear()
    assert last_values(read_records(make_log(fs, recovery_point=41))) == expected


# -- comparison with a dict


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_compacted_log_matches_dict_model(data: st.DataObject) -> None:
    fs = FaultyFileSystem()
    fs.make_dirs("/data")
    fs.sync_dir("/")
    log, now = make_log(fs, config={"delete.retention.ms": 50}), NOW
    every: dict[int, ReadRecord] = {}
    live: dict[bytes, ReadRecord] = {}
    for number in range(data.draw(st.integers(5, 40))):
        match data.draw(st.sampled_from("aaaaarccfpo")):
            case "a":
                key = b"%d" % data.draw(st.integers(0, 3))
                values = [
                    None if tombstone else b"%d" % number * 20
                    for tombstone in data.draw(st.lists(st.booleans(), min_size=1, max_size=3))
                ]
                compression = data.draw(st.integers(0, 4))
                start = log.log_end_offset
                append(log, key, *values, now_ms=now, compression=compression)
                for at, value in enumerate(values):
                    every[start + at] = (start + at, key, value, now + at)
                live[key] = every[start + len(values) - 1]
            case "r":
                settle(log, now)
            case "c":
                compact_now(log, now, log.log_end_offset, memory_bytes=data.draw(st.sampled_from([100, 1 << 20])))
            case "f":
                now += data.draw(st.integers(1, 60))
            case "p":
                log.flush()
                point, dirty = log.recovery_point, log.first_dirty_offset
                fs.crash(Random(number))
                log = make_log(fs, recovery_point=point, config={"delete.retention.ms": 50})
                log.first_dirty_offset = dirty
            case "o":
                wanted = data.draw(st.integers(NOW, now + 3))
                found = log.offset_for_timestamp(wanted, log.log_end_offset)
                first = next((record for record in read_records(log) if record[3] >= wanted), None)
                assert (found and found.offset) == (first and first[0])
                largest = log.max_timestamp_offset(log.log_end_offset)
                assert (largest and largest.timestamp) == max((record[3] for record in read_records(log)), default=None)
        check(log, every, live)


def check(log: Log, every: dict[int, ReadRecord], live: dict[bytes, ReadRecord]) -> None:
    records = read_records(log)
    offsets = [record[0] for record in records]
    assert offsets == sorted(set(offsets))
    assert all(every[record[0]] == record for record in records)
    last = last_values(records)
    for key, record in live.items():
        assert last.get(key) == record or (record[2] is None and key not in last)
