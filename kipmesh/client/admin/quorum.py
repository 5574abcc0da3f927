"""DescribeQuorum: read from an answer, and asked of the controllers themselves, which needs no broker.

Only the leader can answer; the other voters name the one they know. All are asked at the same time, and among answers
that contradict each other the highest epoch counts: a leader that was cut off does not know yet that it leads no more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kipmesh import messages as m
from kipmesh.client.calls import call
from kipmesh.client.types import Node, QuorumDescription, QuorumReplica
from kipmesh.core.config.security import ClientSslConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC
from kipmesh.transport.grpc.client import ConnectionPool, TransportError

DESCRIBE_QUORUM = m.DescribeQuorumRequest([m.DescribeQuorumTopic(CLUSTER_METADATA_TOPIC, (0,))])
ASK_TIMEOUT_S = 1.0
"""For one controller's answer: a process that is held must not keep the others' from being told."""
RETRY_BACKOFF_S = 0.1


class _Answer(NamedTuple):
    partition: m.DescribeQuorumPartition
    nodes: tuple[Node, ...]


def quorum_description(response: m.DescribeQuorumResponse) -> QuorumDescription:
    """What the leader answered; KafkaError when the metadata partition is not in it."""
    for answer in _answers(response):
        return _description(answer)
    raise KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "the answer does not mention the metadata partition")


async def describe_quorum(
    controllers: Sequence[str], *, timeout_s: float, security: ClientSslConfig | None = None
) -> QuorumDescription:
    """Ask controllers (`host:port`) until one of them leads, and whom they name as the leader.

    After `timeout_s` without one: a description with leader -1 and the highest epoch that was heard of. Raises
    KafkaError(NETWORK_EXCEPTION) when no controller answered at all.
    """
    pool = ConnectionPool.of("kipmesh-admin", security or ClientSslConfig())
    addresses = dict.fromkeys(controllers)
    deadline = time.monotonic() + timeout_s
    heard: _Answer | None = None
    try:
        while True:
            left_s = max(deadline - time.monotonic(), 0.001)
            asked = [_ask(pool, address, min(ASK_TIMEOUT_S, left_s)) for address in addresses]
            answers = [answer for answer in await asyncio.gather(*asked) if answer is not None]
            leaders = [answer for answer in answers if not answer.partition.error_code]
            if leaders:
                return _description(max(leaders, key=_epoch))
            heard = max([*answers, *([heard] if heard else [])], key=_epoch, default=None)
            for answer in answers:
                addresses |= {node.address: None for node in answer.nodes}
            if time.monotonic() + RETRY_BACKOFF_S >= deadline:
                break
            await asyncio.sleep(RETRY_BACKOFF_S)
    finally:
        await pool.close()
    if heard is None:
        text = f"no controller answers at {','.join(controllers)} within {timeout_s:g} s"
        raise KafkaError(ErrorCode.NETWORK_EXCEPTION, text)
    return _description(heard)._replace(leader_id=-1, high_watermark=-1)


async def _ask(pool: ConnectionPool, address: str, timeout_s: float) -> _Answer | None:
    """None without an answer that says anything of the quorum."""
    try:
        response: m.DescribeQuorumResponse = await call(pool, address, DESCRIBE_QUORUM, timeout_s)
    except TransportError:
        return None
    return next(_answers(response), None)


def _epoch(answer: _Answer) -> int:
    return answer.partition.leader_epoch


def _answers(response: m.DescribeQuorumResponse) -> Iterator[_Answer]:
    nodes = tuple([Node(node.node_id, node.host, node.port, node.rack) for node in response.endpoints])
    for topic in response.topics:
        for each in topic.partitions:
            yield _Answer(each, nodes)


def _description(answer: _Answer) -> QuorumDescription:
    found = answer.partition
    return QuorumDescription(
        found.leader_id,
        found.leader_epoch,
        found.high_watermark,
        [_replica(replica) for replica in found.current_voters],
        [_replica(replica) for replica in found.observers],
        answer.nodes,
    )


def _replica(replica: m.ReplicaState) -> QuorumReplica:
    return QuorumReplica(
        replica.replica_id, replica.log_end_offset, replica.last_fetch_timestamp, replica.last_caught_up_timestamp
    )
