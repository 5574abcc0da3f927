"""Brokers that die and restart: acknowledged records survive, replicas converge, and topic ids keep topics apart."""

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
from tests.unit.broker.broker_cluster import BrokerCluster, eventually, leader_of


def batch(*values: bytes) -> bytes:
    return build(
        [(None, value) for value in values], base_offset=0, leader_epoch=-1, timestamp_ms=time.time_ns() // 1_000_000
    )


def log_bytes(cluster: BrokerCluster, broker: int, topic_id: bytes, partition: int = 0) -> bytes:
    log = cluster.brokers[broker].hosted_replicas.get(topic_id, partition).log
    return log.read(log.log_start_offset, 1 << 24, log.log_end_offset, True)


def values(records: bytes) -> list[bytes]:
    return [record.value for position, header in iterate(records) for record in read_records(records, position, header)]


async def acknowledged(cluster: BrokerCluster, topic: str, topic_id: bytes, value: bytes) -> None:
    """Produce a record, and retry like a client until it is acknowledged."""

    async with asyncio.timeout(20):
        while True:
            broker = await leader_of(cluster, topic_id)
            try:
                response = await cluster.produce(topic, batch(value), via=broker)
            except TransportError:
                response = None
            if response is not None and response.error_code == 0:
                return
            await asyncio.sleep(0.05)


async def in_sync(cluster: BrokerCluster, topic_id: bytes, *brokers: int) -> None:
    """Wait until the ISR is exactly `brokers` and their logs are equal byte for byte."""
    leader = await leader_of(cluster, topic_id)
    replica = cluster.brokers[leader].hosted_replicas.get(topic_id, 0)
    await eventually(lambda: replica.leader is not None and replica.leader.isr == set(brokers), f"ISR is {brokers}")
    await eventually(
        lambda: len({log_bytes(cluster, broker, topic_id) for broker in brokers}) == 1, "the replicas are identical"
    )


async def kill(cluster: BrokerCluster, broker: int) -> None:
    await cluster.brokers.pop(broker).abort()


async def restart(cluster: BrokerCluster, broker: int, **keys: Any) -> None:
    await cluster.start_broker(broker, **keys)
    await cluster.ready(broker)


async def power_cut(cluster: BrokerCluster) -> None:
    """Kill the controller, then all brokers, and restart the controller, which fences all brokers together."""
    await cluster.controllers.pop(100).abort()
    await asyncio.gather(*[kill(cluster, broker) for broker in (1, 2, 3)])
    await cluster.start_controllers()
    await eventually(
        lambda: all(broker.fenced for broker in cluster.controller.image.brokers.values()), "all brokers fenced"
    )


async def test_killed_follower_restarts_and_catches_up(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("follower")
    await acknowledged(cluster, "follower", topic_id, b"before")
    await kill(cluster, 2)
    for number in range(20):
        await acknowledged(cluster, "follower", topic_id, b"%d" % number)
    await restart(cluster, 2)
    await in_sync(cluster, topic_id, 1, 2, 3)
    assert values(log_bytes(cluster, 2, topic_id)) == [b"before", *(b"%d" % n for n in range(20))]


async def test_new_leader_serves_acknowledged_records_of_killed_leader(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("leader")
    for number in range(20):
        await acknowledged(cluster, "leader", topic_id, b"%d" % number)
    await kill(cluster, 1)
    for number in range(20, 30):
        await acknowledged(cluster, "leader", topic_id, b"%d" % number)
    await restart(cluster, 1)
    await in_sync(cluster, topic_id, 1, 2, 3)
    seen = values(log_bytes(cluster, 1, topic_id))
    assert [value for index, value in enumerate(seen) if value not in seen[:index]] == [b"%d" % n for n in range(30)]


async def test_acknowledged_records_survive_power_cut_of_all_nodes(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("power")
    for number in range(20):
        await acknowledged(cluster, "power", topic_id, b"%d" % number)
    await power_cut(cluster)
    for broker in (3, 2, 1):
        await cluster.start_broker(broker)
    await cluster.ready(1, 2, 3)
    await acknowledged(cluster, "power", topic_id, b"after")
    await in_sync(cluster, topic_id, 1, 2, 3)
    assert values(log_bytes(cluster, 3, topic_id)) == [*(b"%d" % n for n in range(20)), b"after"]


async def test_longest_log_is_elected_after_power_cut(cluster: BrokerCluster) -> None:
    """Two members of the last ISR lost unsynced records and register first. The third still becomes leader."""
    topic_id = await cluster.create("longest")
    for number in range(10):
        await acknowledged(cluster, "longest", topic_id, b"%d" % number)
    await power_cut(cluster)
    for broker in (1, 3):  # lose their unsynced tails
        (path,) = (cluster.directory / f"broker-{broker}").glob("longest-0/*.log")
        path.write_bytes(path.read_bytes()[: 3 * len(batch(b"0"))])
    await cluster.start_broker(1)
    await cluster.start_broker(3)
    await cluster.ready(1, 3)
    await asyncio.sleep(0.5)
    assert all(node.hosted_replicas.get(topic_id, 0).leader is None for node in cluster.brokers.values()), (
        "no leader before broker 2 registers"
    )
    async with AdminClient(f"127.0.0.1:{cluster.ports[1]}") as admin:
        async with asyncio.timeout(20):  # until brokers 1 and 3 have reported their log end offsets
            while (await admin.describe_topics(["longest"]))[0].partitions[0].waits_for != (2,):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    await restart(cluster, 2)
    assert await leader_of(cluster, topic_id) == 2
    await in_sync(cluster, topic_id, 1, 2, 3)
    assert values(log_bytes(cluster, 1, topic_id)) == [b"%d" % n for n in range(10)]


async def test_follower_truncates_records_missing_on_leader(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("diverged")
    for number in range(3):
        await acknowledged(cluster, "diverged", topic_id, b"%d" % number)
    await kill(cluster, 3)
    manager = LogManager(
        RealFileSystem(),
        (str(cluster.directory / "broker-3"),),
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
    await kill(cluster, 1)
    leader = await leader_of(cluster, topic_id)
    for number in range(3, 5):  # the epoch of the new leader exposes the phantom records
        assert (await cluster.produce("diverged", batch(b"%d" % number), via=leader, acks=1)).error_code == 0
    await restart(cluster, 3)
    await restart(cluster, 1)
    await in_sync(cluster, topic_id, 1, 2, 3)
    assert values(log_bytes(cluster, 3, topic_id)) == [b"%d" % n for n in range(5)]


async def test_leader_refuses_writes_below_min_isr_until_isr_grows(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("minisr")
    await kill(cluster, 2)
    await kill(cluster, 3)
    replica = cluster.brokers[1].hosted_replicas.get(topic_id, 0)
    await eventually(lambda: replica.leader.isr == {1}, "the ISR is the leader")
    response = await cluster.produce("minisr", batch(b"x"))
    assert response.error_code == ErrorCode.NOT_ENOUGH_REPLICAS
    assert replica.log.log_end_offset == 0
    assert (await cluster.produce("minisr", batch(b"y"), acks=1)).error_code == 0
    assert (await cluster.fetch("minisr", 0)).records == b""  # not committed
    await restart(cluster, 2)
    await acknowledged(cluster, "minisr", topic_id, b"z")
    assert values((await cluster.fetch("minisr", 0)).records) == [b"y", b"z"]


async def test_pending_produce_fails_if_isr_shrinks_below_min_isr(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("shrinks")
    for broker in (2, 3):  # stop fetching, so that the write stays pending
        manager = cluster.brokers[broker].parts.replica_manager
        manager._fetchers[1].unfollow(cluster.brokers[broker].hosted_replicas.get(topic_id, 0))
    writing = asyncio.create_task(cluster.produce("shrinks", batch(b"x"), timeout_ms=60_000))
    replica = cluster.brokers[1].hosted_replicas.get(topic_id, 0)
    await eventually(lambda: replica.log.log_end_offset == 1, "the record is appended")
    await kill(cluster, 2)
    await kill(cluster, 3)
    assert (await writing).error_code == ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND


async def test_recreated_topic_does_not_use_log_of_old_topic_id(cluster: BrokerCluster) -> None:
    old_id = await cluster.create("again")
    await acknowledged(cluster, "again", old_id, b"old")
    await kill(cluster, 3)
    await eventually(
        lambda: cluster.controller.image.brokers[3].fenced, "broker 3 is fenced and gets no replica of the new topic"
    )
    await cluster.call(
        1, "DeleteTopics", m.DeleteTopicsRequest([m.DeleteTopicState("again")], timeout_ms=10_000), "Admin"
    )
    for broker in (1, 2):
        await eventually(
            lambda b=broker: not cluster.brokers[b].hosted_replicas.image.topic_by_name("again"), "the topic is deleted"
        )
    new_id = await cluster.create("again", replication_factor=2)
    assert new_id != old_id
    await acknowledged(cluster, "again", new_id, b"new")
    await restart(cluster, 3)
    assert (await cluster.fetch("again", 0, topic_id=old_id)).error_code == ErrorCode.UNKNOWN_TOPIC_ID
    leader = await leader_of(cluster, new_id)
    assert values((await cluster.fetch("again", 0, via=leader)).records) == [b"new"]
    third = cluster.brokers[3].hosted_replicas
    assert third.get(old_id, 0) is None


async def test_cleanly_stopped_leader_hands_over_and_rejoins_isr(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("clean")
    await acknowledged(cluster, "clean", topic_id, b"1")
    await cluster.brokers.pop(1).stop()
    assert await leader_of(cluster, topic_id) in (2, 3)
    await acknowledged(cluster, "clean", topic_id, b"2")
    await restart(cluster, 1)
    await in_sync(cluster, topic_id, 1, 2, 3)
    assert values(log_bytes(cluster, 1, topic_id)) == [b"1", b"2"]


async def test_cleanly_stopped_cluster_restarts_with_all_records(cluster: BrokerCluster) -> None:
    topic_id = await cluster.create("rest")
    await acknowledged(cluster, "rest", topic_id, b"1")
    await asyncio.gather(*(cluster.brokers.pop(broker).stop() for broker in (1, 2, 3)))
    await cluster.controller.stop()
    await cluster.start_controller()
    for broker in (1, 2, 3):
        await cluster.start_broker(broker)
    await cluster.ready(1, 2, 3)
    await acknowledged(cluster, "rest", topic_id, b"2")
    await in_sync(cluster, topic_id, 1, 2, 3)
    assert values(log_bytes(cluster, 2, topic_id)) == [b"1", b"2"]


async def test_high_watermark_advances_without_fenced_follower(cluster: BrokerCluster) -> None:
    """The follower was caught up. The high watermark must not wait for it until replica.lag.time.max.ms has passed."""
    topic_id = await cluster.create("fenced")
    await acknowledged(cluster, "fenced", topic_id, b"1")
    await kill(cluster, 3)
    await acknowledged(cluster, "fenced", topic_id, b"2")  # in less than replica.lag.time.max.ms (30 s)


async def test_recreated_topic_does_not_inherit_old_configs(cluster: BrokerCluster) -> None:
    await cluster.create("fresh", retention_ms="1000", min_insync_replicas="3")
    await cluster.call(
        1, "DeleteTopics", m.DeleteTopicsRequest([m.DeleteTopicState("fresh")], timeout_ms=10_000), "Admin"
    )
    for node in cluster.brokers.values():
        await eventually(
            lambda node=node: not node.hosted_replicas.image.topic_by_name("fresh"), "the topic is deleted"
        )
    topic_id = await cluster.create("fresh")
    replica = cluster.brokers[1].hosted_replicas.get(topic_id, 0)
    assert replica.log.config.retention_ms == TopicConfig().retention_ms
    assert replica.leader.min_insync_replicas == 2


async def test_deleting_topic_during_fsync_keeps_broker_running(cluster: BrokerCluster) -> None:
    await cluster.create("kept")
    await cluster.create("gone", flush_messages="1")
    writing = [asyncio.create_task(cluster.produce("gone", batch(b"x"))) for _ in range(20)]
    await cluster.call(
        1, "DeleteTopics", m.DeleteTopicsRequest([m.DeleteTopicState("gone")], timeout_ms=10_000), "Admin"
    )
    await asyncio.gather(*writing)
    assert (await cluster.produce("kept", batch(b"x"))).error_code == 0
    assert not any(node.failed.done() for node in cluster.brokers.values())


async def test_broker_keeps_log_missing_from_metadata_as_stray(cluster: BrokerCluster) -> None:
    await cluster.create("named")
    await kill(cluster, 3)
    manager = LogManager(
        RealFileSystem(),
        (str(cluster.directory / "broker-3"),),
        cluster_id="broker-tests",
        node_id=3,
        defaults=TopicConfig(),
    )
    manager.load(0)
    manager.create("stranger", 0, b"s" * 16, TopicConfig(), 0).append_as_follower(assign(batch(b"x"), 0, 0), 0)
    manager.abandon()
    await restart(cluster, 3)
    await eventually(
        lambda: list((cluster.directory / "broker-3").glob("stranger-0.*-stray")), "the log is kept as stray"
    )
