"""An install on the machine's task while a cleaning runs on a thread (630-06, 630-12)."""

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
    assert_630_06,
    make,
    open_replica,
    received,
    reopen,
)

# -- installing while a thread cleans


def beside(clean: Callable[[], object], install: Callable[[], object], *, begun: threading.Event) -> None:
    """Clean on a thread, and install once that has begun what `begun` says."""
    thread = threading.Thread(target=clean)
    thread.start()
    assert begun.wait(60)
    install()
    thread.join(60)
    assert not thread.is_alive()


def cleanable() -> tuple[FaultyFileSystem, QuorumReplica]:
    """The log start is to be made durable at 20; a snapshot at 50 has come."""
    fs = FaultyFileSystem()
    replica = open_replica(fs)
    append(replica, 30)
    make(replica, 10)
    make(replica, 20)
    replica.raise_log_start(20)
    received(replica, 50, 2).complete()
    return fs, replica


def test_an_install_beside_a_clean_has_the_last_word_of_the_log_start(monkeypatch: pytest.MonkeyPatch) -> None:
    fs, replica = cleanable()
    begun, rename = threading.Event(), fs.rename

    def slow(source: str, target: str) -> None:
        if target.endswith("log-start-offset-checkpoint") and not begun.is_set():
            begun.set()
            time.sleep(0.2)  # an install that did not wait would be done by then
        rename(source, target)

    monkeypatch.setattr(fs, "rename", slow)
    beside(replica.clean, lambda: replica.install(SnapshotId(50, 2)), begun=begun)
    assert replica.latest_snapshot == SnapshotId(50, 2)
    again = reopen(fs)
    assert (again.log.log_start_offset, again.log.log_end_offset) == (50, 50)
    assert_630_06(again)


def test_an_install_beside_a_clean_has_the_last_word_of_what_is_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    _, replica = cleanable()
    begun, calls = threading.Event(), 0

    def slow(snapshot_id: SnapshotId) -> tuple[int, int]:
        nonlocal calls
        if threading.current_thread() is not threading.main_thread():
            calls += 1
            if calls == 5:  # the last look: nobody would mend what it says
                begun.set()
                time.sleep(0.2)
        return age_order(snapshot_id)

    monkeypatch.setattr(quorum_replica, "age_order", slow)
    beside(replica.clean, lambda: replica.install(SnapshotId(50, 2)), begun=begun)
    assert (replica.latest_snapshot, replica.earliest_snapshot) == (SnapshotId(50, 2), SnapshotId(50, 2))
