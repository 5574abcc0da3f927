"""The four cases of an offset that a follower has no records for, on live processes (392-03 to 392-06, 392-08).

A consumer in rack-b reads from the follower there. In each case it gets what it should, and it was that case that the
follower there counted.
"""

from __future__ import annotations

import asyncio
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kipmesh.cli.chaos_clusters import LocalCluster
from kipmesh.client import AdminClient, Consumer, Producer
from kipmesh.client.types import NewTopic
from kipmesh.core import record_batch
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.testing import until
from kipmesh_chaos.experiment import ClusterPart
from kipmesh_chaos.links import Links
from kipmesh_chaos.network import Network

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="links between nodes need /proc"),
]

LEADER, NEAR, FAR = "leader-1", "follower-1", "follower-2"
VALUE_BYTES = 1000
METRIC = "kipmesh_broker_fetch_offset_cases_total"
CONFIG = {
    "replica.selector.class": "RackAwareReplicaSelector",
    "broker.session.timeout.ms": "600000",  # who stands still is not fenced
    "replica.lag.time.max.ms": "2000",  # who lags leaves the ISR: without that it has all that is committed
    "replica.fetch.max.bytes": str(VALUE_BYTES),  # a batch for each fetch
}
CONSUMER = {
    "client.rack": "rack-b",
    "auto.offset.reset": "earliest",
    "fetch.max.wait.ms": "20000",  # no follower is taken for silent
}
AT_ONCE = {"acks": "1", "enable.idempotence": "false"}
"""Acknowledged by the leader alone."""
WAIT_S = 60.0
LAG_S, BEHIND = 0.5, 300
"""What each batch takes to a follower, and how many: two and a half minutes behind, whatever the machine does."""


Case = tuple[str, str, str]
"""The broker that counted, the case, and the broker's role."""


class Linked:
    """Nodes reach each other by links."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def properties(self, state: Any, node: Any) -> Mapping[str, str]:
        return self._network.properties(state.nodes, node)

    def command(self, node: Any, command: list[str]) -> list[str]:
        return command


class Mesh:
    """A leader in rack-a, followers in rack-b and rack-c; a topic for each case."""

    def __init__(self, cluster: LocalCluster, network: Network) -> None:
        self.cluster = cluster
        self.network = network
        self.nodes = {node.name: node for node in cluster.nodes()}
        self.leader, self.near = self.nodes[LEADER].node_id or 0, self.nodes[NEAR].node_id or 0
        self.bootstrap = ",".join(str(self.nodes[name].grpc) for name in (LEADER, NEAR))

    async def create(self, topic: str, records: int, **config: str) -> None:
        """With records that every replica has."""
        async with AdminClient(self.bootstrap) as admin:
            await admin.create_topics([NewTopic(topic, 1, 3, config)])
        await self.produce(topic, records)
        for name in (LEADER, NEAR, FAR):
            await self.has(name, topic, records)

    async def produce(self, topic: str, records: int, **config: str) -> None:
        """Each is a batch; returns when they are acknowledged."""
        async with Producer(self.bootstrap, **{"batch.size": "0", **config}) as producer:
            sent = [await producer.send(topic, bytes(VALUE_BYTES), partition=0) for _ in range(records)]
            await asyncio.gather(*sent)

    def records_at(self, name: str, topic: str) -> int:
        """How many are in a replica's log."""
        files = sorted((Path(self.nodes[name].dir) / "data" / f"{topic}-0").glob("*.log"))
        data = b"".join(file.read_bytes() for file in files)
        return sum(header.record_count for _, header in record_batch.iterate(data, allow_partial=True))

    async def has(self, name: str, topic: str, records: int) -> None:
        """Return when so many are in a replica's log."""
        await until(lambda: self.records_at(name, topic) == records, f"{records} records of {topic} at {name}")

    async def cases(self) -> Counter[Case]:
        """What the brokers have counted so far; FAR may be held, and serves nobody here."""
        found: Counter[Case] = Counter()
        for name in (LEADER, NEAR):
            text = await asyncio.to_thread(_scrape, f"http://{self.nodes[name].http}/metrics")
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == METRIC:
                        found[name, sample.labels["case"], sample.labels["role"]] = int(sample.value)
        return found

    async def counted(self, before: Counter[Case]) -> set[Case]:
        """The cases that there were since then."""
        return set(await self.cases() - before)

    @asynccontextmanager
    async def reader(self, topic: str, records: int, **config: str) -> AsyncIterator[Consumer]:
        """A consumer in rack-b that has read so many from the follower there."""
        async with Consumer(self.bootstrap, **{**CONSUMER, **config}) as consumer:
            consumer.assign([(topic, 0)])
            async with asyncio.timeout(WAIT_S):
                # On a slow machine the follower may not be in sync at once, and the leader serves.
                while not consumer.fetch_stats.bytes_by_node[self.near]:
                    consumer.seek((topic, 0), 0)
                    assert await read(consumer, records) == list(range(records))
            yield consumer


async def read(consumer: Consumer, records: int) -> list[int]:
    """The offsets of the next so many."""
    found: list[int] = []
    async with asyncio.timeout(WAIT_S):
        while len(found) < records:
            found += [record.offset for record in await consumer.poll(1000)]
    return found


def _scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        text: str = answer.read().decode()
    return text


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with Links() as links:
        made: list[LocalCluster] = []
        network = Network(links, lambda: made[0].nodes())
        cluster = LocalCluster(tmp_path / "mesh", ClusterPart(controllers=1, config=CONFIG), Linked(network))
        made.append(cluster)
        try:
            await asyncio.to_thread(cluster.up)
            yield Mesh(cluster, network)
        finally:
            await asyncio.to_thread(cluster.destroy)


async def test_consumer_handles_each_offset_that_a_follower_does_not_serve(mesh: Mesh) -> None:
    """One mesh for all: it takes longer to start than the cases do."""
    await case_1_uncommitted(mesh)
    await case_2_unavailable(mesh)
    await case_3_too_small(mesh)
    await case_4_too_large(mesh)
    await case_4_too_large_where_the_follower_does_not_know_better(mesh)


async def case_1_uncommitted(mesh: Mesh) -> None:
    """What a follower has and others do not is not served, and is no error; when they have it, the follower serves."""
    topic = "uncommitted"
    # Three have to have a record before it counts, in sync or not: nothing is committed while one of them is held.
    await mesh.create(topic, 3, **{"min.insync.replicas": "3"})
    async with mesh.reader(topic, 3) as consumer:
        before = await mesh.cases()
        elsewhere = consumer.fetch_stats.bytes_by_node[mesh.leader]
        await asyncio.to_thread(mesh.cluster.pause, FAR)
        try:
            await mesh.produce(topic, 2, **AT_ONCE)
            await mesh.has(NEAR, topic, 5)
            consumer.seek((topic, 0), 4)
            async with asyncio.timeout(WAIT_S):
                while not await mesh.counted(before):
                    assert await consumer.poll(50) == []
            assert await consumer.position((topic, 0)) == 4
        finally:
            await asyncio.to_thread(mesh.cluster.resume, FAR)
        assert await read(consumer, 1) == [4]
        assert await mesh.counted(before) == {(NEAR, "uncommitted", "follower")}
        assert not consumer.fetch_stats.returns
        assert consumer.fetch_stats.bytes_by_node[mesh.leader] == elsewhere


async def case_2_unavailable(mesh: Mesh) -> None:
    """What is committed and not at the follower yet is waited for, and then read from the leader: no reset."""
    topic = "unavailable"
    await mesh.create(topic, 2)
    async with mesh.reader(topic, 2) as consumer:
        before = await mesh.cases()
        mesh.network.delay(1, [(LEADER, NEAR)], LAG_S)
        await mesh.produce(topic, BEHIND, **AT_ONCE)
        # The ISR goes on without the follower, which is told so with each batch.
        await until(lambda: consumer.high_watermark((topic, 0)) == BEHIND + 2, "the high watermark at the follower")
        consumer.seek((topic, 0), BEHIND)
        assert await read(consumer, 2) == [BEHIND, BEHIND + 1]
        assert mesh.records_at(NEAR, topic) < BEHIND, "the follower was to be behind"
        assert errors(await mesh.counted(before)) == {(NEAR, "unavailable", "follower")}
        assert consumer.fetch_stats.returns == {"stuck": 1}
        mesh.network.heal(1)
    await mesh.has(NEAR, topic, BEHIND + 2)


async def case_3_too_small(mesh: Mesh) -> None:
    """What was deleted is not at the leader either: `auto.offset.reset` applies."""
    topic = "too-small"
    await mesh.create(topic, 5)
    async with mesh.reader(topic, 5) as consumer:
        before = await mesh.cases()
        async with AdminClient(mesh.bootstrap) as admin:
            assert await admin.delete_records({(topic, 0): 3}) == {(topic, 0): 3}
        consumer.seek((topic, 0), 1)
        assert await read(consumer, 2) == [3, 4]
        assert errors(await mesh.counted(before)) == {(NEAR, "too-small", "follower")}
        assert consumer.fetch_stats.returns == {"out-of-range": 1}


async def case_4_too_large(mesh: Mesh) -> None:
    """What there is not at the leader either is the user's to decide, where `auto.offset.reset` is none."""
    topic = "too-large"
    await mesh.create(topic, 2)
    async with mesh.reader(topic, 2, **{"auto.offset.reset": "none"}) as consumer:
        before = await mesh.cases()
        consumer.seek((topic, 0), 5)
        with pytest.raises(KafkaError) as caught:
            await read(consumer, 1)
        assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
        assert errors(await mesh.counted(before)) == {(NEAR, "too-large", "follower")}
        assert consumer.fetch_stats.returns == {"out-of-range": 1}


async def case_4_too_large_where_the_follower_does_not_know_better(mesh: Mesh) -> None:
    """A follower that hears nothing takes an offset for too large; the leader has it, and there is no reset."""
    topic = "too-large"
    async with mesh.reader(topic, 2) as consumer:
        before = await mesh.cases()
        mesh.network.cut(2, [(LEADER, NEAR)])
        await mesh.produce(topic, 3)
        consumer.seek((topic, 0), 4)
        assert await read(consumer, 1) == [4]
        assert mesh.records_at(NEAR, topic) == 2
        assert errors(await mesh.counted(before)) == {(NEAR, "too-large", "follower")}
        assert consumer.fetch_stats.returns == {"out-of-range": 1}


def errors(counted: set[Case]) -> set[Case]:
    """Without case 1, which any read at the end of a log may be for the moment until a record is committed."""
    return {case for case in counted if case[1] != "uncommitted"}
