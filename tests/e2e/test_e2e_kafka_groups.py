"""Consumer groups of third-party clients, and groups with members of both protocols."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import aiokafka
import confluent_kafka
import confluent_kafka.admin
import pytest
from aiokafka.coordinator.assignors import range as aio_range
from aiokafka.coordinator.assignors import roundrobin as aio_roundrobin

from kipmesh.client import NewTopic, sync
from kipmesh.cluster import LocalCluster

with warnings.catch_warnings():  # the package uses deprecated functions of Python
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka
    from kafka.coordinator.assignors.range import RangePartitionAssignor
    from kafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:kafka.*")]

PARTITIONS = 6
RECORDS = 300
DEADLINE_S = 60

Owned = set[tuple[str, int]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    config = {"group.initial.rebalance.delay.ms": 200, "group.min.session.timeout.ms": 1000}
    with LocalCluster(mode="single", config=config) as running:
        yield running


@pytest.fixture
def topic(cluster: LocalCluster) -> str:
    """A topic with records `0` to `299`, the same number in each partition."""
    name = f"topic-{secrets.token_hex(4)}"
    with sync.AdminClient(cluster.bootstrap) as admin:
        admin.create_topics([NewTopic(name, PARTITIONS, 1)])
    with sync.Producer(cluster.bootstrap) as producer:
        for number in range(RECORDS):
            producer.send(name, str(number).encode(), partition=number % PARTITIONS)
        producer.flush()
    return name


class Member(threading.Thread):
    """A group member that polls on a thread until it is stopped. Subclasses wrap a client each."""

    def __init__(self, cluster: LocalCluster, group: str, topic: str, strategy: str) -> None:
        super().__init__(daemon=True)
        self.values: Counter[str] = Counter()
        """Filled by this thread. Other threads copy it by one call (`list`, `len`) and never iterate over it."""
        self.owned: Owned = set()
        self.error: BaseException | None = None
        self._cluster, self._group, self._topic, self._strategy = cluster, group, topic, strategy
        self._stop_requested = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            self.consume()
        except BaseException as error:
            self.error = error
        finally:
            self.owned = set()

    def consume(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self._stop_requested.set()
        self.join(DEADLINE_S)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


class Confluent(Member):
    def consume(self) -> None:
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self._cluster.kafka_bootstrap,
                "group.id": self._group,
                "auto.offset.reset": "earliest",
                "partition.assignment.strategy": self._strategy,
                "session.timeout.ms": 30_000,
            }
        )
        consumer.subscribe([self._topic])
        try:
            while not self._stop_requested.is_set():
                message = consumer.poll(0.1)
                if message is not None and message.error() is None:
                    self.values[_text(message.value())] += 1
                self.owned = {(each.topic, each.partition) for each in consumer.assignment()}
        finally:
            consumer.close()


class KafkaPython(Member):
    def consume(self) -> None:
        assignor = {"range": RangePartitionAssignor, "roundrobin": RoundRobinPartitionAssignor}[self._strategy]
        consumer = kafka.KafkaConsumer(
            self._topic,
            bootstrap_servers=str(self._cluster.kafka_bootstrap).split(","),
            group_id=self._group,
            auto_offset_reset="earliest",
            partition_assignment_strategy=[assignor],
        )
        try:
            while not self._stop_requested.is_set():
                for records in consumer.poll(timeout_ms=100).values():
                    self.values.update(record.value.decode() for record in records)
                self.owned = {(each.topic, each.partition) for each in consumer.assignment()}
        finally:
            consumer.close()


class AioKafka(Member):
    def consume(self) -> None:
        asyncio.run(self._consume())

    async def _consume(self) -> None:
        assignor = {
            "range": aio_range.RangePartitionAssignor,
            "roundrobin": aio_roundrobin.RoundRobinPartitionAssignor,
        }[self._strategy]
        consumer = aiokafka.AIOKafkaConsumer(
            self._topic,
            bootstrap_servers=self._cluster.kafka_bootstrap,
            group_id=self._group,
            session_timeout_ms=30_000,
            auto_offset_reset="earliest",
            partition_assignment_strategy=[assignor],
        )
        await consumer.start()
        try:
            while not self._stop_requested.is_set():
                for records in (await consumer.getmany(timeout_ms=100)).values():
                    self.values.update(record.value.decode() for record in records)
                self.owned = {(each.topic, each.partition) for each in consumer.assignment()}
        finally:
            await consumer.stop()


class Kipmesh(Member):
    """kipmesh's consumer, by gRPC."""

    def consume(self) -> None:
        consumer = sync.Consumer(
            self._cluster.bootstrap,
            group_id=self._group,
            auto_offset_reset="earliest",
            partition_assignment_strategy=self._strategy,
        )
        with consumer:
            consumer.subscribe([self._topic])
            while not self._stop_requested.is_set():
                self.values.update(_text(record.value) for record in consumer.poll(100))
                self.owned = {(each.topic, each.partition) for each in consumer.assignment()}


def _text(value: bytes | None) -> str:
    assert value is not None
    return value.decode()


def _until(condition: Callable[[], Any], members: list[Member], expected: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        for member in members:
            if member.error is not None:
                raise member.error
        state = [(type(member).__name__, sorted(member.owned), len(member.values)) for member in members]
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {expected}; {state}"
        time.sleep(0.05)


def _is_shared(members: list[Member], topic: str) -> bool:
    """Return whether each partition has one owner and the members' shares differ by at most one partition."""
    owned = Counter(partition for member in members for partition in member.owned)
    sizes = [len(member.owned) for member in members]
    every = {(topic, number) for number in range(PARTITIONS)}
    return owned == Counter(every) and max(sizes) - min(sizes) <= 1


@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    ("kinds", "strategy"),
    [
        ((Confluent, Confluent), "cooperative-sticky"),
        ((KafkaPython, AioKafka), "range"),
        ((Kipmesh, Confluent), "range"),
        ((Confluent, Kipmesh), "cooperative-sticky"),
        ((Kipmesh, KafkaPython, AioKafka, Confluent), "roundrobin"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(kind.__name__ for kind in value),
)
def test_members_share_partitions_and_skip_no_record(
    cluster: LocalCluster, topic: str, kinds: tuple[type[Member], ...], strategy: str
) -> None:
    """Members join one by one and share the partitions. When the first leaves, the others take over its partitions."""
    group = f"group-{secrets.token_hex(4)}"
    members: list[Member] = []
    try:
        for kind in kinds:
            members.append(kind(cluster, group, topic, strategy))
            _until(lambda: _is_shared(members, topic), members, f"{len(members)} members share")
        everything = {str(number) for number in range(RECORDS)}
        _until(lambda: set().union(*(list(member.values) for member in members)) == everything, members, "all is read")
        first = members[0]
        first.stop()
        _until(lambda: _is_shared(members[1:], topic), members[1:], "the other members own all partitions")
        with sync.AdminClient(cluster.bootstrap) as admin:
            # A client may rejoin when it refreshes its metadata.
            _until(lambda: admin.describe_groups([group])[group].state == "Stable", members[1:], "the group is stable")
            described = admin.describe_groups([group])[group]
        assert described.partition_assignor == strategy
        assert len(described.members) == len(members) - 1
    finally:
        for member in members:
            member.stop()
    with sync.AdminClient(cluster.bootstrap) as admin:  # each member committed when it left
        committed = admin.list_group_offsets(group)
    assert {partition.partition: offset.offset for partition, offset in committed.items()} == dict.fromkeys(
        range(PARTITIONS), RECORDS // PARTITIONS
    )


def test_static_member_rejoins_without_a_rebalance(cluster: LocalCluster, topic: str) -> None:
    group = f"group-{secrets.token_hex(4)}"
    changes: list[str] = []

    def member(instance: str) -> confluent_kafka.Consumer:
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": cluster.kafka_bootstrap,
                "group.id": group,
                "group.instance.id": instance,
                "session.timeout.ms": 45_000,
            }
        )
        consumer.subscribe(
            [topic],
            on_assign=lambda _, partitions: changes.append(f"{instance} got {len(partitions)}"),
            on_revoke=lambda _, partitions: changes.append(f"{instance} lost {len(partitions)}"),
        )
        return consumer

    def poll_until_shared(*consumers: confluent_kafka.Consumer) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while {len(consumer.assignment()) for consumer in consumers} != {PARTITIONS // 2}:
            assert time.monotonic() < deadline, changes
            for consumer in consumers:
                consumer.poll(0.1)

    first, second = member("a"), member("b")
    poll_until_shared(first, second)
    second.close()  # static members do not leave
    changes.clear()
    second = member("b")
    poll_until_shared(first, second)
    assert changes == [f"b got {PARTITIONS // 2}"]
    first.close()
    second.close()


def test_groups_are_listed_described_altered_and_deleted(cluster: LocalCluster, topic: str) -> None:
    group = f"group-{secrets.token_hex(4)}"
    member = Confluent(cluster, group, topic, "range")
    _until(lambda: len(member.values) == RECORDS, [member], "all is read")
    assert cluster.kafka_bootstrap is not None
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": cluster.kafka_bootstrap})
    listed = admin.list_consumer_groups().result()
    assert group in {listing.group_id for listing in listed.valid}
    described = admin.describe_consumer_groups([group])[group].result()
    assert described.state == confluent_kafka.ConsumerGroupState.STABLE
    assert described.partition_assignor == "range"
    [only] = described.members
    assert {(each.topic, each.partition) for each in only.assignment.topic_partitions} == member.owned
    with pytest.raises(confluent_kafka.KafkaException) as refused:
        admin.delete_consumer_groups([group])[group].result()
    assert refused.value.args[0].code() == confluent_kafka.KafkaError.NON_EMPTY_GROUP
    member.stop()
    empty = confluent_kafka.ConsumerGroupState.EMPTY  # a closing consumer hardly waits for its LeaveGroup response
    _until(lambda: admin.describe_consumer_groups([group])[group].result().state == empty, [], "the group is empty")

    offset_7 = confluent_kafka.TopicPartition(topic, 0, 7)
    request = confluent_kafka.ConsumerGroupTopicPartitions(group, [offset_7])
    altered = admin.alter_consumer_group_offsets([request])[group].result()
    assert altered.topic_partitions[0].error is None
    fetched = admin.list_consumer_group_offsets([confluent_kafka.ConsumerGroupTopicPartitions(group)])[group].result()
    offsets = {each.partition: each.offset for each in fetched.topic_partitions}
    assert offsets == {0: 7} | dict.fromkeys(range(1, PARTITIONS), RECORDS // PARTITIONS)

    other = kafka.KafkaAdminClient(bootstrap_servers=str(cluster.kafka_bootstrap).split(","))
    try:
        found = other.list_group_offsets({group: None})[group]
        assert {partition.partition: value.offset for partition, value in found.items()} == offsets
    finally:
        other.close()
    admin.delete_consumer_groups([group])[group].result()
    listed = admin.list_consumer_groups().result()
    assert group not in {listing.group_id for listing in listed.valid}
