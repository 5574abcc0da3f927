"""ListFetchSessions: the fetch sessions of one broker. Only kipmesh has this API."""

from collections.abc import Sequence

from kipmesh.messages.schema import Bool, Int32, Int64, Message, field


class ListFetchSessionsRequest(Message):
    pass


class FetchSession(Message):
    session_id: Int32 = field(1)
    client_id: str = field(2)
    # The broker id of a follower, below 0 for clients.
    replica_id: Int32 = field(3)
    # Whether a follower created it.
    privileged: Bool = field(4)
    partitions: Int32 = field(5)
    # Partitions that the next fetch reads.
    dirty_partitions: Int32 = field(6)
    # The session epoch of the next request.
    epoch: Int32 = field(7)
    # Time since the session was created.
    age_ms: Int64 = field(8)
    # Time since the last request.
    idle_ms: Int64 = field(9)
    # Whether a fetch of the session is pending.
    is_waiting: Bool = field(10)


class ListFetchSessionsResponse(Message):
    error_code: Int32 = field(1)
    error_message: str | None = field(2)
    # The broker that responds; it lists its own sessions.
    node_id: Int32 = field(3)
    # In the order of session ids.
    sessions: Sequence[FetchSession] = field(4)
