"""The four cases of a fetch offset that a follower cannot serve, on live processes (392-03 to 392-06, 392-08).

A consumer in rack-b reads from the follower in rack-b. Each case checks the consumer's result and the case that the
follower counted.
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
    "broker.session.timeout.ms": "600000",  # paused brokers are not fenced
    "replica.lag.time.max.ms": "2000",  # a lagging follower must leave the ISR to lack committed records
    "replica.fetch.max.bytes": str(VALUE_BYTES),  # one batch per fetch
}
CONSUMER = {
    "client.rack": "rack-b",
    "auto.offset.reset": "earliest",
    "fetch.max.wait.ms": "20000",  # no fetch times out
}
LEADER_ACKS = {"acks": "1", "enable.idempotence": "false"}
"""Acknowledged by the leader alone."""
WAIT_S = 60.0
LAG_S, BEHIND = 0.5, 300
"""Network delay of each batch to the follower, and number of batches: the follower lags by two and a half minutes."""


Case = tuple[str, str, str]
"""The broker that counted, the case, and the broker's role."""


class LinkedNodes:
    """Connects the nodes of a cluster by links that can be delayed and cut."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def properties(self, state: Any, node: Any) -> Mapping[str, str]:
        return self._network.properties(state.nodes, node)

    def command(self, node: Any, command: list[str]) -> list[str]:
        return command


class RackedCluster:
    """A leader in rack-a, followers in rack-b and rack-c; a topic for each case."""

    def __init__(self, local_cluster: LocalCluster, network: Network) -> None:
        self.local_cluster = local_cluster
        self.network = network
        self.nodes = {node.name: node for node in local_cluster.nodes()}
        self.leader, self.near = self.nodes[LEADER].node_id or 0, self.nodes[NEAR].node_id or 0
        self.bootstrap = ",".join(str(self.nodes[name].grpc) for name in (LEADER, NEAR))

    async def create(self, topic: str, records: int, **config: str) -> None:
        """Create a topic and write records to every replica."""
        async with AdminClient(self.bootstrap) as admin:
            await admin.create_topics([NewTopic(topic, 1, 3, config)])
        await self.produce(topic, records)
        for name in (LEADER, NEAR, FAR):
            await self.wait_records(name, topic, records)

    async def produce(self, topic: str, records: int, **config: str) -> None:
        """Produce records, one per batch, and wait until they are acknowledged."""
        async with Producer(self.bootstrap, **{"batch.size": "0", **config}) as producer:
            sent = [await producer.send(topic, bytes(VALUE_BYTES), partition=0) for _ in range(records)]
            await asyncio.gather(*sent)

    def records_at(self, name: str, topic: str) -> int:
        """Return the number of records in a replica's log."""
        files = sorted((Path(self.nodes[name].dir) / "data" / f"{topic}-0").glob("*.log"))
        data = b"".join(file.read_bytes() for file in files)
        return sum(header.record_count for _, header in record_batch.iterate(data, allow_partial=True))

    async def wait_records(self, name: str, topic: str, records: int) -> None:
        """Wait until a replica's log has this number of records."""
        await until(lambda: self.records_at(name, topic) == records, f"{records} records of {topic} at {name}")

    async def cases(self) -> Counter[Case]:
        """Return the counters of LEADER and NEAR. FAR may be paused and serves no consumer."""
        found: Counter[Case] = Counter()
        for name in (LEADER, NEAR):
            text = await asyncio.to_thread(_scrape, f"http://{self.nodes[name].http}/metrics")
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == METRIC:
                        found[name, sample.labels["case"], sample.labels["role"]] = int(sample.value)
        return found

    async def cases_since(self, before: Counter[Case]) -> set[Case]:
        """Return the cases that were counted after `before`."""
        return set(await self.cases() - before)

    @asynccontextmanager
    async def reader(self, topic: str, records: int, **config: str) -> AsyncIterator[Consumer]:
        """A consumer in rack-b that has read `records` records from the follower in rack-b."""
        async with Consumer(self.bootstrap, **{**CONSUMER, **config}) as consumer:
            consumer.assign([(topic, 0)])
            async with asyncio.timeout(WAIT_S):
                # On a slow machine the leader serves until the follower is in sync.
                while not consumer.fetch_stats.bytes_by_node[self.near]:
                    consumer.seek((topic, 0), 0)
                    assert await read(consumer, records) == list(range(records))
            yield consumer


async def read(consumer: Consumer, records: int) -> list[int]:
    """Return the offsets of the next `records` records."""
    found: list[int] = []
    async with asyncio.timeout(WAIT_S):
        while len(found) < records:
            found += [record.offset for record in await consumer.poll(1000)]
    return found


def _scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=WAIT_S) as response:
        text: str = response.read().decode()
    return text


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[RackedCluster]:
    async with Links() as links:
        clusters: list[LocalCluster] = []
        network = Network(links, lambda: clusters[0].nodes())
        part = ClusterPart(controllers=1, config=CONFIG)
        local_cluster = LocalCluster(tmp_path / "cluster", part, LinkedNodes(network))
        clusters.append(local_cluster)
        try:
            await asyncio.to_thread(local_cluster.up)
            yield RackedCluster(local_cluster, network)
        finally:
            await asyncio.to_thread(local_cluster.destroy)


async def test_consumer_handles_each_offset_case_of_a_follower(cluster: RackedCluster) -> None:
    """One test for all cases, because the cluster takes longer to start than the cases take."""
    await case_1_uncommitted(cluster)
    await case_2_unavailable(cluster)
    await case_3_too_small(cluster)
    await case_4_too_large(cluster)
    await case_4_too_large_at_an_isolated_follower(cluster)


async def case_1_uncommitted(cluster: RackedCluster) -> None:
    """An uncommitted record is neither served nor an error. The follower serves it once it is committed."""
    topic = "uncommitted"
    # With min.insync.replicas=3 no record is committed while one replica is paused.
    await cluster.create(topic, 3, **{"min.insync.replicas": "3"})
    async with cluster.reader(topic, 3) as consumer:
        before = await cluster.cases()
        leader_bytes = consumer.fetch_stats.bytes_by_node[cluster.leader]
        await asyncio.to_thread(cluster.local_cluster.pause, FAR)
        try:
            await cluster.produce(topic, 2, **LEADER_ACKS)
            await cluster.wait_records(NEAR, topic, 5)
            consumer.seek((topic, 0), 4)
            async with asyncio.timeout(WAIT_S):
                while not await cluster.cases_since(before):
                    assert await consumer.poll(50) == []
            assert await consumer.position((topic, 0)) == 4
        finally:
            await asyncio.to_thread(cluster.local_cluster.resume, FAR)
        assert await read(consumer, 1) == [4]
        assert await cluster.cases_since(before) == {(NEAR, "uncommitted", "follower")}
        assert not consumer.fetch_stats.returns
        assert consumer.fetch_stats.bytes_by_node[cluster.leader] == leader_bytes


async def case_2_unavailable(cluster: RackedCluster) -> None:
    """The consumer reads a committed record that the follower lacks from the leader, without a reset."""
    topic = "unavailable"
    await cluster.create(topic, 2)
    async with cluster.reader(topic, 2) as consumer:
        before = await cluster.cases()
        cluster.network.delay(1, [(LEADER, NEAR)], LAG_S)
        await cluster.produce(topic, BEHIND, **LEADER_ACKS)
        # The follower leaves the ISR and receives the high watermark with each batch.
        await until(lambda: consumer.high_watermark((topic, 0)) == BEHIND + 2, "the high watermark at the follower")
        consumer.seek((topic, 0), BEHIND)
        assert await read(consumer, 2) == [BEHIND, BEHIND + 1]
        assert cluster.records_at(NEAR, topic) < BEHIND, "the follower does not lag"
        assert errors(await cluster.cases_since(before)) == {(NEAR, "unavailable", "follower")}
        assert consumer.fetch_stats.returns == {"stuck": 1}
        cluster.network.heal(1)
    await cluster.wait_records(NEAR, topic, BEHIND + 2)


async def case_3_too_small(cluster: RackedCluster) -> None:
    """`auto.offset.reset` applies to a deleted record, because the leader does not have it either."""
    topic = "too-small"
    await cluster.create(topic, 5)
    async with cluster.reader(topic, 5) as consumer:
        before = await cluster.cases()
        async with AdminClient(cluster.bootstrap) as admin:
            assert await admin.delete_records({(topic, 0): 3}) == {(topic, 0): 3}
        consumer.seek((topic, 0), 1)
        assert await read(consumer, 2) == [3, 4]
        assert errors(await cluster.cases_since(before)) == {(NEAR, "too-small", "follower")}
        assert consumer.fetch_stats.returns == {"out-of-range": 1}


async def case_4_too_large(cluster: RackedCluster) -> None:
    """With `auto.offset.reset=none` the consumer raises OFFSET_OUT_OF_RANGE for an offset beyond the leader's log."""
    topic = "too-large"
    await cluster.create(topic, 2)
    async with cluster.reader(topic, 2, **{"auto.offset.reset": "none"}) as consumer:
        before = await cluster.cases()
        consumer.seek((topic, 0), 5)
        with pytest.raises(KafkaError) as caught:
            await read(consumer, 1)
        assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
        assert errors(await cluster.cases_since(before)) == {(NEAR, "too-large", "follower")}
        assert consumer.fetch_stats.returns == {"out-of-range": 1}


async def case_4_too_large_at_an_isolated_follower(cluster: RackedCluster) -> None:
    """The consumer reads from the leader an offset that an isolated follower reports as too large, without a reset."""
    topic = "too-large"
    async with cluster.reader(topic, 2) as consumer:
        before = await cluster.cases()
        cluster.network.cut(2, [(LEADER, NEAR)])
        await cluster.produce(topic, 3)
        consumer.seek((topic, 0), 4)
        assert await read(consumer, 1) == [4]
        assert cluster.records_at(NEAR, topic) == 2
        assert errors(await cluster.cases_since(before)) == {(NEAR, "too-large", "follower")}
        assert consumer.fetch_stats.returns == {"out-of-range": 1}


def errors(cases: set[Case]) -> set[Case]:
    """Drop case 1: any read at the end of a log may be counted as uncommitted until the high watermark advances."""
    return {case for case in cases if case[1] != "uncommitted"}
