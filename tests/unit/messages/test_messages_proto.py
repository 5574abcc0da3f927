"""The protobuf codec of declared messages, compared with Google's implementation and the committed `protos/`."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings

from kipmesh import messages as m
from kipmesh.messages import proto
from kipmesh.messages.kafka import MalformedError
from tests.unit.messages.messages_of_tests import CARRIED, from_google, google, to_google, values
from tools import gen_protos

_IDS = [of.__name__ for of in CARRIED]


def test_committed_protos_match_declarations() -> None:
    assert gen_protos.main(["--check"]) == 0, "make docs"


def test_generator_refuses_changed_field_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changed = tmp_path / "field_numbers.txt"
    changed.write_text(gen_protos.NUMBERS.read_text() + "FetchRequest.rack_id = 99 string\n")
    monkeypatch.setattr(gen_protos, "NUMBERS", changed)
    assert gen_protos.main(["--check"]) == 1


@pytest.mark.parametrize("of", CARRIED, ids=_IDS)
def test_field_numbers_are_unique_within_message(of: Any) -> None:
    fields = proto.carried_fields(of)
    numbers = [field.number for field in fields] + [field.null_flag.number for field in fields if field.null_flag]
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("of", [of for of in CARRIED if of.__name__ in google()], ids=lambda of: of.__name__)
def test_codec_reads_and_writes_same_bytes_as_google(of: Any) -> None:
    @settings(max_examples=15, deadline=None, database=None)
    @given(values(of))
    def check(value: Any) -> None:
        encoded, theirs = proto.encode(value), to_google(value)
        assert google()[of.__name__].FromString(encoded) == theirs
        assert proto.decode(of, theirs.SerializeToString()) == value == from_google(of, theirs)
        assert proto.decode(of, encoded) == value

    check()


@pytest.mark.parametrize("of", [m.FetchRequest, m.FetchResponse, m.BrokerHeartbeatRequest, m.MetadataRequest])
def test_damaged_messages_are_malformed_or_decoded_as_by_google(of: Any) -> None:
    """The only difference: Google merges a message field that occurs twice."""
    source, examples = Random(f"{of.__name__} 7"), []

    @settings(max_examples=30, deadline=None, database=None)
    @given(values(of))
    def collect(value: Any) -> None:
        examples.append(proto.encode(value))

    collect()
    outcomes = {"refused": 0, "read": 0}
    for _ in range(3000):
        data = bytearray(source.choice(examples))
        for _ in range(source.randrange(1, 4)):
            position = source.randrange(len(data) + 1)
            if data and source.random() < 0.4:
                del data[position - 1 : position - 1 + source.randrange(1, 4)]
            else:
                data[position : position + source.randrange(2)] = bytes([source.randrange(256)])
        try:
            decoded = proto.decode(of, bytes(data))
        except MalformedError:
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        try:
            theirs = google()[of.__name__].FromString(bytes(data))
        except DecodeError:
            continue
        if theirs.SerializeToString() == to_google(decoded).SerializeToString():
            assert from_google(of, theirs) == decoded
    assert min(outcomes.values()) > 100


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"\x22\x05\x0a", "cut inside a list"),
        (b"\x08", "a number without a byte"),
        (b"\x08" + b"\xff" * 11, "varint must have at most ten bytes"),
        (b"\x00\x00", "a field with number 0"),
        (b"\x0b\x0c", "groups"),
        (b"\x62\x02\xff\xfe", "text that is not UTF-8"),
        (b"\xa2\x06\x10abc", "an unknown field that is cut"),
    ],
)
def test_invalid_bytes_raise_malformed_error(data: bytes, fault: str) -> None:
    with pytest.raises(MalformedError):
        proto.decode(m.FetchRequest, data)


def test_unknown_fields_are_skipped() -> None:
    known = m.FetchRequest(session_id=7, rack_id="a")
    unknown = b"\xa2\x06\x04next" + b"\xa8\x06\x05" + b"\xb1\x06" + bytes(8) + b"\xbd\x06" + bytes(4)
    assert proto.decode(m.FetchRequest, unknown + proto.encode(known) + unknown) == known


def test_null_list_with_items_is_malformed() -> None:
    data = proto.encode(m.MetadataRequest(topics=None)) + proto.encode(
        m.MetadataRequest([m.MetadataRequestTopic(name="t")])
    )
    with pytest.raises(MalformedError, match="all_topics must not be set if topics has items"):
        proto.decode(m.MetadataRequest, data)


@pytest.mark.parametrize(
    "value",
    [
        m.FetchRequest(max_bytes=2**31),
        m.FetchRequest(session_id=-(2**31) - 1),
        m.FetchRequest(rack_id="\udcff"),
        m.FetchRequest(session_id="x"),  # type: ignore[arg-type]
        m.PartitionData(high_watermark=2**63),
        m.ForgottenTopic(partitions=[2**40]),
    ],
)
def test_values_outside_range_of_type_are_refused(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        proto.encode(value)


def test_large_records_are_encoded_in_order() -> None:
    topics = [
        m.FetchableTopicResponse("t", b"", [m.PartitionData(index, records=bytes([index]) * size)])
        for index, size in enumerate([10, 20_000, 0, 9_000])
    ]
    response = m.FetchResponse(session_id=3, responses=tuple(topics), node_endpoints=(m.NodeEndpoint(1, "h", 2),))
    theirs = to_google(response)
    assert proto.encode(response) == theirs.SerializeToString(deterministic=True)
    assert from_google(m.FetchResponse, theirs).responses[3].partitions[0].records == b"\x03" * 9000


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (
            m.FetchRequest(
                None,
                2,
                7,
                500,
                1,
                session_id=9,
                session_epoch=3,
                topics=(m.FetchTopic("", bytes(range(16)), (m.FetchPartition(1, 4, 99, 3, 0, 1024),)),),
            ),
            "1002180720f403280130ffffffff074009480352211210000102030405060708090a0b0c0d0e0f1a0d08011004186320032800308008",
        ),
        (
            m.FetchResponse(
                0,
                0,
                9,
                (m.FetchableTopicResponse("", bytes(range(16)), (m.PartitionData(1, 0, 5, 5, 0, records=b"xyz"),)),),
            ),
            "1809222c1210000102030405060708090a0b0c0d0e0f1a18080118052005280050ffffffffffffffffff015a0378797a",
        ),
        (m.BrokerHeartbeatRequest(3, 17), "0803101118ffffffffffffffffff01"),
        (
            m.CreateTopicsRequest((m.CreatableTopic("t"),), 1000),
            "0a190a017410ffffffffffffffffff0118ffffffffffffffffff0110e807",
        ),
        (m.MetadataRequest(topics=None), "1001"),
        (m.OffsetFetchRequest(groups=(m.OffsetFetchRequestGroup("g", topics=None),)), "0a050a01671001"),
        (
            m.AlterPartitionReassignmentsRequest(1, (m.ReassignableTopic("t", (m.ReassignablePartition(3, None),)),)),
            "080112090a0174120408031801",
        ),
    ],
)
def test_messages_of_version_0_1_are_decoded(value: Any, encoded: str) -> None:
    """Version 0.1 encodes default values, which this version omits."""
    assert proto.decode(type(value), bytes.fromhex(encoded)) == value


def test_bool_is_true_for_every_number_except_0() -> None:
    assert proto.decode(m.MetadataRequest, b"\x18\x02").allow_auto_topic_creation is True
    assert proto.decode(m.MetadataRequest, b"\x18\x00").allow_auto_topic_creation is False
