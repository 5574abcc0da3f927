"""Texts of invalid configuration values."""

from __future__ import annotations

import pytest

from kipmesh.core.config import BrokerConfig, ConsumerConfig, ProducerConfig
from kipmesh.core.config.base import Config
from kipmesh.core.config.topic import TopicConfig
from kipmesh.core.errors import InvalidConfigError


@pytest.mark.parametrize(
    ("config", "values", "text"),
    [
        (TopicConfig, {"segment.bytes": "abc"}, "segment.bytes must be an integer, got 'abc'"),
        (TopicConfig, {"segment.bytes": ""}, "segment.bytes must be an integer, got ''"),
        (TopicConfig, {"segment.bytes": 1.5}, "segment.bytes must be an integer, got 1.5"),
        (TopicConfig, {"retention.ms": "-7"}, "retention.ms must be at least -1, got -7"),
        (TopicConfig, {"segment.bytes": "3000000000"}, "segment.bytes must be at most 2147483647, got 3000000000"),
        (TopicConfig, {"min.cleanable.dirty.ratio": "x"}, "min.cleanable.dirty.ratio must be a number, got 'x'"),
        (TopicConfig, {"min.cleanable.dirty.ratio": "nan"}, "min.cleanable.dirty.ratio must be a number, got nan"),
        (TopicConfig, {"min.cleanable.dirty.ratio": "2"}, "min.cleanable.dirty.ratio must be at most 1, got 2"),
        (ConsumerConfig, {"check.crcs": "perhaps"}, "check.crcs must be true or false, got 'perhaps'"),
        (ConsumerConfig, {"group.id": ""}, "group.id must not be empty"),
        (ConsumerConfig, {"client.id": "x" * 250}, "client.id must have at most 249 characters, got 250"),
        (ConsumerConfig, {"client.rack": 3}, "client.rack must be a string, got 3"),
        (ProducerConfig, {"acks": "2"}, "acks must be -1, 0 or 1, got '2'"),
        (
            ConsumerConfig,
            {"heartbeat.interval.ms": "5", "session.timeout.ms": "5"},
            "heartbeat.interval.ms (5) must be less than session.timeout.ms (5)",
        ),
        (
            ConsumerConfig,
            {"partition.assignment.strategy": "x"},
            "partition.assignment.strategy must list some of range, roundrobin, cooperative-sticky, got 'x'",
        ),
        (TopicConfig, {"segment.bytes": "x" * 200}, f"segment.bytes must be an integer, got '{'x' * 99}..."),
        (BrokerConfig, {}, "node.id is missing"),
    ],
)
def test_error_states_key_limit_and_value(config: type[Config], values: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        config.parse(values)
    assert caught.value.message == text
    assert text.startswith(caught.value.key)
