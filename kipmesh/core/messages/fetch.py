"""Fetch (API key 1), as in `protos/kipmesh/v1/fetch.proto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kipmesh.core.messages.limits import MAX_INT32


class FetchPartition(NamedTuple):
    partition: int = 0
    current_leader_epoch: int = -1
    fetch_offset: int = 0
    last_fetched_epoch: int = -1
    log_start_offset: int = -1
    partition_max_bytes: int = 0


class FetchTopic(NamedTuple):
    topic: str = ""
    topic_id: bytes = b""
    partitions: Sequence[FetchPartition] = ()


class ForgottenTopic(NamedTuple):
    topic: str = ""
    topic_id: bytes = b""
    partitions: Sequence[int] = ()


class FetchRequest(NamedTuple):
    cluster_id: str | None = None
    replica_id: int = -1
    replica_epoch: int = -1
    max_wait_ms: int = 0
    min_bytes: int = 0
    max_bytes: int = MAX_INT32
    isolation_level: int = 0
    session_id: int = 0
    session_epoch: int = -1
    topics: Sequence[FetchTopic] = ()
    forgotten_topics_data: Sequence[ForgottenTopic] = ()
    rack_id: str = ""


class EpochEndOffset(NamedTuple):
    epoch: int = -1
    end_offset: int = -1


class LeaderIdAndEpoch(NamedTuple):
    leader_id: int = -1
    leader_epoch: int = -1


class SnapshotId(NamedTuple):
    end_offset: int = -1
    epoch: int = -1


class AbortedTransaction(NamedTuple):
    producer_id: int = 0
    first_offset: int = 0


class PartitionData(NamedTuple):
    partition_index: int = 0
    error_code: int = 0
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    diverging_epoch: EpochEndOffset | None = None
    current_leader: LeaderIdAndEpoch | None = None
    snapshot_id: SnapshotId | None = None
    aborted_transactions: Sequence[AbortedTransaction] = ()
    preferred_read_replica: int = -1
    records: bytes = b""


class FetchableTopicResponse(NamedTuple):
    topic: str = ""
    topic_id: bytes = b""
    partitions: Sequence[PartitionData] = ()


class NodeEndpoint(NamedTuple):
    node_id: int = 0
    host: str = ""
    port: int = 0
    rack: str | None = None


class FetchResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    session_id: int = 0
    responses: Sequence[FetchableTopicResponse] = ()
    node_endpoints: Sequence[NodeEndpoint] = ()
