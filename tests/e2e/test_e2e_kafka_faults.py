"""Faults injected by `kipmesh faults` and observed by third-party clients."""

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
"""A long session, so that a slow machine does not move leaders: only injected errors occur."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(mode="single", followers=0, config=CONFIG) as running:
        yield running


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
    """Produce one record and return the errors of its delivery reports."""
    errors: list[Any] = []
    producer = confluent_kafka.Producer({"bootstrap.servers": cluster.kafka_bootstrap, **config})
    producer.produce(topic, b"value", on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(60) == 0
    return errors


def test_injected_error_ends_after_its_number_of_requests(cluster: LocalCluster, topic: str) -> None:
    _faults(cluster, "inject", "--api", "Produce", "--error", "NOT_ENOUGH_REPLICAS", "--times", "3", "--client-id", "a")
    listed = _faults(cluster, "list")
    assert "NOT_ENOUGH_REPLICAS" in listed
    [error] = _produce(cluster, topic, **{"client.id": "a", "retries": 0})
    assert error.code() == confluent_kafka.KafkaError.NOT_ENOUGH_REPLICAS
    assert _produce(cluster, topic, **{"client.id": "b", "retries": 0}) == [None]
    assert _produce(cluster, topic, **{"client.id": "a", "retries": 10}) == [
        None
    ]  # the two remaining errors, then success
    assert "NOT_ENOUGH" not in _faults(cluster, "list")


def test_consumer_resumes_after_injected_errors_delays_and_disconnects(cluster: LocalCluster, topic: str) -> None:
    for fault in (("--error", "OFFSET_NOT_AVAILABLE", "--times", "3"), ("--drop-connection",), ("--delay-ms", "300")):
        _faults(cluster, "inject", "--api", "Fetch", *fault)
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
    assert _faults(cluster, "clear").endswith(": 0 cleared\n")  # all faults were used up


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
            assert [fault.fault_id for fault in (await admin.list_faults(broker))[broker]] == [number]
            assert await admin.clear_faults() == {broker: 1}
            with pytest.raises(KafkaError) as refused:
                await admin.inject_fault(InjectedFault(api_name="fetch", delay_ms=1, times=1))
            assert refused.value.code == ErrorCode.INVALID_REQUEST

    import asyncio

    asyncio.run(work())
