"""Values of fetch sessions that server and client share, and what the server's driver gives and gets (227-03, 227-04).

`Reader` is the driver's side of a fetch: it knows the partitions. Times are milliseconds of the caller's monotonic
clock.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal, NamedTuple, Protocol

from kipmesh.messages import FetchPartition, PartitionData

INVALID_SESSION_ID: Final = 0
"""No session: in a request none is used, in a response none was made or it is closed (227-06)."""
INITIAL_EPOCH: Final = 0
"""A full fetch that wants a session."""
FINAL_EPOCH: Final = -1
"""A full fetch that wants none."""
INT_MAX: Final = (1 << 31) - 1

SESSION_SLOTS: Final = 10_000
"""Default of `max.incremental.fetch.session.cache.slots` (227-13)."""
UNUSED_MS_MAX: Final = 120_000
"""Default of `min.incremental.fetch.session.eviction.ms` (227-14) and of its sister in 227-15."""
SESSION_PARTITIONS_MAX: Final = 1_000_000
"""No session has more partitions: a client cannot grow one without end."""

TOPIC_BYTES_MAX: Final = 249
"""No topic has a longer name or id. A session keeps them once a partition, so a request of one long name and many
partitions would take a multiple of its own size."""

# What may happen to a partition: flags, so that one event can be several. Plain integers, for events are frequent.
LOG_END: Final = 1
"""Records were appended: news for followers."""
HIGH_WATERMARK: Final = 2
"""It moved (the last stable offset with it): news for all; consumers have records to read."""
LOG_START: Final = 4
"""It moved: to be told, but nobody waits for it (227-21)."""
LEADERSHIP: Final = 8
"""Leader, leader epoch, what reads are answered with, or the log itself (truncation): what was sent may be wrong."""


def next_epoch(epoch: int) -> int:
    """The epoch of the request after one of `epoch`: plus 1, 1 after INT_MAX, FINAL_EPOCH after itself (227-03)."""
    if epoch < 0:
        return FINAL_EPOCH
    return 1 if epoch >= INT_MAX else epoch + 1


class FetchKind(Enum):
    """The four kinds of fetch."""

    SESSIONLESS = "sessionless"
    FULL = "full"
    INCREMENTAL = "incremental"
    ERROR = "error"


class PartitionRead(NamedTuple):
    """What a partition answers now. `data.partition_index` is that of the request.

    - `has_news`: the fetch is answered at once, however few bytes there are (227-21): error, divergence, snapshot id,
      redirect.
    - `is_cut`: there are readable records that `max_bytes` left no room for (227-11), with or without others before
      them. Without others it must be said, or they would never come; with others it ends a wait for what has no room.
    - `again`: read it at the next fetch, too, even if nothing happens to it until then.
    """

    data: PartitionData
    has_news: bool = False
    is_cut: bool = False
    again: bool = False


class Reader(Protocol):
    """Reads partitions for one request; errors are in the result, nothing is raised."""

    def read(
        self, topic: str, topic_id: bytes, asked: FetchPartition, max_bytes: int, min_one_batch: bool
    ) -> PartitionRead:
        """Whole batches from `asked.fetch_offset` on: at most `max_bytes`, or one batch if it `min_one_batch`.

        The topic is meant by its id; by its name if the id is empty. A follower's read moves its position at the
        leader, even when `max_bytes` is 0. Events that the read itself causes for this partition are in its result.
        """
        ...

    def topic_name(self, topic_id: bytes) -> str:
        """The name of the topic, empty if there is none."""
        ...


class SessionEvent(NamedTuple):
    """A session was made, or is over: for logs (227-02)."""

    what: Literal["made", "closed", "evicted"]
    session_id: int
    client_id: str
    privileged: bool
    partitions: int
    reason: str | None = None
    """Why it was evicted, or closed although its client did not ask for it."""
    evictor: str | None = None
    """The client id that got the slot."""


class FetchSessionDescription(NamedTuple):
    """A fetch session as its broker lists it; `epoch` is that of its next request."""

    session_id: int
    client_id: str
    replica_id: int
    """The broker id of a follower, below 0 for clients."""
    privileged: bool
    partitions: int
    dirty_partitions: int
    """Partitions that the next fetch looks at."""
    epoch: int
    age_ms: int
    """Since it was made."""
    idle_ms: int
    """Since its last use."""
    is_waiting: bool
    """Whether a fetch of it waits at the broker."""
