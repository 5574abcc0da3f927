"""What the listener asks of its broker: the same handlers that gRPC's services call, by the same values."""

# ruff: noqa: D102 - the handlers' own texts are in kipmesh.node.broker

from __future__ import annotations

from typing import NamedTuple, Protocol

from kipmesh.core import messages as m
from kipmesh.core.context import RequestContext
from kipmesh.wire.sasl import Sasl


class BrokerService(Protocol):
    """The service Broker."""

    async def fetch(
        self, request: m.FetchRequest, context: RequestContext, *, names_rack: bool = True
    ) -> m.FetchResponse: ...
    async def produce(self, request: m.ProduceRequest, context: RequestContext) -> m.ProduceResponse: ...
    async def list_offsets(self, request: m.ListOffsetsRequest, context: RequestContext) -> m.ListOffsetsResponse: ...
    async def offsets_for_leader_epoch(
        self, request: m.OffsetsForLeaderEpochRequest, context: RequestContext
    ) -> m.OffsetsForLeaderEpochResponse: ...
    async def delete_records(
        self, request: m.DeleteRecordsRequest, context: RequestContext
    ) -> m.DeleteRecordsResponse: ...
    async def metadata(self, request: m.MetadataRequest, context: RequestContext) -> m.MetadataResponse: ...
    async def init_producer_id(
        self, request: m.InitProducerIdRequest, context: RequestContext
    ) -> m.InitProducerIdResponse: ...
    async def describe_log_dirs(
        self, request: m.DescribeLogDirsRequest, context: RequestContext
    ) -> m.DescribeLogDirsResponse: ...


class GroupsService(Protocol):
    """The service Groups."""

    async def find_coordinator(
        self, request: m.FindCoordinatorRequest, context: RequestContext
    ) -> m.FindCoordinatorResponse: ...
    async def join_group(
        self,
        request: m.JoinGroupRequest,
        context: RequestContext,
        *,
        requires_member_id: bool = True,
        skips_assignment: bool = True,
    ) -> m.JoinGroupResponse: ...
    async def sync_group(self, request: m.SyncGroupRequest, context: RequestContext) -> m.SyncGroupResponse: ...
    async def heartbeat(self, request: m.HeartbeatRequest, context: RequestContext) -> m.HeartbeatResponse: ...
    async def leave_group(self, request: m.LeaveGroupRequest, context: RequestContext) -> m.LeaveGroupResponse: ...
    async def offset_commit(
        self, request: m.OffsetCommitRequest, context: RequestContext
    ) -> m.OffsetCommitResponse: ...
    async def offset_fetch(self, request: m.OffsetFetchRequest, context: RequestContext) -> m.OffsetFetchResponse: ...
    async def offset_delete(
        self, request: m.OffsetDeleteRequest, context: RequestContext
    ) -> m.OffsetDeleteResponse: ...
    async def list_groups(self, request: m.ListGroupsRequest, context: RequestContext) -> m.ListGroupsResponse: ...
    async def describe_groups(
        self, request: m.DescribeGroupsRequest, context: RequestContext
    ) -> m.DescribeGroupsResponse: ...
    async def delete_groups(
        self, request: m.DeleteGroupsRequest, context: RequestContext
    ) -> m.DeleteGroupsResponse: ...


class AdminService(Protocol):
    """The service Admin."""

    async def create_topics(
        self, request: m.CreateTopicsRequest, context: RequestContext
    ) -> m.CreateTopicsResponse: ...
    async def delete_topics(
        self, request: m.DeleteTopicsRequest, context: RequestContext
    ) -> m.DeleteTopicsResponse: ...
    async def create_partitions(
        self, request: m.CreatePartitionsRequest, context: RequestContext
    ) -> m.CreatePartitionsResponse: ...
    async def describe_configs(
        self, request: m.DescribeConfigsRequest, context: RequestContext
    ) -> m.DescribeConfigsResponse: ...
    async def incremental_alter_configs(
        self, request: m.IncrementalAlterConfigsRequest, context: RequestContext
    ) -> m.IncrementalAlterConfigsResponse: ...
    async def elect_leaders(
        self, request: m.ElectLeadersRequest, context: RequestContext
    ) -> m.ElectLeadersResponse: ...
    async def describe_user_scram_credentials(
        self, request: m.DescribeUserScramCredentialsRequest, context: RequestContext
    ) -> m.DescribeUserScramCredentialsResponse: ...
    async def alter_user_scram_credentials(
        self, request: m.AlterUserScramCredentialsRequest, context: RequestContext
    ) -> m.AlterUserScramCredentialsResponse: ...
    async def alter_partition_reassignments(
        self, request: m.AlterPartitionReassignmentsRequest, context: RequestContext
    ) -> m.AlterPartitionReassignmentsResponse: ...
    async def list_partition_reassignments(
        self, request: m.ListPartitionReassignmentsRequest, context: RequestContext
    ) -> m.ListPartitionReassignmentsResponse: ...


class QuorumService(Protocol):
    """The service Quorum."""

    async def describe_quorum(
        self, request: m.DescribeQuorumRequest, context: RequestContext
    ) -> m.DescribeQuorumResponse: ...


class Services(NamedTuple):
    """One broker's handlers, and who it is."""

    broker: BrokerService
    groups: GroupsService
    admin: AdminService
    quorum: QuorumService
    node_id: int
    cluster_id: str
    sasl: Sasl | None = None
    """Who may come in by listeners with SASL."""
