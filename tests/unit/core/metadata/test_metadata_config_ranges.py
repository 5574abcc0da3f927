"""Ranges of integer configs: Kafka's INT and LONG. Out-of-range values of earlier versions still load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kipmesh import messages as m
from kipmesh.broker.replication.replica_manager import ReplicaManager
from kipmesh.core.config.base import Config
from kipmesh.core.config.node import BrokerConfig, ControllerConfig
from kipmesh.core.config.topic import BROKER_DEFAULTS, TopicConfig
from kipmesh.core.errors import ErrorCode, InvalidConfigError
from kipmesh.messages.schema import MAX_INT32, MAX_INT64
from tests.unit.core.metadata.metadata_support import Controller

INTS = {"index.interval.bytes", "max.message.bytes", "min.insync.replicas", "segment.bytes", "segment.index.bytes"}
"""INT configs of Kafka's LogConfig. The others are LONGs."""
LIMITS = TopicConfig.limits()
BROKER = {
    "node.id": "1",
    "cluster.id": "c",
    "log.dirs": "data",
    "controller.quorum.voters": "1@127.0.0.1:1",
    "listeners": "MESH://127.0.0.1:0",
}
ANY = st.one_of(
    st.integers(-5, 5),
    st.builds(int.__add__, st.sampled_from([MAX_INT32, MAX_INT64, -MAX_INT64, 10**40]), st.integers(-2, 2)),
)


def test_topic_config_ranges_match_kafka_types() -> None:
    assert {key: maximum for key, (_, maximum) in LIMITS.items()} == {
        key: MAX_INT32 if key in INTS else MAX_INT64 for key in LIMITS
    }


@pytest.mark.parametrize("config", [TopicConfig, BrokerConfig, ControllerConfig])
def test_all_integer_configs_have_limits(config: type[Config]) -> None:
    numbers = {
        key for key, field in zip(config.keys(), config.model_fields.values(), strict=True) if field.annotation is int
    }
    assert numbers == config.limits().keys()
    assert {maximum for _, maximum in config.limits().values()} >= {MAX_INT32, MAX_INT64}
    assert all(minimum >= -1 and maximum <= MAX_INT64 for minimum, maximum in config.limits().values())


def test_broker_defaults_of_topic_configs_have_topic_ranges() -> None:
    """A broker must not start with a default that topics refuse."""
    broker_limits = BrokerConfig.limits()
    assert [
        key for key in LIMITS if key in BROKER_DEFAULTS and LIMITS[key][1] != broker_limits[BROKER_DEFAULTS[key]][1]
    ] == []


@given(st.sampled_from(sorted(LIMITS)), ANY)
def test_topic_config_accepts_exactly_its_range(key: str, number: int) -> None:
    minimum, maximum = LIMITS[key]
    try:
        found = TopicConfig.parse({key: str(number)}).as_dict()[key]
    except InvalidConfigError as error:
        text = str(error)
        is_lag = "above max.compaction.lag.ms" in text  # a constraint between two keys
        assert is_lag or not minimum <= number <= maximum
        limit = f"at least {minimum}" if number < minimum else f"at most {maximum}"
        assert is_lag or f"{key} must be {limit}, got {number}" in text
    else:
        assert found == number
        assert minimum <= number <= maximum


@given(st.sampled_from(sorted(BrokerConfig.limits().keys() - BROKER.keys())), st.integers(1))
def test_broker_config_refuses_values_above_maximum(key: str, beyond: int) -> None:
    _, maximum = BrokerConfig.limits()[key]
    with pytest.raises(InvalidConfigError, match=f"{key} must be at most {maximum}, got {maximum + beyond}"):
        BrokerConfig.parse({**BROKER, key: str(maximum + beyond)})


@given(st.dictionaries(st.sampled_from(sorted(LIMITS)), ANY))
def test_stored_out_of_range_topic_config_loads_as_nearest_limit(stored: dict[str, int]) -> None:
    """A broker loads values that an earlier version wrote to the metadata log."""
    texts = {key: str(number) for key, number in stored.items()}
    manager: Any = SimpleNamespace(
        _topic_configs={},
        hosted_replicas=SimpleNamespace(image=SimpleNamespace(topic_config=lambda _name: texts)),
        _defaults=TopicConfig.parse({}),
    )
    nearest = {key: min(max(number, LIMITS[key][0]), LIMITS[key][1]) for key, number in stored.items()}
    # No version accepted a minimum lag above the maximum lag.
    assume(nearest.get("min.compaction.lag.ms", 0) <= nearest.get("max.compaction.lag.ms", MAX_INT64))
    found = ReplicaManager._topic_config(manager, "t").as_dict()
    assert {key: found[key] for key in stored} == nearest


@pytest.mark.parametrize(
    "key", ["retention.ms", "segment.ms", "flush.messages", "retention.bytes", "segment.index.bytes"]
)
def test_topic_creation_and_alteration_refuse_out_of_range_values(key: str) -> None:
    controller = Controller()
    controller.join(1)
    beyond = str(LIMITS[key][1] + 1)
    configs: dict[str, Any] = {key: beyond}
    refused = controller.create("t", **configs)
    assert refused.error_code == ErrorCode.INVALID_CONFIG
    assert key in str(refused.error_message)
    assert controller.create("u").error_code == 0
    change = m.AlterConfigsResource(2, "u", [m.AlterableConfig(key, 0, beyond)])
    (response,) = controller.run(
        controller.core.incremental_alter_configs(m.IncrementalAlterConfigsRequest([change]))
    ).responses
    assert response.error_code == ErrorCode.INVALID_CONFIG
    assert controller.image.topic_config("u") == {}
