"""Consumer groups (KIP-62, 345, 394, 559, 814): adapts versions of requests to the coordinator of a group.

Older versions name one group or member where newer ones, and gRPC, name several; they become lists of one. Offsets are
kept for `offsets.retention.minutes`, whatever a commit of version 2 to 4 states. Groups are of type `classic`.
"""

from __future__ import annotations

from kipmesh import messages as m
from kipmesh.broker.parts import BrokerParts
from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.classic import GroupState

_MANY_COORDINATORS_SINCE = 4
_MEMBER_ID_REQUIRED_SINCE, _SKIP_ASSIGNMENT_SINCE, _NULL_PROTOCOL_SINCE = 4, 9, 7
_SYNC_PROTOCOL_SINCE = 5
_MANY_MEMBERS_SINCE = 3
_COMMIT_GROUP_ID_NOT_FOUND_SINCE = 9
_MANY_GROUPS_SINCE, _GROUP_ERROR_SINCE = 8, 2
_DESCRIBE_NOT_FOUND_SINCE = 6


async def find_coordinator(
    broker: BrokerParts, request: m.FindCoordinatorRequest, context: RequestContext
) -> m.FindCoordinatorResponse:
    """Return the coordinators of groups.

    Errors: INVALID_REQUEST for transactions and share groups, INVALID_GROUP_ID, COORDINATOR_NOT_AVAILABLE.
    """
    if not context.is_before(_MANY_COORDINATORS_SINCE):
        return await broker.groups.find_coordinator(request, context)
    response = await broker.groups.find_coordinator(request._replace(coordinator_keys=(request.key,)), context)
    one = response.coordinators[0]
    return m.FindCoordinatorResponse(0, one.error_code, one.error_message, one.node_id, one.host, one.port)


async def join_group(broker: BrokerParts, request: m.JoinGroupRequest, context: RequestContext) -> m.JoinGroupResponse:
    """Join a group. Responds when all members have joined.

    From version 4 on a member without an id receives one with MEMBER_ID_REQUIRED. Before version 9 a static leader that
    rejoins is not notified that it still leads.
    """
    response = await broker.groups.join_group(
        request,
        context,
        requires_member_id=not context.is_before(_MEMBER_ID_REQUIRED_SINCE),
        skips_assignment=not context.is_before(_SKIP_ASSIGNMENT_SINCE),
    )
    if response.protocol_name is None and context.is_before(_NULL_PROTOCOL_SINCE):
        response = response._replace(protocol_name="")
    return response


async def sync_group(broker: BrokerParts, request: m.SyncGroupRequest, context: RequestContext) -> m.SyncGroupResponse:
    """Return the member's assignment, once the leader of the group has sent the assignments of all members.

    From version 5 on, a request without protocol type and name returns INCONSISTENT_GROUP_PROTOCOL.
    """
    is_stated = request.protocol_type is not None and request.protocol_name is not None
    if context.version is not None and context.version >= _SYNC_PROTOCOL_SINCE and not is_stated:
        return m.SyncGroupResponse(error_code=ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
    return await broker.groups.sync_group(request, context)


async def leave_group(
    broker: BrokerParts, request: m.LeaveGroupRequest, context: RequestContext
) -> m.LeaveGroupResponse:
    """Remove members from a group.

    Before version 3 a request names one member, and the response has its error at the top level.
    """
    if not context.is_before(_MANY_MEMBERS_SINCE):
        return await broker.groups.leave_group(request, context)
    one = m.LeaveGroupRequest(request.group_id, members=[m.MemberIdentity(request.member_id)])
    response = await broker.groups.leave_group(one, context)
    code = response.error_code or next((member.error_code for member in response.members), 0)
    return response._replace(error_code=code, members=())


async def offset_commit(
    broker: BrokerParts, request: m.OffsetCommitRequest, context: RequestContext
) -> m.OffsetCommitResponse:
    """Commit offsets. Responds when they are committed to the log.

    An unknown group returns GROUP_ID_NOT_FOUND, or ILLEGAL_GENERATION before version 9.
    """
    response = await broker.groups.offset_commit(request, context)
    if not context.is_before(_COMMIT_GROUP_ID_NOT_FOUND_SINCE):
        return response

    def with_old_code(one: m.OffsetCommitResponsePartition) -> m.OffsetCommitResponsePartition:
        is_unknown = one.error_code == ErrorCode.GROUP_ID_NOT_FOUND
        return one._replace(error_code=ErrorCode.ILLEGAL_GENERATION) if is_unknown else one

    topics = [topic._replace(partitions=[with_old_code(one) for one in topic.partitions]) for topic in response.topics]
    return response._replace(topics=topics)


async def offset_fetch(
    broker: BrokerParts, request: m.OffsetFetchRequest, context: RequestContext
) -> m.OffsetFetchResponse:
    """Return committed offsets, -1 for a partition without one. Null topics mean all.

    Without transactions there are no unstable offsets.
    """
    if not context.is_before(_MANY_GROUPS_SINCE):
        return await broker.groups.offset_fetch(request, context)
    one = m.OffsetFetchRequestGroup(request.group_id, topics=request.topics)
    response = await broker.groups.offset_fetch(m.OffsetFetchRequest(groups=[one]), context)
    (group,) = response.groups
    topics = group.topics
    if group.error_code and context.is_before(_GROUP_ERROR_SINCE):
        topics = [_refused(topic, group.error_code) for topic in request.topics or ()]
    return m.OffsetFetchResponse(response.throttle_time_ms, topics, group.error_code)


def _refused(topic: m.OffsetFetchRequestTopics, code: int) -> m.OffsetFetchResponseTopics:
    return m.OffsetFetchResponseTopics(
        topic.name,
        [m.OffsetFetchResponsePartitions(index, metadata="", error_code=code) for index in topic.partition_indexes],
    )


async def describe_groups(
    broker: BrokerParts, request: m.DescribeGroupsRequest, context: RequestContext
) -> m.DescribeGroupsResponse:
    """Describe groups. Unknown groups have the state `Dead` and, from version 6 on, GROUP_ID_NOT_FOUND (KIP-1043)."""
    response = await broker.groups.describe_groups(request, context)
    if context.version is None or context.version < _DESCRIBE_NOT_FOUND_SINCE:
        return response
    return response._replace(groups=[_not_found_if_dead(group) for group in response.groups])


def _not_found_if_dead(group: m.DescribedGroup) -> m.DescribedGroup:
    if group.error_code or group.group_state != GroupState.DEAD.value:
        return group
    message = f"group {group.group_id!r} does not exist"
    return group._replace(error_code=ErrorCode.GROUP_ID_NOT_FOUND, error_message=message)
