"""Idle consumers that a Python worker keeps for its next task, as Spark's Kafka connector does in the JVM.

Spark runs many tasks in one worker process, and connecting takes longer than reading a small range. A successful task
therefore leaves its consumer to the next task with the same configuration. An idle consumer has no partitions: it
buffers nothing and closes its fetch sessions within a second (227-17). It is closed after `IDLE_SECONDS`.

Invariant: a consumer is either idle or used by one task. A forked child never uses consumers of its parent.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Final, NamedTuple

from kipmesh.client.sync import Consumer

IDLE_SECONDS: Final = 30.0
"""Time after which an idle consumer is closed."""
KEPT_MAX: Final = 4
"""Maximum number of idle consumers, each with a different configuration. The one idle for longest is closed first."""


class Key(NamedTuple):
    """Process id, bootstrap servers and configuration. Consumers with equal keys are interchangeable."""

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
    """Return the key of this process's consumers with these bootstrap servers and this configuration."""
    return Key(os.getpid(), bootstrap, frozenset(config.items()))


def borrow(key: Key) -> Consumer | None:
    """Remove and return the idle consumer with this key, or None if there is none."""
    with _lock:
        found = _kept.pop(key, None)
    if found is None:
        return None
    found.timer.cancel()
    return found.consumer


def give_back(key: Key, consumer: Consumer) -> None:
    """Unassign the partitions of a consumer and keep it for the next task. Close it if that fails.

    Also closes an idle consumer with the same key, and the longest idle ones if more than `KEPT_MAX` are kept. Logs
    errors instead of raising them.
    """
    try:
        consumer.assign([])
        timer = threading.Timer(IDLE_SECONDS, _expire, (key, consumer))
        timer.daemon = True
        with _lock:
            timer.start()  # `_expire` needs the lock, so it cannot run before the entry exists
            surplus = [_kept.pop(key)] if key in _kept else []
            while len(_kept) >= KEPT_MAX:
                surplus.append(_kept.pop(next(iter(_kept))))
            _kept[key] = _Kept(consumer, timer)
    except Exception:
        _log.warning("keeping an idle consumer failed", exc_info=True)
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
        _log.warning("closing an idle consumer failed", exc_info=True)
