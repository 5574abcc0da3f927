"""Consumer groups on a broker: the service Groups.

A group belongs to the partition of `__consumer_offsets` that Kafka's hash of its id names, and that partition's leader
is its coordinator (`group_shard`). The topic is made when somebody first looks for a coordinator. Any broker answers
FindCoordinator; the other calls are for the coordinator, elsewhere they get NOT_COORDINATOR. ListGroups lists what one
broker coordinates.

The topic is compacted (`cleanup.policy=compact`): its log keeps the last record of each group and offset.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kipmesh import messages as m
from kipmesh.broker.groups.group_shard import Gone, GroupShard, Step
from kipmesh.broker.membership.forwarder import Forwarder
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.replica import Disk
from kipmesh.broker.requests.selection import peer_host
from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.group.coordinator import GROUP_METADATA_TOPIC, GroupCoordinator, partition_for
from kipmesh.core.group.membership import is_too_long
from kipmesh.core.group.offsets import commit_response
from kipmesh.core.group.types import Client
from kipmesh.core.metadata.image import MetadataDelta, TopicState
from kipmesh.transport.grpc.server import RequestContext

T = TypeVar("T")

GROUP_KEY_TYPE = 0
CREATE_TIMEOUT_S = 5.0


@dataclass(eq=False)
class GroupsHandler:
    """One broker's groups; `metadata_changed` follows what it leads."""

    config: BrokerConfig
    hosted_replicas: HostedReplicas
    disk: Disk
    forwarder: Forwarder
    on_task_done: Callable[[asyncio.Task[None]], None]

    def __post_init__(self) -> None:
        self._shards: dict[int, GroupShard] = {}
        self._creating = asyncio.Lock()
        self._is_stopped = False

    # --- what this broker leads --------------------------------------------------------------------------------------

    def metadata_changed(self, delta: MetadataDelta) -> None:
        """Roles were given: load what this broker leads now, let go of what it leads no more."""
        if self._is_stopped:
            return
        topic = self._topic()
        topic_id = topic.topic_id if topic is not None else b""
        led = {}
        for partition in topic.partitions if topic is not None else ():
            replica = self.hosted_replicas.get(topic_id, partition)
            if replica is not None and replica.leader is not None:
                led[partition] = replica
        for partition, shard in list(self._shards.items()):
            replica = led.get(partition)
            if replica is not shard.replica or replica.leader_epoch != shard.leader_epoch or shard.is_closed:
                shard.close()
                del self._shards[partition]
        for partition, replica in led.items():
            if partition not in self._shards:
                self._shards[partition] = GroupShard(replica, self.config, self.disk, self.on_task_done)
        names = [topic.name for topic in delta.deleted_topics]
        if names:
            for shard in self._shards.values():
                shard.do(lambda coordinator, now: coordinator.topics_deleted(names, now))

    def stop(self) -> None:
        """The node ends: whoever waits is sent away."""
        self._is_stopped = True
        for shard in self._shards.values():
            shard.close()
        self._shards.clear()

    async def expire(self) -> None:
        """Look for offsets that expired, again and again."""
        while True:
            await asyncio.sleep(self.config.offsets_retention_check_interval_ms / 1000)
            for shard in list(self._shards.values()):
                shard.do(lambda coordinator, now: coordinator.expire_offsets(now))

    def _topic(self) -> TopicState | None:
        return self.hosted_replicas.image.topic_by_name(GROUP_METADATA_TOPIC)

    def _shard(self, group_id: str) -> GroupShard:
        if is_too_long(group_id):
            raise KafkaError(ErrorCode.INVALID_GROUP_ID)
        topic = self._topic()
        shard = None if topic is None else self._shards.get(partition_for(group_id, len(topic.partitions)))
        if shard is None:
            raise KafkaError(ErrorCode.NOT_COORDINATOR)
        return shard

    # --- finding -----------------------------------------------------------------------------------------------------

    async def find_coordinator(
        self, request: m.FindCoordinatorRequest, context: RequestContext
    ) -> m.FindCoordinatorResponse:
        """FindCoordinator (API key 10), of groups only."""
        if request.key_type != GROUP_KEY_TYPE:
            message = "only groups (key type 0) have coordinators"
            return _not_found(request.coordinator_keys, ErrorCode.INVALID_REQUEST, message)
        topic = self._topic() or await self._create(context)
        if topic is None:
            message = f"{GROUP_METADATA_TOPIC} is being made"
            return _not_found(request.coordinator_keys, ErrorCode.COORDINATOR_NOT_AVAILABLE, message)
        endpoints = self.hosted_replicas.endpoints(context.listener or self.config.inter_broker_listener_name)
        coordinators = []
        for key in request.coordinator_keys:
            if is_too_long(key):
                coordinators.append(m.Coordinator(key, error_code=ErrorCode.INVALID_GROUP_ID))
                continue
            state = topic.partitions[partition_for(key, len(topic.partitions))]
            node = endpoints.get(state.leader)
            if node is None:
                code = ErrorCode.COORDINATOR_NOT_AVAILABLE
                coordinators.append(m.Coordinator(key, error_code=code, error_message="its partition has no leader"))
            else:
                coordinators.append(m.Coordinator(key, node.node_id, node.host, node.port))
        return m.FindCoordinatorResponse(coordinators=coordinators)

    async def _create(self, context: RequestContext) -> TopicState | None:
        """Make the topic; None where that did not come about in time."""
        async with self._creating:
            if self._topic() is None:
                config = self.config
                await self.forwarder.create_internal_topic(
                    GROUP_METADATA_TOPIC,
                    config.offsets_topic_num_partitions,
                    config.offsets_topic_replication_factor,
                    {"cleanup.policy": "compact", "segment.bytes": config.offsets_topic_segment_bytes},
                    context.respond_within(CREATE_TIMEOUT_S),
                    context,
                )
        return self._topic()

    # --- members -----------------------------------------------------------------------------------------------------

    async def _ask(self, group_id: str, step: Step, refused: Callable[..., T], gone: Gone | None = None) -> T:
        """The coordinator's response, or `refused(error_code=...)` where this broker is not it, or not yet."""
        try:
            response: T = await self._shard(group_id).ask(step, gone)
        except KafkaError as error:
            return refused(error_code=error.code)
        return response

    async def join_group(
        self,
        request: m.JoinGroupRequest,
        context: RequestContext,
        *,
        requires_member_id: bool = True,
        skips_assignment: bool = True,
    ) -> m.JoinGroupResponse:
        """JoinGroup (API key 11): waits for the others. The last two are what the request's version knows."""
        client = Client(context.client_id, _host(context.peer), requires_member_id, skips_assignment)
        unique = str(uuid.uuid4())
        return await self._ask(
            request.group_id,
            lambda coordinator, number, now: coordinator.join(request, client, unique, number, now),
            partial(m.JoinGroupResponse, member_id=request.member_id),
            lambda coordinator, number: coordinator.hung_up(request.group_id, number),
        )

    async def sync_group(self, request: m.SyncGroupRequest, context: RequestContext) -> m.SyncGroupResponse:
        """SyncGroup (API key 14): waits for the leader's assignment."""
        return await self._ask(
            request.group_id,
            lambda coordinator, number, now: coordinator.sync(request, number, now),
            m.SyncGroupResponse,
        )

    async def heartbeat(self, request: m.HeartbeatRequest, context: RequestContext) -> m.HeartbeatResponse:
        """Heartbeat (API key 12)."""

        def refused(error_code: ErrorCode) -> m.HeartbeatResponse:
            # While the groups are read nobody's session ends: members that joined before need not join again.
            is_loading = error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
            return m.HeartbeatResponse(error_code=ErrorCode.NONE if is_loading else error_code)

        return await self._ask(
            request.group_id,
            lambda coordinator, number, now: coordinator.heartbeat(request, number, now),
            refused,
        )

    async def leave_group(self, request: m.LeaveGroupRequest, context: RequestContext) -> m.LeaveGroupResponse:
        """LeaveGroup (API key 13)."""
        return await self._ask(
            request.group_id,
            lambda coordinator, number, now: coordinator.leave(request, number, now),
            m.LeaveGroupResponse,
        )

    # --- offsets -----------------------------------------------------------------------------------------------------

    async def offset_commit(self, request: m.OffsetCommitRequest, context: RequestContext) -> m.OffsetCommitResponse:
        """OffsetCommit (API key 8); of topics that there are not, UNKNOWN_TOPIC_OR_PARTITION."""
        known, results = [], {}
        for topic in request.topics:
            found = self.hosted_replicas.image.topic_by_name(topic.name)
            there = [one for one in topic.partitions if found is not None and one.partition_index in found.partitions]
            known.append(topic._replace(partitions=there))
            code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            results[topic.name] = {
                one.partition_index: m.OffsetCommitResponsePartition(one.partition_index, code)
                for one in topic.partitions
            }
        kept = request._replace(topics=[topic for topic in known if topic.partitions])
        try:
            response: m.OffsetCommitResponse = await self._shard(request.group_id).ask(
                lambda coordinator, number, now: coordinator.commit(kept, number, now)
            )
        except KafkaError as error:
            return commit_response(request, error.code)
        for topic_response in response.topics:
            results[topic_response.name].update({one.partition_index: one for one in topic_response.partitions})
        return m.OffsetCommitResponse(
            topics=[m.OffsetCommitResponseTopic(name, list(found.values())) for name, found in results.items()]
        )

    async def offset_fetch(self, request: m.OffsetFetchRequest, context: RequestContext) -> m.OffsetFetchResponse:
        """OffsetFetch (API key 9), of several groups if they are here."""

        async def respond(group: m.OffsetFetchRequestGroup) -> m.OffsetFetchResponseGroup:
            return await self._ask(
                group.group_id,
                lambda coordinator, number, now: coordinator.fetch(group, number),
                partial(m.OffsetFetchResponseGroup, group.group_id, ()),
            )

        return m.OffsetFetchResponse(groups=[await respond(group) for group in request.groups])

    async def offset_delete(self, request: m.OffsetDeleteRequest, context: RequestContext) -> m.OffsetDeleteResponse:
        """OffsetDelete (API key 47)."""
        return await self._ask(
            request.group_id,
            lambda coordinator, number, now: coordinator.delete_offsets(request, number, now),
            m.OffsetDeleteResponse,
        )

    # --- groups ------------------------------------------------------------------------------------------------------

    async def list_groups(self, request: m.ListGroupsRequest, context: RequestContext) -> m.ListGroupsResponse:
        """ListGroups (API key 16): the groups of this broker; COORDINATOR_LOAD_IN_PROGRESS while some are not known."""
        groups = []
        for shard in list(self._shards.values()):
            try:
                groups += shard.active().list_groups(request.states_filter, request.types_filter)
            except KafkaError as error:
                if error.code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
                    return m.ListGroupsResponse(error_code=error.code)
        return m.ListGroupsResponse(groups=groups)

    async def describe_groups(
        self, request: m.DescribeGroupsRequest, context: RequestContext
    ) -> m.DescribeGroupsResponse:
        """DescribeGroups (API key 15)."""

        def respond(group_id: str) -> m.DescribedGroup:
            try:
                return self._shard(group_id).active().describe(group_id)
            except KafkaError as error:
                return m.DescribedGroup(error.code, group_id=group_id)

        return m.DescribeGroupsResponse(groups=[respond(group_id) for group_id in request.groups])

    async def delete_groups(self, request: m.DeleteGroupsRequest, context: RequestContext) -> m.DeleteGroupsResponse:
        """DeleteGroups (API key 42)."""

        async def respond(group_id: str) -> m.DeletableGroupResult:
            return await self._ask(
                group_id,
                lambda coordinator, number, now: coordinator.delete_group(group_id, number, now),
                partial(m.DeletableGroupResult, group_id),
            )

        return m.DeleteGroupsResponse(results=await asyncio.gather(*map(respond, dict.fromkeys(request.groups_names))))

    # --- numbers -----------------------------------------------------------------------------------------------------

    def coordinators(self) -> list[GroupCoordinator]:
        """Those that are loaded, for a scrape on another thread."""
        return [one.coordinator for one in list(self._shards.values()) if one.coordinator]


def _not_found(keys: Sequence[str], code: ErrorCode, message: str) -> m.FindCoordinatorResponse:
    return m.FindCoordinatorResponse(
        coordinators=[m.Coordinator(key, error_code=code, error_message=message) for key in keys]
    )


def _host(peer: str) -> str:
    """The host of a gRPC peer as Kafka writes those of members."""
    host = peer_host(peer)
    return f"/{host}" if host else peer
