"""ListFetchSessions (ours), as in `protos/kipmesh/v1/fetch_sessions.proto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ListFetchSessionsRequest(NamedTuple):
    pass


class FetchSession(NamedTuple):
    session_id: int = 0
    client_id: str = ""
    replica_id: int = 0
    privileged: bool = False
    partitions: int = 0
    dirty_partitions: int = 0
    epoch: int = 0
    age_ms: int = 0
    idle_ms: int = 0
    is_waiting: bool = False


class ListFetchSessionsResponse(NamedTuple):
    error_code: int = 0
    error_message: str | None = None
    node_id: int = 0
    sessions: Sequence[FetchSession] = ()
