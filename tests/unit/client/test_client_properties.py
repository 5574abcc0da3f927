"""Random faults: acknowledged records are in the log in order, and consumers read each record once."""

from __future__ import annotations

import asyncio
import contextlib
from typing import NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kipmesh.client import Consumer, Delivery, Producer
from kipmesh.client.records import decode_columns, encode_batch
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.testing.fake_broker import FakeCluster

FAST = {"retry.backoff.ms": 1, "retry.backoff.max.ms": 4}
PARTITIONS = 3

RETRIABLE = (
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.NOT_ENOUGH_REPLICAS,
    ErrorCode.KAFKA_STORAGE_ERROR,
    ErrorCode.UNKNOWN_TOPIC_ID,
    None,  # connection error
)
FATAL = (ErrorCode.INVALID_RECORD, ErrorCode.UNKNOWN_SERVER_ERROR)


class Fault(NamedTuple):
    method: str
    code: ErrorCode | None
    times: int
    after: bool


def faults(*methods: str, fatal: bool = False, after: bool = False) -> st.SearchStrategy[list[Fault]]:
    times, done = st.integers(1, 3), st.booleans() if after else st.just(False)
    fault = st.builds(Fault, st.sampled_from(methods), st.sampled_from(RETRIABLE), times, done)
    if fatal:
        fault |= st.builds(Fault, st.just("Produce"), st.sampled_from(FATAL), times, done)
    return st.lists(fault, max_size=6)


class Sent(NamedTuple):
    partition: int
    value: bytes
    delivery: Delivery


class Plan(NamedTuple):
    sends: list[tuple[int, int]]  # partition, bytes
    pauses: set[int]  # indexes after which the producer pauses
    moves: dict[int, int]  # index -> partition whose leader moves
    config: dict[str, object]


plans = st.builds(
    Plan,
    st.lists(st.tuples(st.integers(0, PARTITIONS - 1), st.integers(0, 400)), min_size=1, max_size=120),
    st.sets(st.integers(0, 120), max_size=5),
    st.dictionaries(st.integers(0, 120), st.integers(0, PARTITIONS - 1), max_size=3),
    st.fixed_dictionaries(
        {
            "batch.size": st.sampled_from([0, 300, 2000, 16384]),
            "linger.ms": st.sampled_from([0, 2]),
            "max.in.flight.requests.per.connection": st.integers(1, 5),
            "max.request.size": st.sampled_from([1000, 1 << 20]),
            "buffer.memory": st.sampled_from([1500, 10_000, 1 << 20]),
            "compression.type": st.sampled_from(["none", "gzip", "zstd"]),
        }
    ),
)


async def produce(cluster: FakeCluster, plan: Plan) -> list[Sent]:
    sent: list[Sent] = []
    async with Producer(cluster.bootstrap, **FAST, **plan.config) as producer:
        for index, (partition, size) in enumerate(plan.sends):
            value = b"%06d" % index + b"." * size
            sent.append(Sent(partition, value, await producer.send("t", value, partition=partition)))
            if index in plan.moves:
                old = cluster.topics["t"].partitions[plan.moves[index]].leader_id
                cluster.move_leader("t", plan.moves[index], 3 - old)
            if index in plan.pauses:
                await asyncio.sleep(0.003)
    return sent


def log_of(cluster: FakeCluster, partition: int) -> dict[int, bytes | None]:
    log: dict[int, bytes | None] = {}
    for _, batch in cluster.topics["t"].partitions[partition].batches:
        columns = decode_columns(batch)
        log.update(zip(columns.offsets, columns.values, strict=True))
    return log


async def check_producer(plan: Plan, injected: list[Fault]) -> None:
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", PARTITIONS)
        for fault in injected:
            cluster.inject(fault.method, fault.code, times=fault.times, after=fault.after)
        async with asyncio.timeout(60):
            sent = await produce(cluster, plan)
        ambiguous = any(fault.after or (fault.code is None and fault.method == "Produce") for fault in injected)
        for partition in range(PARTITIONS):
            log = log_of(cluster, partition)
            of_partition = [each for each in sent if each.partition == partition]
            acknowledged = [each for each in of_partition if each.delivery.exception() is None]
            for each in acknowledged:
                assert log[each.delivery.result().offset] == each.value
            offsets = [each.delivery.result().offset for each in acknowledged]
            assert offsets == sorted(offsets)
            firsts = list(dict.fromkeys(log.values()))
            assert firsts == sorted(firsts, key=lambda value: value or b"")
            if not ambiguous:
                assert list(log.values()) == [each.value for each in acknowledged]


@given(plans, faults("Produce", "Metadata", fatal=True))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_acknowledged_records_are_stored_once_and_in_order(plan: Plan, injected: list[Fault]) -> None:
    asyncio.run(check_producer(plan, injected))


@given(plans, faults("Produce", after=True))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_lost_responses_may_duplicate_but_never_lose_or_reorder_records(plan: Plan, injected: list[Fault]) -> None:
    asyncio.run(check_producer(plan, injected))


async def check_consumer(
    sizes: list[tuple[int, int]], moves: set[int], config: dict[str, object], injected: list[Fault]
) -> None:
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", PARTITIONS)
        logs = cluster.topics["t"].partitions
        for fault in injected:
            cluster.inject(fault.method, fault.code, times=fault.times)
        async with Consumer(cluster.bootstrap, **FAST, **config) as consumer:
            consumer.subscribe(["t"])
            read: dict[int, list[int]] = {partition: [] for partition in range(PARTITIONS)}
            for index, (partition, count) in enumerate(sizes):
                log = logs[partition]
                log.append(encode_batch([(None, b"x" * 50)] * count, timestamp_ms=1))
                cluster.appended.set()
                cluster.appended = asyncio.Event()
                if index in moves:
                    cluster.move_leader("t", partition, 3 - log.leader_id)
                with contextlib.suppress(KafkaError):
                    for record in await consumer.poll(0):
                        read[record.partition].append(record.offset)
            async with asyncio.timeout(60):
                while any(len(read[partition]) < logs[partition].end_offset for partition in read):
                    # A topic that several responses do not contain raises an error. The next poll continues.
                    with contextlib.suppress(KafkaError):
                        for record in await consumer.poll(500):
                            read[record.partition].append(record.offset)
            for partition, offsets in read.items():
                assert offsets == list(range(logs[partition].end_offset))


@given(
    st.lists(st.tuples(st.integers(0, PARTITIONS - 1), st.integers(1, 20)), min_size=1, max_size=60),
    st.sets(st.integers(0, 59), max_size=3),
    st.fixed_dictionaries(
        {
            "auto.offset.reset": st.just("earliest"),
            "max.poll.records": st.sampled_from([1, 7, 500]),
            "fetch.max.bytes": st.sampled_from([200, 3000, 1 << 20]),
            "max.partition.fetch.bytes": st.sampled_from([200, 2000, 1 << 20]),
            "fetch.max.wait.ms": st.just(20),
        }
    ),
    faults("Fetch", "ListOffsets", "OffsetsForLeaderEpoch", "Metadata"),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_consumers_read_each_record_once(
    sizes: list[tuple[int, int]], moves: set[int], config: dict[str, object], injected: list[Fault]
) -> None:
    asyncio.run(check_consumer(sizes, moves, config, injected))
