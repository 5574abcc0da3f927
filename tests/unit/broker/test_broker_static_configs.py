"""DescribeConfigs of a broker: its file's values and the defaults, at the broker itself."""

from __future__ import annotations

from kipmesh import messages as m
from kipmesh.broker.handlers.admin import merge_resources, static_configs
from kipmesh.core.config import BrokerConfig
from kipmesh.core.config.base import ConfigSource, ResourceType
from tests.unit.broker.conftest_broker import Mesh

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


def test_values_are_as_a_file_has_them() -> None:
    config = _config(**{"max.connections": 7})
    told = {one.name: one for one in static_configs(config)}
    assert told.keys() == set(BrokerConfig.keys())
    assert told["max.connections"] == m.DescribeConfigsResourceResult(
        "max.connections", "7", True, ConfigSource.STATIC_BROKER
    )
    assert (told["log.dirs"].value, told["auto.create.topics.enable"].value) == ("/a,/b", "true")
    assert told["auto.create.topics.enable"].config_source == ConfigSource.DEFAULT
    again = BrokerConfig.parse({name: one.value for name, one in told.items() if one.value is not None})
    assert again == config


def test_keys_and_documentation_as_they_are_asked_for() -> None:
    (one,) = static_configs(_config(), ["max.connections"], has_documentation=True)
    assert one.documentation is not None
    assert one.documentation.startswith("Maximum Kafka connections")


async def _described(mesh: Mesh, at: int, name: str, *keys: str) -> dict[str, m.DescribeConfigsResourceResult]:
    resource = m.DescribeConfigsResource(ResourceType.BROKER, name, keys)
    answer = await mesh.call(at, "DescribeConfigs", m.DescribeConfigsRequest([resource]), "Admin")
    (result,) = answer.results
    assert result.error_code == 0, result
    return {one.name: one for one in result.configs}


async def test_a_broker_tells_its_own_values_and_no_other_s(mesh: Mesh) -> None:
    own = await _described(mesh, 1, "1")
    assert (own["node.id"].value, own["node.id"].read_only) == ("1", True)
    assert "node.id" not in await _described(mesh, 1, "2")
    assert (await _described(mesh, 2, "2", "node.id"))["node.id"].value == "2"
    change = m.AlterConfigsResource(ResourceType.BROKER, "1", [m.AlterableConfig(RATE, 0, "5000")])
    answer = await mesh.call(1, "IncrementalAlterConfigs", m.IncrementalAlterConfigsRequest([change]), "Admin")
    assert answer.responses[0].error_code == 0
    changed = (await _described(mesh, 1, "1"))[RATE]
    assert (changed.value, changed.read_only, changed.config_source) == ("5000", False, ConfigSource.DYNAMIC_BROKER)


def test_each_resource_once_with_all_its_keys() -> None:
    topic, broker = ResourceType.TOPIC, ResourceType.BROKER
    asked = [
        (broker, "1", ("a",)),
        (topic, "1", ("a",)),
        (broker, "1", ("b", "a")),
        (topic, "t", ()),
        (topic, "t", ("c",)),
    ]
    once = merge_resources(
        m.DescribeConfigsRequest([m.DescribeConfigsResource(*each) for each in asked], include_documentation=True)
    )
    assert once.include_documentation
    assert [tuple(each) for each in once.resources] == [
        (broker, "1", ("a", "b")),
        (topic, "1", ("a",)),
        (topic, "t", ()),
    ]
    assert merge_resources(once) is once


async def test_a_resource_named_many_times_is_answered_once(mesh: Mesh) -> None:
    mine = m.DescribeConfigsResource(ResourceType.BROKER, "1", ("node.id",))
    other = m.DescribeConfigsResource(ResourceType.BROKER, "1", ("log.dirs",))
    answer = await mesh.call(1, "DescribeConfigs", m.DescribeConfigsRequest([mine] * 5000 + [other]), "Admin")
    (result,) = answer.results
    assert {one.name for one in result.configs} == {"node.id", "log.dirs"}
