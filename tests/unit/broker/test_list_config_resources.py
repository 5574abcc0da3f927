"""ListConfigResources: topics, brokers and broker loggers."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
from kio.schema.list_config_resources.v0.request import ListConfigResourcesRequest as Version0Request
from kio.schema.list_config_resources.v0.response import ListConfigResourcesResponse as Version0Response

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from tests.unit.broker.broker_cluster import eventually
from tests.unit.broker.kafka_cluster import kafka_cluster

TOPIC, BROKER, LOGGER, METRICS, GROUP = 2, 4, 8, 16, 32


async def list_resources(cluster, *types: int, via: int = 2) -> Collection[tuple[int, str]]:
    response = await cluster.call(via, "ListConfigResources", m.ListConfigResourcesRequest(types))
    assert response.error_code == 0
    return [(resource.resource_type, resource.resource_name) for resource in response.config_resources]


async def test_list_config_resources_returns_requested_types(cluster) -> None:
    await cluster.create("b")
    await cluster.create("a", retention_ms="1000")
    change = m.AlterConfigsResource(BROKER, "", [m.AlterableConfig("follower.replication.throttled.rate", 0, "7")])
    await cluster.call(1, "IncrementalAlterConfigs", m.IncrementalAlterConfigsRequest([change]), "Admin")
    loggers, brokers = [(LOGGER, node_id) for node_id in "123"], [(BROKER, node_id) for node_id in "123"]
    topics = [(TOPIC, "a"), (TOPIC, "b")]
    assert await list_resources(cluster) == [*loggers, *brokers, *topics]
    assert await list_resources(cluster, TOPIC, BROKER, TOPIC) == [*brokers, *topics]
    assert await list_resources(cluster, METRICS, GROUP) == []
    await cluster.brokers.pop(3).stop()  # a stopped broker stays registered
    await eventually(lambda: cluster.brokers[2].hosted_replicas.image.brokers[3].fenced, "fenced")
    assert await list_resources(cluster, BROKER) == brokers


@pytest.mark.parametrize("types", [(0,), (1,), (3,), (-1,), (TOPIC, 64)])
async def test_list_config_resources_refuses_unknown_types(cluster, types: tuple[int, ...]) -> None:
    response = await cluster.call(1, "ListConfigResources", m.ListConfigResourcesRequest(types))
    assert response == m.ListConfigResourcesResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)


async def test_list_config_resources_serves_third_party_clients(tmp_path: Path) -> None:
    async with kafka_cluster(tmp_path) as cluster:
        await cluster.create("t")
        brokers = ["1", "2", "3"]
        all_resources = {"topic": ["t"], "broker": brokers, "broker_logger": brokers}
        assert await cluster.kafka_python("list_config_resources") == all_resources
        assert await cluster.kafka_python("list_config_resources", ["TOPIC", "CLIENT_METRICS"]) == {"topic": ["t"]}
        response = await cluster.kio(1, Version0Request(), Version0Response)  # version 0 lists client metrics only
        assert (response.error_code, response.config_resources) == (0, ())
