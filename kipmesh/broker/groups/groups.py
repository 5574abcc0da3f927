"""Consumer groups on a broker: the service Groups.

Kafka's hash of the group id selects a partition of `__consumer_offsets`, and that partition's leader coordinates the
group (`group_shard`). The topic is created at the first FindCoordinator. Any broker serves FindCoordinator; all other
requests return NOT_COORDINATOR except on the coordinator. ListGroups returns the groups that this broker coordinates.

The topic is compacted (`cleanup.policy=compact`): its log keeps the last record of each group and offset.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from kipmesh import messages as m
from kipmesh.broker.groups.group_shard import GroupShard, OnDisconnect, RequestStep
from kipmesh.broker.membership.forwarder import Forwarder
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.replica import Disk
from kipmesh.broker.requests.selection import peer_host
from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.group.classic import GroupState
from kipmesh.core.group.coordinator import GROUP_METADATA_TOPIC, partition_for
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
    """The group coordinators of one broker: one `GroupShard` for each partition of `__consumer_offsets` that it leads.

    Requests to a group return INVALID_GROUP_ID for a group id that is too long, NOT_COORDINATOR on other brokers, and,
    except for Heartbeat, COORDINATOR_LOAD_IN_PROGRESS while the partition is loading.
    """

    config: BrokerConfig
    hosted_replicas: HostedReplicas
    disk: Disk
    forwarder: Forwarder
    on_task_done: Callable[[asyncio.Task[None]], None]

    def __post_init__(self) -> None:
        self._shards: dict[int, GroupShard] = {}
        self._creating = asyncio.Lock()
        self._is_stopped = False

    # --- led partitions ----------------------------------------------------------------------------------------------

    def metadata_changed(self, delta: MetadataDelta) -> None:
        """Load the partitions that this broker now leads, and close those that it no longer leads.

        Offsets of deleted topics are removed from the groups.
        """
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
                shard.execute(lambda coordinator, now: coordinator.topics_deleted(names, now))

    def stop(self) -> None:
        """Close all coordinators for good. Pending requests get NOT_COORDINATOR."""
        self._is_stopped = True
        for shard in self._shards.values():
            shard.close()
        self._shards.clear()

    async def expire(self) -> None:
        """Remove expired offsets every `offsets.retention.check.interval.ms`, until cancelled."""
        while True:
            await asyncio.sleep(self.config.offsets_retention_check_interval_ms / 1000)
            for shard in list(self._shards.values()):
                shard.execute(lambda coordinator, now: coordinator.expire_offsets(now))

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

    # --- coordinators ------------------------------------------------------------------------------------------------

    async def find_coordinator(
        self, request: m.FindCoordinatorRequest, context: RequestContext
    ) -> m.FindCoordinatorResponse:
        """Return the coordinator of each group: FindCoordinator (API key 10). Creates `__consumer_offsets` if missing.

        Errors per key: INVALID_REQUEST for key types other than groups, INVALID_GROUP_ID for an id that is too long,
        COORDINATOR_NOT_AVAILABLE if the topic does not exist or has no leader.
        """
        if request.key_type != GROUP_KEY_TYPE:
            message = f"key type must be 0 (group), got {request.key_type}"
            return _not_found(request.coordinator_keys, ErrorCode.INVALID_REQUEST, message)
        topic = self._topic() or await self._create(context)
        if topic is None:
            message = f"topic {GROUP_METADATA_TOPIC} does not exist yet"
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
                coordinators.append(
                    m.Coordinator(key, error_code=code, error_message="the group's partition has no leader")
                )
            else:
                coordinators.append(m.Coordinator(key, node.node_id, node.host, node.port))
        return m.FindCoordinatorResponse(coordinators=coordinators)

    async def _create(self, context: RequestContext) -> TopicState | None:
        """Create `__consumer_offsets` and return its state, or None if it does not appear in time."""
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

    async def _request(
        self, group_id: str, step: RequestStep, refused: Callable[..., T], on_disconnect: OnDisconnect | None = None
    ) -> T:
        """Return the coordinator's response, or `refused(error_code=...)` if the request is not accepted.

        Codes: INVALID_GROUP_ID, NOT_COORDINATOR, COORDINATOR_LOAD_IN_PROGRESS.
        """
        try:
            response: T = await self._shard(group_id).request(step, on_disconnect)
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
        """Join a group and wait for the other members: JoinGroup (API key 11).

        Errors are in the response, among them NOT_COORDINATOR and COORDINATOR_LOAD_IN_PROGRESS.

        With `requires_member_id`, a member without an id receives one with MEMBER_ID_REQUIRED. With `skips_assignment`,
        the response can tell a static leader that rejoins not to assign partitions again.
        """
        client = Client(context.client_id, _host(context.peer), requires_member_id, skips_assignment)
        unique = str(uuid.uuid4())
        return await self._request(
            request.group_id,
            lambda coordinator, number, now: coordinator.join(request, client, unique, number, now),
            partial(m.JoinGroupResponse, member_id=request.member_id),
            lambda coordinator, number: coordinator.join_disconnected(request.group_id, number),
        )

    async def sync_group(self, request: m.SyncGroupRequest, context: RequestContext) -> m.SyncGroupResponse:
        """Return the member's assignment: SyncGroup (API key 14). Waits until the leader of the group has sent it.

        Errors are in the response, among them NOT_COORDINATOR and COORDINATOR_LOAD_IN_PROGRESS.
        """
        return await self._request(
            request.group_id,
            lambda coordinator, number, now: coordinator.sync(request, number, now),
            m.SyncGroupResponse,
        )

    async def heartbeat(self, request: m.HeartbeatRequest, context: RequestContext) -> m.HeartbeatResponse:
        """Renew a member's session: Heartbeat (API key 12). Succeeds while the group is loading.

        Errors are in the response, among them NOT_COORDINATOR.
        """

        def refused(error_code: ErrorCode) -> m.HeartbeatResponse:
            # Sessions do not expire while the groups load: members need not join again.
            is_loading = error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
            return m.HeartbeatResponse(error_code=ErrorCode.NONE if is_loading else error_code)

        return await self._request(
            request.group_id, lambda coordinator, number, now: coordinator.heartbeat(request, number, now), refused
        )

    async def leave_group(self, request: m.LeaveGroupRequest, context: RequestContext) -> m.LeaveGroupResponse:
        """Remove members from a group: LeaveGroup (API key 13).

        Errors are in the response, among them NOT_COORDINATOR and COORDINATOR_LOAD_IN_PROGRESS.
        """
        return await self._request(
            request.group_id,
            lambda coordinator, number, now: coordinator.leave(request, number, now),
            m.LeaveGroupResponse,
        )

    # --- offsets -----------------------------------------------------------------------------------------------------

    async def offset_commit(self, request: m.OffsetCommitRequest, context: RequestContext) -> m.OffsetCommitResponse:
        """Commit offsets of a group: OffsetCommit (API key 8). Errors are per partition.

        Unknown partitions get UNKNOWN_TOPIC_OR_PARTITION; the others are committed. All get the same code, such as
        NOT_COORDINATOR, if the coordinator does not accept the request.
        """
        known, results = [], {}
        for topic in request.topics:
            state = self.hosted_replicas.image.topic_by_name(topic.name)
            existing = [
                one for one in topic.partitions if state is not None and one.partition_index in state.partitions
            ]
            known.append(topic._replace(partitions=existing))
            code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            results[topic.name] = {
                one.partition_index: m.OffsetCommitResponsePartition(one.partition_index, code)
                for one in topic.partitions
            }
        valid = request._replace(topics=[topic for topic in known if topic.partitions])
        try:
            response: m.OffsetCommitResponse = await self._shard(request.group_id).request(
                lambda coordinator, number, now: coordinator.commit(valid, number, now)
            )
        except KafkaError as error:
            return commit_response(request, error.code)
        for topic_response in response.topics:
            results[topic_response.name].update({one.partition_index: one for one in topic_response.partitions})
        return m.OffsetCommitResponse(
            topics=[
                m.OffsetCommitResponseTopic(name, list(partitions.values())) for name, partitions in results.items()
            ]
        )

    async def offset_fetch(self, request: m.OffsetFetchRequest, context: RequestContext) -> m.OffsetFetchResponse:
        """Return committed offsets of groups of this coordinator: OffsetFetch (API key 9). Errors are per group."""

        async def respond(group: m.OffsetFetchRequestGroup) -> m.OffsetFetchResponseGroup:
            return await self._request(
                group.group_id,
                lambda coordinator, number, now: coordinator.fetch(group, number),
                partial(m.OffsetFetchResponseGroup, group.group_id, ()),
            )

        return m.OffsetFetchResponse(groups=[await respond(group) for group in request.groups])

    async def offset_delete(self, request: m.OffsetDeleteRequest, context: RequestContext) -> m.OffsetDeleteResponse:
        """Delete committed offsets of a group: OffsetDelete (API key 47).

        Errors are in the response, among them NOT_COORDINATOR and COORDINATOR_LOAD_IN_PROGRESS.
        """
        return await self._request(
            request.group_id,
            lambda coordinator, number, now: coordinator.delete_offsets(request, number, now),
            m.OffsetDeleteResponse,
        )

    # --- groups ------------------------------------------------------------------------------------------------------

    async def list_groups(self, request: m.ListGroupsRequest, context: RequestContext) -> m.ListGroupsResponse:
        """List the groups that this broker coordinates, by state and type: ListGroups (API key 16).

        Returns COORDINATOR_LOAD_IN_PROGRESS and no groups while a partition is loading.
        """
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
        """Describe groups: DescribeGroups (API key 15). An unknown group has state `Dead`. Errors are per group."""

        def respond(group_id: str) -> m.DescribedGroup:
            try:
                return self._shard(group_id).active().describe(group_id)
            except KafkaError as error:
                return m.DescribedGroup(error.code, group_id=group_id)

        return m.DescribeGroupsResponse(groups=[respond(group_id) for group_id in request.groups])

    async def delete_groups(self, request: m.DeleteGroupsRequest, context: RequestContext) -> m.DeleteGroupsResponse:
        """Delete groups without members: DeleteGroups (API key 42). Errors are per group."""

        async def respond(group_id: str) -> m.DeletableGroupResult:
            return await self._request(
                group_id,
                lambda coordinator, number, now: coordinator.delete_group(group_id, number, now),
                partial(m.DeletableGroupResult, group_id),
            )

        return m.DeleteGroupsResponse(results=await asyncio.gather(*map(respond, dict.fromkeys(request.groups_names))))

    # --- metrics -----------------------------------------------------------------------------------------------------

    def metrics(self) -> Iterator[Metric]:
        """Yield Kafka's group gauges and `kafka_consumergroup_lag`. O(committed offsets).

        Lags are known for partitions that this broker hosts, as leader or as follower. Committed offsets in other
        partitions are counted, so that a gap does not look like a group that is up to date. Requests to their leaders
        at each scrape would cost too much; `kipmesh group describe` sends them once. Callable from other threads.
        """
        coordinators = [shard.coordinator for shard in list(self._shards.values()) if shard.coordinator]
        prefix, hosted = "kafka_coordinator_group_groupmetadatamanager_", self.hosted_replicas
        states: Counter[GroupState] = Counter()
        for coordinator in coordinators:
            states.update(coordinator.group_states())
        offsets = sum(coordinator.table.offset_count for coordinator in coordinators)
        yield GaugeMetricFamily(prefix + "numoffsets", "Committed offsets that this broker coordinates.", offsets)
        yield GaugeMetricFamily(prefix + "numgroups", "Groups that this broker coordinates.", states.total())
        for state in GroupState:
            text = f"Groups that this broker coordinates in state {state.value}."
            yield GaugeMetricFamily(f"{prefix}numgroups{state.value.lower()}", text, states[state])
        text = "Records between a group's committed offset and the high watermark."
        lags = GaugeMetricFamily("kafka_consumergroup_lag", text, labels=["group", "topic", "partition"])
        unknown = 0
        for coordinator in coordinators:
            for group_id, (topic, partition), offset in coordinator.table.committed():
                topic_id = hosted.image.topic_names.get(topic)  # the event loop may be deleting the topic
                replica = None if topic_id is None else hosted.get(topic_id, partition)
                if replica is None:
                    unknown += 1
                else:
                    lag = max(replica.leader_high_watermark - offset, 0)
                    lags.add_metric([group_id, topic, str(partition)], lag)
        yield lags
        text = "Committed offsets without a lag, because this broker has no replica of their partition."
        yield GaugeMetricFamily("kipmesh_consumergroup_unknown_lags", text, unknown)


def _not_found(keys: Sequence[str], code: ErrorCode, message: str) -> m.FindCoordinatorResponse:
    return m.FindCoordinatorResponse(
        coordinators=[m.Coordinator(key, error_code=code, error_message=message) for key in keys]
    )


def _host(peer: str) -> str:
    """Return the host of a gRPC peer in Kafka's form, `/127.0.0.1`, or `peer` unchanged if it has no host."""
    host = peer_host(peer)
    return f"/{host}" if host else peer
