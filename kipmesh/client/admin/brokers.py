"""What each broker knows for itself: its log directories, its fetch sessions, and the faults injected for tests."""

from __future__ import annotations

from typing import Any, NamedTuple

from kipmesh import messages as m
from kipmesh.client.admin.requests import AdminRequests, failure_of
from kipmesh.client.types import BrokerSessions, FetchSessionDescription, TopicPartition
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.transport.grpc.client import TransportError

SESSIONS_TIMEOUT_S = 5.0
"""For one broker's list of sessions, so that a hung broker does not delay those of the others for long."""


class ReplicaInfo(NamedTuple):
    """A replica in a log directory."""

    size_bytes: int
    offset_lag: int
    """Records by which its log ends below the high watermark."""


class LogDirDescription(NamedTuple):
    """One log directory of a broker."""

    log_dir: str
    """Its path."""
    error: KafkaError | None
    """KAFKA_STORAGE_ERROR, with the reason, while it is offline."""
    replicas: dict[TopicPartition, ReplicaInfo]
    total_bytes: int
    """Of its disk; -1 where that is not known."""
    usable_bytes: int
    """Free ones of these; -1 where that is not known."""


class BrokerAdmin(AdminRequests):
    """The part of `AdminClient` that is about single brokers."""

    async def list_fetch_sessions(self, broker_id: int | None = None) -> list[BrokerSessions]:
        """The fetch sessions at one broker, or at all of them; what a broker did not say has its `error`."""
        timeout_s = min(self._cluster.request_timeout_ms / 1000, SESSIONS_TIMEOUT_S)
        nodes = await self._nodes(broker_id)
        answers = await self._call_brokers(m.ListFetchSessionsRequest(), nodes, timeout_s)
        return [
            BrokerSessions(node_id, (), answer)
            if isinstance(answer, KafkaError)
            else BrokerSessions(node_id, [FetchSessionDescription(**each._asdict()) for each in answer.sessions])
            for node_id, answer in answers.items()
        ]

    async def describe_log_dirs(self, broker_id: int) -> list[LogDirDescription]:
        """A broker's log directories, what is in them, and which are offline."""
        response: m.DescribeLogDirsResponse = (await self._all_of(m.DescribeLogDirsRequest(), broker_id))[broker_id]
        return [
            LogDirDescription(
                result.log_dir,
                failure_of(result, "offline"),
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

    async def inject_fault(self, fault: m.InjectedFault, broker_id: int | None = None) -> dict[int, int]:
        """A fault for tests, at one broker or at each of them: its numbers by the brokers' ids (`kipmesh faults`).

        Raises KafkaError, POLICY_VIOLATION where faults are not allowed (`fault.injection.enable`).
        """
        answers = await self._all_of(m.InjectFaultRequest(fault), broker_id)
        return {node_id: answer.fault_id for node_id, answer in answers.items()}

    async def list_faults(self, broker_id: int | None = None) -> dict[int, list[m.InjectedFault]]:
        """The faults that are still to act, by the brokers' ids."""
        answers = await self._all_of(m.ListFaultsRequest(), broker_id)
        return {node_id: list(answer.faults) for node_id, answer in answers.items()}

    async def clear_faults(self, broker_id: int | None = None) -> dict[int, int]:
        """Take all faults away: how many there were, by the brokers' ids."""
        answers = await self._all_of(m.ClearFaultsRequest(), broker_id)
        return {node_id: answer.cleared for node_id, answer in answers.items()}

    async def _all_of(self, request: Any, broker_id: int | None) -> dict[int, Any]:
        """The responses by broker id; raises the first error, BROKER_NOT_AVAILABLE for a broker that is silent."""
        nodes = await self._nodes(broker_id)
        answers = await self._call_brokers(request, nodes, self._cluster.request_timeout_ms / 1000)
        for answer in answers.values():
            if isinstance(answer, KafkaError):
                is_silent = isinstance(answer.__cause__, TransportError)
                raise KafkaError(ErrorCode.BROKER_NOT_AVAILABLE if is_silent else answer.code, answer.message) from None
        return answers
