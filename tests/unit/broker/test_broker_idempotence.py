"""Idempotent batches over a mesh: duplicates are answered with their first place, by every later leader too."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kipmesh.core.errors import ErrorCode
from kipmesh.testing import produced_batch
from kipmesh.testing import until as eventually
from tests.unit.broker.conftest_broker import Mesh, leader_of


def batch(sequence: int, *values: bytes, epoch: int = 0) -> bytes:
    return produced_batch(values or [b"v"], producer=(5, epoch, sequence))


async def test_a_batch_that_comes_again_is_written_once(mesh) -> None:
    topic_id = await mesh.create("once")
    log = mesh.brokers[1].hosted_replicas.get(topic_id, 0).log
    assert (await mesh.produce("once", batch(0, b"a", b"b"))).base_offset == 0
    assert (await mesh.produce("once", batch(2))).base_offset == 2
    for acks in (-1, 1):
        again = await mesh.produce("once", batch(0, b"a", b"b"), acks=acks)
        assert (again.error_code, again.base_offset, again.log_append_time_ms) == (0, 0, -1)
    assert log.log_end_offset == 3
    assert (await mesh.produce("once", batch(4))).error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert (await mesh.produce("once", batch(0, epoch=1))).base_offset == 3
    assert (await mesh.produce("once", batch(3))).error_code == ErrorCode.INVALID_PRODUCER_EPOCH


async def test_a_batch_that_comes_twice_at_a_time_is_acknowledged_twice(mesh) -> None:
    topic_id = await mesh.create("twice")
    for sequence in range(5):
        answers = await asyncio.gather(*[mesh.produce("twice", batch(sequence)) for _ in range(4)])
        assert [(answer.error_code, answer.base_offset) for answer in answers] == [(0, sequence)] * 4
    leader = mesh.brokers[1].hosted_replicas.get(topic_id, 0)
    assert (leader.log.log_end_offset, leader.high_watermark) == (5, 5)


async def test_the_next_leader_knows_the_batches_of_the_one_before(mesh) -> None:
    topic_id = await mesh.create("moves")
    for sequence in range(8):
        assert (await mesh.produce("moves", batch(sequence))).base_offset == sequence
    await mesh.brokers[1].abort()
    leader = await leader_of(mesh, topic_id, (1,))
    for sequence in range(3, 8):
        answer = await mesh.produce("moves", batch(sequence), via=leader)
        assert (answer.error_code, answer.base_offset) == (0, sequence)
    assert (await mesh.produce("moves", batch(8), via=leader)).base_offset == 8


async def test_a_broker_that_stopped_well_or_not_knows_them_when_it_is_back(mesh) -> None:
    topic_id = await mesh.create("alone", replication_factor=1, min_insync_replicas="1")
    (owner,) = [
        broker for broker, node in mesh.brokers.items() if (r := node.hosted_replicas.get(topic_id, 0)) and r.leader
    ]
    for sequence in range(6):
        assert (await mesh.produce("alone", batch(sequence), via=owner)).base_offset == sequence
    written = 6
    for stop in (mesh.brokers[owner].stop, None):
        await (stop() if stop else mesh.brokers[owner].abort())
        await mesh.start_broker(owner)
        await mesh.ready(owner)
        await eventually(
            lambda: (r := mesh.brokers[owner].hosted_replicas.get(topic_id, 0)) and r.leader is not None, "leads again"
        )
        for sequence in range(written - 5, written):
            answer = await mesh.produce("alone", batch(sequence), via=owner)
            assert (answer.error_code, answer.base_offset) == (0, sequence), answer
        assert (await mesh.produce("alone", batch(written), via=owner)).base_offset == written
        written += 1


async def test_producers_that_are_silent_are_forgotten(tmp_path: Path) -> None:
    keys = {"producer.id.expiration.ms": 1, "producer.id.expiration.check.interval.ms": 20}
    mesh = Mesh(tmp_path, **keys)
    await mesh.start()
    try:
        topic_id = await mesh.create("silent")
        await mesh.produce("silent", batch(0))
        states = mesh.brokers[1].hosted_replicas.get(topic_id, 0).log.producers.states
        await eventually(lambda: not len(states), "the producer is forgotten")
        assert (await mesh.produce("silent", batch(70))).base_offset == 1
    finally:
        await mesh.stop()
