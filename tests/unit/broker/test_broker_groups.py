"""Consumer groups on real brokers: membership, offsets in `__consumer_offsets`, and coordinator failover."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import cramjam
import pytest

from kipmesh import messages as m
from kipmesh.broker.groups.group_shard import read_table
from kipmesh.core import record_batch
from kipmesh.core.errors import ErrorCode
from kipmesh.core.group.coordinator import GROUP_METADATA_TOPIC, partition_for
from kipmesh.node import wall_ms
from kipmesh.testing import until as eventually
from kipmesh.transport.grpc.client import TransportError
from tests.unit.broker.broker_cluster import BrokerCluster

E = ErrorCode
GROUP = "readers"
PROTOCOL = m.JoinGroupRequestProtocol("range", b"\0\0\0\0\0\x01\0\x01t\xff\xff\xff\xff")
RETRIABLE = {E.COORDINATOR_NOT_AVAILABLE, E.COORDINATOR_LOAD_IN_PROGRESS, E.NOT_COORDINATOR}


KEYS: dict[str, Any] = {
    "group.initial.rebalance.delay.ms": 0,
    "offsets.topic.num.partitions": 2,
    "offsets.commit.timeout.ms": 20_000,
    "offsets.retention.check.interval.ms": 50,
}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[BrokerCluster]:
    running = BrokerCluster(tmp_path, **KEYS)
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def short_commit_timeout(tmp_path: Path) -> AsyncIterator[BrokerCluster]:
    """A cluster that fails offset commits that are not replicated within a second."""
    cluster = BrokerCluster(tmp_path, **KEYS | {"offsets.commit.timeout.ms": 1000})
    await cluster.start()
    yield cluster
    await cluster.stop()


async def poll(call: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat the call until its result is true, and return the result."""
    for _ in range(1000):
        response = await call()
        if response:
            return response
        await asyncio.sleep(0.02)
    raise AssertionError("the result of the call stayed false")


class Client:
    """Finds the coordinator of a group and retries requests while it moves."""

    def __init__(self, cluster: BrokerCluster, group: str = GROUP) -> None:
        self.cluster = cluster
        self.group = group

    async def coordinator(self) -> int:
        async def find() -> int:
            for broker_id in list(self.cluster.brokers):
                request = m.FindCoordinatorRequest(coordinator_keys=[self.group])
                try:
                    response = await self.cluster.call(broker_id, "FindCoordinator", request, "Groups")
                except TransportError:
                    continue
                found = response.coordinators[0]
                if not found.error_code and found.node_id in self.cluster.brokers:
                    assert found.port == self.cluster.ports[found.node_id]
                    return int(found.node_id)
            return 0

        return await poll(find)

    async def request(self, method: str, request: Any) -> Any:
        async with asyncio.timeout(20):
            while True:
                response = await self.cluster.call(await self.coordinator(), method, request, "Groups")
                if not RETRIABLE & set(_codes(response)):
                    return response
                await asyncio.sleep(0.02)

    async def join(self, member_id: str = "", instance: str | None = None) -> m.JoinGroupResponse:
        request = m.JoinGroupRequest(self.group, 60_000, 60_000, member_id, instance, "consumer", [PROTOCOL])
        response: m.JoinGroupResponse = await self.request("JoinGroup", request)
        if response.error_code == E.MEMBER_ID_REQUIRED:
            return await self.join(response.member_id)
        assert response.error_code == 0, response
        return response

    async def join_stable_group(self) -> m.JoinGroupResponse:
        """Join as the only member, which gets all partitions."""
        joined = await self.join()
        assignment = m.SyncGroupRequestAssignment(joined.member_id, b"all")
        request = m.SyncGroupRequest(self.group, joined.generation_id, joined.member_id, assignments=[assignment])
        synced = await self.request("SyncGroup", request)
        assert (synced.error_code, synced.assignment) == (0, b"all")
        return joined

    async def heartbeat(self, member: m.JoinGroupResponse) -> ErrorCode:
        request = m.HeartbeatRequest(self.group, member.generation_id, member.member_id)
        return ErrorCode((await self.request("Heartbeat", request)).error_code)

    def commit_request(self, offset: int, member: m.JoinGroupResponse | None, topic: str = "t") -> Any:
        partitions = [m.OffsetCommitRequestPartition(0, offset, -1, "note")]
        topics = [m.OffsetCommitRequestTopic(topic, partitions)]
        if member is None:
            return m.OffsetCommitRequest(self.group, topics=topics)
        return m.OffsetCommitRequest(self.group, member.generation_id, member.member_id, None, topics=topics)

    async def commit(self, offset: int, member: m.JoinGroupResponse | None = None, topic: str = "t") -> ErrorCode:
        response = await self.request("OffsetCommit", self.commit_request(offset, member, topic))
        return ErrorCode(response.topics[0].partitions[0].error_code)

    async def committed(self) -> dict[str, int]:
        request = m.OffsetFetchRequest(groups=[m.OffsetFetchRequestGroup(self.group, topics=None)])
        (group,) = (await self.request("OffsetFetch", request)).groups
        assert group.error_code == 0
        return {topic.name: topic.partitions[0].committed_offset for topic in group.topics}


def _codes(response: Any) -> list[int]:
    codes = [getattr(response, "error_code", 0)]
    for field in ("topics", "groups", "results"):
        for item in getattr(response, field, ()):
            codes += [getattr(item, "error_code", 0)]
            codes += [getattr(partition, "error_code", 0) for partition in getattr(item, "partitions", ())]
    return codes


async def test_find_coordinator_creates_offsets_topic(cluster: BrokerCluster) -> None:
    async def find(broker_id: int) -> m.Coordinator:
        request = m.FindCoordinatorRequest(coordinator_keys=[GROUP])
        response = await cluster.call(broker_id, "FindCoordinator", request, "Groups")
        found: m.Coordinator = response.coordinators[0]
        return found

    await asyncio.gather(*[find(broker_id) for broker_id in (1, 2, 3)])
    found = await Client(cluster).coordinator()
    topic = cluster.brokers[1].hosted_replicas.image.topic_by_name(GROUP_METADATA_TOPIC)
    assert topic is not None
    assert {len(state.replicas) for state in topic.partitions.values()} == {3}
    assert topic.partitions[partition_for(GROUP, 2)].leader == found
    request = m.MetadataRequest([m.MetadataRequestTopic(b"", GROUP_METADATA_TOPIC)])
    assert (await cluster.call(1, "Metadata", request)).topics[0].is_internal
    refused = await cluster.call(
        1, "FindCoordinator", m.FindCoordinatorRequest(key_type=1, coordinator_keys=["transaction"]), "Groups"
    )
    assert refused.coordinators[0].error_code == E.INVALID_REQUEST
    batch = record_batch.build([(b"k", b"v")], base_offset=0, leader_epoch=-1, timestamp_ms=1)
    assert (await cluster.produce(GROUP_METADATA_TOPIC, batch, via=found)).error_code == E.INVALID_TOPIC_EXCEPTION


async def test_group_requests_refuse_too_long_group_ids(cluster: BrokerCluster) -> None:
    await Client(cluster).coordinator()
    name = "g" * 8193
    found = await cluster.call(
        1, "FindCoordinator", m.FindCoordinatorRequest(key_type=0, coordinator_keys=[GROUP, name]), "Groups"
    )
    assert [coordinator.error_code for coordinator in found.coordinators] == [0, E.INVALID_GROUP_ID]
    for api, request in (
        ("JoinGroup", m.JoinGroupRequest(name)),
        ("Heartbeat", m.HeartbeatRequest(name)),
        ("DescribeGroups", m.DescribeGroupsRequest([name])),
        ("OffsetFetch", m.OffsetFetchRequest(groups=[m.OffsetFetchRequestGroup(name)])),
    ):
        response = await cluster.call(1, api, request, "Groups")
        assert E.INVALID_GROUP_ID in _codes(response), api


async def test_group_lifecycle_from_join_to_delete(cluster: BrokerCluster) -> None:
    await cluster.create("t")
    client = Client(cluster)
    member = await client.join_stable_group()
    assert await client.heartbeat(member) == 0
    assert await client.commit(5, member) == 0
    assert await client.commit(6, member._replace(generation_id=9)) == E.ILLEGAL_GENERATION
    assert await client.commit(6, member, "nowhere") == E.UNKNOWN_TOPIC_OR_PARTITION
    assert await client.committed() == {"t": 5}
    described = (await client.request("DescribeGroups", m.DescribeGroupsRequest([GROUP]))).groups[0]
    assert (described.group_state, described.protocol_data) == ("Stable", "range")
    assert described.members[0].client_host.startswith(("/127.0.0.1", "/::1"))
    coordinator = await client.coordinator()
    listed = await cluster.call(coordinator, "ListGroups", m.ListGroupsRequest(["stable"]), "Groups")
    assert [group.group_id for group in listed.groups] == [GROUP]
    assert (await client.request("DeleteGroups", m.DeleteGroupsRequest([GROUP]))).results[
        0
    ].error_code == E.NON_EMPTY_GROUP
    left = await client.request("LeaveGroup", m.LeaveGroupRequest(GROUP, members=[m.MemberIdentity(member.member_id)]))
    assert left.members[0].error_code == 0
    assert await client.heartbeat(member) == E.UNKNOWN_MEMBER_ID
    deletion = m.OffsetDeleteRequest(GROUP, [m.OffsetDeleteRequestTopic("t", [m.OffsetDeleteRequestPartition(0)])])
    assert (await client.request("OffsetDelete", deletion)).topics[0].partitions[0].error_code == 0
    assert await client.committed() == {}
    await client.request("DeleteGroups", m.DeleteGroupsRequest([GROUP]))
    described = (await client.request("DescribeGroups", m.DescribeGroupsRequest([GROUP]))).groups[0]
    assert described.group_state == "Dead"


async def test_other_brokers_return_not_coordinator(cluster: BrokerCluster) -> None:
    coordinator = await Client(cluster).coordinator()
    other = next(broker_id for broker_id in cluster.brokers if broker_id != coordinator)
    calls = {
        "JoinGroup": m.JoinGroupRequest(GROUP),
        "SyncGroup": m.SyncGroupRequest(GROUP),
        "Heartbeat": m.HeartbeatRequest(GROUP),
        "LeaveGroup": m.LeaveGroupRequest(GROUP),
        "OffsetCommit": Client(cluster).commit_request(1, None),
        "OffsetFetch": m.OffsetFetchRequest(groups=[m.OffsetFetchRequestGroup(GROUP, topics=None)]),
        "OffsetDelete": m.OffsetDeleteRequest(GROUP),
        "DescribeGroups": m.DescribeGroupsRequest([GROUP]),
        "DeleteGroups": m.DeleteGroupsRequest([GROUP]),
    }
    for method, request in calls.items():
        assert E.NOT_COORDINATOR in _codes(await cluster.call(other, method, request, "Groups")), method


async def test_second_member_joins_and_both_receive_their_assignments(cluster: BrokerCluster) -> None:
    client = Client(cluster)
    first = await client.join_stable_group()
    waiting = asyncio.create_task(client.join())
    await wait_for_code(client, first, E.REBALANCE_IN_PROGRESS)
    rejoined, second = await asyncio.gather(client.join(first.member_id), waiting)
    assert rejoined.generation_id == second.generation_id == first.generation_id + 1
    assert [len(joined.members) for joined in (rejoined, second)] == [2, 0]
    follower = asyncio.create_task(
        client.request("SyncGroup", m.SyncGroupRequest(GROUP, second.generation_id, second.member_id))
    )
    assignments = [m.SyncGroupRequestAssignment(each.member_id, each.member_id.encode()) for each in rejoined.members]
    request = m.SyncGroupRequest(GROUP, rejoined.generation_id, rejoined.member_id, assignments=assignments)
    assert (await client.request("SyncGroup", request)).assignment == rejoined.member_id.encode()
    assert (await follower).assignment == second.member_id.encode()


async def wait_for_code(client: Client, member: m.JoinGroupResponse, code: ErrorCode) -> None:
    async def has_code() -> bool:
        return await client.heartbeat(member) == code

    await poll(has_code)


async def test_group_survives_killed_coordinator(cluster: BrokerCluster) -> None:
    await cluster.create("t")
    client = Client(cluster)
    member = await client.join_stable_group()
    assert await client.commit(5, member) == 0
    before = await client.coordinator()
    await cluster.brokers.pop(before).abort()
    assert await client.heartbeat(member) == 0
    assert await client.coordinator() != before
    assert await client.committed() == {"t": 5}
    assert await client.commit(6, member) == 0
    await cluster.start_broker(before)
    await cluster.ready(before)
    assert await client.committed() == {"t": 6}


async def test_pending_join_fails_with_not_coordinator_when_coordinator_moves(cluster: BrokerCluster) -> None:
    client = Client(cluster)
    first = await client.join_stable_group()
    coordinator = await client.coordinator()
    announced = await cluster.call(
        coordinator, "JoinGroup", m.JoinGroupRequest(GROUP, 60_000, 60_000, "", None, "consumer", [PROTOCOL]), "Groups"
    )
    request = m.JoinGroupRequest(GROUP, 60_000, 60_000, announced.member_id, None, "consumer", [PROTOCOL])
    waiting = asyncio.create_task(cluster.call(coordinator, "JoinGroup", request, "Groups"))
    await wait_for_code(client, first, E.REBALANCE_IN_PROGRESS)
    await cluster.brokers.pop(coordinator).stop()
    assert (await waiting).error_code == E.NOT_COORDINATOR
    assert await client.heartbeat(first) == 0, "the new coordinator knows the generation"


async def test_offset_commit_below_min_isr_fails_and_is_not_visible(short_commit_timeout: BrokerCluster) -> None:
    cluster = short_commit_timeout
    await cluster.create("t")
    client = Client(cluster)
    assert await client.commit(1) == 0
    coordinator = await client.coordinator()
    for broker_id in set(cluster.brokers) - {coordinator}:
        await cluster.brokers.pop(broker_id).abort()
    response = await cluster.call(coordinator, "OffsetCommit", client.commit_request(2, None), "Groups")
    assert response.topics[0].partitions[0].error_code == E.COORDINATOR_NOT_AVAILABLE
    fetched = m.OffsetFetchRequest(groups=[m.OffsetFetchRequestGroup(GROUP, topics=None)])
    (group,) = (await cluster.call(coordinator, "OffsetFetch", fetched, "Groups")).groups
    assert group.topics[0].partitions[0].committed_offset == 1


async def test_deleting_topic_deletes_its_committed_offsets(cluster: BrokerCluster) -> None:
    await cluster.create("t")
    client = Client(cluster)
    assert await client.commit(1) == 0
    await cluster.call(1, "DeleteTopics", m.DeleteTopicsRequest([m.DeleteTopicState("t")], timeout_ms=10_000), "Admin")

    async def are_deleted() -> bool:
        return not await client.committed()

    await poll(are_deleted)


async def test_coordinator_reads_compressed_offsets_and_skips_unknown_records(cluster: BrokerCluster) -> None:
    """Apache Kafka may compress its batches and write records of newer types."""
    await cluster.create("t")
    client = Client(cluster)
    assert await client.commit(1) == 0
    coordinator = cluster.brokers[await client.coordinator()]
    topic = coordinator.hosted_replicas.image.topic_by_name(GROUP_METADATA_TOPIC)
    assert topic is not None
    replica = coordinator.hosted_replicas.get(topic.topic_id, partition_for(GROUP, 2))
    assert replica is not None
    records = replica.log.read(0, 1 << 20, replica.log.log_end_offset, True)
    header = record_batch.parse_header(records)
    body = records[record_batch.HEADER_BYTES : header.size_bytes].replace(
        (1).to_bytes(8, "big"), (9).to_bytes(8, "big"), 1
    )
    packed = bytes(cramjam.gzip.compress(body))
    compressed = record_batch.join(header.with_records(len(packed), 1), packed)
    unknown = record_batch.build(
        [(b"?", b"?"), (b"\0\x03\0\x01g", b"newer"), (b"\0\x02\xff\xff", b"")],
        base_offset=0,
        leader_epoch=-1,
        timestamp_ms=1,
    )
    for batch in (compressed, unknown):
        replica.append(batch, 1, wall_ms())
    table = await read_table(replica, replica.log.log_end_offset)
    assert [value.offset for value in table.offsets(GROUP).values()] == [9]
    assert table.group_ids() == [GROUP]


async def test_coordinator_exports_group_and_offset_gauges(cluster: BrokerCluster) -> None:
    await cluster.create("t")
    client = Client(cluster)
    await client.commit(1, await client.join_stable_group())
    registry = cluster.brokers[await client.coordinator()].registry
    prefix = "kafka_coordinator_group_groupmetadatamanager"

    def values() -> list[float | None]:
        return [
            registry.get_sample_value(f"{prefix}_{name}") for name in ("numgroups", "numgroupsstable", "numoffsets")
        ]

    await eventually(lambda: values() == [1, 1, 1], "the gauges")
