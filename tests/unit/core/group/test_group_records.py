"""Records of `__consumer_offsets` and the consumer protocol match Kafka's bytes."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.group import records as consumer_protocol
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
    TopicPartitionList,
    decode_record,
    encode_record,
)
from kipmesh.core.group.table import GroupTable

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
MEMBERS = st.builds(
    MemberMetadata,
    TEXT,
    st.none() | TEXT,
    TEXT,
    TEXT,
    INT32,
    INT32,
    st.binary(max_size=8),
    st.binary(max_size=8),
)
GROUP_VALUES = st.builds(
    GroupMetadataValue, TEXT, INT32, st.none() | TEXT, st.none() | TEXT, INT64, st.lists(MEMBERS, max_size=3).map(tuple)
)
OFFSET_VALUES = st.builds(OffsetCommitValue, INT64, INT32, TEXT, INT64, st.just(-1))
RECORDS: st.SearchStrategy[Record] = st.one_of(
    st.builds(GroupRecord, st.builds(GroupMetadataKey, TEXT), st.none() | GROUP_VALUES),
    st.builds(OffsetRecord, st.builds(OffsetCommitKey, TEXT, TEXT, INT32), st.none() | OFFSET_VALUES),
)
LISTS = st.lists(st.builds(TopicPartitionList, TEXT, st.lists(INT32, max_size=3).map(tuple)), max_size=3).map(tuple)


def test_offset_commit_record_matches_kafka_bytes() -> None:
    record = OffsetRecord(OffsetCommitKey("grp", "tpc", 7), OffsetCommitValue(42, 5, "m", 1000))
    key, value = encode_record(record)
    assert key == b"\0\x01" + b"\0\x03grp" + b"\0\x03tpc" + b"\0\0\0\x07"
    assert value == b"\0\x03" + (42).to_bytes(8, "big") + b"\0\0\0\x05" + b"\0\x01m" + (1000).to_bytes(8, "big")


def test_offset_commit_record_with_expire_timestamp_matches_kafka_bytes() -> None:
    value = encode_record(OffsetRecord(OffsetCommitKey("g", "t", 0), OffsetCommitValue(42, -1, "", 1000, 2000)))[1]
    assert value == b"\0\x01" + b"".join(
        ((42).to_bytes(8, "big"), b"\0\0", (1000).to_bytes(8, "big"), (2000).to_bytes(8, "big"))
    )


def test_group_metadata_record_matches_kafka_bytes() -> None:
    member = MemberMetadata("m", None, "c", "/h", 60, 10, b"sub", b"as")
    record = GroupRecord(GroupMetadataKey("grp"), GroupMetadataValue("consumer", 3, "range", "m", 9, (member,)))
    key, value = encode_record(record)
    assert key == b"\0\x02\0\x03grp"
    assert value == b"".join(
        (
            b"\0\x03\0\x08consumer\0\0\0\x03\0\x05range\0\x01m",
            (9).to_bytes(8, "big"),
            b"\0\0\0\x01",
            b"\0\x01m\xff\xff\0\x01c\0\x02/h\0\0\0\x3c\0\0\0\x0a\0\0\0\x03sub\0\0\0\x02as",
        )
    )


def test_newer_record_versions_with_tagged_fields_are_decoded() -> None:
    value = b"\0\x04" + (42).to_bytes(8, "big") + b"\0\0\0\x05" + b"\x02m" + (7).to_bytes(8, "big") + b"\x01\x09\x01x"
    key = encode_record(OffsetRecord(OffsetCommitKey("g", "t", 0), None))[0]
    assert decode_record(key, value) == OffsetRecord(OffsetCommitKey("g", "t", 0), OffsetCommitValue(42, 5, "m", 7))


def test_older_record_versions_are_decoded() -> None:
    key = b"\0\0" + b"\0\x01g\0\x01t\0\0\0\0"
    value = b"\0\0" + (42).to_bytes(8, "big") + b"\0\x01m" + (7).to_bytes(8, "big")
    assert decode_record(key, value) == OffsetRecord(OffsetCommitKey("g", "t", 0), OffsetCommitValue(42, -1, "m", 7))


def test_records_of_other_group_types_are_skipped() -> None:
    assert decode_record(b"\0\x03\0\x01g", b"whatever") is None


@given(RECORDS)
def test_encoded_record_decodes_to_itself(record: Record) -> None:
    assert decode_record(*encode_record(record)) == record


@given(RECORDS, st.data())
def test_damaged_record_raises_only_corrupt_record_error(record: Record, data: st.DataObject) -> None:
    key, value = encode_record(record)
    damaged = bytearray(key if value is None or data.draw(st.booleans()) else value)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(0, len(damaged))) :]
    for pair in ((bytes(damaged), value), (key, bytes(damaged))):
        with contextlib.suppress(CorruptRecordError):
            decode_record(*pair)


def test_record_without_key_or_with_unknown_version_is_corrupt() -> None:
    with pytest.raises(CorruptRecordError):
        decode_record(None, b"")
    with pytest.raises(CorruptRecordError):
        decode_record(*encode_record(OffsetRecord(OffsetCommitKey("g", "t", 0), None))[:1], b"\0\x05")


@given(
    st.integers(0, 3),
    st.builds(
        Subscription,
        st.lists(TEXT, max_size=3).map(tuple),
        st.none() | st.binary(max_size=4),
        LISTS,
        INT32,
        st.none() | TEXT,
    ),
)
def test_subscription_versions_keep_their_fields(version: int, subscription: Subscription) -> None:
    read = consumer_protocol.decode_subscription(consumer_protocol.encode_subscription(subscription, version))
    expected = subscription
    if version < 3:
        expected = expected._replace(rack_id=None)
    if version < 2:
        expected = expected._replace(generation_id=-1)
    if version < 1:
        expected = expected._replace(owned_partitions=())
    assert read == expected
    data = consumer_protocol.encode_subscription(subscription, version)
    assert consumer_protocol.subscribed_topics(data) == frozenset(subscription.topics)


@given(st.integers(0, 3), LISTS, st.none() | st.binary(max_size=4))
def test_assignment_versions_round_trip(
    version: int, lists: tuple[TopicPartitionList, ...], user_data: bytes | None
) -> None:
    assignment = Assignment(lists, user_data)
    assert consumer_protocol.decode_assignment(consumer_protocol.encode_assignment(assignment, version)) == assignment


def test_consumer_protocol_matches_kafka_bytes() -> None:
    subscription = Subscription(("a",), None, (TopicPartitionList("a", (0, 2)),), 4, "r")
    assert consumer_protocol.encode_subscription(subscription) == b"".join(
        (
            b"\0\x03",
            b"\0\0\0\x01\0\x01a",
            b"\xff\xff\xff\xff",
            b"\0\0\0\x01\0\x01a\0\0\0\x02\0\0\0\0\0\0\0\x02",
            b"\0\0\0\x04",
            b"\0\x01r",
        )
    )
    newer = b"\0\x09" + consumer_protocol.encode_subscription(subscription)[2:] + b"more"
    assert consumer_protocol.decode_subscription(newer) == subscription
    assert consumer_protocol.decode_assignment(b"") == Assignment()
    assert consumer_protocol.subscribed_topics(b"\0\0\0\0") is None


@given(st.lists(RECORDS, max_size=20))
def test_group_table_holds_last_value_of_each_key(records: list[Record]) -> None:
    table = GroupTable()
    last = {}
    for record in records:
        table.replay(record)
        last[record.key] = record.value
    kept = {key: value for key, value in last.items() if value is not None}
    groups = {key.group: value for key, value in kept.items() if isinstance(key, GroupMetadataKey)}
    offsets = {key: value for key, value in kept.items() if isinstance(key, OffsetCommitKey)}
    assert table.groups == groups
    assert table.offset_count == len(offsets)
    for key, value in offsets.items():
        assert table.offsets(key.group)[key.topic, key.partition] == value
    assert set(table.group_ids()) == {key.group for key in kept}
