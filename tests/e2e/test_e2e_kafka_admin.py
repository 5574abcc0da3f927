"""Administration by the Kafka protocol with third-party clients."""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import ElectionType, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from kipmesh.client import sync
from kipmesh.cluster import LocalCluster

with warnings.catch_warnings():  # the package uses deprecated functions of Python
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka
    import kafka.admin

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:kafka.*")

DEADLINE_S = 60
NOT_THERE_YET = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.LEADER_NOT_AVAILABLE)


CONFIG = {"broker.session.timeout.ms": "120000", "controller.quorum.fetch.timeout.ms": "20000"}
"""Long timeouts, so that a slow machine does not move leaders or the active controller."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(mode="single", controllers=3, config=CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def admin(cluster: LocalCluster) -> AdminClient:
    assert cluster.kafka_bootstrap is not None
    return AdminClient({"bootstrap.servers": cluster.kafka_bootstrap})


@pytest.fixture
def python_admin(cluster: LocalCluster) -> Iterator[kafka.KafkaAdminClient]:
    client = kafka.KafkaAdminClient(bootstrap_servers=str(cluster.kafka_bootstrap).split(","))
    yield client
    client.close()


@pytest.fixture
def topic() -> str:
    return f"topic-{secrets.token_hex(4)}"


def _until(condition: Callable[[], Any], expected: str) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {expected}"
        time.sleep(0.05)
    return found


def _error_code(future: Any) -> int:
    with pytest.raises(KafkaException) as refused:
        future.result()
    return int(refused.value.args[0].code())


def _retry_until_known(request: Callable[[], Any]) -> Any:
    """Return the result of the request, repeated while the broker does not have the new topic."""

    def result() -> Any:
        try:
            return request().result()
        except KafkaException as error:
            if error.args[0].code() not in NOT_THERE_YET:
                raise
            return None

    return _until(result, "the topic is known")


def _partitions(admin: AdminClient, topic: str) -> Any:
    """Return partition metadata of one broker by partition number; empty if it does not have the topic yet."""
    return admin.list_topics(topic).topics[topic].partitions


def test_topic_is_created_extended_and_deleted(cluster: LocalCluster, admin: AdminClient, topic: str) -> None:
    admin.create_topics([NewTopic(topic, 2, 2, config={"retention.ms": "12345"})])[topic].result()
    _until(lambda: topic in admin.list_topics().topics, "the topic is listed")
    described = _retry_until_known(lambda: admin.describe_topics(TopicCollection([topic]))[topic])
    assert [len(partition.replicas) for partition in described.partitions] == [2, 2]

    assert _error_code(admin.create_topics([NewTopic(topic, 2, 2)])[topic]) == KafkaError.TOPIC_ALREADY_EXISTS
    other = f"{topic}-other"
    assert _error_code(admin.create_topics([NewTopic(other, 1, 9)])[other]) == KafkaError.INVALID_REPLICATION_FACTOR
    admin.create_topics([NewTopic(other, 1, 1)], validate_only=True)[other].result()
    assert other not in admin.list_topics().topics

    admin.create_partitions([NewPartitions(topic, 5)])[topic].result()
    _until(lambda: len(_partitions(admin, topic)) == 5, "the topic has five partitions")
    assert _error_code(admin.create_partitions([NewPartitions(topic, 3)])[topic]) == KafkaError.INVALID_PARTITIONS

    admin.delete_topics([topic])[topic].result()
    _until(lambda: topic not in admin.list_topics().topics, "the topic is deleted")
    assert _error_code(admin.delete_topics([topic])[topic]) == KafkaError.UNKNOWN_TOPIC_OR_PART


def test_topic_configs_are_described_and_altered(admin: AdminClient, topic: str) -> None:
    admin.create_topics([NewTopic(topic, 1, 1, config={"retention.ms": "12345"})])[topic].result()
    resource = ConfigResource(ResourceType.TOPIC, topic)

    def value(key: str) -> str | None:
        found = _retry_until_known(lambda: admin.describe_configs([resource])[resource])
        entry: ConfigEntry = found[key]
        return entry.value

    assert value("retention.ms") == "12345"
    assert value("cleanup.policy") == "delete"
    change = ConfigEntry("max.message.bytes", "54321", incremental_operation=AlterConfigOpType.SET)
    reset = ConfigEntry("retention.ms", None, incremental_operation=AlterConfigOpType.DELETE)
    altered = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[change, reset])
    admin.incremental_alter_configs([altered])[altered].result()
    _until(lambda: value("max.message.bytes") == "54321", "the value is set")  # at the broker that responds
    _until(lambda: value("retention.ms") == "604800000", "the value is the default")
    bad = ConfigEntry("no.such.key", "1", incremental_operation=AlterConfigOpType.SET)
    refused = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[bad])
    assert _error_code(admin.incremental_alter_configs([refused])[refused]) == KafkaError.INVALID_CONFIG


def test_delete_records_advances_the_log_start_offset(cluster: LocalCluster, admin: AdminClient, topic: str) -> None:
    admin.create_topics([NewTopic(topic, 1, 3)])[topic].result()
    with sync.Producer(cluster.bootstrap) as producer:
        for number in range(10):
            producer.send(topic, str(number).encode(), partition=0)
        producer.flush()
    until_4 = TopicPartition(topic, 0, 4)
    deleted = _retry_until_known(lambda: next(iter(admin.delete_records([until_4]).values())))
    assert deleted.low_watermark == 4
    with sync.Consumer(cluster.bootstrap) as consumer:
        assert list(consumer.beginning_offsets([(topic, 0)]).values()) == [4]
    beyond = TopicPartition(topic, 0, 11)
    assert _error_code(next(iter(admin.delete_records([beyond]).values()))) == KafkaError.OFFSET_OUT_OF_RANGE


def test_preferred_leader_needs_no_election(admin: AdminClient, topic: str) -> None:
    admin.create_topics([NewTopic(topic, 1, 3)])[topic].result()
    partition = TopicPartition(topic, 0)
    _until(lambda: any(each.leader >= 0 for each in _partitions(admin, topic).values()), "the partition has a leader")
    result = admin.elect_leaders(ElectionType.PREFERRED, [partition]).result()
    assert result[partition].code() == KafkaError.ELECTION_NOT_NEEDED


def test_reassignment_moves_a_replica(cluster: LocalCluster, python_admin: kafka.KafkaAdminClient, topic: str) -> None:
    with sync.AdminClient(cluster.bootstrap) as kipmesh_admin:
        brokers = sorted(broker.node_id for broker in kipmesh_admin.describe_cluster().brokers)
    python_admin.create_topics({topic: {"assignments": {0: brokers[:2]}}})
    partition = kafka.TopicPartition(topic, 0)
    assert python_admin.alter_partition_reassignments({partition: [brokers[0], brokers[2]]}) == {partition: None}

    def replicas() -> list[int]:
        [described] = python_admin.describe_topics([topic])
        return sorted(node for each in described["partitions"] for node in each["replica_nodes"])

    _until(lambda: replicas() == sorted([brokers[0], brokers[2]]), "the replica has moved")
    _until(lambda: not python_admin.list_partition_reassignments(), "the reassignment is complete")
    [refused] = python_admin.alter_partition_reassignments({partition: None}).values()
    assert refused is kafka.errors.NoReassignmentInProgressError


def test_admin_client_describes_log_dirs_and_metadata_quorum(
    cluster: LocalCluster, python_admin: kafka.KafkaAdminClient, topic: str
) -> None:
    python_admin.create_topics({topic: {"num_partitions": 1, "replication_factor": 3}})

    def log_count() -> int:
        found = python_admin.describe_log_dirs()
        return str(found).count(topic)

    _until(lambda: log_count() == 3, "each broker has a log of the topic")
    partition: dict[str, Any] = {}

    def is_complete() -> bool:
        """A new active controller learns observers and the high watermark from the next fetches."""
        nonlocal partition
        [metadata_log] = python_admin.describe_metadata_quorum()["topics"]
        assert metadata_log["topic_name"] == "__cluster_metadata"
        [partition] = metadata_log["partitions"]
        return len(partition["observers"]) == 3 and partition["high_watermark"] > 0

    _until(is_complete, "all brokers observe the quorum")
    assert len(partition["current_voters"]) == 3
    assert partition["leader_id"] in {voter["replica_id"] for voter in partition["current_voters"]}
