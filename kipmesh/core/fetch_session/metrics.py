"""Counters of a node's fetch session cache (227-20). Plain numbers, read by the exporter at each scrape."""

from __future__ import annotations

from collections import Counter

from kipmesh.core.errors import ErrorCode
from kipmesh.core.fetch_session.policy import Eviction, Refusal
from kipmesh.core.fetch_session.types import FetchKind

CLIENT_IDS_MAX = 1000
"""Number of client ids with a counter each."""
OTHERS = "(others)"
"""Label under which all further client ids are counted."""

# Minimum encoded size of a partition. Request: partition, leader epoch, fetch offset, last fetched epoch, log start,
# maximum bytes. Response: partition, error, three offsets, lengths of empty fields.
REQUEST_PARTITION_BYTES = 32
RESPONSE_PARTITION_BYTES = 42


class FetchSessionMetrics:
    """Counters since the node started. Current numbers of sessions and partitions are attributes of the cache."""

    def __init__(self) -> None:
        self.fetches: Counter[FetchKind] = Counter()
        """Responses by kind; ERROR counts session errors."""
        self.errors: Counter[ErrorCode] = Counter()
        """Session errors by code."""
        self.created = 0
        self.closed = 0
        """Sessions closed by their client, or because their broker registered again."""
        self.evictions = 0
        """Number of evictions (metric `IncrementalFetchSessionEvictionsPerSec`)."""
        self.evictions_by_reason: Counter[Eviction] = Counter()
        self.evictions_by_client: Counter[str] = Counter()
        """By client id of the session that took the slot (KAFKA-12797)."""
        self.refusals: Counter[Refusal] = Counter()
        self.quota_refusals_by_client: Counter[str] = Counter()
        self.bytes_saved = 0
        """Bytes that full fetches would have needed in addition. A lower bound, without topic names."""

    def completed(self, kind: FetchKind) -> None:
        """Count a response without a session error, by kind of fetch."""
        self.fetches[kind] += 1

    def failed(self, error: ErrorCode) -> None:
        """Count a response with a session error."""
        self.fetches[FetchKind.ERROR] += 1
        self.errors[error] += 1

    def saved(self, omitted_requested: int, omitted_returned: int) -> None:
        """Add the bytes saved by an incremental fetch; the arguments are numbers of omitted partitions."""
        self.bytes_saved += omitted_requested * REQUEST_PARTITION_BYTES + omitted_returned * RESPONSE_PARTITION_BYTES

    def evicted(self, reason: Eviction, evictor: str) -> None:
        """Count an eviction; `evictor` is the client id that took the slot."""
        self.evictions += 1
        self.evictions_by_reason[reason] += 1
        _count(self.evictions_by_client, evictor)

    def refused(self, reason: Refusal, client_id: str) -> None:
        """Count a full fetch that got no session, by reason and, if a quota was reached, by client id."""
        self.refusals[reason] += 1
        if reason is Refusal.QUOTA:
            _count(self.quota_refusals_by_client, client_id)


def _count(counter: Counter[str], client_id: str) -> None:
    if client_id not in counter and len(counter) >= CLIENT_IDS_MAX:
        client_id = OTHERS
    counter[client_id] += 1
