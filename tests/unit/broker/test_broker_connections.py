"""A broker's heartbeat stream between live nodes: its process dies, its connection breaks, it stops cleanly."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kipmesh.core.record_batch import build
from kipmesh.transport.grpc.client import Connection
from tests.unit.broker.conftest_broker import Mesh, eventually, leader_of


@pytest.fixture
async def patient(tmp_path: Path) -> AsyncIterator[Mesh]:
    """A mesh that fences nobody for silence while a test runs."""
    it = Mesh(tmp_path, **{"broker.session.timeout.ms": 60_000, "shutdown.grace.ms": 60_000})
    await it.start()
    yield it
    await it.stop()


@pytest.fixture
async def very_patient(tmp_path: Path) -> AsyncIterator[Mesh]:
    """One that gives who has lost its connection the time that a slow machine may take for another."""
    it = Mesh(tmp_path)
    it.controller_keys["broker.connection.loss.timeout.ms"] = 15_000
    await it.start()
    yield it
    await it.stop()


def batch(value: bytes) -> bytes:
    return build([(None, value)], base_offset=0, leader_epoch=-1, timestamp_ms=1)


def lost(mesh: Mesh) -> float | None:
    return mesh.controller.registry.get_sample_value("kipmesh_controller_lost_brokers_total")


def new_stream(connection: Connection, old: list[Any]) -> Any:
    """The stream of heartbeats, while it rests, if it is none of the old ones."""
    resting = connection._idle_streams.get(("Controller", "BrokerHeartbeatStream"), [])
    return next((stream for stream in resting if stream not in old), None)


async def test_a_leader_that_dies_is_followed_by_another_at_once(patient: Mesh) -> None:
    topic_id = await patient.create("t")
    assert (await patient.produce("t", batch(b"before"))).error_code == 0
    began = time.monotonic()
    await patient.brokers.pop(1).abort()
    leader = await leader_of(patient, topic_id)
    assert (await patient.produce("t", batch(b"after"), via=leader)).error_code == 0
    assert time.monotonic() - began < 50  # not 60
    await eventually(lambda: lost(patient) == 1, "it is counted")


async def test_a_broker_that_died_comes_back_without_waiting_for_its_session(patient: Mesh) -> None:
    await patient.create("t")
    await patient.brokers.pop(1).abort()
    await patient.start_broker(1)
    await patient.ready(1)


async def test_a_stream_that_breaks_is_opened_again_and_costs_nothing(very_patient: Mesh) -> None:
    patient = very_patient
    node = patient.brokers[2]
    epoch = patient.controller.image.brokers[2].broker_epoch
    connection = node.parts.pool.get(node.parts.channel.voter.address)
    streams: list[Any] = [None]
    for _ in range(3):
        streams.append(await eventually(lambda: new_stream(connection, streams), "another stream at rest"))
        streams[-1].cancel()
    await eventually(lambda: new_stream(connection, streams), "another stream at rest")
    assert patient.controller.image.brokers[2].broker_epoch == epoch
    assert lost(patient) == 0


async def test_a_clean_stop_is_no_loss(patient: Mesh) -> None:
    await patient.create("t")
    await patient.brokers.pop(1).stop()
    assert patient.controller.image.brokers[1].fenced
    await patient.brokers.pop(3).abort()
    await eventually(lambda: patient.controller.image.brokers[3].fenced, "broker 3 fenced")
    await eventually(lambda: lost(patient) == 1, "it is counted")
    assert lost(patient) == 1
