"""Records and topic checks for the tests of third-party clients."""

from __future__ import annotations

import base64
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.clients import clusters_of_tests as clusters
from tests.clients import drivers_of_tests as drivers

BEGINNING, END = -2, -1
GROUPS_TOPIC = "__consumer_offsets"
INVALID_REPLICATION_FACTOR = 38
INVALID_PARTITIONS = 37
INVALID_TOPIC_EXCEPTION = 17
INVALID_CONFIG = 40
MESSAGE_TOO_LARGE = 10
OFFSET_OUT_OF_RANGE = 1
TOPIC_ALREADY_EXISTS = 36
UNKNOWN_TOPIC_OR_PARTITION = 3
NON_EMPTY_GROUP = 68

FIRST_MS = (int(time.time()) - 3600) * 1000
"""Timestamp of the first record: recent enough that retention does not delete the records."""

Record = dict[str, Any]


def encoded(value: bytes) -> str:
    """Encode a value for a driver."""
    return base64.b64encode(value).decode()


def decoded(value: str) -> bytes:
    """Decode a value of a driver."""
    return base64.b64decode(value)


def records(count: int, partitions: int = 1, size: int = 100) -> list[Record]:
    """Return distinct records, partly compressible, for each partition in turn; some without key or headers."""
    source = random.Random(count)
    generated = []
    for number in range(count):
        value = f"{number}:{source.randbytes(source.randint(0, size // 2)).hex()}".encode()
        value += b"abc" * source.randint(0, size // 3)
        generated.append(
            {
                "partition": number % partitions,
                "key": None if number % 5 == 0 else encoded(f"key-{number}".encode()),
                "value": encoded(value),
                "timestamp": FIRST_MS + number * 1000,
                "headers": [["number", encoded(str(number).encode())]] if number % 3 == 0 else [],
            }
        )
    return generated


def create(driver: drivers.Driver, topic: str, partitions: int = 1, **config: str) -> None:
    """Create a topic with three replicas and wait until all are in sync."""
    driver("create_topic", topic=topic, partitions=partitions, replicas=3, config=config)
    wait_in_sync(driver, topic, partitions)


def wait_in_sync(driver: drivers.Driver, topic: str, partitions: int) -> list[dict[str, Any]]:
    """Wait until each partition has a leader and three in-sync replicas, and return the partitions."""
    found: list[dict[str, Any]] = []

    def complete() -> bool:
        nonlocal found
        try:
            found = driver("describe_topic", topic=topic)
        except drivers.ClientError as error:
            if error.code != UNKNOWN_TOPIC_OR_PARTITION:  # the broker does not have the topic yet
                raise
            return False
        return len(found) == partitions and all(each["leader"] >= 0 and len(each["isr"]) == 3 for each in found)

    clusters.wait_for(f"{topic} has {partitions} partitions in sync", complete)
    return sorted(found, key=lambda each: each["id"])


def wait_leaders_restored(driver: drivers.Driver, *topics: str) -> None:
    """Wait until all replicas are in sync and preferred leaders lead, as before a broker was killed.

    This includes __consumer_offsets, so that no coordinator moves in a later test.
    """

    def are_restored() -> bool:
        for topic in (*topics, GROUPS_TOPIC):
            try:
                found = driver("describe_topic", topic=topic)
            except drivers.ClientError as error:
                if error.code == UNKNOWN_TOPIC_OR_PARTITION and topic == GROUPS_TOPIC:  # no group exists yet
                    continue
                if error.code < 0:  # the client's request went to the killed broker
                    return False
                raise
            for each in found:
                if each["leader"] != each["replicas"][0] or len(each["isr"]) != len(each["replicas"]):
                    return False
        return True

    clusters.wait_for("preferred leaders lead", are_restored)


def from_beginning(partitions: int) -> dict[str, int]:
    """Return start offsets to consume all of a topic."""
    return {str(partition): BEGINNING for partition in range(partitions)}


def check_same(
    client: drivers.Client, sent: Sequence[Record], positions: Sequence[Sequence[int]], read: Sequence[Record]
) -> None:
    """Assert that exactly the sent records were read, at their acknowledged positions."""
    fields = [field for field in ("timestamp", "headers") if field in client.features]
    found = {(record["partition"], record["offset"]): record for record in read}
    assert len(found) == len(read), "an offset was read twice"
    assert len(read) == len(sent)
    for record, (partition, offset) in zip(sent, positions, strict=True):
        for field in ("partition", "key", "value", *fields):
            assert found[partition, offset][field] == record[field], (field, partition, offset)


def values_by_partition(read: Iterable[Record]) -> Mapping[int, list[str]]:
    """Return values by partition. Asserts that offsets increase."""
    by_partition: dict[int, list[Record]] = defaultdict(list)
    for record in read:
        by_partition[record["partition"]].append(record)
    for records in by_partition.values():
        offsets = [record["offset"] for record in records]
        assert offsets == sorted(offsets)
    return {partition: [record["value"] for record in records] for partition, records in by_partition.items()}
