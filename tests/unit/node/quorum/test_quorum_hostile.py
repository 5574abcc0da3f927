"""Hostile requests to every method of the Quorum service do not stop the node.

The service does not authenticate requests. Consistent false requests to several nodes are out of scope: nodes that
observe different leaders of one epoch stop with `QuorumError`, as they should.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID
from kipmesh.core.raft import RaftConfig, wire
from kipmesh.messages import proto
from kipmesh.messages.table import METHODS
from kipmesh.transport.grpc.server import RequestContext
from simulation.faulty_fs import FaultyFileSystem
from tests.unit.node.quorum.quorum_support import CLUSTER_ID, Quorum

MAX32, MAX64 = 2**31 - 1, 2**63 - 1
CONTEXT = RequestContext("hostile", "somewhere")

int32 = st.sampled_from([-(2**31), -1, 0, 1, 2, 3, 4, 9, MAX32 - 1, MAX32])
int64 = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 100, MAX64 - 1, MAX64])
partition = st.sampled_from([0, 0, 0, 0, 1, -1, MAX32])
topic = st.sampled_from([CLUSTER_METADATA_TOPIC] * 4 + ["", "other"])
topic_id = st.sampled_from([CLUSTER_METADATA_TOPIC_ID] * 3 + [b"", b"x", bytes(16)])
cluster_id = st.sampled_from([CLUSTER_ID] * 4 + [None, "", "other"])
snapshot_id = st.none() | st.builds(m.SnapshotId, int64, int32)


def lists(of: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=2).map(tuple) | of.map(lambda item: (item,))


vote = st.builds(
    m.VoteRequest,
    cluster_id,
    lists(st.builds(m.VoteTopic, topic, lists(st.builds(m.VotePartition, partition, int32, int32, int32, int64)))),
)
epochs = lists(
    st.builds(
        m.QuorumEpochTopic,
        topic,
        lists(st.builds(m.QuorumEpochPartition, partition, int32, int32, st.lists(int32, max_size=3).map(tuple))),
    )
)
fetch = st.builds(
    m.FetchRequest,
    cluster_id=cluster_id,
    replica_id=int32,
    max_wait_ms=int32,
    min_bytes=int32,
    max_bytes=int32,
    topics=lists(
        st.builds(
            m.FetchTopic,
            topic,
            topic_id,
            lists(st.builds(m.FetchPartition, partition, int32, int64, int32, int64, int32)),
        )
    ),
)
fetch_snapshot = st.builds(
    m.FetchSnapshotRequest,
    cluster_id,
    int32,
    int32,
    lists(
        st.builds(m.TopicSnapshot, topic, lists(st.builds(m.PartitionSnapshot, partition, int32, snapshot_id, int64)))
    ),
)
describe = st.builds(
    m.DescribeQuorumRequest, lists(st.builds(m.DescribeQuorumTopic, topic, st.lists(int32, max_size=3).map(tuple)))
)
requests = st.one_of(
    st.tuples(st.just("vote"), vote),
    st.tuples(st.just("begin_quorum_epoch"), st.builds(m.BeginQuorumEpochRequest, cluster_id, epochs)),
    st.tuples(st.just("end_quorum_epoch"), st.builds(m.EndQuorumEpochRequest, cluster_id, epochs)),
    st.tuples(st.just("fetch"), fetch),
    st.tuples(st.just("fetch_snapshot"), fetch_snapshot),
    st.tuples(st.just("describe_quorum"), describe),
)


async def send_all(voters: int, requested: list[tuple[str, Any]]) -> None:
    disks: defaultdict[int, FaultyFileSystem] = defaultdict(FaultyFileSystem)
    quorum = Quorum(Path("/data"), voters, fs_of=lambda node_id: disks[node_id], election_timeout_ms=20)
    node = quorum.nodes[1]
    await node.boot()
    try:
        if voters == 1:
            await quorum.append(await quorum.leader(), b"a")
        running = []
        for method, request in requested:
            running.append(asyncio.create_task(getattr(node.service, method)(request, CONTEXT)))
            await asyncio.sleep(0)
        await asyncio.wait(running, timeout=0.03)
        if voters == 1:
            assert node.driver.is_leader
            await quorum.append(node, b"b")
        await node.driver.stop()
        await asyncio.gather(*running)  # every request gets a response
        assert not node.failures
    finally:
        await quorum.__aexit__()


@settings(max_examples=60, deadline=None)
@given(requested=st.lists(requests, min_size=1, max_size=8))
@pytest.mark.parametrize("voters", [1, 3])
def test_well_formed_requests_do_not_stop_node(voters: int, requested: list[tuple[str, Any]]) -> None:
    asyncio.run(send_all(voters, requested))


def valid_requests(config: RaftConfig, epoch: int) -> dict[str, Any]:
    """Return a valid request for each method. Only the vote comes from a voter."""
    peer, observer = RaftConfig(2, (1, 2, 3), config.cluster_id), RaftConfig(9, (1, 2, 3), config.cluster_id)
    return {
        "Vote": wire.vote_request(peer, epoch + 1, 1, 5),
        "BeginQuorumEpoch": wire.epoch_request(m.BeginQuorumEpochRequest, observer, epoch),
        "EndQuorumEpoch": wire.epoch_request(m.EndQuorumEpochRequest, observer, epoch, (1, 3)),
        "Fetch": wire.fetch_request(observer, epoch, 1, 1, 0)._replace(max_wait_ms=1),
        "FetchStream": wire.fetch_request(observer, epoch, 1, 1, 0)._replace(max_wait_ms=1),
        "FetchSnapshot": m.FetchSnapshotRequest(
            config.cluster_id,
            2,
            1 << 20,
            (m.TopicSnapshot(CLUSTER_METADATA_TOPIC, (m.PartitionSnapshot(0, epoch, m.SnapshotId(1, 1), 0),)),),
        ),
        "DescribeQuorum": m.DescribeQuorumRequest((m.DescribeQuorumTopic(CLUSTER_METADATA_TOPIC, (0,)),)),
    }


def mutate(rng: Random, data: bytes) -> bytes:
    """Return the bytes with a few random changes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                changed[at:at] = rng.randbytes(rng.randint(1, 4))
            case 1:
                del changed[at : at + rng.randint(1, 4)]
            case 2:
                changed[at : at + 1] = rng.randbytes(1)
            case _:
                changed = bytearray(rng.randbytes(rng.randint(0, 40)))
    return bytes(changed)


async def call(channel: grpc.aio.Channel, method: str, data: bytes) -> None:
    path = METHODS["Quorum"][method].path
    try:
        if METHODS["Quorum"][method].streaming:
            stream = channel.stream_stream(path)(timeout=10)
            await stream.write(data)
            await stream.read()
            stream.cancel()
        else:
            await channel.unary_unary(path)(data, timeout=10)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
            raise AssertionError(f"{method} of {data!r}") from error


async def test_mutated_bytes_do_not_stop_node(tmp_path: Path) -> None:
    rng = Random(20250802)
    async with Quorum(tmp_path, 3) as quorum:
        leader = await quorum.leader()
        await quorum.append(leader, b"a")
        for node in quorum.nodes.values():
            async with grpc.aio.insecure_channel(quorum.voters[node.node_id - 1].address) as channel:
                for method, request in valid_requests(node.driver.config, node.driver.epoch).items():
                    if "QuorumEpoch" in method:  # a changed byte could make a consistent false request
                        request = request._replace(cluster_id="other")
                    valid = proto.encode(request)
                    await asyncio.gather(*[call(channel, method, mutate(rng, valid)) for _ in range(40)])
        assert not any(node.failures for node in quorum.all)
        await quorum.append(await quorum.leader(), b"b")


async def test_requests_with_other_cluster_id_or_invalid_topics_are_refused(tmp_path: Path) -> None:
    async with Quorum(tmp_path, 1) as quorum:
        leader = await quorum.leader()
        connection = leader.pool.get(quorum.voters[0].address)
        for method, request in valid_requests(leader.driver.config, leader.driver.epoch).items():
            if method not in ("FetchStream", "DescribeQuorum"):
                response = await connection.call("Quorum", method, request._replace(cluster_id="other"), 10)
                assert response.error_code == ErrorCode.INCONSISTENT_CLUSTER_ID, method
        response = await connection.call("Quorum", "Vote", m.VoteRequest(CLUSTER_ID), 10)
        assert response.error_code == ErrorCode.INVALID_REQUEST
        many = m.DescribeQuorumRequest((m.DescribeQuorumTopic(CLUSTER_METADATA_TOPIC, (0,) * 101),))
        response = await connection.call("Quorum", "DescribeQuorum", many, 10)
        assert response.error_code == ErrorCode.INVALID_REQUEST
        assert not leader.failures
        await quorum.append(leader, b"a")


def test_fuzz_covers_every_method() -> None:
    assert set(valid_requests(RaftConfig(1, (1, 2, 3), CLUSTER_ID), 1)) == set(METHODS["Quorum"])
