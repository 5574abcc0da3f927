"""Snapshot files: round trip, detection of damage, and no partial snapshot after faults or crashes."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kipmesh.core import record_batch
from kipmesh.core.control_records import SnapshotFooter, SnapshotHeader, encode_control
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import MetadataImage
from kipmesh.core.metadata.image_writer import image_values
from kipmesh.core.snapshot.retention import LogExtent, StartFromLog, StartFromSnapshot, StartRefused
from kipmesh.messages import SnapshotId
from kipmesh.storage.fs import RealFileSystem, StorageError, read_file, write_file
from kipmesh.storage.quorum.snapshot_file import ImageLoader, control_batch
from kipmesh.storage.quorum.snapshots import SnapshotStore
from simulation.faulty_fs import FaultyFileSystem
from tests.unit.core.snapshot.image_strategies import assert_same, images

DIRECTORY = "data/__cluster_metadata-0"
OLD, NEW = SnapshotId(100, 3), SnapshotId(200, 4)
NOW = 1_700_000_000_000
VALUES = [b"value %d" % number for number in range(25)]


def new_store(fs: FaultyFileSystem | None = None) -> tuple[FaultyFileSystem, SnapshotStore]:
    fs = fs or FaultyFileSystem()
    fs.make_dirs(DIRECTORY)
    fs.sync_dir("data")
    fs.sync_dir("")
    return fs, SnapshotStore(fs, DIRECTORY)


def make(store: SnapshotStore, snapshot_id: SnapshotId = OLD, values: list[bytes] = VALUES, **options: str) -> int:
    writer = store.create(snapshot_id, last_contained_log_timestamp=NOW - 5, now_ms=NOW, **options)
    try:
        for start in range(0, len(values), 10):
            writer.append(values[start : start + 10])
        return writer.freeze()
    finally:
        writer.discard()


def read(store: SnapshotStore, snapshot_id: SnapshotId) -> list[bytes]:
    return [value for values in store.open(snapshot_id).values() for value in values]


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "zstd"])
def test_written_snapshot_is_read_back(compression: str) -> None:
    fs, store = new_store()
    values = VALUES * 20
    size = make(store, values=values, compression=compression)
    assert fs.list_dir(DIRECTORY).keys() == {"00000000000000000100-0000000003.checkpoint"}
    assert read(store, OLD) == values
    assert store.validate(OLD) == (SnapshotHeader(0, NOW - 5), len(values), size)
    assert store.header(OLD).last_contained_log_timestamp == NOW - 5
    assert store.size(OLD) == size
    data = read_file(fs, f"{DIRECTORY}/00000000000000000100-0000000003.checkpoint")
    assert store.read(OLD, 7, 50) == data[7:57]
    batches = [header for _, header in record_batch.iterate(data)]
    assert [batch.base_offset for batch in batches[1:]] == [batch.next_offset for batch in batches[:-1]]
    assert {batch.partition_leader_epoch for batch in batches} == {3}
    assert fs.open_files == 0


@given(images())
@settings(max_examples=30, deadline=None)
def test_image_survives_snapshot_file(image: MetadataImage) -> None:
    _, store = new_store()
    snapshot_id = SnapshotId(image.offset + 1, image.epoch)
    image.timestamp_ms = 77
    writer = store.create(snapshot_id, last_contained_log_timestamp=image.timestamp_ms, now_ms=NOW)
    written = list(writer.write(image_values(image.capture())))
    writer.freeze()
    loader = ImageLoader(store.open(snapshot_id), snapshot_id)
    assert list(loader.steps()) == written
    assert_same(image, loader.image)


def test_image_of_large_batches_is_loaded_in_steps() -> None:
    _, store = new_store()
    noop = r.encode_record(r.NoOpRecord())
    writer = store.create(OLD, last_contained_log_timestamp=5, now_ms=NOW)
    writer.append([noop] * 2500)
    writer.freeze()
    loader = ImageLoader(store.open(OLD), OLD)
    assert list(loader.steps()) == [1000, 2000, 2500]
    assert (loader.image.offset, loader.image.epoch, loader.image.timestamp_ms) == (99, 3, 5)
    make(store, NEW, [b"\x09"])
    loader = ImageLoader(store.open(NEW), NEW)
    with pytest.raises(CorruptRecordError, match="frame version 9"):
        list(loader.steps())


def test_snapshot_batches_are_bounded() -> None:
    _, store = new_store()
    writer = store.create(OLD, last_contained_log_timestamp=0, now_ms=NOW)
    assert list(writer.write(b"x" * 10 for _ in range(2500))) == [1000, 2000, 2500]
    assert list(writer.write([b"x" * 900_000] * 3)) == [2502, 2503]
    writer.freeze()
    assert store.validate(OLD).records == 2503


def test_reader_handles_batches_larger_than_read_size() -> None:
    _, store = new_store()
    make(store, values=[b"x" * 3_000_000, b"y" * 10, b"z" * 2_000_000])
    assert [len(value) for value in read(store, OLD)] == [3_000_000, 10, 2_000_000]


def file_of(*batches: bytes) -> tuple[FaultyFileSystem, SnapshotStore]:
    fs, store = new_store()
    write_file(fs, f"{DIRECTORY}/00000000000000000100-0000000003.checkpoint", b"".join(batches), sync=True)
    return fs, store


def control(*pairs: tuple[bytes, bytes], offset: int = 0) -> bytes:
    return record_batch.build(pairs, base_offset=offset, leader_epoch=3, timestamp_ms=NOW, is_control=True)


def data(*values: bytes | None) -> bytes:
    return record_batch.build([(None, value) for value in values], base_offset=1, leader_epoch=3, timestamp_ms=NOW)


HEAD, FOOT = control_batch(SnapshotHeader(0, 1), 0, 3, NOW), control_batch(SnapshotFooter(), 9, 3, NOW)
KRAFT_VERSION = (b"\0\0\0\5", b"\0\0\0\1\0")


def test_snapshot_with_additional_control_records_is_accepted() -> None:
    many = control(encode_control(SnapshotHeader(0, 1)), KRAFT_VERSION, (b"\0\0\0\6", b"whatever"))
    _, store = file_of(many, data(b"a"), control(KRAFT_VERSION), data(b"b"), FOOT)
    assert read(store, OLD) == [b"a", b"b"]
    _, store = file_of(HEAD, FOOT)
    assert store.validate(OLD).records == 0


@pytest.mark.parametrize(
    ("batches", "problem"),
    [
        ((), "does not end with a footer"),
        ((HEAD, data(b"a")), "does not end with a footer"),
        ((data(b"a"), FOOT), "does not start with a header"),
        ((FOOT,), "does not start with a header"),
        ((control(KRAFT_VERSION), HEAD, FOOT), "does not start with a header"),
        ((HEAD, FOOT, data(b"a")), "a batch follows the footer"),
        ((HEAD, FOOT, FOOT), "a batch follows the footer"),
        ((HEAD, control(encode_control(SnapshotFooter()), KRAFT_VERSION)), "a record follows the footer"),
        ((HEAD, data(b"a", None), FOOT), "has no value"),
        ((HEAD, control((b"\0", b"")), FOOT), "control record key must have"),
        ((control((b"\0\0\0\3", b"\0")), FOOT), "invalid control record: SnapshotHeader"),
        ((HEAD, control((b"\0\0\0\4", b"\0"))), "invalid control record: SnapshotFooter"),
        ((HEAD, FOOT[:-1]), "is incomplete"),
        ((HEAD, FOOT, b"\0" * 20), "must have 61 bytes, got 20"),
        ((HEAD, b"\0" * 100, FOOT), "batch format"),
    ],
)
def test_incomplete_snapshot_files_are_corrupt(batches: tuple[bytes, ...], problem: str) -> None:
    _, store = file_of(*batches)
    with pytest.raises(CorruptRecordError, match=problem) as caught:
        store.validate(OLD)
    assert "00000000000000000100-0000000003.checkpoint" in str(caught.value)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_flipped_bit_or_truncation_is_detected(choice: st.DataObject) -> None:
    fs, store = new_store()
    make(store)
    path = f"{DIRECTORY}/00000000000000000100-0000000003.checkpoint"
    whole = bytearray(read_file(fs, path))
    at = choice.draw(st.integers(0, len(whole) - 1))
    # Base offset and leader epoch are outside of the CRC and unused in a snapshot.
    outside = {position + byte for position, _ in record_batch.iterate(whole) for byte in (*range(8), 12, 13, 14, 15)}
    if choice.draw(st.booleans()):
        whole[at] ^= 1 << choice.draw(st.integers(0, 7))
        is_harmless = at in outside
    else:
        del whole[at:]
        is_harmless = False
    write_file(fs, path, bytes(whole), sync=True)
    try:
        assert store.validate(OLD).records == len(VALUES)
        assert is_harmless
    except CorruptRecordError:
        pass


FAULTS = [("write", errno.ENOSPC), ("sync", errno.EIO), ("sync_dir", errno.EIO), ("rename", errno.EIO), ("open", 5)]


@pytest.mark.parametrize(("operation", "error"), FAULTS)
@pytest.mark.parametrize("skip", range(5))
def test_storage_fault_keeps_old_snapshot_and_no_partial_file(operation: str, error: int, skip: int) -> None:
    fs, store = new_store()
    make(store, OLD)
    fs.fail(operation, error, skip=skip, torn_bytes=0)
    try:
        make(store, NEW)
    except StorageError:
        assert store.snapshot_ids() == [OLD]
        assert len(fs.list_dir(DIRECTORY)) == 1
    else:
        assert store.snapshot_ids() == [OLD, NEW]
    fs.faults.clear()
    assert read(store, OLD) == VALUES
    make(store, NEW)
    assert store.snapshot_ids() == [OLD, NEW]
    assert fs.open_files == 0


def test_full_disk_leaves_no_partial_snapshot() -> None:
    fs, store = new_store(FaultyFileSystem(capacity_bytes=1000))
    make(store, OLD, VALUES[:5])
    with pytest.raises(StorageError, match="No space left"):
        make(store, NEW, [b"x" * 200] * 20)
    assert store.snapshot_ids() == [OLD]
    assert fs.used_bytes == store.size(OLD)


STEPS = ("open", "truncate", "write", "sync", "rename", "sync_dir")


@pytest.mark.parametrize("seed", range(40))
def test_crash_while_writing_leaves_old_or_new_snapshot(seed: int) -> None:
    rng = Random(seed)
    fs, store = new_store()
    make(store, OLD)
    fs.fail(STEPS[seed % len(STEPS)], skip=rng.randint(0, 4))
    writer = None
    try:
        writer = store.create(NEW, last_contained_log_timestamp=1, now_ms=NOW)
        for start in range(0, len(VALUES), 10):
            writer.append(VALUES[start : start + 10])
        writer.freeze()
        is_done = True
    except StorageError:
        is_done = False
    fs.crash(rng if seed % 3 else None)
    store = SnapshotStore(fs, DIRECTORY)
    store.clean()
    assert all(not name.endswith(".part") for name in fs.list_dir(DIRECTORY))
    found = store.snapshot_ids()
    assert found[0] == OLD
    assert not is_done or found == [OLD, NEW]
    for snapshot_id in found:
        assert read(store, snapshot_id) == VALUES


def test_snapshot_is_received_in_parts_and_resumed() -> None:
    fs, store = new_store()
    make(store, NEW)
    whole = store.read(NEW, 0, 1 << 20) or b""
    other_fs, other = new_store()
    receiving = other.receive(NEW)
    receiving.write(0, whole[:70])
    with pytest.raises(ValueError, match="got 80"):
        receiving.write(80, whole[80:])
    del receiving
    receiving = other.receive(NEW)
    assert receiving.size_bytes == 70
    receiving.write(70, whole[70:])
    assert other.snapshot_ids() == []
    assert receiving.complete().records == len(VALUES)
    other_fs.crash()
    assert read(other, NEW) == VALUES
    assert other_fs.open_files == fs.open_files == 0


def test_corrupt_received_snapshot_is_deleted() -> None:
    fs, store = new_store()
    receiving = store.receive(NEW)
    receiving.write(0, HEAD)
    with pytest.raises(CorruptRecordError, match="footer"):
        receiving.complete()
    receiving.discard()
    assert fs.list_dir(DIRECTORY) == {}
    receiving = store.receive(NEW)
    receiving.write(0, HEAD + FOOT)
    fs.fail("read")
    with pytest.raises(StorageError):
        receiving.complete()
    assert fs.list_dir(DIRECTORY) == {}


def test_store_deletes_cleans_and_reads_long_file_names() -> None:
    fs, store = new_store()
    make(store, OLD)
    make(store, NEW)
    long = f"{DIRECTORY}/{200:020d}-{4:020d}.checkpoint"
    fs.rename(f"{DIRECTORY}/00000000000000000200-0000000004.checkpoint", long)
    for name in (
        "00000000000000000300-0000000004.checkpoint.part",
        "00000000000000000050-0000000001.checkpoint.deleted",
    ):
        write_file(fs, f"{DIRECTORY}/{name}", b"x", sync=False)
    write_file(fs, f"{DIRECTORY}/leader-epoch-checkpoint", b"0\n0\n", sync=False)
    assert len(store.clean()) == 2
    assert store.snapshot_ids() == [OLD, NEW]
    assert read(store, NEW) == VALUES
    reader = store.open(OLD)
    store.delete([OLD, SnapshotId(1, 1)])
    assert store.snapshot_ids() == [NEW]
    assert reader.check().records == len(VALUES)
    assert (store.size(OLD), store.read(OLD, 0, 1)) == (None, None)
    with pytest.raises(StorageError):
        store.open(OLD)
    make(store, NEW, VALUES[:3])
    assert store.validate(NEW).records == 3
    store.delete([NEW])
    assert fs.list_dir(DIRECTORY).keys() == {"leader-epoch-checkpoint"}


@pytest.mark.parametrize("seed", range(12))
def test_crash_while_deleting_leaves_complete_snapshots(seed: int) -> None:
    rng = Random(seed)
    fs, store = new_store()
    make(store, OLD)
    make(store, NEW)
    fs.fail(("rename", "remove", "sync")[seed % 3])
    with contextlib.suppress(StorageError):
        store.delete([OLD])
    fs.crash(rng if seed % 2 else None)
    store = SnapshotStore(fs, DIRECTORY)
    store.clean()
    found = store.snapshot_ids()
    assert found[-1] == NEW
    assert len(fs.list_dir(DIRECTORY)) == len(found)
    for snapshot_id in found:
        assert read(store, snapshot_id) == VALUES


def corrupt(fs: FaultyFileSystem, name: str) -> None:
    path = f"{DIRECTORY}/{name}.checkpoint"
    changed = bytearray(read_file(fs, path))
    changed[100] ^= 1
    write_file(fs, path, bytes(changed), sync=True)


def test_recovery_uses_newest_valid_snapshot(caplog: pytest.LogCaptureFixture) -> None:
    fs, store = new_store()
    assert store.recover(LogExtent(0, 300, 4), is_voter=True) == (StartFromLog(), None)
    make(store, OLD)
    make(store, NEW)
    start, summary = store.recover(LogExtent(50, 300, 4), is_voter=True)
    assert start == StartFromSnapshot(NEW, replaces_log=False)
    assert summary is not None
    assert summary.records == len(VALUES)
    corrupt(fs, "00000000000000000200-0000000004")
    start, _ = store.recover(LogExtent(50, 300, 4), is_voter=True)
    assert start == StartFromSnapshot(OLD, replaces_log=False)
    assert "00000000000000000200-0000000004.checkpoint.corrupt" in fs.list_dir(DIRECTORY)
    assert "error=snapshot 00000000000000000200-0000000004.checkpoint: wrong CRC" in caplog.text
    corrupt(fs, "00000000000000000100-0000000003")
    start, summary = store.recover(LogExtent(50, 300, 4), is_voter=True)
    assert isinstance(start, StartRefused)
    assert summary is None


def test_read_error_does_not_mark_snapshot_corrupt() -> None:
    fs, store = new_store()
    make(store, OLD)
    for operation in ("read", "open", "list"):
        fs.fail(operation)
        with pytest.raises(StorageError):
            store.recover(LogExtent(0, 300, 4), is_voter=True)
    fs.fail("rename")
    with pytest.raises(StorageError):
        store.set_aside(OLD)
    assert store.snapshot_ids() == [OLD]


def test_snapshot_store_works_on_real_file_system(tmp_path: Path) -> None:
    store = SnapshotStore(RealFileSystem(), str(tmp_path))
    size = make(store)
    assert read(store, OLD) == VALUES
    assert (tmp_path / "00000000000000000100-0000000003.checkpoint").stat().st_size == size
