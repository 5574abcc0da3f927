"""The heartbeat stream of a broker that dies, loses its connection, or stops cleanly."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kipmesh.core.record_batch import build
from kipmesh.transport.grpc.client import Connection
from tests.unit.broker.broker_cluster import BrokerCluster, eventually, leader_of


@pytest.fixture
async def long_session(tmp_path: Path) -> AsyncIterator[BrokerCluster]:
    """A cluster whose broker sessions outlast the test."""
    cluster = BrokerCluster(tmp_path, **{"broker.session.timeout.ms": 60_000, "shutdown.grace.ms": 60_000})
    await cluster.start()
    yield cluster
    await cluster.stop()


@pytest.fixture
async def long_connection_loss(tmp_path: Path) -> AsyncIterator[BrokerCluster]:
    """A cluster whose controller waits long for a lost connection, so that a slow machine can reconnect."""
    cluster = BrokerCluster(tmp_path)
    cluster.controller_keys["broker.connection.loss.timeout.ms"] = 15_000
    await cluster.start()
    yield cluster
    await cluster.stop()


def batch(value: bytes) -> bytes:
    return build([(None, value)], base_offset=0, leader_epoch=-1, timestamp_ms=1)


def lost(cluster: BrokerCluster) -> float | None:
    return cluster.controller.registry.get_sample_value("kipmesh_controller_lost_brokers_total")


def new_stream(connection: Connection, old: list[Any]) -> Any:
    """Return the idle heartbeat stream, or None if it is one of the old streams."""
    idle = connection._idle_streams.get(("Controller", "BrokerHeartbeatStream"), [])
    return next((stream for stream in idle if stream not in old), None)


async def test_controller_elects_leader_before_session_of_dead_leader_expires(long_session: BrokerCluster) -> None:
    topic_id = await long_session.create("t")
    assert (await long_session.produce("t", batch(b"before"))).error_code == 0
    began = time.monotonic()
    await long_session.brokers.pop(1).abort()
    leader = await leader_of(long_session, topic_id)
    assert (await long_session.produce("t", batch(b"after"), via=leader)).error_code == 0
    assert time.monotonic() - began < 50  # the session lasts 60 s
    await eventually(lambda: lost(long_session) == 1, "the lost broker is counted")


async def test_killed_broker_restarts_before_its_session_expires(long_session: BrokerCluster) -> None:
    await long_session.create("t")
    await long_session.brokers.pop(1).abort()
    await long_session.start_broker(1)
    await long_session.ready(1)


async def test_broker_reopens_broken_heartbeat_stream_and_keeps_its_epoch(long_connection_loss: BrokerCluster) -> None:
    cluster = long_connection_loss
    node = cluster.brokers[2]
    epoch = cluster.controller.image.brokers[2].broker_epoch
    connection = node.parts.pool.get(node.parts.channel.voter.address)
    streams: list[Any] = [None]
    for _ in range(3):
        streams.append(await eventually(lambda: new_stream(connection, streams), "a new idle stream"))
        streams[-1].cancel()
    await eventually(lambda: new_stream(connection, streams), "a new idle stream")
    assert cluster.controller.image.brokers[2].broker_epoch == epoch
    assert lost(cluster) == 0


async def test_clean_stop_is_not_counted_as_lost_broker(long_session: BrokerCluster) -> None:
    await long_session.create("t")
    await long_session.brokers.pop(1).stop()
    assert long_session.controller.image.brokers[1].fenced
    await long_session.brokers.pop(3).abort()
    await eventually(lambda: long_session.controller.image.brokers[3].fenced, "broker 3 fenced")
    await eventually(lambda: lost(long_session) == 1, "the lost broker is counted")
    assert lost(long_session) == 1
