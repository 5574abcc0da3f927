"""Faults that `kipmesh faults` injects, as clients that others wrote see them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

import confluent_kafka
import pytest

from kipmesh.client import NewTopic, sync
from kipmesh.cluster import LocalCluster
from kipmesh.core.errors import ErrorCode, KafkaError
from tests.command import run_command

pytestmark = pytest.mark.timeout(300)


CONFIG = {"fault.injection.enable": "true", "broker.session.timeout.ms": "120000"}
"""Errors are those that are injected: a machine that stands still for a while takes no leader away."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(mode="single", followers=0, config=CONFIG) as it:
        yield it


@pytest.fixture
def topic(cluster: LocalCluster) -> str:
    name = f"topic-{secrets.token_hex(4)}"
    with sync.AdminClient(cluster.bootstrap) as admin:
        admin.create_topics([NewTopic(name, 1, 1)])
    return name


def _faults(cluster: LocalCluster, *arguments: str) -> str:
    done = run_command("faults", *arguments, "--bootstrap", cluster.bootstrap)
    done.check_returncode()
    return done.stdout


def _produce(cluster: LocalCluster, topic: str, **config: Any) -> list[Any]:
    """The errors with which one record ends."""
    ends: list[Any] = []
    producer = confluent_kafka.Producer({"bootstrap.servers": cluster.kafka_bootstrap, **config})
    producer.produce(topic, b"value", on_delivery=lambda error, _: ends.append(error))
    assert producer.flush(60) == 0
    return ends


def test_injected_error_ends_after_its_times(cluster: LocalCluster, topic: str) -> None:
    _faults(cluster, "inject", "--api", "Produce", "--error", "NOT_ENOUGH_REPLICAS", "--times", "3", "--client-id", "a")
    listed = _faults(cluster, "list")
    assert "NOT_ENOUGH_REPLICAS" in listed
    [error] = _produce(cluster, topic, **{"client.id": "a", "retries": 0})
    assert error.code() == confluent_kafka.KafkaError.NOT_ENOUGH_REPLICAS
    assert _produce(cluster, topic, **{"client.id": "b", "retries": 0}) == [None]
    assert _produce(cluster, topic, **{"client.id": "a", "retries": 10}) == [None]  # two more, and then it is over
    assert "NOT_ENOUGH" not in _faults(cluster, "list")


def test_a_consumer_goes_on_after_errors_delays_and_broken_connections(cluster: LocalCluster, topic: str) -> None:
    for more in (("--error", "OFFSET_NOT_AVAILABLE", "--times", "3"), ("--drop-connection",), ("--delay-ms", "300")):
        _faults(cluster, "inject", "--api", "Fetch", *more)
    assert _produce(cluster, topic) == [None]
    began = time.monotonic()
    consumer = confluent_kafka.Consumer({"bootstrap.servers": cluster.kafka_bootstrap, "group.id": "g"})
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    message = None
    while message is None or message.error() is not None:
        assert time.monotonic() - began < 60
        message = consumer.poll(1)
    assert message.value() == b"value"
    assert time.monotonic() - began >= 0.3
    consumer.close()
    assert _faults(cluster, "clear").endswith(": 0 cleared\n")  # all of them acted


def test_faults_are_refused_unless_enabled() -> None:
    with LocalCluster(mode="single", followers=0) as cluster:
        done = run_command("faults", "list", "--bootstrap", cluster.bootstrap)
    assert done.returncode == 1
    assert "fault.injection.enable is false" in done.stderr


def test_admin_client_injects_lists_and_clears_faults(cluster: LocalCluster) -> None:
    from kipmesh.client import AdminClient
    from kipmesh.messages import InjectedFault

    async def work() -> None:
        async with AdminClient(cluster.bootstrap) as admin:
            [(broker, number)] = (
                await admin.inject_fault(InjectedFault(api_name="Fetch", delay_ms=1, times=1))
            ).items()
            assert [one.fault_id for one in (await admin.list_faults(broker))[broker]] == [number]
            assert await admin.clear_faults() == {broker: 1}
            with pytest.raises(KafkaError) as refused:
                await admin.inject_fault(InjectedFault(api_name="fetch", delay_ms=1, times=1))
            assert refused.value.code == ErrorCode.INVALID_REQUEST

    import asyncio

    asyncio.run(work())
