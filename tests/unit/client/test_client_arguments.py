"""Arguments of the wrong type at the public methods of the clients."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from kipmesh.client import AdminClient, ConfigResource, Consumer, NewTopic, Producer, ResetTo, ResourceType, sync
from kipmesh.client.admin.quorum import describe_quorum
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.testing.fake_broker import FakeCluster

FAST = {"retry.backoff.ms": 5, "retry.backoff.max.ms": 20}
ADDRESS = "127.0.0.1:1"
TOPIC = ConfigResource(ResourceType.TOPIC, "t")
PAIRS = "(topic, partition) pairs"
TIMESTAMP = "must be an integer of milliseconds since 1970, got 1.5"
STRING_CALLS: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("topics must be a list of NewTopic", lambda admin, text: admin.create_topics(text)),
    ("topics must be a list of names", lambda admin, text: admin.delete_topics(text)),
    ("topics must be a list of names", lambda admin, text: admin.describe_topics(text)),
    ("partitions must be a list of " + PAIRS, lambda admin, text: admin.elect_leaders(partitions=text)),
    ("resources must be a list of ConfigResource", lambda admin, text: admin.describe_configs(text)),
    ("keys must be a list of names", lambda admin, text: admin.describe_configs([TOPIC], keys=text)),
    ("changes must be a list of ConfigAlteration", lambda admin, text: admin.alter_configs({TOPIC: text})),
    ("states must be a list of names", lambda admin, text: admin.list_groups(states=text)),
    ("types must be a list of names", lambda admin, text: admin.list_groups(types=text)),
    ("group_ids must be a list of names", lambda admin, text: admin.describe_groups(text)),
    ("group_ids must be a list of names", lambda admin, text: admin.delete_groups(text)),
    ("partitions must be a list of " + PAIRS, lambda admin, text: admin.list_group_offsets("g", text)),
    ("partitions must be a list of " + PAIRS, lambda admin, text: admin.delete_group_offsets("g", text)),
    (
        "partitions must be a list of " + PAIRS,
        lambda admin, text: admin.reset_group_offsets("g", text, ResetTo.EARLIEST),
    ),
    ("partitions must be a list of " + PAIRS, lambda admin, text: admin.list_partition_reassignments(text)),
    ("partitions must be a list of " + PAIRS, lambda admin, text: admin.wait_reassigned(text)),
    (
        "replicas must be a list of broker ids",
        lambda admin, text: admin.alter_partition_reassignments({("t", 0): text}),
    ),
    ("users must be a list of names", lambda admin, text: admin.describe_user_scram_credentials(text)),
]


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster() as fake:
        fake.create_topic("a")
        fake.create_topic("b")
        yield fake


def raises(message: str) -> Any:
    return pytest.raises(TypeError, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize(("message", "call"), STRING_CALLS)
async def test_admin_refuses_string_where_list_is_expected(
    message: str, call: Callable[[Any, Any], Awaitable[Any]]
) -> None:
    admin = AdminClient(ADDRESS)
    with raises(f"{message}, got the string 'ab'"):
        await call(admin, "ab")
    with raises(f"{message}, got b'ab'"):
        await call(admin, b"ab")
    with raises(f"{message}, got 7"):
        await call(admin, 7)
    await admin.close()


async def test_refused_string_deletes_no_topic(cluster: FakeCluster) -> None:
    async with AdminClient(cluster.bootstrap, **FAST) as admin:
        with raises("topics must be a list of names, got the string 'ab'"):
            await admin.delete_topics("ab")
        assert [topic.name for topic in await admin.list_topics()] == ["a", "b"]
        await admin.delete_topics(name for name in ("a", "b"))
        assert await admin.list_topics() == []


def test_blocking_clients_refuse_string_where_list_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(_client: object) -> None:
        """Do not connect."""

    for kind in (AdminClient, Consumer, Producer):
        monkeypatch.setattr(kind, "start", start)
    with sync.AdminClient(ADDRESS) as admin, sync.Consumer(ADDRESS) as consumer, sync.Producer(ADDRESS) as producer:
        with raises("topics must be a list of names, got the string 'ab'"):
            admin.delete_topics("ab")
        with raises("group_ids must be a list of names, got the string 'q'"):
            admin.delete_groups("q")
        with raises("topics must be a list of names, got the string 'ab'"):
            consumer.subscribe("ab")
        with raises("records must be a list of (key, value) pairs, got the string 'ab'"):
            producer.send_many("t", "ab")  # type: ignore[arg-type]


async def test_controllers_must_be_a_list() -> None:
    with raises(f"controllers must be a list of host:port, got the string '{ADDRESS}'"):
        await describe_quorum(ADDRESS, timeout_s=1)


@pytest.mark.parametrize("config", [{}, {"group.id": "g"}])
async def test_consumer_refuses_string_where_list_is_expected(config: dict[str, str]) -> None:
    consumer = Consumer(ADDRESS, **config)
    with raises("topics must be a list of names, got the string 'ab'"):
        consumer.subscribe("ab")
    with raises("topics must be a list of names, got b'ab'"):
        consumer.subscribe(b"ab")  # type: ignore[arg-type]
    with raises("topic must be str, got b't1'"):
        consumer.subscribe([b"t1"])  # type: ignore[list-item]
    calls: list[Callable[[Any], Any]] = [consumer.assign, consumer.pause, consumer.resume, consumer.seek_to_end]
    for call in calls:
        with raises("partitions must be a list of (topic, partition) pairs, got the string 'ab'"):
            call("ab")
        with raises("partitions must be a list of (topic, partition) pairs, got the element 't'"):
            call(("t", 0))
        with raises("topic must be str, got b't'"):
            call([(b"t", 0)])
        with raises("partition must be int, got '0'"):
            call([("t", "0")])
    await consumer.close()


async def test_consumer_error_names_argument_and_value(cluster: FakeCluster) -> None:
    bad: Any = "x"
    config = {**FAST, "group.id": "g"}
    async with Consumer(cluster.bootstrap, **config) as consumer:
        with raises("offsets must be a dict of (topic, partition) to offset, got 'x'"):
            await consumer.commit(bad)
        with raises("offsets must be a dict of (topic, partition) to offset, got the key 'x'"):
            await consumer.commit({bad: 1})
        with raises("offset must be int, got 'x'"):
            await consumer.commit({("a", 0): bad})
        with raises("timeout_ms must be a number of milliseconds, got 'x'"):
            await consumer.poll(timeout_ms=bad)
        with raises("max_records must be int, got 'x'"):
            await consumer.poll(max_records=bad)
        with raises(f"timestamp {TIMESTAMP}"):
            await consumer.offsets_for_times({("a", 0): 1.5})  # type: ignore[dict-item]
        with raises("offset must be int, got 'x'"):
            consumer.seek(("a", 0), bad)
        with raises("partition must be a (topic, partition) pair, got 'x'"):
            await consumer.position(bad)
        with raises("topic must be str, got b'a'"):
            await consumer.partitions_for(b"a")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda admin: admin.create_topics(["x"]), "topics must be a list of NewTopic, got the element 'x'"),
        (
            lambda admin: admin.create_topics([NewTopic("tt", num_partitions="6")]),  # type: ignore[arg-type]
            "num_partitions must be int, got '6'",
        ),
        (
            lambda admin: admin.create_topics([NewTopic("tt", replication_factor="1")]),  # type: ignore[arg-type]
            "replication_factor must be int, got '1'",
        ),
        (lambda admin: admin.create_topics([NewTopic(b"t1")]), "topic must be str, got b't1'"),  # type: ignore[arg-type]
        (
            lambda admin: admin.create_topics([NewTopic("tt", configs="x")]),  # type: ignore[arg-type]
            "configs must be a dict of name to value, got 'x'",
        ),
        (lambda admin: admin.delete_topics([b"t1"]), "topic must be str, got b't1'"),
        (lambda admin: admin.delete_groups([7]), "group_id must be str, got 7"),
        (
            lambda admin: admin.create_partitions("q"),
            "totals must be a dict of topic to number of partitions, got 'q'",
        ),
        (lambda admin: admin.create_partitions({"t": "6"}), "number of partitions must be int, got '6'"),
        (
            lambda admin: admin.delete_records("q"),
            "offsets must be a dict of (topic, partition) to offset, got 'q'",
        ),
        (lambda admin: admin.delete_records({("t", 0): None}), "offset must be int, got None"),
        (
            lambda admin: admin.list_offsets([("t", 0)]),
            "timestamps must be a dict of (topic, partition) to timestamp, got [('t', 0)]",
        ),
        (lambda admin: admin.list_offsets({("t", 0): 1.5}), f"timestamp {TIMESTAMP}"),
        (
            lambda admin: admin.reset_group_offsets("g", [("t", 0)], ResetTo.TIMESTAMP, 1.5),
            f"value {TIMESTAMP}",
        ),
        (
            lambda admin: admin.alter_group_offsets("g", "q"),
            "offsets must be a dict of (topic, partition) to offset, got 'q'",
        ),
        (
            lambda admin: admin.alter_configs("q"),
            "changes must be a dict of ConfigResource to a list of ConfigAlteration, got 'q'",
        ),
        (
            lambda admin: admin.alter_partition_reassignments("q"),
            "targets must be a dict of (topic, partition) to a list of broker ids, got 'q'",
        ),
    ],
)
async def test_admin_error_names_argument_and_value(call: Callable[[Any], Awaitable[Any]], message: str) -> None:
    admin = AdminClient(ADDRESS)
    with raises(message):
        await call(admin)
    await admin.close()


@pytest.mark.parametrize("kind", [Producer, Consumer, AdminClient, sync.Producer, sync.Consumer, sync.AdminClient])
def test_bootstrap_error_names_form_and_value(kind: Any) -> None:
    form = "bootstrap must be 'host:port' or a list of these"
    with raises(f"{form}, got 9092"):
        kind(9092)
    with raises(f"{form}, got b'h:1'"):
        kind(b"h:1")
    with raises(f"{form}, got the element 9092"):
        kind(["h:1", 9092])


def test_bootstrap_error_does_not_reveal_passwords() -> None:
    with pytest.raises(TypeError, match=r"got a dict of settings; pass them as keyword arguments$") as caught:
        Producer({"bootstrap.servers": "h:1", "sasl.password": "secret"})  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)


async def test_producer_refuses_topic_that_is_bytes(cluster: FakeCluster) -> None:
    topic: Any = b"t1"
    async with Producer(cluster.bootstrap, **FAST) as producer:
        with raises("topic must be str, got b't1'"):
            await producer.send(topic, b"v")
        with raises("topic must be str, got b't1'"):
            producer.send_nowait(topic, b"v")
        with raises("topic must be str, got b't1'"):
            await producer.partitions_for(topic)


async def test_missing_partition_error_counts_one_partition_in_singular(cluster: FakeCluster) -> None:
    async with Producer(cluster.bootstrap, **FAST, **{"max.block.ms": 500}) as producer:
        with pytest.raises(KafkaError, match=r"topic 'a' has no partition 5, it has 1 partition$") as caught:
            await producer.send("a", b"v", partition=5)
        assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
