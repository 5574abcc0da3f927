"""Faults for tests at brokers that allow them (`fault.injection.enable`); each broker has its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from kipmesh import messages as m
from kipmesh.client.cluster import Cluster
from kipmesh.client.types import Node
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.rpc.client import TransportError


async def inject_fault(
    cluster: Cluster, nodes: Iterable[Node], broker_id: int | None, fault: m.InjectedFault
) -> dict[int, int]:
    """The fault's number at each broker; raises KafkaError, POLICY_VIOLATION where faults are not allowed."""
    answers = await _ask_all(cluster, nodes, broker_id, "InjectFault", m.InjectFaultRequest(fault))
    return {node_id: answer.fault_id for node_id, answer in answers.items()}


async def list_faults(
    cluster: Cluster, nodes: Iterable[Node], broker_id: int | None
) -> dict[int, list[m.InjectedFault]]:
    """Those that are still to act."""
    answers = await _ask_all(cluster, nodes, broker_id, "ListFaults", m.ListFaultsRequest())
    return {node_id: list(answer.faults) for node_id, answer in answers.items()}


async def clear_faults(cluster: Cluster, nodes: Iterable[Node], broker_id: int | None) -> dict[int, int]:
    """How many were taken away."""
    answers = await _ask_all(cluster, nodes, broker_id, "ClearFaults", m.ClearFaultsRequest())
    return {node_id: answer.cleared for node_id, answer in answers.items()}


async def _ask_all(
    cluster: Cluster, nodes: Iterable[Node], broker_id: int | None, method: str, request: Any
) -> dict[int, Any]:
    wanted = [node for node in sorted(nodes) if broker_id in (None, node.node_id)]
    if not wanted:
        what = "no broker" if broker_id is None else f"no broker {broker_id}"
        raise KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, f"there is {what}")
    answers = await asyncio.gather(*[_ask(cluster, node, method, request) for node in wanted])
    return {node.node_id: answer for node, answer in zip(wanted, answers, strict=True)}


async def _ask(cluster: Cluster, node: Node, method: str, request: Any) -> Any:
    try:
        answer = await cluster.pool.get(node.address).call("Faults", method, request, cluster.request_timeout_ms / 1000)
    except TransportError as error:
        raise KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, f"broker {node.node_id}: {error}") from None
    if answer.error_code:
        raise KafkaError(answer.error_code, f"broker {node.node_id}: {answer.error_message or 'no reason given'}")
    return answer
