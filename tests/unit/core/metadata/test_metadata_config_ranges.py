"""Whole numbers of configurations are as large as Kafka's types, INT and LONG; what was stored before still loads."""

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
"""Kafka's LogConfig; the others are LONGs."""
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


def test_topics_have_kafkas_types() -> None:
    assert {key: most for key, (_, most) in LIMITS.items()} == {
        key: MAX_INT32 if key in INTS else MAX_INT64 for key in LIMITS
    }


@pytest.mark.parametrize("config", [TopicConfig, BrokerConfig, ControllerConfig])
def test_no_number_is_without_an_end(config: type[Config]) -> None:
    numbers = {
        key for key, field in zip(config.keys(), config.model_fields.values(), strict=True) if field.annotation is int
    }
    assert numbers == config.limits().keys()
    assert {most for _, most in config.limits().values()} >= {MAX_INT32, MAX_INT64}
    assert all(least >= -1 and most <= MAX_INT64 for least, most in config.limits().values())


def test_defaults_of_topics_have_the_types_of_topics() -> None:
    """Or a broker could start with a default that no topic may have."""
    of_broker = BrokerConfig.limits()
    assert [
        key for key in LIMITS if key in BROKER_DEFAULTS and LIMITS[key][1] != of_broker[BROKER_DEFAULTS[key]][1]
    ] == []


@given(st.sampled_from(sorted(LIMITS)), ANY)
def test_a_topic_takes_what_its_type_holds_and_nothing_else(key: str, number: int) -> None:
    least, most = LIMITS[key]
    try:
        found = TopicConfig.parse({key: str(number)}).as_dict()[key]
    except InvalidConfigError as error:
        text = str(error)
        is_lag = "above max.compaction.lag.ms" in text  # a rule of two keys
        assert is_lag or not least <= number <= most
        assert is_lag or (repr(key) in text and f"from {least} to {most}" in text)
    else:
        assert found == number
        assert least <= number <= most


@given(st.sampled_from(sorted(BrokerConfig.limits().keys() - BROKER.keys())), st.integers(1))
def test_a_broker_does_not_start_with_more(key: str, beyond: int) -> None:
    least, most = BrokerConfig.limits()[key]
    with pytest.raises(InvalidConfigError, match=f"{key}.*from {least} to {most}"):
        BrokerConfig.parse({**BROKER, key: str(most + beyond)})


@given(st.dictionaries(st.sampled_from(sorted(LIMITS)), ANY))
def test_what_is_stored_loads_as_the_nearest_that_may_be(stored: dict[str, int]) -> None:
    """As a broker reads the metadata log that an earlier version wrote."""
    texts = {key: str(number) for key, number in stored.items()}
    manager: Any = SimpleNamespace(
        _topic_configs={},
        hosted_replicas=SimpleNamespace(image=SimpleNamespace(topic_config=lambda _name: texts)),
        _defaults=TopicConfig.parse({}),
    )
    nearest = {key: min(max(number, LIMITS[key][0]), LIMITS[key][1]) for key, number in stored.items()}
    # Of these two the one may not be above the other; no version took that.
    assume(nearest.get("min.compaction.lag.ms", 0) <= nearest.get("max.compaction.lag.ms", MAX_INT64))
    found = ReplicaManager._topic_config(manager, "t").as_dict()
    assert {key: found[key] for key in stored} == nearest


@pytest.mark.parametrize(
    "key", ["retention.ms", "segment.ms", "flush.messages", "retention.bytes", "segment.index.bytes"]
)
def test_topics_are_neither_made_nor_altered_so(key: str) -> None:
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
