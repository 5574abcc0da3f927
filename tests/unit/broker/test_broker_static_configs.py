"""DescribeConfigs of a broker: static values and defaults, which only that broker returns."""

from __future__ import annotations

from kipmesh import messages as m
from kipmesh.broker.handlers.admin import merge_resources, static_configs
from kipmesh.core.config import BrokerConfig
from kipmesh.core.config.base import ConfigSource, ResourceType
from tests.unit.broker.broker_cluster import BrokerCluster

RATE = "follower.replication.throttled.rate"


def _config(**changes: object) -> BrokerConfig:
    required = {
        "node.id": 1,
        "cluster.id": "c",
        "process.roles": "broker",
        "controller.quorum.voters": "100@127.0.0.1:1",
        "listeners": "MESH://127.0.0.1:0",
        "log.dirs": "/a,/b",
    }
    known = set(BrokerConfig.keys())
    return BrokerConfig.parse({key: value for key, value in required.items() if key in known} | changes)


def test_static_configs_round_trip_through_parse() -> None:
    config = _config(**{"max.connections": 7})
    configs = {entry.name: entry for entry in static_configs(config)}
    assert configs.keys() == set(BrokerConfig.keys())
    assert configs["max.connections"] == m.DescribeConfigsResourceResult(
        "max.connections", "7", True, ConfigSource.STATIC_BROKER
    )
    assert (configs["log.dirs"].value, configs["auto.create.topics.enable"].value) == ("/a,/b", "true")
    assert configs["auto.create.topics.enable"].config_source == ConfigSource.DEFAULT
    parsed = BrokerConfig.parse({name: entry.value for name, entry in configs.items() if entry.value is not None})
    assert parsed == config


def test_static_configs_returns_requested_keys_and_documentation() -> None:
    (entry,) = static_configs(_config(), ["max.connections"], has_documentation=True)
    assert entry.documentation is not None
    assert entry.documentation.startswith("Maximum Kafka connections")


async def _describe(
    cluster: BrokerCluster, at: int, name: str, *keys: str
) -> dict[str, m.DescribeConfigsResourceResult]:
    resource = m.DescribeConfigsResource(ResourceType.BROKER, name, keys)
    response = await cluster.call(at, "DescribeConfigs", m.DescribeConfigsRequest([resource]), "Admin")
    (result,) = response.results
    assert result.error_code == 0, result
    return {entry.name: entry for entry in result.configs}


async def test_broker_describes_only_its_own_static_configs(cluster: BrokerCluster) -> None:
    own = await _describe(cluster, 1, "1")
    assert (own["node.id"].value, own["node.id"].read_only) == ("1", True)
    assert "node.id" not in await _describe(cluster, 1, "2")
    assert (await _describe(cluster, 2, "2", "node.id"))["node.id"].value == "2"
    change = m.AlterConfigsResource(ResourceType.BROKER, "1", [m.AlterableConfig(RATE, 0, "5000")])
    response = await cluster.call(1, "IncrementalAlterConfigs", m.IncrementalAlterConfigsRequest([change]), "Admin")
    assert response.responses[0].error_code == 0
    changed = (await _describe(cluster, 1, "1"))[RATE]
    assert (changed.value, changed.read_only, changed.config_source) == ("5000", False, ConfigSource.DYNAMIC_BROKER)


def test_merge_resources_merges_keys_of_repeated_resources() -> None:
    topic, broker = ResourceType.TOPIC, ResourceType.BROKER
    requested = [
        (broker, "1", ("a",)),
        (topic, "1", ("a",)),
        (broker, "1", ("b", "a")),
        (topic, "t", ()),
        (topic, "t", ("c",)),
    ]
    merged = merge_resources(
        m.DescribeConfigsRequest(
            [m.DescribeConfigsResource(*resource) for resource in requested], include_documentation=True
        )
    )
    assert merged.include_documentation
    assert [tuple(resource) for resource in merged.resources] == [
        (broker, "1", ("a", "b")),
        (topic, "1", ("a",)),
        (topic, "t", ()),
    ]
    assert merge_resources(merged) is merged


async def test_repeated_resource_is_described_once(cluster: BrokerCluster) -> None:
    first = m.DescribeConfigsResource(ResourceType.BROKER, "1", ("node.id",))
    second = m.DescribeConfigsResource(ResourceType.BROKER, "1", ("log.dirs",))
    response = await cluster.call(1, "DescribeConfigs", m.DescribeConfigsRequest([first] * 5000 + [second]), "Admin")
    (result,) = response.results
    assert {entry.name for entry in result.configs} == {"node.id", "log.dirs"}
