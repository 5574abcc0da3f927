"""Administration by Kafka's own protocol, with clients that others wrote."""

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

with warnings.catch_warnings():  # it uses what Python deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka
    import kafka.admin

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:kafka.*")

DEADLINE_S = 60
NOT_THERE_YET = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.LEADER_NOT_AVAILABLE)


CONFIG = {"broker.session.timeout.ms": "120000", "controller.quorum.fetch.timeout.ms": "20000"}
"""Nothing fails here: a machine that stands still for a while is not to move leaders, or the active controller."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(mode="single", controllers=3, config=CONFIG) as it:
        yield it


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
def name() -> str:
    return f"topic-{secrets.token_hex(4)}"


def _until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


def _code(future: Any) -> int:
    with pytest.raises(KafkaException) as refused:
        future.result()
    return int(refused.value.args[0].code())


def _of_topic(ask: Callable[[], Any]) -> Any:
    """The answer of whichever broker is asked, which may be told of a new topic a little later than another."""

    def answer() -> Any:
        try:
            return ask().result()
        except KafkaException as error:
            if error.args[0].code() not in NOT_THERE_YET:
                raise
            return None

    return _until(answer, "the topic is known")


def _partitions(admin: AdminClient, name: str) -> Any:
    """By number, as one broker has them; none where it was not told of the topic yet."""
    return admin.list_topics(name).topics[name].partitions


def test_topics_are_made_grow_and_go(cluster: LocalCluster, admin: AdminClient, name: str) -> None:
    admin.create_topics([NewTopic(name, 2, 2, config={"retention.ms": "12345"})])[name].result()
    _until(lambda: name in admin.list_topics().topics, "the topic is seen")
    described = _of_topic(lambda: admin.describe_topics(TopicCollection([name]))[name])
    assert [len(one.replicas) for one in described.partitions] == [2, 2]

    assert _code(admin.create_topics([NewTopic(name, 2, 2)])[name]) == KafkaError.TOPIC_ALREADY_EXISTS
    other = f"{name}-other"
    assert _code(admin.create_topics([NewTopic(other, 1, 9)])[other]) == KafkaError.INVALID_REPLICATION_FACTOR
    admin.create_topics([NewTopic(other, 1, 1)], validate_only=True)[other].result()
    assert other not in admin.list_topics().topics

    admin.create_partitions([NewPartitions(name, 5)])[name].result()
    _until(lambda: len(_partitions(admin, name)) == 5, "it has five partitions")
    assert _code(admin.create_partitions([NewPartitions(name, 3)])[name]) == KafkaError.INVALID_PARTITIONS

    admin.delete_topics([name])[name].result()
    _until(lambda: name not in admin.list_topics().topics, "the topic is gone")
    assert _code(admin.delete_topics([name])[name]) == KafkaError.UNKNOWN_TOPIC_OR_PART


def test_topic_configs_are_described_and_altered(admin: AdminClient, name: str) -> None:
    admin.create_topics([NewTopic(name, 1, 1, config={"retention.ms": "12345"})])[name].result()
    topic = ConfigResource(ResourceType.TOPIC, name)

    def value(key: str) -> str | None:
        found = _of_topic(lambda: admin.describe_configs([topic])[topic])
        entry: ConfigEntry = found[key]
        return entry.value

    assert value("retention.ms") == "12345"
    assert value("cleanup.policy") == "delete"
    change = ConfigEntry("max.message.bytes", "54321", incremental_operation=AlterConfigOpType.SET)
    back = ConfigEntry("retention.ms", None, incremental_operation=AlterConfigOpType.DELETE)
    altered = ConfigResource(ResourceType.TOPIC, name, incremental_configs=[change, back])
    admin.incremental_alter_configs([altered])[altered].result()
    _until(lambda: value("max.message.bytes") == "54321", "the value is set")  # by whichever broker is asked
    _until(lambda: value("retention.ms") == "604800000", "the value is the default")
    bad = ConfigEntry("no.such.key", "1", incremental_operation=AlterConfigOpType.SET)
    refused = ConfigResource(ResourceType.TOPIC, name, incremental_configs=[bad])
    assert _code(admin.incremental_alter_configs([refused])[refused]) == KafkaError.INVALID_CONFIG


def test_records_are_deleted(cluster: LocalCluster, admin: AdminClient, name: str) -> None:
    admin.create_topics([NewTopic(name, 1, 3)])[name].result()
    with sync.Producer(cluster.bootstrap) as producer:
        for number in range(10):
            producer.send(name, str(number).encode(), partition=0)
        producer.flush()
    place = TopicPartition(name, 0, 4)
    deleted = _of_topic(lambda: next(iter(admin.delete_records([place]).values())))
    assert deleted.low_watermark == 4
    with sync.Consumer(cluster.bootstrap) as consumer:
        assert list(consumer.beginning_offsets([(name, 0)]).values()) == [4]
    beyond = TopicPartition(name, 0, 11)
    assert _code(next(iter(admin.delete_records([beyond]).values()))) == KafkaError.OFFSET_OUT_OF_RANGE


def test_preferred_leader_needs_no_election(admin: AdminClient, name: str) -> None:
    admin.create_topics([NewTopic(name, 1, 3)])[name].result()
    place = TopicPartition(name, 0)
    _until(lambda: any(one.leader >= 0 for one in _partitions(admin, name).values()), "it has a leader")
    result = admin.elect_leaders(ElectionType.PREFERRED, [place]).result()
    assert result[place].code() == KafkaError.ELECTION_NOT_NEEDED


def test_reassignment_moves_a_replica(cluster: LocalCluster, python_admin: kafka.KafkaAdminClient, name: str) -> None:
    with sync.AdminClient(cluster.bootstrap) as ours:
        brokers = sorted(one.node_id for one in ours.describe_cluster().brokers)
    python_admin.create_topics({name: {"assignments": {0: brokers[:2]}}})
    place = kafka.TopicPartition(name, 0)
    assert python_admin.alter_partition_reassignments({place: [brokers[0], brokers[2]]}) == {place: None}

    def replicas() -> list[int]:
        [topic] = python_admin.describe_topics([name])
        return sorted(node for one in topic["partitions"] for node in one["replica_nodes"])

    _until(lambda: replicas() == sorted([brokers[0], brokers[2]]), "the replica has moved")
    _until(lambda: not python_admin.list_partition_reassignments(), "the reassignment is over")
    [refused] = python_admin.alter_partition_reassignments({place: None}).values()
    assert refused is kafka.errors.NoReassignmentInProgressError


def test_log_dirs_and_the_quorum_are_described(
    cluster: LocalCluster, python_admin: kafka.KafkaAdminClient, name: str
) -> None:
    python_admin.create_topics({name: {"num_partitions": 1, "replication_factor": 3}})

    def held() -> int:
        found = python_admin.describe_log_dirs()
        return str(found).count(name)

    _until(lambda: held() == 3, "each broker has a log of the topic")
    partition: dict[str, Any] = {}

    def is_whole() -> bool:
        """An active controller that is new knows an observer, and what is committed, from the next fetches."""
        nonlocal partition
        [topic] = python_admin.describe_metadata_quorum()["topics"]
        assert topic["topic_name"] == "__cluster_metadata"
        [partition] = topic["partitions"]
        return len(partition["observers"]) == 3 and partition["high_watermark"] > 0

    _until(is_whole, "all brokers observe the quorum")
    assert len(partition["current_voters"]) == 3
    assert partition["leader_id"] in {one["replica_id"] for one in partition["current_voters"]}
