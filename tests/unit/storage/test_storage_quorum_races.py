"""Install on the machine's task while `clean` runs on a thread (630-06, 630-12)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kipmesh.core.snapshot.ids import age_order
from kipmesh.messages import SnapshotId
from kipmesh.storage.quorum import quorum_replica
from kipmesh.storage.quorum.quorum_replica import QuorumReplica
from simulation.faulty_fs import FaultyFileSystem
from tests.unit.storage.quorum_replica_support import (
    append,
    assert_snapshot_covers_log_start,
    make_snapshot,
    open_replica,
    reopen,
    start_receiving,
)

# -- install during clean


def run_concurrently(clean: Callable[[], object], install: Callable[[], object], *, started: threading.Event) -> None:
    """Run `clean` on a thread, and `install` once `started` is set."""
    thread = threading.Thread(target=clean)
    thread.start()
    assert started.wait(60)
    install()
    thread.join(60)
    assert not thread.is_alive()


def cleanable() -> tuple[FaultyFileSystem, QuorumReplica]:
    """Return a replica whose log start 20 is not durable yet, with a received snapshot at 50."""
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 30)
    make_snapshot(replica, 10)
    make_snapshot(replica, 20)
    replica.raise_log_start(20)
    start_receiving(replica, 50, 2).complete()
    return fs, replica


def test_install_during_clean_determines_log_start(monkeypatch: pytest.MonkeyPatch) -> None:
    fs, replica = cleanable()
    started, rename = threading.Event(), fs.rename

    def slow(source: str, target: str) -> None:
        if target.endswith("log-start-offset-checkpoint") and not started.is_set():
            started.set()
            time.sleep(0.2)  # an install that did not wait would have finished
        rename(source, target)

    monkeypatch.setattr(fs, "rename", slow)
    run_concurrently(replica.clean, lambda: replica.install(SnapshotId(50, 2)), started=started)
    assert replica.latest_snapshot == SnapshotId(50, 2)
    again = reopen(fs)
    assert (again.log.log_start_offset, again.log.log_end_offset) == (50, 50)
    assert_snapshot_covers_log_start(again)


def test_install_during_clean_determines_latest_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    _, replica = cleanable()
    started, calls = threading.Event(), 0

    def slow(snapshot_id: SnapshotId) -> tuple[int, int]:
        nonlocal calls
        if threading.current_thread() is not threading.main_thread():
            calls += 1
            if calls == 5:  # the last call, whose result no later call corrects
                started.set()
                time.sleep(0.2)
        return age_order(snapshot_id)

    monkeypatch.setattr(quorum_replica, "age_order", slow)
    run_concurrently(replica.clean, lambda: replica.install(SnapshotId(50, 2)), started=started)
    assert (replica.latest_snapshot, replica.earliest_snapshot) == (SnapshotId(50, 2), SnapshotId(50, 2))
