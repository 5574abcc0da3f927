"""AssignReplicasToDirs and DescribeLogDirs, as in `protos/kipmesh/v1/log_dirs.proto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class AssignReplicasToDirsPartition(NamedTuple):
    partition_index: int = 0


class AssignReplicasToDirsTopic(NamedTuple):
    topic_id: bytes = b""
    partitions: Sequence[AssignReplicasToDirsPartition] = ()


class AssignReplicasToDirsDirectory(NamedTuple):
    id: bytes = b""
    topics: Sequence[AssignReplicasToDirsTopic] = ()


class AssignReplicasToDirsRequest(NamedTuple):
    broker_id: int = 0
    broker_epoch: int = -1
    directories: Sequence[AssignReplicasToDirsDirectory] = ()


class AssignReplicasToDirsPartitionResponse(NamedTuple):
    partition_index: int = 0
    error_code: int = 0


class AssignReplicasToDirsTopicResponse(NamedTuple):
    topic_id: bytes = b""
    partitions: Sequence[AssignReplicasToDirsPartitionResponse] = ()


class AssignReplicasToDirsDirectoryResponse(NamedTuple):
    id: bytes = b""
    topics: Sequence[AssignReplicasToDirsTopicResponse] = ()


class AssignReplicasToDirsResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    directories: Sequence[AssignReplicasToDirsDirectoryResponse] = ()


class DescribableLogDirTopic(NamedTuple):
    topic: str = ""
    partitions: Sequence[int] = ()


class DescribeLogDirsRequest(NamedTuple):
    topics: Sequence[DescribableLogDirTopic] = ()


class DescribeLogDirsPartition(NamedTuple):
    partition_index: int = 0
    partition_size: int = 0
    offset_lag: int = 0
    is_future_key: bool = False


class DescribeLogDirsTopic(NamedTuple):
    name: str = ""
    partitions: Sequence[DescribeLogDirsPartition] = ()


class DescribeLogDirsResult(NamedTuple):
    error_code: int = 0
    log_dir: str = ""
    topics: Sequence[DescribeLogDirsTopic] = ()
    total_bytes: int = -1
    usable_bytes: int = -1
    error_message: str | None = None


class DescribeLogDirsResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    results: Sequence[DescribeLogDirsResult] = ()
