"""TODO fetch_sessions."""

from collections.abc import Sequence

from kipmesh.messages.schema import Bool, Int32, Int64, Message, field


class ListFetchSessionsRequest(Message):
    pass


class FetchSession(Message):
    session_id: Int32 = field(1)
    client_id: str = field(2)
    # The broker id of a follower, below 0 for clients.
    replica_id: Int32 = field(3)
    # A follower's.
    privileged: Bool = field(4)
    partitions: Int32 = field(5)
    # Partitions that the next fetch looks at.
    dirty_partitions: Int32 = field(6)
    # Of the next request.
    epoch: Int32 = field(7)
    # Since it was made.
    age_ms: Int64 = field(8)
    # Since its last use.
    idle_ms: Int64 = field(9)
    # Whether a fetch of it waits at the broker now.
    is_waiting: Bool = field(10)


class ListFetchSessionsResponse(Message):
    error_code: Int32 = field(1)
    error_message: str | None = field(2)
    # The broker that answers, for itself alone.
    node_id: Int32 = field(3)
    # By id, ascending.
    sessions: Sequence[FetchSession] = field(4)
