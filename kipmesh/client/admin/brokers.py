"""Administration of single brokers: log directories, fetch sessions, and faults injected for tests."""

from __future__ import annotations

from typing import Any, NamedTuple

from kipmesh import messages as m
from kipmesh.client.admin.requests import AdminRequests, failure_of
from kipmesh.client.types import BrokerSessions, FetchSessionDescription, TopicPartition
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.transport.grpc.client import TransportError

SESSIONS_TIMEOUT_S = 5.0
"""Timeout of each broker's response, so that a hung broker does not delay the result for long."""


class ReplicaInfo(NamedTuple):
    """Size and lag of a replica in a log directory."""

    size_bytes: int
    offset_lag: int
    """High watermark minus log end offset, in records."""


class LogDirDescription(NamedTuple):
    """State, replicas and disk of a log directory of a broker."""

    log_dir: str
    """Path on the broker."""
    error: KafkaError | None
    """KAFKA_STORAGE_ERROR with the reason if the directory is offline."""
    replicas: dict[TopicPartition, ReplicaInfo]
    total_bytes: int
    """Size of the disk; -1 if unknown."""
    usable_bytes: int
    """Free space on the disk; -1 if unknown."""


class BrokerAdmin(AdminRequests):
    """The part of `AdminClient` that sends requests to single brokers."""

    async def list_fetch_sessions(self, broker_id: int | None = None) -> list[BrokerSessions]:
        """Return the fetch sessions of one broker, or of all brokers if `broker_id` is None.

        The entry of a broker that does not respond within 5 s has an error. Raises KafkaError(BROKER_NOT_AVAILABLE) if
        the broker is not in the cluster.
        """
        timeout_s = min(self._cluster.request_timeout_ms / 1000, SESSIONS_TIMEOUT_S)
        nodes = await self._nodes(broker_id)
        responses = await self._call_brokers(m.ListFetchSessionsRequest(), nodes, timeout_s)
        return [
            BrokerSessions(node_id, (), response)
            if isinstance(response, KafkaError)
            else BrokerSessions(node_id, [FetchSessionDescription(**each._asdict()) for each in response.sessions])
            for node_id, response in responses.items()
        ]

    async def describe_log_dirs(self, broker_id: int) -> list[LogDirDescription]:
        """Return the log directories of a broker with their replicas and their state.

        An offline directory has an error in its entry. Raises KafkaError: BROKER_NOT_AVAILABLE if the broker is not in
        the cluster or does not respond.
        """
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
        """Inject a fault for tests and return its id by broker id. None as `broker_id` means all brokers.

        Raises KafkaError: POLICY_VIOLATION if `fault.injection.enable` is false or there are too many faults,
        INVALID_REQUEST for an invalid fault, BROKER_NOT_AVAILABLE if a broker is not in the cluster or does not
        respond. Other brokers may then have the fault.
        """
        responses = await self._all_of(m.InjectFaultRequest(fault), broker_id)
        return {node_id: response.fault_id for node_id, response in responses.items()}

    async def list_faults(self, broker_id: int | None = None) -> dict[int, list[m.InjectedFault]]:
        """Return the active injected faults of one broker, or of all if `broker_id` is None, by broker id.

        Raises KafkaError: POLICY_VIOLATION if `fault.injection.enable` is false, BROKER_NOT_AVAILABLE if a broker
        is not in the cluster or does not respond.
        """
        responses = await self._all_of(m.ListFaultsRequest(), broker_id)
        return {node_id: list(response.faults) for node_id, response in responses.items()}

    async def clear_faults(self, broker_id: int | None = None) -> dict[int, int]:
        """Remove all injected faults and return their number by broker id. None as `broker_id` means all brokers.

        Raises KafkaError: POLICY_VIOLATION if `fault.injection.enable` is false, BROKER_NOT_AVAILABLE if a broker
        is not in the cluster or does not respond.
        """
        responses = await self._all_of(m.ClearFaultsRequest(), broker_id)
        return {node_id: response.cleared for node_id, response in responses.items()}

    async def _all_of(self, request: Any, broker_id: int | None) -> dict[int, Any]:
        """Send a request to one broker, or to all if `broker_id` is None. Returns the responses by broker id.

        Raises the first KafkaError; BROKER_NOT_AVAILABLE if a broker is not in the cluster or does not respond.
        """
        nodes = await self._nodes(broker_id)
        responses = await self._call_brokers(request, nodes, self._cluster.request_timeout_ms / 1000)
        for error in responses.values():
            if isinstance(error, KafkaError):
                has_response = not isinstance(error.__cause__, TransportError)
                raise KafkaError(
                    error.code if has_response else ErrorCode.BROKER_NOT_AVAILABLE, error.message
                ) from None
        return responses
