"""Incremental fetch sessions (KIP-227), sans-IO: `cache` and `fetch` for servers, `handler` for clients.

docs/fetch_sessions.md says how it fits together and who has to call what.
"""

from kipmesh.core.fetch_session.cache import FetchSessionCache
from kipmesh.core.fetch_session.fetch import Fetch
from kipmesh.core.fetch_session.handler import Answer, Answered, FetchSessionHandler, SessionRequest
from kipmesh.core.fetch_session.metrics import FetchSessionMetrics
from kipmesh.core.fetch_session.policy import (
    AdoptedPolicy,
    Candidate,
    Eviction,
    EvictionPolicy,
    Refusal,
    ReservedPolicy,
    Room,
)
from kipmesh.core.fetch_session.subscriptions import Subscriptions, partition_key
from kipmesh.core.fetch_session.types import (
    HIGH_WATERMARK,
    LEADERSHIP,
    LOG_END,
    LOG_START,
    FetchKind,
    FetchSessionDescription,
    PartitionRead,
    Reader,
    SessionEvent,
)

__all__ = [
    "HIGH_WATERMARK",
    "LEADERSHIP",
    "LOG_END",
    "LOG_START",
    "AdoptedPolicy",
    "Answer",
    "Answered",
    "Candidate",
    "Eviction",
    "EvictionPolicy",
    "Fetch",
    "FetchKind",
    "FetchSessionCache",
    "FetchSessionDescription",
    "FetchSessionHandler",
    "FetchSessionMetrics",
    "PartitionRead",
    "Reader",
    "Refusal",
    "ReservedPolicy",
    "Room",
    "SessionEvent",
    "SessionRequest",
    "Subscriptions",
    "partition_key",
]
