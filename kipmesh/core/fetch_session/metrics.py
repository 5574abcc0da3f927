"""What a node's session cache counts (227-20), as plain numbers: whoever exports them reads them at each scrape."""

from __future__ import annotations

from collections import Counter

from kipmesh.core.errors import ErrorCode
from kipmesh.core.fetch_session.policy import Eviction, Refusal
from kipmesh.core.fetch_session.types import FetchKind

CLIENT_IDS_MAX = 1000
"""Distinct client ids that are counted by name."""
OTHERS = "(others)"
"""Where clients beyond that are counted."""

# What a partition takes at least, by the widths of the protocol's fields: partition, leader epoch, fetch offset, last
# fetched epoch, log start, maximum bytes; partition, error, three offsets, and the lengths of what is empty.
REQUEST_PARTITION_BYTES = 32
RESPONSE_PARTITION_BYTES = 42


class FetchSessionMetrics:
    """Counters since the node's start. `sessions` and `partitions` are read from the cache itself."""

    def __init__(self) -> None:
        self.fetches: Counter[FetchKind] = Counter()
        """Answered fetches by kind; ERROR are those with a session error."""
        self.errors: Counter[ErrorCode] = Counter()
        """Session errors by code."""
        self.created = 0
        self.closed = 0
        """Closed by their clients, or because their broker has registered anew."""
        self.evictions = 0
        """`IncrementalFetchSessionEvictionsPerSec` is the rate of this."""
        self.evictions_by_reason: Counter[Eviction] = Counter()
        self.evictions_by_client: Counter[str] = Counter()
        """By the client id of the session that took the slot (KAFKA-12797)."""
        self.refusals: Counter[Refusal] = Counter()
        self.quota_refusals_by_client: Counter[str] = Counter()
        self.bytes_saved = 0
        """Bytes that full fetches would have had in addition, topic names not counted: a lower bound."""

    def answered(self, kind: FetchKind) -> None:
        """A fetch was answered."""
        self.fetches[kind] += 1

    def failed(self, error: ErrorCode) -> None:
        """A fetch was answered with a session error."""
        self.fetches[FetchKind.ERROR] += 1
        self.errors[error] += 1

    def saved(self, not_asked: int, not_answered: int) -> None:
        """An incremental fetch left these many partitions out of its request and of its response."""
        self.bytes_saved += not_asked * REQUEST_PARTITION_BYTES + not_answered * RESPONSE_PARTITION_BYTES

    def evicted(self, reason: Eviction, evictor: str) -> None:
        """A session was evicted by one of this client id."""
        self.evictions += 1
        self.evictions_by_reason[reason] += 1
        _count(self.evictions_by_client, evictor)

    def refused(self, reason: Refusal, client_id: str) -> None:
        """No session was made for this client id."""
        self.refusals[reason] += 1
        if reason is Refusal.QUOTA:
            _count(self.quota_refusals_by_client, client_id)


def _count(counter: Counter[str], client_id: str) -> None:
    if client_id not in counter and len(counter) >= CLIENT_IDS_MAX:
        client_id = OTHERS
    counter[client_id] += 1
