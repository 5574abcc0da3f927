"""DescribeQuorum through a broker, or directly at the controllers, which works without brokers.

Only the quorum leader returns a description; other voters return the leader they know. All controllers are called in
parallel. The response with the highest epoch wins, because a partitioned leader may not know that it was replaced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kipmesh import messages as m
from kipmesh.client import arguments
from kipmesh.client.calls import call
from kipmesh.client.types import Node, QuorumDescription, QuorumReplica
from kipmesh.core.config.security import ClientSslConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC
from kipmesh.transport.grpc.client import ConnectionPool, TransportError

DESCRIBE_QUORUM = m.DescribeQuorumRequest([m.DescribeQuorumTopic(CLUSTER_METADATA_TOPIC, (0,))])
CALL_TIMEOUT_S = 1.0
"""Timeout of each controller's response, so that a hung controller does not delay the result."""
RETRY_BACKOFF_S = 0.1


class _Result(NamedTuple):
    partition: m.DescribeQuorumPartition
    nodes: tuple[Node, ...]


def quorum_description(response: m.DescribeQuorumResponse) -> QuorumDescription:
    """Return the quorum's state from the leader's response.

    Raises KafkaError(UNKNOWN_SERVER_ERROR) if the response lacks the metadata partition.
    """
    for result in _results(response):
        return _description(result)
    raise KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "DescribeQuorum response lacks the metadata partition")


async def describe_quorum(
    controllers: Sequence[str], *, timeout_s: float, security: ClientSslConfig | None = None
) -> QuorumDescription:
    """Describe the quorum by calling controllers (`host:port`), and those that they name, until one is the leader.

    Without a leader within `timeout_s`, the result has leader -1, high watermark -1 and the highest observed epoch.
    Raises KafkaError(NETWORK_EXCEPTION) if no controller responds.
    """
    addresses = dict.fromkeys(arguments.names("controllers", controllers, "host:port"))
    pool = ConnectionPool.of("kipmesh-admin", security or ClientSslConfig())
    deadline = time.monotonic() + timeout_s
    latest: _Result | None = None
    try:
        while True:
            remaining_s = max(deadline - time.monotonic(), 0.001)
            calls = [_call(pool, address, min(CALL_TIMEOUT_S, remaining_s)) for address in addresses]
            results = [result for result in await asyncio.gather(*calls) if result is not None]
            leaders = [result for result in results if not result.partition.error_code]
            if leaders:
                return _description(max(leaders, key=_epoch))
            latest = max([*results, *([latest] if latest else [])], key=_epoch, default=None)
            for result in results:
                addresses |= {node.address: None for node in result.nodes}
            if time.monotonic() + RETRY_BACKOFF_S >= deadline:
                break
            await asyncio.sleep(RETRY_BACKOFF_S)
    finally:
        await pool.close()
    if latest is None:
        text = f"no controller responded at {','.join(controllers)} within {timeout_s:g} s"
        raise KafkaError(ErrorCode.NETWORK_EXCEPTION, text)
    return _description(latest)._replace(leader_id=-1, high_watermark=-1)


async def _call(pool: ConnectionPool, address: str, timeout_s: float) -> _Result | None:
    """Return the controller's result, or None if the response is missing or lacks the metadata partition."""
    try:
        response: m.DescribeQuorumResponse = await call(pool, address, DESCRIBE_QUORUM, timeout_s)
    except TransportError:
        return None
    return next(_results(response), None)


def _epoch(result: _Result) -> int:
    return result.partition.leader_epoch


def _results(response: m.DescribeQuorumResponse) -> Iterator[_Result]:
    nodes = tuple([Node(node.node_id, node.host, node.port, node.rack) for node in response.endpoints])
    for topic in response.topics:
        for each in topic.partitions:
            yield _Result(each, nodes)


def _description(result: _Result) -> QuorumDescription:
    partition = result.partition
    return QuorumDescription(
        partition.leader_id,
        partition.leader_epoch,
        partition.high_watermark,
        [_replica(replica) for replica in partition.current_voters],
        [_replica(replica) for replica in partition.observers],
        result.nodes,
    )


def _replica(replica: m.ReplicaState) -> QuorumReplica:
    return QuorumReplica(
        replica.replica_id, replica.log_end_offset, replica.last_fetch_timestamp, replica.last_caught_up_timestamp
    )
