"""Idempotent batches: leaders return the first offset for duplicates, also after a leader change or restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kipmesh.core.errors import ErrorCode
from kipmesh.testing import produced_batch
from kipmesh.testing import until as eventually
from tests.unit.broker.broker_cluster import BrokerCluster, leader_of


def batch(sequence: int, *values: bytes, epoch: int = 0) -> bytes:
    return produced_batch(values or [b"v"], producer=(5, epoch, sequence))


async def test_leader_appends_duplicate_batch_once(cluster) -> None:
    topic_id = await cluster.create("once")
    log = cluster.brokers[1].hosted_replicas.get(topic_id, 0).log
    assert (await cluster.produce("once", batch(0, b"a", b"b"))).base_offset == 0
    assert (await cluster.produce("once", batch(2))).base_offset == 2
    for acks in (-1, 1):
        duplicate = await cluster.produce("once", batch(0, b"a", b"b"), acks=acks)
        assert (duplicate.error_code, duplicate.base_offset, duplicate.log_append_time_ms) == (0, 0, -1)
    assert log.log_end_offset == 3
    assert (await cluster.produce("once", batch(4))).error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert (await cluster.produce("once", batch(0, epoch=1))).base_offset == 3
    assert (await cluster.produce("once", batch(3))).error_code == ErrorCode.INVALID_PRODUCER_EPOCH


async def test_leader_acknowledges_concurrent_duplicates_with_same_offset(cluster) -> None:
    topic_id = await cluster.create("twice")
    for sequence in range(5):
        responses = await asyncio.gather(*[cluster.produce("twice", batch(sequence)) for _ in range(4)])
        assert [(response.error_code, response.base_offset) for response in responses] == [(0, sequence)] * 4
    leader = cluster.brokers[1].hosted_replicas.get(topic_id, 0)
    assert (leader.log.log_end_offset, leader.high_watermark) == (5, 5)


async def test_new_leader_detects_duplicates_of_batches_of_old_leader(cluster) -> None:
    topic_id = await cluster.create("moves")
    for sequence in range(8):
        assert (await cluster.produce("moves", batch(sequence))).base_offset == sequence
    await cluster.brokers[1].abort()
    leader = await leader_of(cluster, topic_id, (1,))
    for sequence in range(3, 8):
        response = await cluster.produce("moves", batch(sequence), via=leader)
        assert (response.error_code, response.base_offset) == (0, sequence)
    assert (await cluster.produce("moves", batch(8), via=leader)).base_offset == 8


async def test_restarted_broker_detects_duplicates_after_clean_stop_and_kill(cluster) -> None:
    topic_id = await cluster.create("alone", replication_factor=1, min_insync_replicas="1")
    (owner,) = [
        broker for broker, node in cluster.brokers.items() if (r := node.hosted_replicas.get(topic_id, 0)) and r.leader
    ]
    for sequence in range(6):
        assert (await cluster.produce("alone", batch(sequence), via=owner)).base_offset == sequence
    written = 6
    for stop in (cluster.brokers[owner].stop, None):
        await (stop() if stop else cluster.brokers[owner].abort())
        await cluster.start_broker(owner)
        await cluster.ready(owner)
        await eventually(
            lambda: (r := cluster.brokers[owner].hosted_replicas.get(topic_id, 0)) and r.leader is not None,
            "a leader after the restart",
        )
        for sequence in range(written - 5, written):
            response = await cluster.produce("alone", batch(sequence), via=owner)
            assert (response.error_code, response.base_offset) == (0, sequence), response
        assert (await cluster.produce("alone", batch(written), via=owner)).base_offset == written
        written += 1


async def test_broker_expires_state_of_idle_producers(tmp_path: Path) -> None:
    keys = {"producer.id.expiration.ms": 1, "producer.id.expiration.check.interval.ms": 20}
    cluster = BrokerCluster(tmp_path, **keys)
    await cluster.start()
    try:
        topic_id = await cluster.create("silent")
        await cluster.produce("silent", batch(0))
        states = cluster.brokers[1].hosted_replicas.get(topic_id, 0).log.producers.states
        await eventually(lambda: not len(states), "the producer state has expired")
        assert (await cluster.produce("silent", batch(70))).base_offset == 1
    finally:
        await cluster.stop()
