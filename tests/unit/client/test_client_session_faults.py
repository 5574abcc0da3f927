"""Consumers under random faults of sessions and followers read records once in order (227-12, 227-19, 392-14).

The oracle is the next expected offset of each partition. A failed run prints its seed.
`KIPMESH_SESSION_SEEDS=17 pytest tests/unit/client/test_client_session_faults.py` replays seed 17; `1-500` runs a range.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from kipmesh.client import Consumer
from kipmesh.client.records import encode_batch
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.messages import FetchableTopicResponse, FetchResponse, PartitionData
from kipmesh.testing.fake_broker import FakeCluster
from kipmesh.testing.fake_partitions import FakeFollower

PARTITIONS = 8
STEPS = 150
FIRST, _, LAST = os.environ.get("KIPMESH_SESSION_SEEDS", "1-12").partition("-")
CODES = (
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.KAFKA_STORAGE_ERROR,
    ErrorCode.UNKNOWN_LEADER_EPOCH,
    ErrorCode.OFFSET_NOT_AVAILABLE,
)
FOLLOWER_CODES = (ErrorCode.OFFSET_OUT_OF_RANGE, ErrorCode.UNKNOWN_SERVER_ERROR, ErrorCode.FENCED_LEADER_EPOCH)
TOP_LEVEL = (
    ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
    ErrorCode.INVALID_FETCH_SESSION_EPOCH,
    ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
    ErrorCode.KAFKA_STORAGE_ERROR,
)
MALFORMED = (
    FetchResponse(),
    FetchResponse(session_id=77),
    FetchResponse(responses=[FetchableTopicResponse("t", b"?" * 16, [PartitionData(0)])]),
    FetchResponse(responses=[FetchableTopicResponse("t", b"", [PartitionData(0, records=b"x")])]),
)


class Run:
    """One consumer under a random sequence of faults."""

    def __init__(self, seed: int, cluster: FakeCluster) -> None:
        self.random = random.Random(seed)
        self.cluster = cluster
        self.expected = dict.fromkeys(range(PARTITIONS), 0)
        self.paused: set[int] = set()
        self.assigned = set(range(PARTITIONS))
        chance = self.random
        self.config: dict[str, Any] = {
            "retry.backoff.ms": 1,
            "retry.backoff.max.ms": 4,
            "default.api.timeout.ms": 30_000,
            "auto.offset.reset": "earliest",
            "fetch.max.wait.ms": chance.choice([5, 30, 200]),
            "max.poll.records": chance.choice([1, 7, 500]),
            "fetch.max.bytes": chance.choice([300, 3000, 1 << 20]),
            "max.partition.fetch.bytes": chance.choice([200, 1000, 1 << 20]),
            "enable.incremental.fetch": chance.random() < 0.95,
            "metadata.max.age.ms": chance.choice([100, 1000, 300_000]),
            "client.rack": chance.choice(["", "1", "2", "3"]),
            "replica.selection.mode": chance.choice(["fetch", "fetch", "metadata", "consumer"]),
            "replica.selection.policy": "preferred",
            "replica.selector.class": "RackAwareReplicaSelector",
        }

    @property
    def logs(self) -> list[int]:
        """The log end offset of each partition."""
        return [each.end_offset for each in self.cluster.topics["t"].partitions]

    # -- faults

    def append(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            log = self.cluster.topics["t"].partitions[self.random.randrange(PARTITIONS)]
            count, base = self.random.randint(1, 12), log.end_offset
            log.append(encode_batch([(None, b"%d" % (base + index)) for index in range(count)], timestamp_ms=1))
        self.cluster.appended.set()
        self.cluster.appended = asyncio.Event()

    def lose(self) -> None:
        self.cluster.inject("Fetch", after=self.random.random() < 0.7, times=self.random.randint(1, 2))

    def duplicate(self) -> None:
        self.cluster.inject("Fetch", twice=True, times=self.random.randint(1, 2))

    def delay(self) -> None:
        self.cluster.inject("Fetch", delay_s=self.random.choice([0.005, 0.05, 0.6]))

    def fail_partitions(self) -> None:
        self.cluster.inject("Fetch", self.random.choice(CODES))

    def fail_requests(self) -> None:
        code = self.random.choice(TOP_LEVEL)
        self.cluster.inject("Fetch", malformed=FetchResponse(error_code=code), times=self.random.randint(1, 2))

    def send_malformed(self) -> None:
        self.cluster.inject("Fetch", malformed=self.random.choice(MALFORMED))

    def evict(self) -> None:
        self.cluster.brokers[self.random.randint(1, 3)].sessions.evict()

    def overtake(self) -> None:
        self.cluster.brokers[self.random.randint(1, 3)].sessions.overtake()

    def move_leader(self) -> None:
        partition = self.random.randrange(PARTITIONS)
        followers = sorted(self.cluster.topics["t"].partitions[partition].followers)
        self.cluster.move_leader("t", partition, self.random.choice(followers))

    async def restart(self) -> None:
        broker = self.cluster.brokers[self.random.randint(1, 3)]
        await broker.stop()
        await broker.start()

    def degrade_follower(self) -> None:
        partition = self.cluster.topics["t"].partitions[self.random.randrange(PARTITIONS)]
        node_id, chance = self.random.choice(sorted(partition.followers)), self.random
        behind = chance.randint(0, partition.end_offset)
        partition.followers[node_id] = chance.choice(
            [
                FakeFollower(),
                FakeFollower(),
                FakeFollower(code=chance.choice((*CODES, *FOLLOWER_CODES))),
                FakeFollower(end_offset=behind),
                FakeFollower(end_offset=behind, known_high_watermark=behind),
                FakeFollower(log_start_offset=behind),
                FakeFollower(is_in_sync=False),
                FakeFollower(is_online=False),
            ]
        )

    # -- application

    def pause(self, consumer: Consumer) -> None:
        partition = self.random.choice(sorted(self.assigned))
        if partition in self.paused:
            self.paused.remove(partition)
            consumer.resume([("t", partition)])
        else:
            self.paused.add(partition)
            consumer.pause([("t", partition)])

    def seek(self, consumer: Consumer) -> None:
        partition = self.random.choice(sorted(self.assigned))
        self.expected[partition] = self.random.randint(0, self.logs[partition])
        consumer.seek(("t", partition), self.expected[partition])

    def assign(self, consumer: Consumer) -> None:
        before, count = self.assigned, self.random.randint(1, PARTITIONS)
        self.assigned = set(self.random.sample(range(PARTITIONS), count))
        self.apply_assignment(consumer, before)

    def apply_assignment(self, consumer: Consumer, before: set[int]) -> None:
        consumer.assign([("t", partition) for partition in sorted(self.assigned)])
        self.paused &= self.assigned & before
        for partition in sorted(self.assigned - before):
            consumer.seek(("t", partition), self.expected[partition])

    async def poll(self, consumer: Consumer, timeout_ms: int) -> None:
        try:
            records = await consumer.poll(timeout_ms)
        except KafkaError:  # Not retriable, or a malformed response. The next poll continues.
            assert consumer._fetcher.failure is None
            return
        for record in records:
            partition = record.partition
            expected = self.expected[partition]
            assert record.offset == expected, f"{partition}: got {record.offset}, expected {expected}"
            assert partition in self.assigned - self.paused
            self.expected[partition] += 1

    # -- run

    async def run(self) -> None:
        faults: list[Callable[[], None]] = [
            self.lose,
            self.duplicate,
            self.delay,
            self.fail_partitions,
            self.fail_requests,
            self.send_malformed,
            self.evict,
            self.overtake,
            self.move_leader,
            self.degrade_follower,
            self.degrade_follower,
        ]
        async with Consumer(self.cluster.bootstrap, **self.config) as consumer:
            short_timeout = consumer.config.model_copy(update={"request_timeout_ms": 400})  # after connecting
            consumer._fetcher._config = short_timeout
            self.apply_assignment(consumer, set())
            for _ in range(STEPS):
                chance = self.random.random()
                if chance < 0.35:
                    self.append()
                elif chance < 0.55:
                    self.random.choice(faults)()
                elif chance < 0.57:
                    await self.restart()
                elif chance < 0.67:
                    self.random.choice([self.pause, self.pause, self.seek, self.seek, self.assign])(consumer)
                else:
                    await self.poll(consumer, self.random.choice([0, 0, 1, 10]))
            before, self.assigned = self.assigned, set(range(PARTITIONS))
            self.apply_assignment(consumer, before)
            consumer.resume([("t", partition) for partition in sorted(self.paused)])
            self.paused.clear()
            await self.drain(consumer)

    async def drain(self, consumer: Consumer) -> None:
        """Check that all records and high watermarks arrive, and that no requests loop."""
        for each in self.cluster.topics["t"].partitions:  # a follower that never catches up would leave the ISR
            each.followers = {node_id: FakeFollower() for node_id in each.followers}
        async with asyncio.timeout(60):
            while any(self.expected[partition] < end for partition, end in enumerate(self.logs)):
                await self.poll(consumer, 500)
            self.cluster._faults.clear()
            ends = self.logs
            while any(consumer.high_watermark(("t", partition)) != ends[partition] for partition in range(PARTITIONS)):
                await self.poll(consumer, 20)
        await self.poll(consumer, 100)
        calls = len(self.cluster.calls)
        await self.poll(consumer, 300)
        assert len(self.cluster.calls) - calls < 4 * 300 / self.config["fetch.max.wait.ms"] + 20
        buffered = consumer._fetcher.buffered_bytes
        assert buffered == 0


@pytest.mark.parametrize("seed", range(int(FIRST), int(LAST or FIRST) + 1))
async def test_random_session_faults_lose_and_repeat_no_records(seed: int) -> None:
    async with FakeCluster(3) as cluster:
        cluster.racks = {1: "1", 2: "2", 3: "3"}
        cluster.create_topic("t", PARTITIONS, replicas=3)
        await Run(seed, cluster).run()
        for broker in cluster.brokers.values():
            broker.sessions.evict()
