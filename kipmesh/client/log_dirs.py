"""DescribeLogDirs: the data folders of one broker, which answers for itself alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kipmesh.client.cluster import Cluster
from kipmesh.client.types import Node, TopicPartition
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages import DescribeLogDirsRequest, DescribeLogDirsResponse
from kipmesh.rpc.client import TransportError


class ReplicaInfo(NamedTuple):
    """A replica in a data folder."""

    size_bytes: int
    offset_lag: int
    """Records by which its log ends below the high watermark."""


class LogDirDescription(NamedTuple):
    """One data folder of a broker."""

    log_dir: str
    """Its path."""
    error: KafkaError | None
    """KAFKA_STORAGE_ERROR, with the reason, while it is offline."""
    replicas: dict[TopicPartition, ReplicaInfo]
    total_bytes: int
    """Of its disk; -1 where that is not known."""
    usable_bytes: int
    """Free ones of these; -1 where that is not known."""


async def describe_log_dirs(cluster: Cluster, nodes: Iterable[Node], broker_id: int) -> list[LogDirDescription]:
    """The folders of the broker. KafkaError: BROKER_NOT_AVAILABLE when it is not there, or does not answer."""
    address = next((node.address for node in nodes if node.node_id == broker_id), None)
    if address is None:
        raise KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, f"there is no broker {broker_id}")
    try:
        response: DescribeLogDirsResponse = await cluster.pool.get(address).call(
            "Broker", "DescribeLogDirs", DescribeLogDirsRequest(), cluster.request_timeout_ms / 1000
        )
    except TransportError as error:
        raise KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, f"broker {broker_id}: {error}") from None
    if response.error_code:
        raise KafkaError(response.error_code, f"broker {broker_id} does not describe its folders")
    return [
        LogDirDescription(
            result.log_dir,
            KafkaError(result.error_code, result.error_message or "offline") if result.error_code else None,
            {
                TopicPartition(topic.name, one.partition_index): ReplicaInfo(one.partition_size, one.offset_lag)
                for topic in result.topics
                for one in topic.partitions
            },
            result.total_bytes,
            result.usable_bytes,
        )
        for result in response.results
    ]
