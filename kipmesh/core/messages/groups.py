"""Consumer groups by Kafka's classic protocol, as in `protos/kipmesh/v1/groups.proto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class FindCoordinatorRequest(NamedTuple):
    key_type: int = 0
    coordinator_keys: Sequence[str] = ()


class FindCoordinatorResponse(NamedTuple):
    throttle_time_ms: int = 0
    coordinators: Sequence[Coordinator] = ()


class Coordinator(NamedTuple):
    key: str = ""
    node_id: int = -1
    host: str = ""
    port: int = -1
    error_code: int = 0
    error_message: str | None = None


class JoinGroupRequest(NamedTuple):
    group_id: str = ""
    session_timeout_ms: int = 0
    rebalance_timeout_ms: int = -1
    member_id: str = ""
    group_instance_id: str | None = None
    protocol_type: str = ""
    protocols: Sequence[JoinGroupRequestProtocol] = ()
    reason: str | None = None


class JoinGroupRequestProtocol(NamedTuple):
    name: str = ""
    metadata: bytes = b""


class JoinGroupResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    generation_id: int = -1
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader: str = ""
    skip_assignment: bool = False
    member_id: str = ""
    members: Sequence[JoinGroupResponseMember] = ()


class JoinGroupResponseMember(NamedTuple):
    member_id: str = ""
    group_instance_id: str | None = None
    metadata: bytes = b""


class SyncGroupRequest(NamedTuple):
    group_id: str = ""
    generation_id: int = 0
    member_id: str = ""
    group_instance_id: str | None = None
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignments: Sequence[SyncGroupRequestAssignment] = ()


class SyncGroupRequestAssignment(NamedTuple):
    member_id: str = ""
    assignment: bytes = b""


class SyncGroupResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignment: bytes = b""


class HeartbeatRequest(NamedTuple):
    group_id: str = ""
    generation_id: int = 0
    member_id: str = ""
    group_instance_id: str | None = None


class HeartbeatResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0


class LeaveGroupRequest(NamedTuple):
    group_id: str = ""
    members: Sequence[MemberIdentity] = ()


class MemberIdentity(NamedTuple):
    member_id: str = ""
    group_instance_id: str | None = None
    reason: str | None = None


class LeaveGroupResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    members: Sequence[MemberResponse] = ()


class MemberResponse(NamedTuple):
    member_id: str = ""
    group_instance_id: str | None = None
    error_code: int = 0


class OffsetCommitRequest(NamedTuple):
    group_id: str = ""
    generation_id_or_member_epoch: int = -1
    member_id: str = ""
    group_instance_id: str | None = None
    topics: Sequence[OffsetCommitRequestTopic] = ()


class OffsetCommitRequestTopic(NamedTuple):
    name: str = ""
    partitions: Sequence[OffsetCommitRequestPartition] = ()


class OffsetCommitRequestPartition(NamedTuple):
    partition_index: int = 0
    committed_offset: int = 0
    committed_leader_epoch: int = -1
    committed_metadata: str | None = None


class OffsetCommitResponse(NamedTuple):
    throttle_time_ms: int = 0
    topics: Sequence[OffsetCommitResponseTopic] = ()


class OffsetCommitResponseTopic(NamedTuple):
    name: str = ""
    partitions: Sequence[OffsetCommitResponsePartition] = ()


class OffsetCommitResponsePartition(NamedTuple):
    partition_index: int = 0
    error_code: int = 0


class OffsetFetchRequest(NamedTuple):
    groups: Sequence[OffsetFetchRequestGroup] = ()
    require_stable: bool = False


class OffsetFetchRequestGroup(NamedTuple):
    group_id: str = ""
    all_topics: bool = False
    topics: Sequence[OffsetFetchRequestTopics] = ()


class OffsetFetchRequestTopics(NamedTuple):
    name: str = ""
    partition_indexes: Sequence[int] = ()


class OffsetFetchResponse(NamedTuple):
    throttle_time_ms: int = 0
    groups: Sequence[OffsetFetchResponseGroup] = ()


class OffsetFetchResponseGroup(NamedTuple):
    group_id: str = ""
    topics: Sequence[OffsetFetchResponseTopics] = ()
    error_code: int = 0


class OffsetFetchResponseTopics(NamedTuple):
    name: str = ""
    partitions: Sequence[OffsetFetchResponsePartitions] = ()


class OffsetFetchResponsePartitions(NamedTuple):
    partition_index: int = 0
    committed_offset: int = -1
    committed_leader_epoch: int = -1
    metadata: str | None = None
    error_code: int = 0


class OffsetDeleteRequest(NamedTuple):
    group_id: str = ""
    topics: Sequence[OffsetDeleteRequestTopic] = ()


class OffsetDeleteRequestTopic(NamedTuple):
    name: str = ""
    partitions: Sequence[OffsetDeleteRequestPartition] = ()


class OffsetDeleteRequestPartition(NamedTuple):
    partition_index: int = 0


class OffsetDeleteResponse(NamedTuple):
    error_code: int = 0
    throttle_time_ms: int = 0
    topics: Sequence[OffsetDeleteResponseTopic] = ()


class OffsetDeleteResponseTopic(NamedTuple):
    name: str = ""
    partitions: Sequence[OffsetDeleteResponsePartition] = ()


class OffsetDeleteResponsePartition(NamedTuple):
    partition_index: int = 0
    error_code: int = 0


class ListGroupsRequest(NamedTuple):
    states_filter: Sequence[str] = ()
    types_filter: Sequence[str] = ()


class ListGroupsResponse(NamedTuple):
    throttle_time_ms: int = 0
    error_code: int = 0
    groups: Sequence[ListedGroup] = ()


class ListedGroup(NamedTuple):
    group_id: str = ""
    protocol_type: str = ""
    group_state: str = ""
    group_type: str = ""


class DescribeGroupsRequest(NamedTuple):
    groups: Sequence[str] = ()


class DescribeGroupsResponse(NamedTuple):
    throttle_time_ms: int = 0
    groups: Sequence[DescribedGroup] = ()


class DescribedGroup(NamedTuple):
    error_code: int = 0
    group_id: str = ""
    group_state: str = ""
    protocol_type: str = ""
    protocol_data: str = ""
    members: Sequence[DescribedGroupMember] = ()


class DescribedGroupMember(NamedTuple):
    member_id: str = ""
    group_instance_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    member_metadata: bytes = b""
    member_assignment: bytes = b""


class DeleteGroupsRequest(NamedTuple):
    groups_names: Sequence[str] = ()


class DeleteGroupsResponse(NamedTuple):
    throttle_time_ms: int = 0
    results: Sequence[DeletableGroupResult] = ()


class DeletableGroupResult(NamedTuple):
    group_id: str = ""
    error_code: int = 0
