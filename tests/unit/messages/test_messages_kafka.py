"""Kafka's wire format: malformed tagged fields, control records of newer versions, and zero ids."""

from __future__ import annotations

import struct

import pytest

from kipmesh import messages as m
from kipmesh.core.control_records import decode_control, encode_control
from kipmesh.core.errors import CorruptRecordError
from kipmesh.messages.kafka import Codec, MalformedError, Out, put_varint
from kipmesh.messages.records.control import LeaderChangeMessage, SnapshotFooter, SnapshotHeader, Voter
from kipmesh.messages.table import find_api


def test_tagged_field_with_value_beyond_its_size_is_malformed() -> None:
    """Repeated reads of such a field once blocked the event loop for minutes per frame (LIM-03)."""
    fetch = find_api("Fetch")
    out = Out()
    fetch.request_codec(12).write(out, m.FetchRequest())
    assert out[-1] == 0  # the number of tagged fields
    cluster_id = b"\x81\x80\x01" + bytes(16_384)  # a string of 16,384 characters
    body = bytearray(out[:-1])
    put_varint(body, 400)
    body += b"\x00\x00\x7f\x00" * 200 + cluster_id
    with pytest.raises(MalformedError, match="cluster_id does not have the length"):
        fetch.decode(memoryview(bytes(body)), 0, 12)


def test_control_records_of_newer_versions_are_decoded() -> None:
    assert decode_control(SnapshotHeader, struct.pack(">hq", 1, 5) + b"\x05abc") == SnapshotHeader(1, 5)
    assert decode_control(SnapshotFooter, struct.pack(">h", 1) + b"more") == SnapshotFooter(1)
    change = LeaderChangeMessage(0, 3, (Voter(1), Voter(3)), (Voter(3),))
    assert decode_control(LeaderChangeMessage, encode_control(change)[1]) == change
    for of in (SnapshotHeader, SnapshotFooter, LeaderChangeMessage):
        with pytest.raises(CorruptRecordError):
            decode_control(of, b"\x00")


def test_zero_uuid_decodes_to_default_of_field() -> None:
    codec = Codec(m.FetchTopic, 13, flexible=True)
    out = Out()
    codec.write(out, m.FetchTopic(topic_id=b""))
    assert codec.read(bytes(out))[0].topic_id == b""
