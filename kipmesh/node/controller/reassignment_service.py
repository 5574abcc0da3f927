"""The part of the service Admin that moves replicas and lets brokers leave; each request is one operation."""

from __future__ import annotations

from kipmesh.core.errors import KafkaError
from kipmesh.core.messages import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
    PlanBrokerDrainRequest,
    PlanBrokerDrainResponse,
    UnregisterBrokerRequest,
    UnregisterBrokerResponse,
)
from kipmesh.node.controller.owner import Do
from kipmesh.rpc.server import RequestContext


class ReassignmentService:
    """Errors of the whole request stand at the top."""

    def __init__(self, do: Do) -> None:
        self._do = do

    async def alter_partition_reassignments(
        self, request: AlterPartitionReassignmentsRequest, context: RequestContext
    ) -> AlterPartitionReassignmentsResponse:
        """AlterPartitionReassignments (API key 45)."""
        try:
            response: AlterPartitionReassignmentsResponse = await self._do(
                "AlterPartitionReassignments", lambda controller: controller.alter_reassignments(request)
            )
        except KafkaError as error:
            return AlterPartitionReassignmentsResponse(error_code=error.code, error_message=error.message)
        return response

    async def list_partition_reassignments(
        self, request: ListPartitionReassignmentsRequest, context: RequestContext
    ) -> ListPartitionReassignmentsResponse:
        """ListPartitionReassignments (API key 46)."""
        try:
            response: ListPartitionReassignmentsResponse = await self._do(
                "ListPartitionReassignments", lambda controller: controller.list_reassignments(request)
            )
        except KafkaError as error:
            return ListPartitionReassignmentsResponse(error_code=error.code, error_message=error.message)
        return response

    async def plan_broker_drain(
        self, request: PlanBrokerDrainRequest, context: RequestContext
    ) -> PlanBrokerDrainResponse:
        """PlanBrokerDrain, which is ours."""
        try:
            response: PlanBrokerDrainResponse = await self._do(
                "PlanBrokerDrain", lambda controller: controller.plan_drain(request)
            )
        except KafkaError as error:
            return PlanBrokerDrainResponse(error_code=error.code, error_message=error.message)
        return response

    async def unregister_broker(
        self, request: UnregisterBrokerRequest, context: RequestContext
    ) -> UnregisterBrokerResponse:
        """UnregisterBroker (API key 64)."""
        try:
            response: UnregisterBrokerResponse = await self._do(
                "UnregisterBroker", lambda controller: controller.unregister(request)
            )
        except KafkaError as error:
            return UnregisterBrokerResponse(error_code=error.code, error_message=error.message)
        return response
