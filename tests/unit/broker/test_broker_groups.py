"""Consumer groups on real brokers: found, joined, written to `__consumer_offsets`, taken over by the next leader."""

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
from tests.unit.broker.conftest_broker import Mesh

E = ErrorCode
GROUP = "readers"
PROTOCOL = m.JoinGroupRequestProtocol("range", b"\0\0\0\0\0\x01\0\x01t\xff\xff\xff\xff")
RETRIED = {E.COORDINATOR_NOT_AVAILABLE, E.COORDINATOR_LOAD_IN_PROGRESS, E.NOT_COORDINATOR}


KEYS: dict[str, Any] = {
    "group.initial.rebalance.delay.ms": 0,
    "offsets.topic.num.partitions": 2,
    "offsets.commit.timeout.ms": 20_000,
    "offsets.retention.check.interval.ms": 50,
}


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    it = Mesh(tmp_path, **KEYS)
    await it.start()
    yield it
    await it.stop()


@pytest.fixture
async def hasty(tmp_path: Path) -> AsyncIterator[Mesh]:
    """Commits that are not replicated soon are refused."""
    it = Mesh(tmp_path, **KEYS | {"offsets.commit.timeout.ms": 1000})
    await it.start()
    yield it
    await it.stop()


async def patiently(ask: Callable[[], Awaitable[Any]]) -> Any:
    """Ask until the answer is something."""
    for _ in range(1000):
        answer = await ask()
        if answer:
            return answer
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come about")


class Client:
    """Finds the coordinator, and asks again while it moves."""

    def __init__(self, mesh: Mesh, group: str = GROUP) -> None:
        self.mesh = mesh
        self.group = group

    async def coordinator(self) -> int:
        async def find() -> int:
            for broker_id in list(self.mesh.brokers):
                request = m.FindCoordinatorRequest(coordinator_keys=[self.group])
                try:
                    answer = await self.mesh.call(broker_id, "FindCoordinator", request, "Groups")
                except TransportError:
                    continue
                found = answer.coordinators[0]
                if not found.error_code and found.node_id in self.mesh.brokers:
                    assert found.port == self.mesh.ports[found.node_id]
                    return int(found.node_id)
            return 0

        return await patiently(find)

    async def ask(self, method: str, request: Any) -> Any:
        async with asyncio.timeout(20):
            while True:
                answer = await self.mesh.call(await self.coordinator(), method, request, "Groups")
                if not RETRIED & set(_codes(answer)):
                    return answer
                await asyncio.sleep(0.02)

    async def join(self, member_id: str = "", instance: str | None = None) -> m.JoinGroupResponse:
        request = m.JoinGroupRequest(self.group, 60_000, 60_000, member_id, instance, "consumer", [PROTOCOL])
        answer: m.JoinGroupResponse = await self.ask("JoinGroup", request)
        if answer.error_code == E.MEMBER_ID_REQUIRED:
            return await self.join(answer.member_id)
        assert answer.error_code == 0, answer
        return answer

    async def stable(self) -> m.JoinGroupResponse:
        """A group of one member, which owns everything."""
        joined = await self.join()
        mine = m.SyncGroupRequestAssignment(joined.member_id, b"mine")
        request = m.SyncGroupRequest(self.group, joined.generation_id, joined.member_id, assignments=[mine])
        synced = await self.ask("SyncGroup", request)
        assert (synced.error_code, synced.assignment) == (0, b"mine")
        return joined

    async def beat(self, member: m.JoinGroupResponse) -> ErrorCode:
        request = m.HeartbeatRequest(self.group, member.generation_id, member.member_id)
        return ErrorCode((await self.ask("Heartbeat", request)).error_code)

    def commit_request(self, offset: int, member: m.JoinGroupResponse | None, topic: str = "t") -> Any:
        partitions = [m.OffsetCommitRequestPartition(0, offset, -1, "note")]
        topics = [m.OffsetCommitRequestTopic(topic, partitions)]
        if member is None:
            return m.OffsetCommitRequest(self.group, topics=topics)
        return m.OffsetCommitRequest(self.group, member.generation_id, member.member_id, None, topics=topics)

    async def commit(self, offset: int, member: m.JoinGroupResponse | None = None, topic: str = "t") -> ErrorCode:
        answer = await self.ask("OffsetCommit", self.commit_request(offset, member, topic))
        return ErrorCode(answer.topics[0].partitions[0].error_code)

    async def committed(self) -> dict[str, int]:
        request = m.OffsetFetchRequest(groups=[m.OffsetFetchRequestGroup(self.group, topics=None)])
        (group,) = (await self.ask("OffsetFetch", request)).groups
        assert group.error_code == 0
        return {topic.name: topic.partitions[0].committed_offset for topic in group.topics}


def _codes(answer: Any) -> list[int]:
    codes = [getattr(answer, "error_code", 0)]
    for field in ("topics", "groups", "results"):
        for item in getattr(answer, field, ()):
            codes += [getattr(item, "error_code", 0)]
            codes += [getattr(partition, "error_code", 0) for partition in getattr(item, "partitions", ())]
    return codes


async def test_the_topic_is_made_when_somebody_looks_for_a_coordinator(mesh: Mesh) -> None:
    async def find(broker_id: int) -> m.Coordinator:
        request = m.FindCoordinatorRequest(coordinator_keys=[GROUP])
        answer = await mesh.call(broker_id, "FindCoordinator", request, "Groups")
        found: m.Coordinator = answer.coordinators[0]
        return found

    await asyncio.gather(*[find(broker_id) for broker_id in (1, 2, 3)])
    found = await Client(mesh).coordinator()
    topic = mesh.brokers[1].hosted_replicas.image.topic_by_name(GROUP_METADATA_TOPIC)
    assert topic is not None
    assert {len(state.replicas) for state in topic.partitions.values()} == {3}
    assert topic.partitions[partition_for(GROUP, 2)].leader == found
    request = m.MetadataRequest([m.MetadataRequestTopic(b"", GROUP_METADATA_TOPIC)])
    assert (await mesh.call(1, "Metadata", request)).topics[0].is_internal
    refused = await mesh.call(
        1, "FindCoordinator", m.FindCoordinatorRequest(key_type=1, coordinator_keys=["transaction"]), "Groups"
    )
    assert refused.coordinators[0].error_code == E.INVALID_REQUEST
    batch = record_batch.build([(b"k", b"v")], base_offset=0, leader_epoch=-1, timestamp_ms=1)
    assert (await mesh.produce(GROUP_METADATA_TOPIC, batch, via=found)).error_code == E.INVALID_TOPIC_EXCEPTION


async def test_names_that_are_too_long_are_refused_wherever_they_come(mesh: Mesh) -> None:
    await Client(mesh).coordinator()
    name = "g" * 8193
    found = await mesh.call(
        1, "FindCoordinator", m.FindCoordinatorRequest(key_type=0, coordinator_keys=[GROUP, name]), "Groups"
    )
    assert [one.error_code for one in found.coordinators] == [0, E.INVALID_GROUP_ID]
    for api, request in (
        ("JoinGroup", m.JoinGroupRequest(name)),
        ("Heartbeat", m.HeartbeatRequest(name)),
        ("DescribeGroups", m.DescribeGroupsRequest([name])),
        ("OffsetFetch", m.OffsetFetchRequest(groups=[m.OffsetFetchRequestGroup(name)])),
    ):
        answer = await mesh.call(1, api, request, "Groups")
        assert E.INVALID_GROUP_ID in _codes(answer), api


async def test_the_life_of_a_group(mesh: Mesh) -> None:
    await mesh.create("t")
    client = Client(mesh)
    member = await client.stable()
    assert await client.beat(member) == 0
    assert await client.commit(5, member) == 0
    assert await client.commit(6, member._replace(generation_id=9)) == E.ILLEGAL_GENERATION
    assert await client.commit(6, member, "nowhere") == E.UNKNOWN_TOPIC_OR_PARTITION
    assert await client.committed() == {"t": 5}
    described = (await client.ask("DescribeGroups", m.DescribeGroupsRequest([GROUP]))).groups[0]
    assert (described.group_state, described.protocol_data) == ("Stable", "range")
    assert described.members[0].client_host.startswith(("/127.0.0.1", "/::1"))
    coordinator = await client.coordinator()
    listed = await mesh.call(coordinator, "ListGroups", m.ListGroupsRequest(["stable"]), "Groups")
    assert [group.group_id for group in listed.groups] == [GROUP]
    assert (await client.ask("DeleteGroups", m.DeleteGroupsRequest([GROUP]))).results[0].error_code == E.NON_EMPTY_GROUP
    left = await client.ask("LeaveGroup", m.LeaveGroupRequest(GROUP, members=[m.MemberIdentity(member.member_id)]))
    assert left.members[0].error_code == 0
    assert await client.beat(member) == E.UNKNOWN_MEMBER_ID
    gone = m.OffsetDeleteRequest(GROUP, [m.OffsetDeleteRequestTopic("t", [m.OffsetDeleteRequestPartition(0)])])
    assert (await client.ask("OffsetDelete", gone)).topics[0].partitions[0].error_code == 0
    assert await client.committed() == {}
    await client.ask("DeleteGroups", m.DeleteGroupsRequest([GROUP]))
    described = (await client.ask("DescribeGroups", m.DescribeGroupsRequest([GROUP]))).groups[0]
    assert described.group_state == "Dead"


async def test_who_is_not_the_coordinator_says_so(mesh: Mesh) -> None:
    coordinator = await Client(mesh).coordinator()
    other = next(broker_id for broker_id in mesh.brokers if broker_id != coordinator)
    calls = {
        "JoinGroup": m.JoinGroupRequest(GROUP),
        "SyncGroup": m.SyncGroupRequest(GROUP),
        "Heartbeat": m.HeartbeatRequest(GROUP),
        "LeaveGroup": m.LeaveGroupRequest(GROUP),
        "OffsetCommit": Client(mesh).commit_request(1, None),
        "OffsetFetch": m.OffsetFetchRequest(groups=[m.OffsetFetchRequestGroup(GROUP, topics=None)]),
        "OffsetDelete": m.OffsetDeleteRequest(GROUP),
        "DescribeGroups": m.DescribeGroupsRequest([GROUP]),
        "DeleteGroups": m.DeleteGroupsRequest([GROUP]),
    }
    for method, request in calls.items():
        assert E.NOT_COORDINATOR in _codes(await mesh.call(other, method, request, "Groups")), method


async def test_two_members_share_and_one_that_waits_can_be_lost(mesh: Mesh) -> None:
    client = Client(mesh)
    first = await client.stable()
    waiting = asyncio.create_task(client.join())
    await eventually_code(client, first, E.REBALANCE_IN_PROGRESS)
    again, second = await asyncio.gather(client.join(first.member_id), waiting)
    assert again.generation_id == second.generation_id == first.generation_id + 1
    assert [len(one.members) for one in (again, second)] == [2, 0]
    follower = asyncio.create_task(
        client.ask("SyncGroup", m.SyncGroupRequest(GROUP, second.generation_id, second.member_id))
    )
    given = [m.SyncGroupRequestAssignment(one.member_id, one.member_id.encode()) for one in again.members]
    request = m.SyncGroupRequest(GROUP, again.generation_id, again.member_id, assignments=given)
    assert (await client.ask("SyncGroup", request)).assignment == again.member_id.encode()
    assert (await follower).assignment == second.member_id.encode()


async def eventually_code(client: Client, member: m.JoinGroupResponse, code: ErrorCode) -> None:
    async def has_come() -> bool:
        return await client.beat(member) == code

    await patiently(has_come)


async def test_groups_go_on_when_their_coordinator_is_killed(mesh: Mesh) -> None:
    await mesh.create("t")
    client = Client(mesh)
    member = await client.stable()
    assert await client.commit(5, member) == 0
    before = await client.coordinator()
    await mesh.brokers.pop(before).abort()
    assert await client.beat(member) == 0
    assert await client.coordinator() != before
    assert await client.committed() == {"t": 5}
    assert await client.commit(6, member) == 0
    await mesh.start_broker(before)
    await mesh.ready(before)
    assert await client.committed() == {"t": 6}


async def test_members_that_wait_are_told_when_the_coordinator_moves(mesh: Mesh) -> None:
    client = Client(mesh)
    first = await client.stable()
    coordinator = await client.coordinator()
    announced = await mesh.call(
        coordinator, "JoinGroup", m.JoinGroupRequest(GROUP, 60_000, 60_000, "", None, "consumer", [PROTOCOL]), "Groups"
    )
    waits = m.JoinGroupRequest(GROUP, 60_000, 60_000, announced.member_id, None, "consumer", [PROTOCOL])
    waiting = asyncio.create_task(mesh.call(coordinator, "JoinGroup", waits, "Groups"))
    await eventually_code(client, first, E.REBALANCE_IN_PROGRESS)
    await mesh.brokers.pop(coordinator).stop()
    assert (await waiting).error_code == E.NOT_COORDINATOR
    assert await client.beat(first) == 0, "the next coordinator knows the last generation"


async def test_commits_need_enough_replicas(hasty: Mesh) -> None:
    mesh = hasty
    await mesh.create("t")
    client = Client(mesh)
    assert await client.commit(1) == 0
    coordinator = await client.coordinator()
    for broker_id in [one for one in mesh.brokers if one != coordinator]:
        await mesh.brokers.pop(broker_id).abort()
    answer = await mesh.call(coordinator, "OffsetCommit", client.commit_request(2, None), "Groups")
    assert answer.topics[0].partitions[0].error_code == E.COORDINATOR_NOT_AVAILABLE
    fetched = m.OffsetFetchRequest(groups=[m.OffsetFetchRequestGroup(GROUP, topics=None)])
    (group,) = (await mesh.call(coordinator, "OffsetFetch", fetched, "Groups")).groups
    assert group.topics[0].partitions[0].committed_offset == 1


async def test_offsets_go_with_their_topic(mesh: Mesh) -> None:
    await mesh.create("t")
    client = Client(mesh)
    assert await client.commit(1) == 0
    await mesh.call(1, "DeleteTopics", m.DeleteTopicsRequest([m.DeleteTopicState("t")], timeout_ms=10_000), "Admin")

    async def are_gone() -> bool:
        return not await client.committed()

    await patiently(are_gone)


async def test_foreign_and_compressed_records_do_not_stop_the_groups(mesh: Mesh) -> None:
    """What is in the log and is not ours is skipped; batches of Kafka's that are compressed are read."""
    await mesh.create("t")
    client = Client(mesh)
    assert await client.commit(1) == 0
    coordinator = mesh.brokers[await client.coordinator()]
    topic = coordinator.hosted_replicas.image.topic_by_name(GROUP_METADATA_TOPIC)
    assert topic is not None
    replica = coordinator.hosted_replicas.get(topic.topic_id, partition_for(GROUP, 2))
    assert replica is not None
    ours = replica.log.read(0, 1 << 20, replica.log.log_end_offset, True)
    header = record_batch.parse_header(ours)
    body = ours[record_batch.HEADER_BYTES : header.size_bytes].replace(
        (1).to_bytes(8, "big"), (9).to_bytes(8, "big"), 1
    )
    packed = bytes(cramjam.gzip.compress(body))
    compressed = record_batch.join(header.with_records(len(packed), 1), packed)
    foreign = record_batch.build(
        [(b"?", b"?"), (b"\0\x03\0\x01g", b"newer"), (b"\0\x02\xff\xff", b"")],
        base_offset=0,
        leader_epoch=-1,
        timestamp_ms=1,
    )
    for batch in (compressed, foreign):
        replica.append(batch, 1, wall_ms())
    table = await read_table(replica, replica.log.log_end_offset)
    assert [value.offset for value in table.offsets(GROUP).values()] == [9]
    assert table.group_ids() == [GROUP]


async def test_gauges(mesh: Mesh) -> None:
    await mesh.create("t")
    client = Client(mesh)
    await client.commit(1, await client.stable())
    registry = mesh.brokers[await client.coordinator()].registry
    prefix = "kafka_coordinator_group_groupmetadatamanager"

    def values() -> list[float | None]:
        return [
            registry.get_sample_value(f"{prefix}_{name}") for name in ("numgroups", "numgroupsstable", "numoffsets")
        ]

    await eventually(lambda: values() == [1, 1, 1], "the gauges")
