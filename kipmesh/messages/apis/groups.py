"""FindCoordinator (10), JoinGroup (11), Heartbeat (12), LeaveGroup (13), SyncGroup (14), DescribeGroups (15),
ListGroups (16) and DeleteGroups (42)."""

from collections.abc import Sequence

from kipmesh.messages.schema import ITEM, Bool, Int8, Int16, Int32, Message, field


class FindCoordinatorRequest(Message):
    key: str = field(versions="0-3")
    key_type: Int8 = field(1, versions="1+")
    coordinator_keys: Sequence[str] = field(2, versions="4+")


class Coordinator(Message):
    key: str = field(1, mirrors=ITEM)
    node_id: Int32 = field(2, default=-1)
    host: str = field(3)
    port: Int32 = field(4, default=-1)
    error_code: Int16 = field(5)
    error_message: str | None = field(6, nullable="4+")


class FindCoordinatorResponse(Message):
    throttle_time_ms: Int32 = field(1, versions="1+")
    error_code: Int16 = field(versions="0-3")
    error_message: str | None = field(versions="1-3")
    node_id: Int32 = field(versions="0-3", default=-1)
    host: str = field(versions="0-3")
    port: Int32 = field(versions="0-3", default=-1)
    coordinators: Sequence[Coordinator] = field(2, versions="4+", mirrors="coordinator_keys")


class JoinGroupRequestProtocol(Message):
    name: str = field(1)
    metadata: bytes = field(2)


class JoinGroupRequest(Message):
    group_id: str = field(1)
    session_timeout_ms: Int32 = field(2)
    # -1: the session timeout.
    rebalance_timeout_ms: Int32 = field(3, versions="1+", default=-1)
    # Empty in the first request; the response assigns one (KIP-394).
    member_id: str = field(4)
    # The name of a static member (KIP-345).
    group_instance_id: str | None = field(5, versions="5+")
    # `consumer` for Kafka consumers.
    protocol_type: str = field(6)
    # Supported assignment protocols, preferred first.
    protocols: Sequence[JoinGroupRequestProtocol] = field(7)
    reason: str | None = field(8, versions="8+")


class JoinGroupResponseMember(Message):
    member_id: str = field(1)
    group_instance_id: str | None = field(2, versions="5+")
    metadata: bytes = field(3)


class JoinGroupResponse(Message):
    throttle_time_ms: Int32 = field(1, versions="2+")
    error_code: Int16 = field(2)
    generation_id: Int32 = field(3, default=-1)
    protocol_type: str | None = field(4, versions="7+")
    protocol_name: str | None = field(5, nullable="7+")
    leader: str = field(6)
    # The leader must not assign partitions: a static member has returned, and the assignment stays (KIP-814).
    skip_assignment: Bool = field(7, versions="9+")
    member_id: str = field(8)
    # For the leader; empty for others.
    members: Sequence[JoinGroupResponseMember] = field(9)


class SyncGroupRequestAssignment(Message):
    member_id: str = field(1)
    assignment: bytes = field(2)


class SyncGroupRequest(Message):
    group_id: str = field(1)
    generation_id: Int32 = field(2)
    member_id: str = field(3)
    group_instance_id: str | None = field(4, versions="3+")
    protocol_type: str | None = field(5, versions="5+")
    protocol_name: str | None = field(6, versions="5+")
    # From the leader; empty from others.
    assignments: Sequence[SyncGroupRequestAssignment] = field(7)


class SyncGroupResponse(Message):
    throttle_time_ms: Int32 = field(1, versions="1+")
    error_code: Int16 = field(2)
    protocol_type: str | None = field(3, versions="5+")
    protocol_name: str | None = field(4, versions="5+")
    assignment: bytes = field(5)


class HeartbeatRequest(Message):
    group_id: str = field(1)
    generation_id: Int32 = field(2)
    member_id: str = field(3)
    group_instance_id: str | None = field(4, versions="3+")


class HeartbeatResponse(Message):
    throttle_time_ms: Int32 = field(1, versions="1+")
    error_code: Int16 = field(2)


class MemberIdentity(Message):
    member_id: str = field(1)
    group_instance_id: str | None = field(2, nullable="3+")
    reason: str | None = field(3, versions="5+")


class LeaveGroupRequest(Message):
    group_id: str = field(1)
    member_id: str = field(versions="0-2")
    members: Sequence[MemberIdentity] = field(2, versions="3+")


class MemberResponse(Message):
    member_id: str = field(1)
    group_instance_id: str | None = field(2, nullable="3+")
    error_code: Int16 = field(3)


class LeaveGroupResponse(Message):
    throttle_time_ms: Int32 = field(1, versions="1+")
    error_code: Int16 = field(2)
    members: Sequence[MemberResponse] = field(3, versions="3+")


class ListGroupsRequest(Message):
    # Empty: all. Case-insensitive.
    states_filter: Sequence[str] = field(1, versions="4+")
    types_filter: Sequence[str] = field(2, versions="5+")


class ListedGroup(Message):
    group_id: str = field(1)
    protocol_type: str = field(2)
    group_state: str = field(3, versions="4+")
    group_type: str = field(4, versions="5+")


class ListGroupsResponse(Message):
    throttle_time_ms: Int32 = field(1, versions="1+")
    error_code: Int16 = field(2)
    groups: Sequence[ListedGroup] = field(3)


class DescribeGroupsRequest(Message):
    groups: Sequence[str] = field(1)
    include_authorized_operations: Bool = field(versions="3+")


class DescribedGroupMember(Message):
    member_id: str = field(1)
    group_instance_id: str | None = field(2, versions="4+")
    client_id: str = field(3)
    client_host: str = field(4)
    member_metadata: bytes = field(5)
    member_assignment: bytes = field(6)


class DescribedGroup(Message):
    error_code: Int16 = field(1)
    error_message: str | None = field(versions="6+")
    group_id: str = field(2, mirrors=ITEM)
    group_state: str = field(3)
    protocol_type: str = field(4)
    protocol_data: str = field(5)
    members: Sequence[DescribedGroupMember] = field(6)
    authorized_operations: Int32 = field(versions="3+", default=-2147483648)


class DescribeGroupsResponse(Message):
    throttle_time_ms: Int32 = field(1, versions="1+")
    groups: Sequence[DescribedGroup] = field(2, mirrors="groups")


class DeleteGroupsRequest(Message):
    groups_names: Sequence[str] = field(1)


class DeletableGroupResult(Message):
    group_id: str = field(1, mirrors=ITEM)
    error_code: Int16 = field(2)


class DeleteGroupsResponse(Message):
    throttle_time_ms: Int32 = field(1)
    results: Sequence[DeletableGroupResult] = field(2, mirrors="groups_names")
