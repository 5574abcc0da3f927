"""A search in a log from any thread, while the owner appends and cuts: begun anew when the log was cut meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.storage.segment import Segment

if TYPE_CHECKING:
    from kipmesh.storage.log import Log

_SEARCHES_MAX = 5
_Found = TypeVar("_Found")


def search(log: Log, find: Callable[[Sequence[Segment], int, int], _Found], max_offset: int) -> _Found:
    """What `find(segments, log start offset, max offset)` gives of one state of the log. KafkaError."""
    for _ in range(_SEARCHES_MAX):
        log.check_usable()
        generation = log.durability.generation
        try:
            limit = min(max_offset, log.log_end_offset)
            found = find(list(log.segments.items), log.log_start_offset, limit)
        except (OSError, CorruptRecordError) as error:
            if log.durability.is_unchanged(generation):
                raise (log.fail(error, "search") if isinstance(error, OSError) else error) from error
        else:
            if log.durability.is_unchanged(generation):
                return found
    raise KafkaError(ErrorCode.OFFSET_NOT_AVAILABLE, f"{log!r} is being cut")
