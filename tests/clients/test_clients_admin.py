"""Administration and refusals, by clients that others wrote."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients import clusters_of_tests as clusters
from tests.clients import drivers_of_tests as drivers
from tests.clients import scenarios_of_tests as scenarios

pytestmark = pytest.mark.timeout(400)


def refused(driver: drivers.Driver, verb: str, **arguments: object) -> int:
    """Kafka's number of the refusal."""
    with pytest.raises(drivers.ClientError) as error:
        driver(verb, **arguments)
    return error.value.code


def test_describe_cluster_returns_all_brokers(driver: drivers.Driver, cluster: clusters.Cluster) -> None:
    found: dict[str, Any] = {}

    def has_all() -> bool:
        """Each broker hears of the others' coming in its own time."""
        found.update(driver("describe_cluster"))
        return len(found["brokers"]) == 3

    clusters.wait_for("three brokers", has_all)
    addresses = {f"{each['host']}:{each['port']}" for each in found["brokers"]}
    assert addresses == set(cluster.bootstrap.split(","))
    assert {each["id"] for each in found["brokers"]} == {1, 2, 3}
    for each in found["brokers"]:  # kafkajs does not tell
        assert each.get("rack", clusters.RACKS[each["id"] - 1]) == clusters.RACKS[each["id"] - 1]
    assert found["controller"] in {1, 2, 3}


def test_topic_is_listed_until_it_is_deleted(driver: drivers.Driver, topic: str) -> None:
    scenarios.create(driver, topic, 3)
    described = scenarios.settled(driver, topic, 3)
    assert [each["id"] for each in described] == [0, 1, 2]
    assert all(sorted(each["replicas"]) == [1, 2, 3] for each in described)
    # Any broker may be asked, and one may hear of the topic after the others.
    clusters.wait_for("the topic is listed", lambda: topic in driver("list_topics"))
    driver("delete_topic", topic=topic)
    clusters.wait_for("the topic is gone", lambda: topic not in driver("list_topics"))


def test_partitions_are_added_and_never_removed(driver: drivers.Driver, topic: str) -> None:
    scenarios.create(driver, topic, 1)
    driver("create_partitions", topic=topic, total=3)
    scenarios.settled(driver, topic, 3)
    assert refused(driver, "create_partitions", topic=topic, total=2) == scenarios.INVALID_PARTITIONS


def test_topic_config_is_described_and_altered(driver: drivers.Driver, topic: str) -> None:
    scenarios.create(driver, topic, 1, **{"retention.ms": "3600000"})

    def has(name: str, value: str) -> bool:
        try:
            return bool(driver("describe_configs", topic=topic)[name] == value)
        except drivers.ClientError as error:
            if error.code != scenarios.UNKNOWN_TOPIC_OR_PARTITION:  # this broker has not heard of it yet
                raise
            return False

    clusters.wait_for("as it was created", lambda: has("retention.ms", "3600000"))
    clusters.wait_for("what is as by default", lambda: has("cleanup.policy", "delete"))
    driver("alter_config", topic=topic, name="retention.ms", value="7200000")
    clusters.wait_for("as it was altered", lambda: has("retention.ms", "7200000"))
    assert refused(driver, "alter_config", topic=topic, name="retention.ms", value="soon") == scenarios.INVALID_CONFIG


def test_records_are_deleted(driver: drivers.Driver, topic: str) -> None:
    scenarios.create(driver, topic, 1)
    sent = scenarios.records(20)
    driver("produce", topic=topic, records=sent)
    assert driver("delete_records", topic=topic, partition=0, before=12) == 12
    assert driver("watermarks", topic=topic, partition=0) == [12, 20]
    read = driver("consume", topic=topic, partitions={"0": scenarios.BEGINNING}, count=8)
    assert [each["value"] for each in read] == [each["value"] for each in sent[12:]]


def test_invalid_topics_are_refused(driver: drivers.Driver, topic: str) -> None:
    if "topics" not in driver.client.keeps:
        pytest.skip(f"{driver.client.name} creates no topics")
    scenarios.create(driver, topic, 1)
    asked = {"topic": topic, "partitions": 1, "replicas": 3}
    assert refused(driver, "create_topic", **asked) == scenarios.TOPIC_ALREADY_EXISTS
    asked["topic"] = f"{topic}-other"
    assert refused(driver, "create_topic", **{**asked, "replicas": 9}) == scenarios.INVALID_REPLICATION_FACTOR
    assert refused(driver, "create_topic", **{**asked, "partitions": 0}) == scenarios.INVALID_PARTITIONS
    assert refused(driver, "create_topic", **{**asked, "topic": "a b"}) == scenarios.INVALID_TOPIC_EXCEPTION
    assert refused(driver, "create_topic", **asked, config={"retention.ms": "x"}) == scenarios.INVALID_CONFIG


def test_unknown_topic_is_refused(driver: drivers.Driver, topic: str) -> None:
    assert refused(driver, "delete_topic", topic=topic) == scenarios.UNKNOWN_TOPIC_OR_PARTITION
    assert refused(driver, "describe_topic", topic=topic) == scenarios.UNKNOWN_TOPIC_OR_PARTITION


def test_too_large_records_are_refused(driver: drivers.Driver, topic: str) -> None:
    scenarios.create(driver, topic, 1, **{"max.message.bytes": "2000"})
    (small,) = scenarios.records(1)
    large = {**small, "value": scenarios.encoded(bytes(range(256)) * 40)}
    driver("produce", topic=topic, records=[small])
    assert refused(driver, "produce", topic=topic, records=[large]) == scenarios.MESSAGE_TOO_LARGE
    assert driver("watermarks", topic=topic, partition=0) == [0, 1]


def test_offset_out_of_range_resets_by_policy(driver: drivers.Driver, topic: str) -> None:
    """Nobody resets what is not to be reset; who may goes to the beginning."""
    scenarios.create(driver, topic, 1)
    sent = scenarios.records(5)
    driver("produce", topic=topic, records=sent)
    read = driver("consume", topic=topic, partitions={"0": 999}, count=5, reset="earliest")
    assert [each["offset"] for each in read] == [0, 1, 2, 3, 4]
    asked = {"topic": topic, "partitions": {"0": 999}, "count": 1, "timeout_s": 60}
    assert refused(driver, "consume", **asked, reset="none") == scenarios.OFFSET_OUT_OF_RANGE
