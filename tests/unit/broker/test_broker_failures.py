"""A mesh that loses nodes: what was acknowledged is there, replicas end identical, ids are never confused."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from kipmesh import messages as m
from kipmesh.client import AdminClient
from kipmesh.core.config import TopicConfig
from kipmesh.core.errors import ErrorCode
from kipmesh.core.record_batch import assign, build, iterate, read_records
from kipmesh.storage.fs import RealFileSystem
from kipmesh.storage.log_manager import LogManager
from kipmesh.transport.grpc.client import TransportError
from tests.unit.broker.conftest_broker import Mesh, eventually, leader_of


def batch(*values: bytes) -> bytes:
    return build(
        [(None, value) for value in values], base_offset=0, leader_epoch=-1, timestamp_ms=time.time_ns() // 1_000_000
    )


def log_bytes(mesh: Mesh, broker: int, topic_id: bytes, partition: int = 0) -> bytes:
    log = mesh.brokers[broker].hosted_replicas.get(topic_id, partition).log
    return log.read(log.log_start_offset, 1 << 24, log.log_end_offset, True)


def values(records: bytes) -> list[bytes]:
    return [record.value for position, header in iterate(records) for record in read_records(records, position, header)]


async def acknowledged(mesh: Mesh, topic: str, topic_id: bytes, value: bytes) -> None:
    """Produce until it is acknowledged, as a client does."""

    async with asyncio.timeout(20):
        while True:
            broker = await leader_of(mesh, topic_id)
            try:
                answer = await mesh.produce(topic, batch(value), via=broker)
            except TransportError:
                answer = None
            if answer is not None and answer.error_code == 0:
                return
            await asyncio.sleep(0.05)


async def in_sync(mesh: Mesh, topic_id: bytes, *brokers: int) -> None:
    """Until the leader has exactly these in its ISR and their logs are equal byte for byte."""
    leader = await leader_of(mesh, topic_id)
    replica = mesh.brokers[leader].hosted_replicas.get(topic_id, 0)
    await eventually(lambda: replica.leader is not None and replica.leader.isr == set(brokers), f"ISR is {brokers}")
    await eventually(
        lambda: len({log_bytes(mesh, broker, topic_id) for broker in brokers}) == 1, "the replicas are identical"
    )


async def kill(mesh: Mesh, broker: int) -> None:
    await mesh.brokers.pop(broker).abort()


async def restart(mesh: Mesh, broker: int, **keys: Any) -> None:
    await mesh.start_broker(broker, **keys)
    await mesh.ready(broker)


async def power_cut(mesh: Mesh) -> None:
    """All processes end, the controller's first: it fences nobody before all brokers are gone, and then all at once."""
    await mesh.controllers.pop(100).abort()
    await asyncio.gather(*[kill(mesh, broker) for broker in (1, 2, 3)])
    await mesh.start_controllers()
    await eventually(lambda: all(one.fenced for one in mesh.controller.image.brokers.values()), "all are fenced")


async def test_a_killed_follower_comes_back_identical(mesh: Mesh) -> None:
    topic_id = await mesh.create("follower")
    await acknowledged(mesh, "follower", topic_id, b"before")
    await kill(mesh, 2)
    for number in range(20):
        await acknowledged(mesh, "follower", topic_id, b"%d" % number)
    await restart(mesh, 2)
    await in_sync(mesh, topic_id, 1, 2, 3)
    assert values(log_bytes(mesh, 2, topic_id)) == [b"before", *(b"%d" % n for n in range(20))]


async def test_a_killed_leader_s_acknowledged_records_are_served_by_the_next(mesh: Mesh) -> None:
    topic_id = await mesh.create("leader")
    for number in range(20):
        await acknowledged(mesh, "leader", topic_id, b"%d" % number)
    await kill(mesh, 1)
    for number in range(20, 30):
        await acknowledged(mesh, "leader", topic_id, b"%d" % number)
    await restart(mesh, 1)
    await in_sync(mesh, topic_id, 1, 2, 3)
    seen = values(log_bytes(mesh, 1, topic_id))
    assert [value for index, value in enumerate(seen) if value not in seen[:index]] == [b"%d" % n for n in range(30)]


async def test_a_power_cut_of_everything_loses_nothing(mesh: Mesh) -> None:
    topic_id = await mesh.create("power")
    for number in range(20):
        await acknowledged(mesh, "power", topic_id, b"%d" % number)
    await power_cut(mesh)
    for broker in (3, 2, 1):
        await mesh.start_broker(broker)
    await mesh.ready(1, 2, 3)
    await acknowledged(mesh, "power", topic_id, b"after")
    await in_sync(mesh, topic_id, 1, 2, 3)
    assert values(log_bytes(mesh, 3, topic_id)) == [*(b"%d" % n for n in range(20)), b"after"]


async def test_after_a_power_cut_the_longest_log_leads(mesh: Mesh) -> None:
    """One member of the last ISR lost what it had not synced; whoever registers first, the longest log wins."""
    topic_id = await mesh.create("longest")
    for number in range(10):
        await acknowledged(mesh, "longest", topic_id, b"%d" % number)
    await power_cut(mesh)
    for broker in (1, 3):  # both lose their unsynced tails
        (path,) = (mesh.folder / f"broker-{broker}").glob("longest-0/*.log")
        path.write_bytes(path.read_bytes()[: 3 * len(batch(b"0"))])
    await mesh.start_broker(1)
    await mesh.start_broker(3)
    await mesh.ready(1, 3)
    await asyncio.sleep(0.5)
    assert all(node.hosted_replicas.get(topic_id, 0).leader is None for node in mesh.brokers.values()), (
        "2 is waited for"
    )
    async with AdminClient(f"127.0.0.1:{mesh.ports[1]}") as admin:
        async with asyncio.timeout(20):  # until the others have told the ends of their logs
            while (await admin.describe_topics(["longest"]))[0].partitions[0].waits_for != (2,):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    await restart(mesh, 2)
    assert await leader_of(mesh, topic_id) == 2
    await in_sync(mesh, topic_id, 1, 2, 3)
    assert values(log_bytes(mesh, 1, topic_id)) == [b"%d" % n for n in range(10)]


async def test_a_follower_truncates_what_the_leader_never_had(mesh: Mesh) -> None:
    topic_id = await mesh.create("diverged")
    for number in range(3):
        await acknowledged(mesh, "diverged", topic_id, b"%d" % number)
    await kill(mesh, 3)
    manager = LogManager(
        RealFileSystem(),
        (str(mesh.folder / "broker-3"),),
        cluster_id="broker-tests",
        node_id=3,
        defaults=TopicConfig(),
    )
    manager.load(0)
    log = manager.get("diverged", 0)
    assert log is not None
    for offset in (3, 4, 5):
        log.append_as_follower(assign(batch(b"phantom"), offset, 0), 0)
    manager.abandon()
    await kill(mesh, 1)
    leader = await leader_of(mesh, topic_id)
    for number in range(3, 5):  # the next leader's own epoch tells the truth from the phantoms
        assert (await mesh.produce("diverged", batch(b"%d" % number), via=leader, acks=1)).error_code == 0
    await restart(mesh, 3)
    await restart(mesh, 1)
    await in_sync(mesh, topic_id, 1, 2, 3)
    assert values(log_bytes(mesh, 3, topic_id)) == [b"%d" % n for n in range(5)]


async def test_below_min_isr_writes_are_refused_and_then_go_on(mesh: Mesh) -> None:
    topic_id = await mesh.create("minisr")
    await kill(mesh, 2)
    await kill(mesh, 3)
    replica = mesh.brokers[1].hosted_replicas.get(topic_id, 0)
    await eventually(lambda: replica.leader.isr == {1}, "the ISR is the leader alone")
    answer = await mesh.produce("minisr", batch(b"x"))
    assert answer.error_code == ErrorCode.NOT_ENOUGH_REPLICAS
    assert replica.log.log_end_offset == 0
    assert (await mesh.produce("minisr", batch(b"y"), acks=1)).error_code == 0
    assert (await mesh.fetch("minisr", 0)).records == b""  # not committed
    await restart(mesh, 2)
    await acknowledged(mesh, "minisr", topic_id, b"z")
    assert values((await mesh.fetch("minisr", 0)).records) == [b"y", b"z"]


async def test_an_isr_that_shrinks_meanwhile_fails_what_waits(mesh: Mesh) -> None:
    topic_id = await mesh.create("shrinks")
    for broker in (2, 3):  # they hang, so that it waits for them
        manager = mesh.brokers[broker].parts.replica_manager
        manager._fetchers[1].unfollow(mesh.brokers[broker].hosted_replicas.get(topic_id, 0))
    writing = asyncio.create_task(mesh.produce("shrinks", batch(b"x"), timeout_ms=60_000))
    replica = mesh.brokers[1].hosted_replicas.get(topic_id, 0)
    await eventually(lambda: replica.log.log_end_offset == 1, "it is appended")
    await kill(mesh, 2)
    await kill(mesh, 3)
    assert (await writing).error_code == ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND


async def test_a_recreated_topic_never_meets_its_old_log(mesh: Mesh) -> None:
    old_id = await mesh.create("again")
    await acknowledged(mesh, "again", old_id, b"old")
    await kill(mesh, 3)
    await eventually(lambda: mesh.controller.image.brokers[3].fenced, "it gets no replica of the next topic")
    await mesh.call(1, "DeleteTopics", m.DeleteTopicsRequest([m.DeleteTopicState("again")], timeout_ms=10_000), "Admin")
    for broker in (1, 2):
        await eventually(
            lambda b=broker: not mesh.brokers[b].hosted_replicas.image.topic_by_name("again"), "it is gone"
        )
    new_id = await mesh.create("again", replication_factor=2)
    assert new_id != old_id
    await acknowledged(mesh, "again", new_id, b"new")
    await restart(mesh, 3)
    assert (await mesh.fetch("again", 0, topic_id=old_id)).error_code == ErrorCode.UNKNOWN_TOPIC_ID
    leader = await leader_of(mesh, new_id)
    assert values((await mesh.fetch("again", 0, via=leader)).records) == [b"new"]
    third = mesh.brokers[3].hosted_replicas
    assert third.get(old_id, 0) is None


async def test_a_clean_stop_keeps_the_isr_and_hands_over(mesh: Mesh) -> None:
    topic_id = await mesh.create("clean")
    await acknowledged(mesh, "clean", topic_id, b"1")
    await mesh.brokers.pop(1).stop()
    assert await leader_of(mesh, topic_id) in (2, 3)
    await acknowledged(mesh, "clean", topic_id, b"2")
    await restart(mesh, 1)
    await in_sync(mesh, topic_id, 1, 2, 3)
    assert values(log_bytes(mesh, 1, topic_id)) == [b"1", b"2"]


async def test_everything_stopped_cleanly_comes_back_with_its_leaders(mesh: Mesh) -> None:
    topic_id = await mesh.create("rest")
    await acknowledged(mesh, "rest", topic_id, b"1")
    await asyncio.gather(*(mesh.brokers.pop(broker).stop() for broker in (1, 2, 3)))
    await mesh.controller.stop()
    await mesh.start_controller()
    for broker in (1, 2, 3):
        await mesh.start_broker(broker)
    await mesh.ready(1, 2, 3)
    await acknowledged(mesh, "rest", topic_id, b"2")
    await in_sync(mesh, topic_id, 1, 2, 3)
    assert values(log_bytes(mesh, 2, topic_id)) == [b"1", b"2"]


async def test_a_fenced_follower_is_not_waited_for(mesh: Mesh) -> None:
    """Its last fetch made it caught up; the high watermark must not wait for it for replica.lag.time.max.ms."""
    topic_id = await mesh.create("fenced")
    await acknowledged(mesh, "fenced", topic_id, b"1")
    await kill(mesh, 3)
    await acknowledged(mesh, "fenced", topic_id, b"2")  # in less than the 30 s that a laggard is waited for


async def test_a_recreated_topic_does_not_inherit_the_old_one_s_configuration(mesh: Mesh) -> None:
    await mesh.create("fresh", retention_ms="1000", min_insync_replicas="3")
    await mesh.call(1, "DeleteTopics", m.DeleteTopicsRequest([m.DeleteTopicState("fresh")], timeout_ms=10_000), "Admin")
    for node in mesh.brokers.values():
        await eventually(lambda node=node: not node.hosted_replicas.image.topic_by_name("fresh"), "it is gone")
    topic_id = await mesh.create("fresh")
    replica = mesh.brokers[1].hosted_replicas.get(topic_id, 0)
    assert replica.log.config.retention_ms == TopicConfig().retention_ms
    assert replica.leader.min_insync_replicas == 2


async def test_a_log_that_is_deleted_while_it_waits_for_an_fsync_hurts_nobody(mesh: Mesh) -> None:
    await mesh.create("kept")
    await mesh.create("gone", flush_messages="1")
    writing = [asyncio.create_task(mesh.produce("gone", batch(b"x"))) for _ in range(20)]
    await mesh.call(1, "DeleteTopics", m.DeleteTopicsRequest([m.DeleteTopicState("gone")], timeout_ms=10_000), "Admin")
    await asyncio.gather(*writing)
    assert (await mesh.produce("kept", batch(b"x"))).error_code == 0
    assert not any(node.failed.done() for node in mesh.brokers.values())


async def test_a_log_that_the_metadata_does_not_name_is_kept_aside(mesh: Mesh) -> None:
    await mesh.create("named")
    await kill(mesh, 3)
    manager = LogManager(
        RealFileSystem(), (str(mesh.folder / "broker-3"),), cluster_id="broker-tests", node_id=3, defaults=TopicConfig()
    )
    manager.load(0)
    manager.create("stranger", 0, b"s" * 16, TopicConfig(), 0).append_as_follower(assign(batch(b"x"), 0, 0), 0)
    manager.abandon()
    await restart(mesh, 3)
    await eventually(lambda: list((mesh.folder / "broker-3").glob("stranger-0.*-stray")), "it is kept")
