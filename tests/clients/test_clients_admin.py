"""Topic administration and error codes by third-party clients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients import clusters_of_tests as clusters
from tests.clients import drivers_of_tests as drivers
from tests.clients import scenarios_of_tests as scenarios

pytestmark = pytest.mark.timeout(400)


def error_code(driver: drivers.Driver, verb: str, **arguments: object) -> int:
    """Return the Kafka error code of a request that must fail."""
    with pytest.raises(drivers.ClientError) as error:
        driver(verb, **arguments)
    return error.value.code


def test_describe_cluster_returns_all_brokers(driver: drivers.Driver, cluster: clusters.Cluster) -> None:
    found: dict[str, Any] = {}

    def has_all() -> bool:
        found.update(driver("describe_cluster"))
        return len(found["brokers"]) == 3

    clusters.wait_for("three brokers", has_all)
    addresses = {f"{broker['host']}:{broker['port']}" for broker in found["brokers"]}
    assert addresses == set(cluster.bootstrap.split(","))
    assert {broker["id"] for broker in found["brokers"]} == {1, 2, 3}
    for broker in found["brokers"]:  # kafkajs does not return racks
        assert broker.get("rack", clusters.RACKS[broker["id"] - 1]) == clusters.RACKS[broker["id"] - 1]
    assert found["controller"] in {1, 2, 3}


def test_topic_is_listed_until_it_is_deleted(driver: drivers.Driver, topic: str) -> None:
    scenarios.create(driver, topic, 3)
    described = scenarios.wait_in_sync(driver, topic, 3)
    assert [partition["id"] for partition in described] == [0, 1, 2]
    assert all(sorted(partition["replicas"]) == [1, 2, 3] for partition in described)
    # Brokers observe a new topic at different times.
    clusters.wait_for("the topic is listed", lambda: topic in driver("list_topics"))
    driver("delete_topic", topic=topic)
    clusters.wait_for("the topic is deleted", lambda: topic not in driver("list_topics"))


def test_partitions_are_added_but_not_removed(driver: drivers.Driver, topic: str) -> None:
    scenarios.create(driver, topic, 1)
    driver("create_partitions", topic=topic, total=3)
    scenarios.wait_in_sync(driver, topic, 3)
    assert error_code(driver, "create_partitions", topic=topic, total=2) == scenarios.INVALID_PARTITIONS


def test_topic_config_is_described_and_altered(driver: drivers.Driver, topic: str) -> None:
    scenarios.create(driver, topic, 1, **{"retention.ms": "3600000"})

    def has(name: str, value: str) -> bool:
        try:
            return bool(driver("describe_configs", topic=topic)[name] == value)
        except drivers.ClientError as error:
            if error.code != scenarios.UNKNOWN_TOPIC_OR_PARTITION:  # the broker does not have the topic yet
                raise
            return False

    clusters.wait_for("the configured value", lambda: has("retention.ms", "3600000"))
    clusters.wait_for("the default value", lambda: has("cleanup.policy", "delete"))
    driver("alter_config", topic=topic, name="retention.ms", value="7200000")
    clusters.wait_for("the altered value", lambda: has("retention.ms", "7200000"))
    assert (
        error_code(driver, "alter_config", topic=topic, name="retention.ms", value="soon") == scenarios.INVALID_CONFIG
    )


def test_delete_records_advances_the_low_watermark(driver: drivers.Driver, topic: str) -> None:
    scenarios.create(driver, topic, 1)
    sent = scenarios.records(20)
    driver("produce", topic=topic, records=sent)
    assert driver("delete_records", topic=topic, partition=0, before=12) == 12
    assert driver("watermarks", topic=topic, partition=0) == [12, 20]
    read = driver("consume", topic=topic, partitions={"0": scenarios.BEGINNING}, count=8)
    assert [record["value"] for record in read] == [record["value"] for record in sent[12:]]


def test_create_topic_refuses_invalid_requests(driver: drivers.Driver, topic: str) -> None:
    if "topics" not in driver.client.features:
        pytest.skip(f"{driver.client.name} does not create topics")
    scenarios.create(driver, topic, 1)
    request = {"topic": topic, "partitions": 1, "replicas": 3}
    assert error_code(driver, "create_topic", **request) == scenarios.TOPIC_ALREADY_EXISTS
    request["topic"] = f"{topic}-other"
    assert error_code(driver, "create_topic", **{**request, "replicas": 9}) == scenarios.INVALID_REPLICATION_FACTOR
    assert error_code(driver, "create_topic", **{**request, "partitions": 0}) == scenarios.INVALID_PARTITIONS
    assert error_code(driver, "create_topic", **{**request, "topic": "a b"}) == scenarios.INVALID_TOPIC_EXCEPTION
    assert error_code(driver, "create_topic", **request, config={"retention.ms": "x"}) == scenarios.INVALID_CONFIG


def test_delete_and_describe_refuse_an_unknown_topic(driver: drivers.Driver, topic: str) -> None:
    assert error_code(driver, "delete_topic", topic=topic) == scenarios.UNKNOWN_TOPIC_OR_PARTITION
    assert error_code(driver, "describe_topic", topic=topic) == scenarios.UNKNOWN_TOPIC_OR_PARTITION


def test_produce_refuses_a_record_larger_than_max_message_bytes(driver: drivers.Driver, topic: str) -> None:
    scenarios.create(driver, topic, 1, **{"max.message.bytes": "2000"})
    (small,) = scenarios.records(1)
    large = {**small, "value": scenarios.encoded(bytes(range(256)) * 40)}
    driver("produce", topic=topic, records=[small])
    assert error_code(driver, "produce", topic=topic, records=[large]) == scenarios.MESSAGE_TOO_LARGE
    assert driver("watermarks", topic=topic, partition=0) == [0, 1]


def test_offset_out_of_range_resets_by_policy(driver: drivers.Driver, topic: str) -> None:
    """The consumer resets to the beginning with `earliest` and raises OFFSET_OUT_OF_RANGE with `none`."""
    scenarios.create(driver, topic, 1)
    sent = scenarios.records(5)
    driver("produce", topic=topic, records=sent)
    read = driver("consume", topic=topic, partitions={"0": 999}, count=5, reset="earliest")
    assert [record["offset"] for record in read] == [0, 1, 2, 3, 4]
    request = {"topic": topic, "partitions": {"0": 999}, "count": 1, "timeout_s": 60}
    assert error_code(driver, "consume", **request, reset="none") == scenarios.OFFSET_OUT_OF_RANGE
