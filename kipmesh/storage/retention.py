"""Which segments a log may drop: by time, by size and below the log start, as Kafka decides; and the dropped files."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.config import TopicConfig
from kipmesh.storage.fs import FileSystem
from kipmesh.storage.segment import Segment

_LOG = logging.getLogger(__name__)


class LogOffsets(NamedTuple):
    """Where a log starts and ends, and up to where it is committed."""

    log_start_offset: int
    log_end_offset: int
    high_watermark: int


def expired(segments: Sequence[Segment], config: TopicConfig, now_ms: int, offsets: LogOffsets) -> int:
    """How many segments, from the oldest on, may go; the active one is among them only if all may.

    Nothing at or above the high watermark goes. By time a segment goes when its largest timestamp is older than
    `retention.ms`; by size when what remains still has `retention.bytes`; below the log start whatever
    `cleanup.policy` is.
    """
    total = sum(segment.size_bytes for segment in segments)
    excess = total - config.retention_bytes if config.is_deleted and config.retention_bytes >= 0 else -1
    for number, segment in enumerate(segments):
        is_active = number + 1 == len(segments)
        end = offsets.log_end_offset if is_active else segments[number + 1].base_offset
        if end > offsets.high_watermark or (is_active and not segment.size_bytes):
            return number
        excess -= segment.size_bytes
        age_ms = now_ms - segment.largest_timestamp(segment.created_ms)
        is_old = config.is_deleted and 0 <= config.retention_ms < age_ms
        is_below_start = not is_active and end <= offsets.log_start_offset
        if not (is_old or is_below_start or excess >= 0):
            return number
    return len(segments)


class RetiredFiles:
    """Files out of use, to be removed after a delay; a start removes those that a stop left.

    The log's owner adds, and another thread may remove.
    """

    __slots__ = ("_files", "_lock")

    def __init__(self) -> None:
        self._files: list[tuple[int, str]] = []
        self._lock = threading.Lock()

    def add(self, due_ms: int, path: str) -> None:
        """Remove this file from `due_ms` on."""
        with self._lock:
            self._files.append((due_ms, path))

    def remove(self, fs: FileSystem, now_ms: int) -> int:
        """Remove what is due; gives how many."""
        if not self._files:
            return 0
        with self._lock:
            due = [path for due_ms, path in self._files if due_ms <= now_ms]
            self._files = [entry for entry in self._files if entry[0] > now_ms]
        for path in due:
            try:
                fs.remove(path)
            except FileNotFoundError:
                pass  # a name that two compactions gave in turn
            except OSError as error:
                _LOG.warning("cannot remove %s: %s", path, error)
        return len(due)
