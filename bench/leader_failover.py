"""How long nothing can be produced when the leader of a partition fails: a part of `python -m bench.failover`.

Three controllers and three brokers as processes, one topic with three replicas; a few producers send one record after
the other with acks=all. The gap of a fault is the longest time between two acknowledgements that ended after it: a
producer has to learn of another leader, which has to be elected. Every fault happens to whichever broker leads then;
the next one comes when all three replicas are in sync again.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from bench.acknowledged import Acknowledged
from bench.faults import FAULTS
from bench.quorum_cluster import QuorumCluster, wait_for
from kipmesh.client import AdminClient, Producer
from kipmesh.client.types import NewTopic
from kipmesh.core.errors import KafkaError

TARGETS_S = {"kill": 1.5, "pause": 4.0, "stop": 1.5, "both": None}
"""The faults that are measured here, and what their median should be, if anything says that."""
TOPIC = "records"
PRODUCERS = 3
PAUSE_S = 0.005
WAIT_S = 60.0
RECORDS = (100, 200, 100)
"""That are acknowledged before a fault, while it lasts, and after its end, at least."""


class Outcome(NamedTuple):
    """What one fault did: the leader's name before it and after its end, and how many records failed."""

    gap_s: float
    before: str
    after: str
    failed: int


class Records(Acknowledged):
    """`with Records(...)`: produced from then on, until the end of the block, on the loop of the mesh's portal."""

    def __init__(self, mesh: QuorumCluster) -> None:
        super().__init__(mesh.portal, PRODUCERS, WAIT_S)
        self.failed = 0
        self._bootstrap = mesh.bootstrap

    async def _work(self, number: int) -> None:
        async with Producer(self._bootstrap, acks="all", **{"linger.ms": 0}) as producer:
            while not self._ends:
                try:
                    await (await producer.send(TOPIC, b"x" * 100))
                except KafkaError:
                    self.failed += 1
                    continue
                self._acknowledge()
                await asyncio.sleep(PAUSE_S)


async def _create(bootstrap: str) -> None:
    async with AdminClient(bootstrap) as admin:
        await admin.create_topics([NewTopic(TOPIC, 1, 3)])


async def _partition(bootstrap: str) -> tuple[int, int]:
    async with AdminClient(bootstrap) as admin:
        (topic,) = await admin.describe_topics([TOPIC])
        partition = topic.partitions[0]
        return partition.leader_id, len(partition.isr)


def prepare(mesh: QuorumCluster) -> None:
    """Make the topic."""
    mesh.run(_create(mesh.bootstrap))


def leader(mesh: QuorumCluster) -> str:
    """The name of the broker that leads, once all three replicas are in sync; QuorumError."""
    found = (-1, 0)

    def in_sync() -> bool:
        nonlocal found
        found = mesh.run(_partition(mesh.bootstrap))
        return found[0] >= 0 and found[1] == 3

    wait_for(in_sync, lambda: f"leader with three replicas in sync: {found}", WAIT_S)
    return next(node.name for node in mesh.brokers if node.node_id == found[0])


def suffer(mesh: QuorumCluster, kind: str) -> Outcome:
    """One fault of the leader under load, undone at the end; QuorumError, TimeoutError."""
    fault, (first, during, after) = FAULTS[kind], RECORDS
    before = leader(mesh)
    with Records(mesh) as records:
        records.more(first)
        since = time.monotonic()
        fault.do(mesh, before)
        records.more(during)
        gap_s = records.gap_s(since)
        fault.undo(mesh, before)
        records.more(after)
    return Outcome(gap_s, before, leader(mesh), records.failed)
