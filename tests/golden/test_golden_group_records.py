"""Apache Kafka's DumpLogSegments decodes the records of `__consumer_offsets`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kipmesh.broker.groups.group_shard import batch_of
from kipmesh.core.config import TopicConfig
from kipmesh.core.group.coordinator import GROUP_METADATA_TOPIC
from kipmesh.core.group.records import (
    Assignment,
    GroupMetadataKey,
    GroupMetadataValue,
    GroupRecord,
    MemberMetadata,
    OffsetCommitKey,
    OffsetCommitValue,
    OffsetRecord,
    Record,
    Subscription,
    by_topic,
    encode_assignment,
    encode_subscription,
)
from kipmesh.storage import LogManager, RealFileSystem

pytestmark = [pytest.mark.kafka_tools, pytest.mark.timeout(600)]

NOW = 1_700_000_000_000
OWNED = by_topic([("topic", 0), ("topic", 2)])
MEMBER = MemberMetadata(
    "member-1",
    "static-1",
    "client-1",
    "/127.0.0.1",
    60_000,
    45_000,
    encode_subscription(Subscription(("topic",), None, OWNED, 6, "rack-a")),
    encode_assignment(Assignment(OWNED)),
)
RECORDS: list[Record] = [
    OffsetRecord(OffsetCommitKey("group", "topic", 2), OffsetCommitValue(42, 5, "note", NOW)),
    OffsetRecord(OffsetCommitKey("group", "topic", 0), OffsetCommitValue(43, -1, "", NOW, NOW + 1000)),
    OffsetRecord(OffsetCommitKey("group", "topic", 2), None),
    GroupRecord(GroupMetadataKey("group"), GroupMetadataValue("consumer", 7, "range", "member-1", NOW, (MEMBER,))),
    GroupRecord(GroupMetadataKey("group"), GroupMetadataValue("consumer", 8, None, None, NOW)),
    GroupRecord(GroupMetadataKey("group"), None),
]
LINE = re.compile(r"^\| offset: \d+ .*? key: (.*?) payload: (.*)$", re.MULTILINE)


def test_kafka_decodes_offset_and_group_records(tmp_path: Path, kafka_dump: Callable[..., str]) -> None:
    defaults = TopicConfig()
    manager = LogManager(RealFileSystem(), [str(tmp_path)], cluster_id="cluster", node_id=1, defaults=defaults)
    manager.load(NOW)
    log = manager.create(GROUP_METADATA_TOPIC, 0, b"i" * 16, defaults, NOW)
    for record in RECORDS:
        log.append_as_leader(batch_of([record], NOW), 0, NOW)
    (file,) = Path(tmp_path).glob(f"{GROUP_METADATA_TOPIC}-0/*.log")
    output = kafka_dump([file], "--offsets-decoder")
    found: list[tuple[Any, Any]] = [
        (json.loads(key), None if value == "<DELETE>" else json.loads(value)) for key, value in LINE.findall(output)
    ]
    assert len(found) == len(RECORDS), output
    assert [(key["type"], key["data"]) for key, _ in found] == [
        *[("1", {"group": "group", "topic": "topic", "partition": number}) for number in (2, 0, 2)],
        *[("2", {"group": "group"})] * 3,
    ]
    assert found[2][1] is None
    assert found[5][1] is None
    _check_offsets(found)
    _check_group(found[3][1])
    assert found[4][1]["data"]["members"] == []


def _check_offsets(found: list[tuple[Any, Any]]) -> None:
    assert found[0][1] == {
        "version": "3",
        "data": {"offset": 42, "leaderEpoch": 5, "metadata": "note", "commitTimestamp": NOW},
    }
    assert found[1][1]["version"] == "1"
    assert found[1][1]["data"]["expireTimestamp"] == NOW + 1000


def _check_group(value: Any) -> None:
    data = value["data"]
    (member,) = data.pop("members")
    assert value["version"] == "3"
    assert data == {
        "protocolType": "consumer",
        "generation": 7,
        "protocol": "range",
        "leader": "member-1",
        "currentStateTimestamp": NOW,
    }
    assert (member["memberId"], member["groupInstanceId"]) == ("member-1", "static-1")
    assert (member["rebalanceTimeout"], member["sessionTimeout"]) == (60_000, 45_000)
