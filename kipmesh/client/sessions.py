"""ListFetchSessions (ours): which fetch sessions the brokers have. Each broker answers for itself alone."""

from __future__ import annotations

import asyncio

from kipmesh.client.cluster import Cluster
from kipmesh.client.types import BrokerSessions, FetchSessionDescription, Node
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages import ListFetchSessionsRequest, ListFetchSessionsResponse
from kipmesh.rpc.client import TransportError

ASK_SECONDS_MAX = 5.0
"""For one broker's answer: one that is held must not keep the others' from being told for long."""


async def list_fetch_sessions(cluster: Cluster, nodes: list[Node], broker_id: int | None) -> list[BrokerSessions]:
    """The sessions at these brokers, or at one of them, by node id; a broker's failure is in its entry.

    Raises KafkaError(BROKER_NOT_AVAILABLE) when there is no broker with that id.
    """
    wanted = [node for node in sorted(nodes) if broker_id in (None, node.node_id)]
    if not wanted:
        what = "no broker" if broker_id is None else f"no broker {broker_id}"
        raise KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, f"there is {what}")
    return list(await asyncio.gather(*[_ask(cluster, node) for node in wanted]))


async def _ask(cluster: Cluster, node: Node) -> BrokerSessions:
    timeout_s = min(cluster.request_timeout_ms / 1000, ASK_SECONDS_MAX)
    try:
        response: ListFetchSessionsResponse = await cluster.pool.get(node.address).call(
            "Broker", "ListFetchSessions", ListFetchSessionsRequest(), timeout_s
        )
    except TransportError as error:
        code = ErrorCode.REQUEST_TIMED_OUT if error.timed_out else ErrorCode.NETWORK_EXCEPTION
        if error.code.name == "UNIMPLEMENTED":
            code = ErrorCode.UNSUPPORTED_VERSION
        return BrokerSessions(node.node_id, (), KafkaError(code, f"broker {node.node_id}: {error}"))
    if response.error_code:
        text = f"broker {node.node_id}: {response.error_message or 'no reason given'}"
        return BrokerSessions(node.node_id, (), KafkaError(response.error_code, text))
    return BrokerSessions(node.node_id, [FetchSessionDescription(**each._asdict()) for each in response.sessions])
