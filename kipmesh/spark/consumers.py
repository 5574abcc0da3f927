"""Consumers that a Python worker keeps from one task to the next, as Spark's Kafka connector does in the JVM.

Spark runs task after task in the same worker process. Connecting takes longer than reading a small range does, so a
task that ended well leaves its consumer to the next one with the same settings. It is left without partitions: it
buffers nothing, and a second later it has closed its fetch sessions (227-17). After `IDLE_SECONDS` it is closed.

Invariant: a consumer is one task's or nobody's; those of a process that forked are never used in the child.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Final, NamedTuple

from kipmesh.client.sync import Consumer

IDLE_SECONDS: Final = 30.0
"""How long a consumer waits for the next task."""
KEPT_MAX: Final = 4
"""Consumers that wait at once, each for tasks with other settings; the one that has waited longest goes."""


class Key(NamedTuple):
    """What makes one consumer as good as another."""

    pid: int
    bootstrap: str
    config: frozenset[tuple[str, str]]


class _Kept(NamedTuple):
    consumer: Consumer
    timer: threading.Timer


_log = logging.getLogger(__name__)
_lock = threading.Lock()
_kept: dict[Key, _Kept] = {}


def key_of(bootstrap: str, config: Mapping[str, str]) -> Key:
    """The key of a consumer of this process."""
    return Key(os.getpid(), bootstrap, frozenset(config.items()))


def borrow(key: Key) -> Consumer | None:
    """One that waits, which is the caller's now."""
    with _lock:
        found = _kept.pop(key, None)
    if found is None:
        return None
    found.timer.cancel()
    return found.consumer


def give_back(key: Key, consumer: Consumer) -> None:
    """Keep it for the next task; where there are enough, one that has waited is closed.

    A consumer that is not in order is closed instead. Nothing is raised: the task that had it has done its work.
    """
    try:
        consumer.assign([])
        timer = threading.Timer(IDLE_SECONDS, _expire, (key, consumer))
        timer.daemon = True
        with _lock:
            timer.start()  # which waits for the lock, too, before it looks
            surplus = [_kept.pop(key)] if key in _kept else []
            while len(_kept) >= KEPT_MAX:
                surplus.append(_kept.pop(next(iter(_kept))))
            _kept[key] = _Kept(consumer, timer)
    except Exception:
        _log.warning("a consumer cannot be kept for the next task", exc_info=True)
        _close(consumer)
        return
    for each in surplus:
        each.timer.cancel()
        _close(each.consumer)


def _expire(key: Key, consumer: Consumer) -> None:
    with _lock:
        found = _kept.get(key)
        if found is None or found.consumer is not consumer:
            return
        del _kept[key]
    _close(consumer)


def _close(consumer: Consumer) -> None:
    try:
        consumer.close()
    except Exception:
        _log.warning("a consumer that is not needed any more is not closed well", exc_info=True)
