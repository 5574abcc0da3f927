"""Incremental fetch sessions (KIP-227), sans-IO: `server` for brokers, `handler` for clients.

docs/fetch_sessions.md explains the design and what callers must do.
"""

from kipmesh.core.fetch_session.handler import FetchedPartition, FetchSessionHandler, SessionRequest, SessionResponse
from kipmesh.core.fetch_session.policy import (
    AdoptedPolicy,
    Eviction,
    EvictionPolicy,
    Refusal,
    ReservedPolicy,
)
from kipmesh.core.fetch_session.server import Fetch, FetchSessionCache
from kipmesh.core.fetch_session.subscriptions import Subscriptions, partition_key
from kipmesh.core.fetch_session.types import (
    HIGH_WATERMARK,
    LEADERSHIP,
    LOG_END,
    LOG_START,
    FetchKind,
    FetchSessionDescription,
    PartitionRead,
    SessionEvent,
)

__all__ = [
    "HIGH_WATERMARK",
    "LEADERSHIP",
    "LOG_END",
    "LOG_START",
    "AdoptedPolicy",
    "Eviction",
    "EvictionPolicy",
    "Fetch",
    "FetchKind",
    "FetchSessionCache",
    "FetchSessionDescription",
    "FetchSessionHandler",
    "FetchedPartition",
    "PartitionRead",
    "Refusal",
    "ReservedPolicy",
    "SessionEvent",
    "SessionRequest",
    "SessionResponse",
    "Subscriptions",
    "partition_key",
]
