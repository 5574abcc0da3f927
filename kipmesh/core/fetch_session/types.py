"""Values of fetch sessions shared by server and client, and the interface of the server's driver (227-03, 227-04).

The driver implements `Reader`, which reads partitions for one request. Times are milliseconds of a monotonic clock.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from kipmesh.messages import FetchPartition, PartitionData

INVALID_SESSION_ID: Final = 0
"""No session: the request uses none, or the response created none or closed it (227-06)."""
INITIAL_EPOCH: Final = 0
"""Session epoch of a full fetch that creates a session."""
FINAL_EPOCH: Final = -1
"""Session epoch of a full fetch without a session."""
INT_MAX: Final = (1 << 31) - 1

SESSION_SLOTS: Final = 10_000
"""Default of `max.incremental.fetch.session.cache.slots` (227-13)."""
UNUSED_MS_MAX: Final = 120_000
"""Default of `min.incremental.fetch.session.eviction.ms` (227-14) and its equivalent in 227-15."""
SESSION_PARTITIONS_MAX: Final = 1_000_000
"""Maximum number of partitions of a session, so that a client cannot grow its session without limit."""

TOPIC_BYTES_MAX: Final = 249
"""Maximum bytes of a topic name or id.

A session stores them once per partition, so a long name in a request with many partitions would use a multiple of the
request's size.
"""

# Flags of a partition change. Plain integers instead of enum.Flag, because changes are frequent.
LOG_END: Final = 1
"""Records were appended. Relevant for followers."""
HIGH_WATERMARK: Final = 2
"""The high watermark, and with it the last stable offset, moved. Consumers have new records to read."""
LOG_START: Final = 4
"""The log start offset moved. Reported to clients, but completes no waiting fetch (227-21)."""
LEADERSHIP: Final = 8
"""Leader, leader epoch, error, or log content (truncation) changed: values sent before may be wrong."""


def next_epoch(epoch: int) -> int:
    """Return the session epoch of the request after `epoch`: `epoch` + 1, but 1 after INT_MAX; FINAL_EPOCH stays
    unchanged (227-03)."""
    if epoch < 0:
        return FINAL_EPOCH
    return 1 if epoch >= INT_MAX else epoch + 1


class FetchKind(Enum):
    """Kind of a Fetch request; the value is its name in metrics."""

    SESSIONLESS = "sessionless"
    FULL = "full"
    INCREMENTAL = "incremental"
    ERROR = "error"


class PartitionRead(NamedTuple):
    """Result of reading one partition. `data.partition_index` is that of the request.

    - `completes_fetch`: respond immediately, however few bytes there are (227-21): error, diverging epoch, snapshot id,
      redirect.
    - `is_cut`: readable records were left out because of `max_bytes` (227-11). Required if `data` has no records
      although some are readable; otherwise the partition would become clean. With records it is optional, and stops the
      fetch from waiting for bytes that it has no room for.
    - `again`: the next fetch reads the partition again, even if it does not change until then.
    """

    data: PartitionData
    completes_fetch: bool = False
    is_cut: bool = False
    again: bool = False


class Reader(Protocol):
    """Reads partitions for one request. Errors are in the results; methods do not raise."""

    def read(
        self, topic: str, topic_id: bytes, requested: FetchPartition, max_bytes: int, min_one_batch: bool, /
    ) -> PartitionRead:
        """Read whole batches from `requested.fetch_offset`, up to `max_bytes`. With `min_one_batch`, the first batch
        may be larger.

        The topic is identified by its id, or by name if the id is empty. A read by a follower updates its position at
        the leader, even if `max_bytes` is 0. Changes to this partition caused by the read itself are included in its
        result.
        """
        ...

    def topic_name(self, topic_id: bytes) -> str:
        """Return the topic's name, or an empty string if the topic does not exist."""
        ...


SessionEventKind: TypeAlias = Literal["created", "closed", "evicted"]


class SessionEvent(NamedTuple):
    """The creation, closing or eviction of a session, for logging (227-02)."""

    kind: SessionEventKind
    session_id: int
    client_id: str
    privileged: bool
    partitions: int
    reason: str | None = None
    """Why the session was evicted, or closed without a request of its client."""
    evictor: str | None = None
    """Client id of the session that replaced an evicted one."""


class FetchSessionDescription(NamedTuple):
    """A fetch session as listed by its broker. `epoch` is the session epoch of its next request."""

    session_id: int
    client_id: str
    replica_id: int
    """Broker id of a follower, below 0 for clients."""
    privileged: bool
    partitions: int
    dirty_partitions: int
    """Partitions that the next fetch will read."""
    epoch: int
    age_ms: int
    """Time since the session was created."""
    idle_ms: int
    """Time since the session was last used."""
    is_waiting: bool
    """Whether a fetch of the session is waiting at the broker."""
