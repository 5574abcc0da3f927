"""The blocking forms, against brokers in memory on a thread of their own."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kipmesh import client as asyncio_client
from kipmesh.client import NewTopic
from kipmesh.client.producer import producer_metadata, pump
from kipmesh.client.sync import AdminClient, Consumer, Producer
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.testing.fake_broker import FakeCluster

FAST = {"retry.backoff.ms": 5, "retry.backoff.max.ms": 20}


@pytest.fixture
def bootstrap() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    # grpc.aio wakes every loop of a process; those that find nothing to read say so.
    loop.set_exception_handler(lambda _loop, _context: None)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    cluster = FakeCluster(2)
    asyncio.run_coroutine_threadsafe(cluster.__aenter__(), loop).result()
    yield cluster.bootstrap
    asyncio.run_coroutine_threadsafe(cluster.__aexit__(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def kipmesh_threads() -> list[str]:
    """Threads of clients; a cluster that other tests of this process share has its own."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("kipmesh") and name != "kipmesh-cluster"]


def test_records_are_read_as_they_were_sent(bootstrap: str) -> None:
    with AdminClient(bootstrap, **FAST) as admin, Producer(bootstrap, **FAST) as producer:
        admin.create_topics([NewTopic("t", 2)])
        sent = [producer.send("t", b"%d" % index, partition=0) for index in range(5000)]
        producer.flush()
        assert all(each.done() for each in sent)
        assert [each.result().offset for each in sent] == list(range(5000))
        many = producer.send_many("t", [(b"k", b"%d" % index) for index in range(5000)], partition=1)
        producer.flush()
        assert [each.result().offset for each in many] == list(range(5000))
        with Consumer(bootstrap, **FAST, auto_offset_reset="earliest") as consumer:
            consumer.assign([("t", 0)])
            values = []
            for record in consumer:
                values.append(record.value)
                if len(values) == 5000:
                    break
            assert values == [b"%d" % index for index in range(5000)]
            assert consumer.position(("t", 0)) == 5000
            assert consumer.end_offsets([("t", 0), ("t", 1)]) == {("t", 0): 5000, ("t", 1): 5000}
            consumer.seek(("t", 0), 4999)
            assert consumer.poll(60_000)[0].offset == 4999
    assert kipmesh_threads() == []


def test_a_blocking_method_has_the_documentation_of_the_asynchronous_one() -> None:
    assert Consumer.poll.__doc__ == asyncio_client.Consumer.poll.__doc__
    assert list(inspect.signature(AdminClient.create_topics).parameters) == ["self", "topics", "wait", "validate_only"]


def test_an_iterator_that_calls_the_client_is_consumed_by_the_caller(bootstrap: str) -> None:
    with AdminClient(bootstrap, **FAST) as admin, Consumer(bootstrap, **FAST) as consumer:
        admin.create_topics([NewTopic("t", 2)])
        consumer.assign([("t", 0), ("t", 1)])
        consumer.seek_to_end(where for where in consumer.assignment() if consumer.position(where) >= 0)
        assert consumer.position(("t", 1)) == 0


def test_a_topic_without_metadata_waits_alone(bootstrap: str) -> None:
    config = {**FAST, "max.block.ms": 100_000}
    with AdminClient(bootstrap, **FAST) as admin, Producer(bootstrap, **config) as producer:
        admin.create_topics([NewTopic(name, 1) for name in ("a", "b")])
        late = [producer.send("late", b"%d" % index) for index in range(50)]
        others = [producer.send(name, b"%d" % index) for index in range(50) for name in ("a", "b")]
        assert [each.result().offset for each in others] == [index for index in range(50) for _ in ("a", "b")]
        (more,) = producer.send_many("a", [(None, b"x")])
        assert not more.cancelled()
        assert not any(each.done() for each in late)
        admin.create_topics([NewTopic("late", 1)])
        assert [each.result().offset for each in late] == list(range(50))


def test_records_that_waited_together_give_up_together(bootstrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Producer(bootstrap, **FAST, **{"max.block.ms": 100_000}) as producer:
        missing = [producer.send("missing", b"%d" % index) for index in range(200)]
        deadline = time.monotonic() + 60
        while not ((entry := producer._client._metadata._entries.get("missing")) and entry.error):
            assert time.monotonic() < deadline, "no answer"
            time.sleep(0.005)
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 100)  # for records that wait for metadata
        monkeypatch.setattr(pump, "time", later)
        monkeypatch.setattr(producer_metadata, "time", later)
        for each in missing:
            with pytest.raises(KafkaError, match="UNKNOWN_TOPIC_OR_PARTITION"):
                each.result(60)
        producer.flush()


def test_errors_come_to_the_caller(bootstrap: str) -> None:
    with Producer(bootstrap, **FAST, max_block_ms=500) as producer:
        pending = producer.send("nope", b"x")
        with pytest.raises(KafkaError) as caught:
            pending.result(60)
        # The second one when half a second was not enough for an answer.
        assert caught.value.code in (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.REQUEST_TIMED_OUT)
        with pytest.raises(KafkaError):
            producer.send_many("nope", [(None, b"x")])
    with pytest.raises(RuntimeError, match="closed"):
        producer.send("t", b"x")
    with pytest.raises(KafkaError, match=r"127\.0\.0\.1:1"):
        Consumer("127.0.0.1:1", request_timeout_ms=100).poll()
    assert kipmesh_threads() == []


def test_what_is_no_record_ends_at_once_and_stops_nobody(bootstrap: str) -> None:
    with AdminClient(bootstrap) as admin:
        admin.create_topics([NewTopic("t", 1)])
    with Producer(bootstrap, **FAST) as producer:
        bad: list[dict[str, Any]] = [{"topic": []}, {"key": 5}, {"partition": "a"}, {"headers": [("h", 3)]}]
        for _ in range(2):  # without metadata, and with it
            for one in bad:
                with pytest.raises(TypeError, match=next(iter(one))):
                    producer.send(**{"topic": "t", "value": b"v", **one}).result(60)
            producer.send("t", b"v").result(60)


def test_threads_may_share_a_client(bootstrap: str) -> None:
    with AdminClient(bootstrap, **FAST) as admin, Producer(bootstrap, **FAST) as producer:
        admin.create_topics([NewTopic("t", 4)])

        def work(partition: int) -> None:
            sent = [producer.send("t", b"%d" % index, partition=partition) for index in range(500)]
            assert [each.result(60).offset for each in sent] == list(range(500))

        threads = [threading.Thread(target=work, args=(partition,)) for partition in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        offsets = admin.list_offsets({("t", partition): -1 for partition in range(4)})
        assert [place.offset for place in offsets.values() if place is not None] == [500] * 4


@pytest.mark.parametrize("kind", [AdminClient, Consumer, Producer])
def test_a_client_that_was_not_used_can_be_closed_and_stays_closed(kind: Any) -> None:
    client = kind("127.0.0.1:1")
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="client is closed"):
        client.start()
    assert kipmesh_threads() == []


@pytest.mark.parametrize("kind", [AdminClient, Consumer, Producer])
def test_a_client_that_reached_nobody_may_be_closed(kind: Any) -> None:
    """And it is not the closing that is told."""
    client = kind("127.0.0.1:1", **FAST, **{"request.timeout.ms": 100})
    with pytest.raises(KafkaError, match="no broker responds"):
        client.start()
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="client is closed"):
        client.start()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told(bootstrap: str) -> None:
    with Producer(bootstrap, **FAST) as producer:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                producer.flush()
                os.write(write, b"no error")
            except RuntimeError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            assert b"after fork" in pipe.read()
        os.waitpid(child, 0)
