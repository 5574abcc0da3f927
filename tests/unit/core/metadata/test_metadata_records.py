from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.metadata import records as r
from kipmesh.messages.kafka import put_varint, read_varint

NUMBERS = {
    "bool": st.booleans(),
    "int8": st.integers(-(2**7), 2**7 - 1),
    "int16": st.integers(-(2**15), 2**15 - 1),
    "uint16": st.integers(0, 2**16 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float64": st.floats(allow_nan=False),
}
TEXT = st.text(max_size=40)
ID = st.binary(min_size=16, max_size=16)
INT32S = st.lists(NUMBERS["int32"], max_size=5).map(tuple)
IDS = st.lists(ID, max_size=4).map(tuple)
END_POINTS = st.lists(st.builds(r.BrokerEndpoint, TEXT, TEXT, NUMBERS["uint16"], NUMBERS["int16"]), max_size=3).map(
    tuple
)
FEATURES = st.lists(st.builds(r.BrokerFeature, TEXT, NUMBERS["int16"], NUMBERS["int16"]), max_size=3).map(tuple)
i8, i16, i32, i64 = (NUMBERS[name] for name in ("int8", "int16", "int32", "int64"))
flag = NUMBERS["bool"]
maybe = st.none()

RECORDS: dict[Any, st.SearchStrategy[Any]] = {
    r.RegisterBrokerRecord: st.builds(
        r.RegisterBrokerRecord, i32, flag, ID, i64, END_POINTS, FEATURES, maybe | TEXT, flag, flag, IDS
    ),
    r.UnregisterBrokerRecord: st.builds(r.UnregisterBrokerRecord, i32, i64),
    r.TopicRecord: st.builds(r.TopicRecord, TEXT, ID),
    r.PartitionRecord: st.builds(
        r.PartitionRecord,
        i32,
        ID,
        INT32S,
        INT32S,
        INT32S,
        INT32S,
        i32,
        i8,
        i32,
        i32,
        IDS,
        maybe | INT32S,
        maybe | INT32S,
    ),
    r.ConfigRecord: st.builds(r.ConfigRecord, i8, TEXT, TEXT, maybe | TEXT),
    r.PartitionChangeRecord: st.builds(
        r.PartitionChangeRecord,
        i32,
        ID,
        maybe | INT32S,
        i32,
        maybe | INT32S,
        maybe | INT32S,
        maybe | INT32S,
        i8,
        maybe | IDS,
        maybe | INT32S,
        maybe | INT32S,
    ),
    r.FenceBrokerRecord: st.builds(r.FenceBrokerRecord, i32, i64),
    r.UnfenceBrokerRecord: st.builds(r.UnfenceBrokerRecord, i32, i64),
    r.RemoveTopicRecord: st.builds(r.RemoveTopicRecord, ID),
    r.DelegationTokenRecord: st.builds(
        r.DelegationTokenRecord, TEXT, TEXT, st.lists(TEXT, max_size=3).map(tuple), i64, i64, i64, TEXT
    ),
    r.UserScramCredentialRecord: st.builds(
        r.UserScramCredentialRecord, TEXT, i8, st.binary(), st.binary(), st.binary(), i32
    ),
    r.FeatureLevelRecord: st.builds(r.FeatureLevelRecord, TEXT, i16),
    r.ClientQuotaRecord: st.builds(
        r.ClientQuotaRecord,
        st.lists(st.builds(r.EntityData, TEXT, maybe | TEXT), max_size=3).map(tuple),
        TEXT,
        NUMBERS["float64"],
        flag,
    ),
    r.ProducerIdsRecord: st.builds(r.ProducerIdsRecord, i32, i64, i64),
    r.BrokerRegistrationChangeRecord: st.builds(r.BrokerRegistrationChangeRecord, i32, i64, i8, i8, IDS, INT32S, flag),
    r.AccessControlEntryRecord: st.builds(r.AccessControlEntryRecord, ID, i8, TEXT, i8, TEXT, TEXT, i8, i8),
    r.RemoveAccessControlEntryRecord: st.builds(r.RemoveAccessControlEntryRecord, ID),
    r.NoOpRecord: st.builds(r.NoOpRecord),
    r.ZkMigrationStateRecord: st.builds(r.ZkMigrationStateRecord, i8),
    r.RemoveUserScramCredentialRecord: st.builds(r.RemoveUserScramCredentialRecord, TEXT, i8),
    r.BeginTransactionRecord: st.builds(r.BeginTransactionRecord, maybe | TEXT),
    r.EndTransactionRecord: st.builds(r.EndTransactionRecord),
    r.AbortTransactionRecord: st.builds(r.AbortTransactionRecord, maybe | TEXT),
    r.RemoveDelegationTokenRecord: st.builds(r.RemoveDelegationTokenRecord, TEXT),
    r.RegisterControllerRecord: st.builds(r.RegisterControllerRecord, i32, ID, flag, END_POINTS, FEATURES),
}
ANY_RECORD = st.one_of(*RECORDS.values())


def test_all_released_kafka_record_types_are_defined() -> None:
    # The numbers of Kafka's schema files; 6, 13 and 16 were never released.
    assert [type_.record_key.key for type_ in r.RECORD_TYPES] == [
        *range(6),
        *range(7, 13),
        14,
        15,
        *range(17, 28),
    ]
    assert set(r.RECORD_TYPES) == set(RECORDS)


@given(ANY_RECORD)
def test_encoded_metadata_record_decodes_to_itself(record: Any) -> None:
    decoded = r.decode_record(r.encode_record(record))
    assert decoded == record
    assert type(decoded) is type(record)


@given(ANY_RECORD, st.data())
def test_damaged_record_decodes_or_raises_corrupt_record_error(record: Any, data: st.DataObject) -> None:
    encoded = bytearray(r.encode_record(record))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(encoded)))
    for damaged in (bytes(encoded), bytes(encoded[:cut])):
        with contextlib.suppress(CorruptRecordError):
            r.decode_record(damaged)


@given(st.binary(max_size=60))
def test_random_bytes_decode_or_raise_corrupt_record_error(data: bytes) -> None:
    with contextlib.suppress(CorruptRecordError):
        r.decode_record(data)


TOPIC_ID = bytes(range(16))


@pytest.mark.parametrize(
    ("record", "version", "expected"),
    [
        (r.NoOpRecord(), None, "01 14 00 00"),
        (r.FeatureLevelRecord("metadata.version", 25), None, "01 0c 00 11" + b"metadata.version".hex() + "0019 00"),
        (r.TopicRecord("foo", TOPIC_ID), None, "01 02 00 04 666f6f" + TOPIC_ID.hex() + "00"),
        (r.RemoveTopicRecord(TOPIC_ID), None, "01 09 00" + TOPIC_ID.hex() + "00"),
        (
            r.ConfigRecord(2, "foo", "retention.ms", None),
            None,
            "01 04 00 02 04 666f6f 0d" + b"retention.ms".hex() + "00 00",
        ),
        (
            r.PartitionRecord(1, TOPIC_ID, (3, 4), (3,), (), (), 3, 0, 5, 6),
            0,
            f"01 03 00 00000001 {TOPIC_ID.hex()} 03 00000003 00000004 02 00000003 01 01 00000003 00000005 00000006 00",
        ),
        (
            r.PartitionRecord(1, TOPIC_ID, (3,), (3,), (), (), 3, 1, 5, 6, (TOPIC_ID,), None, (4,)),
            2,
            f"01 03 02 00000001 {TOPIC_ID.hex()} 02 00000003 02 00000003 01 01 00000003 00000005 00000006"
            f"02 {TOPIC_ID.hex()} 02 00 01 01 02 05 02 00000004",
        ),
        (
            r.PartitionChangeRecord(1, TOPIC_ID, isr=(2,), leader=2, last_known_elr=(1,)),
            2,
            f"01 05 02 00000001 {TOPIC_ID.hex()} 03 00 05 02 00000002 01 04 00000002 07 05 02 00000001",
        ),
        (
            r.BrokerRegistrationChangeRecord(5, 6, fenced=-1),
            1,
            "01 11 01 00000005 0000000000000006 01 00 01 ff",
        ),
        (
            r.BrokerRegistrationChangeRecord(5, 6, fenced=1, also_gone=(7,)),
            None,
            "01 11 02 00000005 0000000000000006 02 00 01 01 904e 05 02 00000007",
        ),
        (r.BrokerRegistrationChangeRecord(5, 6, proven=True), None, "01 11 02 00000005 0000000000000006 01 914e 01 01"),
        (
            r.RegisterBrokerRecord(
                1,
                False,
                TOPIC_ID,
                7,
                (r.BrokerEndpoint("MESH", "h", 9092, 0),),
                (r.BrokerFeature("f", 0, 1),),
                "a",
                True,
                False,
                (TOPIC_ID,),
            ),
            3,
            f"01 00 03 00000001 00 {TOPIC_ID.hex()} 0000000000000007 02 05 4d455348 02 68 2384 0000 00"
            f"02 02 66 0000 0001 00 02 61 01 00 01 00 11 02 {TOPIC_ID.hex()}",
        ),
    ],
)
def test_metadata_records_match_golden_bytes(record: Any, version: int | None, expected: str) -> None:
    data = bytes.fromhex(expected.replace(" ", ""))
    assert r.encode_record(record, version).hex() == data.hex()
    assert r.decode_record(data) == record


def test_errors_name_unknown_record_types_and_versions() -> None:
    with pytest.raises(CorruptRecordError, match=r"type 99 \(unknown type\) version 0"):
        r.decode_record(b"\1\x63\0")
    with pytest.raises(CorruptRecordError, match=r"type 2 \(TopicRecord\) version 7"):
        r.decode_record(b"\1\2\7")
    with pytest.raises(CorruptRecordError, match="frame version 0"):
        r.decode_record(b"\0\2\0")
    with pytest.raises(CorruptRecordError, match="1 bytes are left"):
        r.decode_record(r.encode_record(r.NoOpRecord()) + b"\0")


def test_older_record_version_refuses_newer_fields() -> None:
    with pytest.raises(ValueError, match="no field last_known_elr"):
        r.encode_record(r.PartitionChangeRecord(0, TOPIC_ID, last_known_elr=(1,)), 1)


def test_unknown_tagged_fields_of_records_are_skipped() -> None:
    data = r.encode_record(r.TopicRecord("foo", TOPIC_ID))[:-1] + bytes.fromhex("01 2a 03 616263".replace(" ", ""))
    assert r.decode_record(data) == r.TopicRecord("foo", TOPIC_ID)


@given(st.integers(0, 2**32 - 1))
def test_unsigned_varint_round_trips_in_five_bytes(value: int) -> None:
    out = bytearray()
    put_varint(out, value)
    assert len(out) <= 5
    assert read_varint(bytes(out), 0) == (value, len(out))
