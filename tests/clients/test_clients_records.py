"""Records of third-party clients: produce, compress, consume, find by timestamp, and survive a killed broker."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.clients import clusters_of_tests as clusters
from tests.clients import drivers_of_tests as drivers
from tests.clients import scenarios_of_tests as scenarios
from tests.clients.scenarios_of_tests import BEGINNING, END

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
Open = Callable[..., drivers.Driver]
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


@pytest.mark.parametrize("codec", CODECS)
def test_compressed_records_are_read_back(driver: drivers.Driver, topic: str, codec: str) -> None:
    scenarios.create(driver, topic, 3)
    sent = scenarios.records(60, 3, size=300)
    positions = driver("produce", topic=topic, records=sent, compression=codec)
    assert sorted(map(tuple, positions)) == [(partition, offset) for partition in range(3) for offset in range(20)]
    read = driver("consume", topic=topic, partitions=scenarios.from_beginning(3), count=60)
    scenarios.check_same(driver.client, sent, positions, read)


@pytest.mark.parametrize("acks", ["0", "1"])
def test_records_with_fewer_acks_are_read_back(driver: drivers.Driver, topic: str, acks: str) -> None:
    scenarios.create(driver, topic)
    scenarios.wait_leaders_restored(driver, topic)  # with fewer acks, a leader change loses records
    sent = scenarios.records(20)
    driver("produce", topic=topic, records=sent[:1])  # with acks=0 the producer does not notice a wrong leader
    driver("produce", topic=topic, records=sent[1:], acks=acks)
    read = driver("consume", topic=topic, partitions={"0": BEGINNING}, count=20)
    assert [record["value"] for record in read] == [record["value"] for record in sent]


def test_assigned_partitions_are_read_from_their_offsets(driver: drivers.Driver, topic: str) -> None:
    scenarios.create(driver, topic, 3)
    sent = scenarios.records(60, 3)
    driver("produce", topic=topic, records=sent)
    read = driver("consume", topic=topic, partitions={"1": 15, "2": BEGINNING}, count=25)
    found = scenarios.values_by_partition(read)
    assert found == {
        1: [record["value"] for record in sent if record["partition"] == 1][15:],
        2: [record["value"] for record in sent if record["partition"] == 2],
    }
    assert driver("watermarks", topic=topic, partition=1) == [0, 20]
    assert driver("consume", topic=topic, partitions={"0": END}, count=1, timeout_s=2) == []


def test_offset_for_time_is_the_first_record_at_or_after_the_timestamp(driver: drivers.Driver, topic: str) -> None:
    if "timestamp" not in driver.client.features:
        pytest.skip(f"{driver.client.name} does not set timestamps")
    scenarios.create(driver, topic)
    sent = scenarios.records(30)
    driver("produce", topic=topic, records=sent[:10])
    driver("produce", topic=topic, records=sent[10:], compression="gzip")
    for number, past in ((0, -5000), (4, 0), (17, -1), (29, 0)):
        wanted = sent[number]["timestamp"] + past
        offset = driver("offset_for_time", topic=topic, partition=0, timestamp=wanted)
        assert offset == (number if past > -1000 else 0)
        read = driver("consume", topic=topic, partitions={"0": offset}, count=1)
        assert read[0]["value"] == sent[offset]["value"]
    assert driver("offset_for_time", topic=topic, partition=0, timestamp=sent[-1]["timestamp"] + 1) in (END, 30)


def test_idempotent_records_are_written_once_in_order(driver: drivers.Driver, topic: str) -> None:
    scenarios.create(driver, topic, 2)
    sent = scenarios.records(200, 2)
    positions = driver("produce", topic=topic, records=sent, idempotent=True, compression=driver.client.codec)
    assert [offset for partition, offset in positions if partition == 1] == list(range(100))
    read = driver("consume", topic=topic, partitions=scenarios.from_beginning(2), count=200)
    scenarios.check_same(driver.client, sent, positions, read)


def test_long_poll_fetch_returns_a_new_record(
    driver: drivers.Driver, client: drivers.Client, open_driver: Open, topic: str
) -> None:
    scenarios.create(driver, topic)
    waiting = open_driver(client)
    waiting.begin("consume", topic=topic, partitions={"0": 0}, count=1, timeout_s=30)
    time.sleep(1.5)
    sent = scenarios.records(1)
    driver("produce", topic=topic, records=sent)
    assert [record["value"] for record in waiting.result()] == [sent[0]["value"]]


def test_large_records_are_read_back_whole(driver: drivers.Driver, topic: str) -> None:
    scenarios.create(driver, topic)
    sent = scenarios.records(4, size=100_000)
    if "binary" in driver.client.features:
        sent[0]["value"] = scenarios.encoded(bytes(range(256)) * 1000)
    positions = driver("produce", topic=topic, records=sent)
    read = driver("consume", topic=topic, partitions={"0": 0}, count=4)
    scenarios.check_same(driver.client, sent, positions, read)


def test_records_survive_a_killed_broker(
    breakable: clusters.Cluster, driver: drivers.Driver, client: drivers.Client, open_driver: Open, topic: str
) -> None:
    """Records of an idempotent producer arrive once and in order while a consumer reads them."""
    scenarios.create(driver, topic, 2)
    leader = scenarios.wait_in_sync(driver, topic, 2)[0]["leader"]
    producer, consumer = open_driver(client), open_driver(client)
    sent = scenarios.records(600, 2, size=30)
    consumer.begin("consume", topic=topic, partitions=scenarios.from_beginning(2), count=len(sent), timeout_s=80)
    producer.begin("produce", topic=topic, records=sent, idempotent=True, pace_ms=10)
    clusters.wait_for("first records", lambda: driver("watermarks", topic=topic, partition=0)[1] > 20)
    breakable.kill(leader)
    try:
        positions, read = producer.result(), consumer.result()
    finally:
        breakable.start(leader)
    scenarios.check_same(driver.client, sent, positions, read)
    wanted = {number: [record["value"] for record in sent if record["partition"] == number] for number in (0, 1)}
    assert scenarios.values_by_partition(read) == wanted
    scenarios.wait_leaders_restored(driver, topic)


def test_consumer_reads_from_its_rack(
    cluster: clusters.Cluster, driver: drivers.Driver, client: drivers.Client, open_driver: Open, topic: str
) -> None:
    """The follower in the consumer's rack sends more bytes than the leader."""
    before = {number: cluster.counters(number).bytes_out for number in (1, 2, 3)}
    scenarios.create(driver, topic)
    scenarios.wait_leaders_restored(driver, topic)
    leader = scenarios.wait_in_sync(driver, topic, 1)[0]["leader"]
    follower = next(number for number in (1, 2, 3) if number != leader)
    sent = scenarios.records(300, size=1000)
    driver("produce", topic=topic, records=sent[:100])
    reader = open_driver(client, rack=clusters.RACKS[follower - 1])
    reader.begin("consume", topic=topic, partitions={"0": 0}, count=len(sent), timeout_s=60)
    time.sleep(2)  # the reader is redirected to the follower before most records are written
    driver("produce", topic=topic, records=sent[100:], pace_ms=5)
    assert len(reader.result()) == len(sent)
    sent_by = {number: cluster.counters(number).bytes_out - before[number] for number in before}
    assert sent_by[follower] > sent_by[leader]
    assert sum(sent_by.values()) > 200_000, sent_by
