"""What scenarios share: records, and what to find out about a cluster by a client."""

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
"""Not so long ago that retention deletes the records."""

Record = dict[str, Any]


def encoded(value: bytes) -> str:
    """As drivers take it."""
    return base64.b64encode(value).decode()


def decoded(value: str) -> bytes:
    """As it was."""
    return base64.b64decode(value)


def records(count: int, partitions: int = 1, size: int = 100) -> list[Record]:
    """Different keys, values (some of each can be compressed), times and headers, in partitions in turn."""
    source = random.Random(count)
    made = []
    for number in range(count):
        value = f"{number}:{source.randbytes(source.randint(0, size // 2)).hex()}".encode()
        value += b"abc" * source.randint(0, size // 3)
        made.append(
            {
                "partition": number % partitions,
                "key": None if number % 5 == 0 else encoded(f"key-{number}".encode()),
                "value": encoded(value),
                "timestamp": FIRST_MS + number * 1000,
                "headers": [["number", encoded(str(number).encode())]] if number % 3 == 0 else [],
            }
        )
    return made


def create(driver: drivers.Driver, topic: str, partitions: int = 1, **config: str) -> None:
    """With three replicas, and wait until each partition has a leader and all of them."""
    driver("create_topic", topic=topic, partitions=partitions, replicas=3, config=config)
    settled(driver, topic, partitions)


def settled(driver: drivers.Driver, topic: str, partitions: int) -> list[dict[str, Any]]:
    """Its partitions, when all have a leader and all replicas in sync."""
    found: list[dict[str, Any]] = []

    def complete() -> bool:
        nonlocal found
        try:
            found = driver("describe_topic", topic=topic)
        except drivers.ClientError as error:
            if error.code != UNKNOWN_TOPIC_OR_PARTITION:  # this broker has not heard of it yet
                raise
            return False
        return len(found) == partitions and all(each["leader"] >= 0 and len(each["isr"]) == 3 for each in found)

    clusters.wait_for(f"{topic} has {partitions} partitions in sync", complete)
    return sorted(found, key=lambda each: each["id"])


def at_home(driver: drivers.Driver, *topics: str) -> None:
    """Wait until all is as before a broker was killed: all replicas in sync, the first one of each partition leads.

    Of these topics and of the one that groups are kept in: otherwise coordinators would move in a later test.
    """

    def all_back() -> bool:
        for topic in (*topics, GROUPS_TOPIC):
            try:
                found = driver("describe_topic", topic=topic)
            except drivers.ClientError as error:
                if error.code == UNKNOWN_TOPIC_OR_PARTITION and topic == GROUPS_TOPIC:  # nobody has asked for a group
                    continue
                if error.code < 0:  # the client asked the broker that was away
                    return False
                raise
            for each in found:
                if each["leader"] != each["replicas"][0] or len(each["isr"]) != len(each["replicas"]):
                    return False
        return True

    clusters.wait_for("all leaders are back", all_back)


def from_beginning(partitions: int) -> dict[str, int]:
    """To consume all of a topic."""
    return {str(partition): BEGINNING for partition in range(partitions)}


def check_same(
    client: drivers.Client, sent: Sequence[Record], placed: Sequence[Sequence[int]], read: Sequence[Record]
) -> None:
    """What was read is what was sent, all of it, where the acknowledgements said."""
    fields = [field for field in ("timestamp", "headers") if field in client.keeps]
    found = {(each["partition"], each["offset"]): each for each in read}
    assert len(found) == len(read), "an offset came twice"
    assert len(read) == len(sent)
    for one, (partition, offset) in zip(sent, placed, strict=True):
        other = found[partition, offset]
        for field in ("partition", "key", "value", *fields):
            assert other[field] == one[field], (field, partition, offset)


def in_order(read: Iterable[Record]) -> Mapping[int, list[str]]:
    """Values by partition; offsets must grow."""
    by_partition: dict[int, list[Record]] = defaultdict(list)
    for each in read:
        by_partition[each["partition"]].append(each)
    for records in by_partition.values():
        offsets = [one["offset"] for one in records]
        assert offsets == sorted(offsets)
    return {partition: [one["value"] for one in records] for partition, records in by_partition.items()}
