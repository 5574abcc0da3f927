"""ListConfigResources: topics, brokers, and brokers' loggers."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
from kio.schema.list_config_resources.v0.request import ListConfigResourcesRequest as Version0Request
from kio.schema.list_config_resources.v0.response import ListConfigResourcesResponse as Version0Response

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from tests.unit.broker.conftest_broker import eventually
from tests.unit.broker.kafka_mesh import kafka_mesh

TOPIC, BROKER, LOGGER, METRICS, GROUP = 2, 4, 8, 16, 32


async def found(mesh, *types: int, via: int = 2) -> Collection[tuple[int, str]]:
    response = await mesh.call(via, "ListConfigResources", m.ListConfigResourcesRequest(types))
    assert response.error_code == 0
    return [(one.resource_type, one.resource_name) for one in response.config_resources]


async def test_all_types_and_some(mesh) -> None:
    await mesh.create("b")
    await mesh.create("a", retention_ms="1000")
    change = m.AlterConfigsResource(BROKER, "", [m.AlterableConfig("follower.replication.throttled.rate", 0, "7")])
    await mesh.call(1, "IncrementalAlterConfigs", m.IncrementalAlterConfigsRequest([change]), "Admin")
    loggers, brokers = [(LOGGER, one) for one in "123"], [(BROKER, one) for one in "123"]
    topics = [(TOPIC, "a"), (TOPIC, "b")]
    assert await found(mesh) == [*loggers, *brokers, *topics]
    assert await found(mesh, TOPIC, BROKER, TOPIC) == [*brokers, *topics]
    assert await found(mesh, METRICS, GROUP) == []
    await mesh.brokers.pop(3).stop()  # it stays registered
    await eventually(lambda: mesh.brokers[2].hosted_replicas.image.brokers[3].fenced, "fenced")
    assert await found(mesh, BROKER) == brokers


@pytest.mark.parametrize("types", [(0,), (1,), (3,), (-1,), (TOPIC, 64)])
async def test_types_that_are_not_known(mesh, types: tuple[int, ...]) -> None:
    response = await mesh.call(1, "ListConfigResources", m.ListConfigResourcesRequest(types))
    assert response == m.ListConfigResourcesResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)


async def test_clients_of_the_kafka_protocol(tmp_path: Path) -> None:
    async with kafka_mesh(tmp_path) as mesh:
        await mesh.create("t")
        brokers = ["1", "2", "3"]
        everything = {"topic": ["t"], "broker": brokers, "broker_logger": brokers}
        assert await mesh.python("list_config_resources") == everything
        assert await mesh.python("list_config_resources", ["TOPIC", "CLIENT_METRICS"]) == {"topic": ["t"]}
        response = await mesh.kio(1, Version0Request(), Version0Response)  # of client metrics only
        assert (response.error_code, response.config_resources) == (0, ())
