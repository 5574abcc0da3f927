"""The services Controller and Admin: each request is one operation of the owner.

What is refused (not active, too much waiting, the disk) is answered in the form that the request has for errors: at
the top, or for each topic and resource. NOT_CONTROLLER says who is active, where the form has room for a text.
"""

from __future__ import annotations

from collections.abc import Callable

from kipmesh.core.errors import KafkaError
from kipmesh.core.messages import (
    AllocateProducerIdsRequest,
    AllocateProducerIdsResponse,
    AlterConfigsResourceResponse,
    AlterPartitionRequest,
    AlterPartitionResponse,
    AssignReplicasToDirsRequest,
    AssignReplicasToDirsResponse,
    BrokerHeartbeatRequest,
    BrokerHeartbeatResponse,
    BrokerRegistrationRequest,
    BrokerRegistrationResponse,
    CreatableTopicResult,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    ElectLeadersRequest,
    ElectLeadersResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from kipmesh.core.metadata.decision import Decision
from kipmesh.node.controller.credential_service import CredentialService
from kipmesh.node.controller.leader_elections import LeaderElections
from kipmesh.node.controller.owner import Do, DoOrCleanUp
from kipmesh.node.controller.reassignment_service import ReassignmentService
from kipmesh.rpc.server import RequestContext


class ControllerService:
    """BrokerRegistration, BrokerHeartbeat (one by one, and over streams whose end is noticed), AlterPartition, and
    AllocateProducerIds."""

    def __init__(
        self,
        do: Do,
        now_ms: Callable[[], int],
        next_offset: Callable[[], int],
        disconnected: Callable[[int, int], None],
    ) -> None:
        """`disconnected` is given a broker and the number of its stream when that is over."""
        self._do = do
        self._now_ms = now_ms
        self._next_offset = next_offset
        self._disconnected = disconnected
        # Whose heartbeats each open stream brings.
        self._brokers: dict[int, int] = {}

    async def broker_registration(
        self, request: BrokerRegistrationRequest, context: RequestContext
    ) -> BrokerRegistrationResponse:
        """BrokerRegistration (API key 62)."""
        try:
            response: BrokerRegistrationResponse = await self._do(
                "BrokerRegistration",
                lambda controller: controller.register(request, self._now_ms(), self._next_offset()),
            )
        except KafkaError as error:
            return BrokerRegistrationResponse(error_code=error.code, error_message=error.message)
        return response

    async def broker_heartbeat(
        self, request: BrokerHeartbeatRequest, context: RequestContext
    ) -> BrokerHeartbeatResponse:
        """BrokerHeartbeat (API key 63)."""
        stream = context.stream
        if stream:
            self._brokers[stream] = request.broker_id
        try:
            response: BrokerHeartbeatResponse = await self._do(
                "BrokerHeartbeat",
                lambda controller: controller.heartbeat(request, self._now_ms(), self._next_offset(), stream),
            )
        except KafkaError as error:
            return BrokerHeartbeatResponse(error_code=error.code)
        return response

    def stream_ended(self, context: RequestContext) -> None:
        """A stream of heartbeats is over: the broker ended it, or it broke."""
        broker_id = self._brokers.pop(context.stream, None)
        if broker_id is not None:
            self._disconnected(broker_id, context.stream)

    async def alter_partition(self, request: AlterPartitionRequest, context: RequestContext) -> AlterPartitionResponse:
        """AlterPartition (API key 56)."""
        try:
            response: AlterPartitionResponse = await self._do(
                "AlterPartition", lambda controller: controller.alter_partition(request)
            )
        except KafkaError as error:
            return AlterPartitionResponse(error_code=error.code)
        return response

    async def assign_replicas_to_dirs(
        self, request: AssignReplicasToDirsRequest, context: RequestContext
    ) -> AssignReplicasToDirsResponse:
        """AssignReplicasToDirs (API key 73)."""
        try:
            response: AssignReplicasToDirsResponse = await self._do(
                "AssignReplicasToDirs", lambda controller: controller.assign_replicas(request)
            )
        except KafkaError as error:
            return AssignReplicasToDirsResponse(error_code=error.code)
        return response

    async def allocate_producer_ids(
        self, request: AllocateProducerIdsRequest, context: RequestContext
    ) -> AllocateProducerIdsResponse:
        """AllocateProducerIds (API key 67)."""
        try:
            response: AllocateProducerIdsResponse = await self._do(
                "AllocateProducerIds", lambda controller: controller.allocate_producer_ids(request)
            )
        except KafkaError as error:
            return AllocateProducerIdsResponse(error_code=error.code)
        return response


class AdminService(ReassignmentService, CredentialService):
    """Topics, configurations, elections, and what `ReassignmentService` and `CredentialService` have."""

    def __init__(self, do: DoOrCleanUp) -> None:
        ReassignmentService.__init__(self, do)
        CredentialService.__init__(self, do)
        self._elections = LeaderElections(do)

    async def create_topics(self, request: CreateTopicsRequest, context: RequestContext) -> CreateTopicsResponse:
        """CreateTopics (API key 19)."""
        try:
            response: CreateTopicsResponse = await self._do(
                "CreateTopics", lambda controller: controller.create_topics(request)
            )
        except KafkaError as error:
            failed = [CreatableTopicResult(topic.name, b"", error.code, error.message) for topic in request.topics]
            return CreateTopicsResponse(topics=tuple(failed))
        return response

    async def delete_topics(self, request: DeleteTopicsRequest, context: RequestContext) -> DeleteTopicsResponse:
        """DeleteTopics (API key 20)."""
        try:
            response: DeleteTopicsResponse = await self._do(
                "DeleteTopics", lambda controller: controller.delete_topics(request)
            )
        except KafkaError as error:
            failed = [
                DeletableTopicResult(topic.name, topic.topic_id, error.code, error.message) for topic in request.topics
            ]
            return DeleteTopicsResponse(responses=tuple(failed))
        return response

    async def create_partitions(
        self, request: CreatePartitionsRequest, context: RequestContext
    ) -> CreatePartitionsResponse:
        """CreatePartitions (API key 37)."""
        try:
            response: CreatePartitionsResponse = await self._do(
                "CreatePartitions", lambda controller: controller.create_partitions(request)
            )
        except KafkaError as error:
            failed = [CreatePartitionsTopicResult(topic.name, error.code, error.message) for topic in request.topics]
            return CreatePartitionsResponse(results=tuple(failed))
        return response

    async def describe_configs(
        self, request: DescribeConfigsRequest, context: RequestContext
    ) -> DescribeConfigsResponse:
        """DescribeConfigs (API key 32) of topics."""
        try:
            response: DescribeConfigsResponse = await self._do(
                "DescribeConfigs", lambda controller: controller.describe_configs(request)
            )
        except KafkaError as error:
            failed = [
                DescribeConfigsResult(error.code, error.message, resource.resource_type, resource.resource_name)
                for resource in request.resources
            ]
            return DescribeConfigsResponse(results=tuple(failed))
        return response

    async def incremental_alter_configs(
        self, request: IncrementalAlterConfigsRequest, context: RequestContext
    ) -> IncrementalAlterConfigsResponse:
        """IncrementalAlterConfigs (API key 44) of topics."""
        try:
            response: IncrementalAlterConfigsResponse = await self._do(
                "IncrementalAlterConfigs", lambda controller: controller.alter_configs(request)
            )
            await self._do("Elect", lambda controller: Decision(controller.elect_pending(), None))
        except KafkaError as error:
            failed = [
                AlterConfigsResourceResponse(error.code, error.message, resource.resource_type, resource.resource_name)
                for resource in request.resources
            ]
            return IncrementalAlterConfigsResponse(responses=tuple(failed))
        return response

    async def elect_leaders(self, request: ElectLeadersRequest, context: RequestContext) -> ElectLeadersResponse:
        """ElectLeaders (API key 43)."""
        return await self._elections.elect_leaders(request, context)
