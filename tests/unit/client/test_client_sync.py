"""The blocking clients, against in-memory brokers on a separate thread."""

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
    # grpc.aio wakes all event loops of a process. Loops without data to read report an error.
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
    """Return names of client threads, without the thread of a cluster shared by other tests."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("kipmesh") and name != "kipmesh-cluster"]


def test_blocking_clients_send_and_read_records(bootstrap: str) -> None:
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


def test_blocking_methods_have_docstrings_of_async_methods() -> None:
    assert Consumer.poll.__doc__ == asyncio_client.Consumer.poll.__doc__
    assert list(inspect.signature(AdminClient.create_topics).parameters) == ["self", "topics", "wait", "validate_only"]


def test_generator_argument_may_call_the_client(bootstrap: str) -> None:
    with AdminClient(bootstrap, **FAST) as admin, Consumer(bootstrap, **FAST) as consumer:
        admin.create_topics([NewTopic("t", 2)])
        consumer.assign([("t", 0), ("t", 1)])
        consumer.seek_to_end(tp for tp in consumer.assignment() if consumer.position(tp) >= 0)
        assert consumer.position(("t", 1)) == 0


def test_topic_without_metadata_blocks_no_other_topic(bootstrap: str) -> None:
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


def test_records_waiting_for_metadata_fail_together(bootstrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Producer(bootstrap, **FAST, **{"max.block.ms": 100_000}) as producer:
        missing = [producer.send("missing", b"%d" % index) for index in range(200)]
        deadline = time.monotonic() + 60
        while not ((entry := producer._client._metadata._entries.get("missing")) and entry.error):
            assert time.monotonic() < deadline, "no response"
            time.sleep(0.005)
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 100)  # the clock of records that wait for metadata
        monkeypatch.setattr(pump, "time", later)
        monkeypatch.setattr(producer_metadata, "time", later)
        for each in missing:
            with pytest.raises(KafkaError, match="UNKNOWN_TOPIC_OR_PARTITION"):
                each.result(60)
        producer.flush()


def test_blocking_calls_raise_errors_in_caller(bootstrap: str) -> None:
    with Producer(bootstrap, **FAST, max_block_ms=500) as producer:
        pending = producer.send("nope", b"x")
        with pytest.raises(KafkaError) as caught:
            pending.result(60)
        # REQUEST_TIMED_OUT if no response arrived within 0.5 s.
        assert caught.value.code in (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.REQUEST_TIMED_OUT)
        with pytest.raises(KafkaError):
            producer.send_many("nope", [(None, b"x")])
    with pytest.raises(RuntimeError, match="closed"):
        producer.send("t", b"x")
    with pytest.raises(KafkaError, match=r"127\.0\.0\.1:1"):
        Consumer("127.0.0.1:1", request_timeout_ms=100).poll()
    assert kipmesh_threads() == []


def test_invalid_record_fails_without_stopping_producer(bootstrap: str) -> None:
    with AdminClient(bootstrap) as admin:
        admin.create_topics([NewTopic("t", 1)])
    with Producer(bootstrap, **FAST) as producer:
        bad: list[dict[str, Any]] = [{"topic": []}, {"key": 5}, {"partition": "a"}, {"headers": [("h", 3)]}]
        for _ in range(2):  # without and with metadata
            for fields in bad:
                with pytest.raises(TypeError, match=next(iter(fields))):
                    producer.send(**{"topic": "t", "value": b"v", **fields}).result(60)
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
        assert [offset.offset for offset in offsets.values() if offset is not None] == [500] * 4


@pytest.mark.parametrize("kind", [AdminClient, Consumer, Producer])
def test_unused_client_can_be_closed_and_stays_closed(kind: Any) -> None:
    client = kind("127.0.0.1:1")
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="client is closed"):
        client.start()
    assert kipmesh_threads() == []


@pytest.mark.parametrize("kind", [AdminClient, Consumer, Producer])
def test_client_that_failed_to_connect_can_be_closed(kind: Any) -> None:
    """`close` does not raise the connection error again."""
    client = kind("127.0.0.1:1", **FAST, **{"request.timeout.ms": 100})
    with pytest.raises(KafkaError, match="no broker responds"):
        client.start()
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="client is closed"):
        client.start()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_client_raises_after_fork(bootstrap: str) -> None:
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
