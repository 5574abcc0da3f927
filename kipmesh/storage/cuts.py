"""What must be durable before a high watermark is ("Log truth", 392-10).

A power failure may bring back what was cut off a log that was not synced since, in place of what was appended there.
A high watermark on disk that lies above would vouch for it: the replica would serve records that were never
committed until its leader cuts them again. So the cut becomes durable first; a lower high watermark is always right.
"""

from __future__ import annotations

import logging

from kipmesh.core.errors import KafkaError
from kipmesh.storage.log import Log

_LOG = logging.getLogger(__name__)


def makes_cuts_durable(log: Log) -> bool:
    """Flush a log that was cut, or may have been by the process before this one; False when that failed or it was cut
    meanwhile. For any thread."""
    try:
        if _has_unsynced_cut(log):
            log.flush()
        return not _has_unsynced_cut(log)
    except KafkaError as error:
        _LOG.warning("the high watermark of %r is not raised: %s", log, error.message)
        return False


def _has_unsynced_cut(log: Log) -> bool:
    return log.durability.has_unsynced_change or log.segments.active.is_cut
