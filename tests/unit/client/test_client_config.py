"""Client configuration: defaults, validation and warnings."""

from __future__ import annotations

import re

import pytest

from kipmesh.client import AdminClient, Consumer, Producer
from kipmesh.client.consumer.replica_selection import ineffective_settings
from kipmesh.core.config import ConsumerConfig, ProducerConfig
from kipmesh.core.config.node import ConsumerServiceConfig
from kipmesh.core.errors import InvalidConfigError


def test_client_defaults_match_kafka() -> None:
    producer = ProducerConfig.parse({}).as_dict()
    assert producer["acks"] == -1
    assert producer["batch.size"] == 16384
    assert producer["buffer.memory"] == 32 << 20
    assert producer["max.in.flight.requests.per.connection"] == 5
    consumer = ConsumerConfig.parse({}).as_dict()
    assert consumer["auto.offset.reset"] == "latest"
    assert consumer["fetch.max.bytes"] == 52428800
    assert consumer["max.poll.records"] == 500


@pytest.mark.parametrize(("given", "expected"), [("all", -1), ("-1", -1), ("1", 1), (0, 0)])
def test_acks_are_parsed_to_protocol_values(given: object, expected: int) -> None:
    assert Producer("h:1", acks=given).config.acks == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, True),
        ({"acks": "all", "retries": 1, "max.in.flight.requests.per.connection": "5"}, True),
        ({"enable.idempotence": "false"}, False),
        ({"acks": "1"}, False),
        ({"acks": 0}, False),
        ({"retries": "0"}, False),
        ({"max.in.flight.requests.per.connection": 6}, False),
    ],
)
def test_idempotence_is_default_unless_config_excludes_it(given: dict[str, object], expected: bool) -> None:
    assert Producer("h:1", **given).config.enable_idempotence is expected


def test_keys_are_accepted_in_both_spellings() -> None:
    assert Producer("h:1", linger_ms=7).config.linger_ms == 7
    assert Producer("h:1", **{"linger.ms": "7"}).config.linger_ms == 7


@pytest.mark.parametrize(
    ("kind", "bootstrap", "config", "words"),
    [
        (Producer, "h:1", {"linger.msec": 1}, "linger.ms"),
        (Producer, "h:1", {"acks": "2"}, "acks"),
        (Producer, "h:1", {"compression.type": "rar"}, "compression.type"),
        (Producer, "h:1", {"transactional.id": "x"}, "transactional.id"),
        (Producer, "h:1", {"enable.idempotence": True, "acks": 1}, "enable.idempotence needs acks=all"),
        (Producer, "h:1", {"enable.idempotence": "true", "retries": 0}, "enable.idempotence needs retries"),
        (Producer, "h:1", {"enable.idempotence": True, "max.in.flight.requests.per.connection": 6}, "at most 5"),
        (Consumer, "h:1", {"auto.offset.reset": "first"}, "auto.offset.reset"),
        (AdminClient, "", {}, "bootstrap.servers"),
        (Consumer, "host", {}, "must be a list of host:port, got 'host'"),
        (Producer, "host:1,other:x", {}, "must be a list of host:port, got 'other:x'"),
    ],
)
def test_invalid_client_config_raises_one_line_error(
    kind: type, bootstrap: str, config: dict[str, object], words: str
) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        kind(bootstrap, **config)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "heartbeat_ms", "session_ms"),
    [
        ({"session.timeout.ms": "3000"}, 3000, 3000),
        ({"heartbeat.interval.ms": 45_001}, 45_001, 45_000),
    ],
)
def test_session_timeout_must_exceed_heartbeat_interval(
    config: dict[str, object], heartbeat_ms: int, session_ms: int
) -> None:
    text = f"heartbeat.interval.ms ({heartbeat_ms}) must be less than session.timeout.ms ({session_ms})"
    for kind, more in ((ConsumerConfig, {}), (ConsumerServiceConfig, {"bootstrap.servers": "h:1"})):
        with pytest.raises(InvalidConfigError, match=re.escape(text)):
            kind.parse({**more, **config})
        shorter = {"session.timeout.ms": 1000, "heartbeat.interval.ms": 999}
        assert kind.parse({**more, **shorter}).as_dict()["heartbeat.interval.ms"] == 999


SELECTOR = {"replica.selector.class": "RackAwareReplicaSelector"}
METADATA = {"replica.selection.mode": "metadata"}
OWN = {"replica.selection.mode": "consumer"}
PREFERRED = {"replica.selection.policy": "preferred"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, []),
        ({"client.rack": "a"}, []),
        ({**METADATA, **PREFERRED, "client.rack": "a"}, []),
        ({**OWN, **PREFERRED, **SELECTOR}, []),
        (SELECTOR, ["replica.selector.class has no effect"]),
        ({"replica.selector.config": "a=1"}, ["replica.selector.config has no effect"]),
        (PREFERRED, ["replica.selection.policy has no effect"]),
        (
            {**METADATA, "client.rack": "a"},
            ["replica.selection.mode=metadata has no effect with replica.selection.policy"],
        ),
        ({**METADATA, **PREFERRED}, ["replica.selection.mode=metadata has no effect without client.rack"]),
        ({**OWN, **PREFERRED}, ["replica.selection.mode=consumer fetches from leaders without replica.selector.class"]),
    ],
)
def test_ineffective_settings_are_logged(
    config: dict[str, str], expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    found = ineffective_settings(ConsumerConfig.parse(config))
    assert len(found) == len(expected)
    assert all(line.startswith(words) for line, words in zip(found, expected, strict=True))
    Consumer("h:1", **config)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * len(expected)
