"""Fetch (1).

A unary call for clients. A replica fetcher sends the same messages over one bidirectional stream, with one response per
request and in order. Error codes are Apache Kafka's numbers.
"""

from collections.abc import Sequence

from kipmesh.messages.schema import MAX_INT32, Int8, Int16, Int32, Int64, Message, Records, Uuid, field


class FetchPartition(Message):
    partition: Int32 = field(1)
    current_leader_epoch: Int32 = field(2, versions="9+", default=-1)
    fetch_offset: Int64 = field(3)
    last_fetched_epoch: Int32 = field(4, versions="12+", default=-1)
    # The follower's own log start; -1 from consumers.
    log_start_offset: Int64 = field(5, versions="5+", default=-1)
    partition_max_bytes: Int32 = field(6)
    replica_directory_id: Uuid = field(versions="17+", tag=0)


class FetchTopic(Message):
    topic: str = field(1, versions="0-12")
    topic_id: Uuid = field(2, versions="13+")
    partitions: Sequence[FetchPartition] = field(3)


class ForgottenTopic(Message):
    topic: str = field(1, versions="7-12")
    topic_id: Uuid = field(2, versions="13+")
    partitions: Sequence[Int32] = field(3)


class FetchReplicaState(Message):
    replica_id: Int32 = field(default=-1)
    replica_epoch: Int64 = field(default=-1)


class FetchRequest(Message):
    cluster_id: str | None = field(1, versions="12+", tag=0)
    # The broker id of a follower, -1 from a consumer, -2 from a consumer that may read any replica (392-16).
    replica_id: Int32 = field(2, versions="0-14", default=-1)
    # The follower's broker epoch, -1 from consumers.
    replica_epoch: Int64 = field(3, versions="", default=-1)
    max_wait_ms: Int32 = field(4)
    min_bytes: Int32 = field(5)
    max_bytes: Int32 = field(6, versions="3+", default=MAX_INT32)
    # 0 read_uncommitted, 1 read_committed.
    isolation_level: Int8 = field(7, versions="4+")
    session_id: Int32 = field(8, versions="7+")
    session_epoch: Int32 = field(9, versions="7+", default=-1)
    topics: Sequence[FetchTopic] = field(10)
    forgotten_topics_data: Sequence[ForgottenTopic] = field(11, versions="7+")
    rack_id: str = field(12, versions="11+")
    replica_state: FetchReplicaState = field(versions="15+", tag=1)


class EpochEndOffset(Message):
    epoch: Int32 = field(1, default=-1)
    end_offset: Int64 = field(2, default=-1)


class LeaderIdAndEpoch(Message):
    leader_id: Int32 = field(1, default=-1)
    leader_epoch: Int32 = field(2, default=-1)


class SnapshotId(Message):
    end_offset: Int64 = field(1, default=-1)
    epoch: Int32 = field(2, default=-1)


class AbortedTransaction(Message):
    producer_id: Int64 = field(1)
    first_offset: Int64 = field(2)


class PartitionData(Message):
    partition_index: Int32 = field(1, mirrors="partition")
    error_code: Int16 = field(2)
    high_watermark: Int64 = field(3, default=-1)
    last_stable_offset: Int64 = field(4, versions="4+", default=-1)
    log_start_offset: Int64 = field(5, versions="5+", default=-1)
    diverging_epoch: EpochEndOffset | None = field(6, versions="12+", tag=0)
    current_leader: LeaderIdAndEpoch | None = field(7, versions="12+", tag=1)
    snapshot_id: SnapshotId | None = field(8, versions="12+", tag=2)
    aborted_transactions: Sequence[AbortedTransaction] | None = field(9, versions="4+", default=())
    preferred_read_replica: Int32 = field(10, versions="11+", default=-1)
    # Record batches, format v2, as on disk.
    records: Records = field(11, nullable="0+")


class FetchableTopicResponse(Message):
    topic: str = field(1, versions="0-12")
    topic_id: Uuid = field(2, versions="13+")
    partitions: Sequence[PartitionData] = field(3, mirrors="partitions")


class NodeEndpoint(Message):
    node_id: Int32 = field(1)
    host: str = field(2)
    port: Int32 = field(3)
    rack: str | None = field(4)


class FetchResponse(Message):
    throttle_time_ms: Int32 = field(1, versions="1+")
    error_code: Int16 = field(2, versions="7+", is_refusal=False)
    session_id: Int32 = field(3, versions="7+")
    responses: Sequence[FetchableTopicResponse] = field(4, mirrors="topics")
    node_endpoints: Sequence[NodeEndpoint] = field(5, versions="16+", tag=0)
