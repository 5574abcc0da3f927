"""Codecs on recorded exchanges between third-party clients and Apache Kafka (`tools/capture_wire.py`).

Each frame is decoded completely and encoded to the same bytes. `DIFFERENT` lists the exceptions with their reasons; an
entry without a difference fails the test.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from kipmesh.messages.kafka import Codec, Out, skip_tags
from kipmesh.messages.table import KAFKA_APIS, Api
from kipmesh.transport.kafka.framing import read_header

DIRECTORY = Path(__file__).resolve().parent / "wire"
EXCHANGES = json.loads((DIRECTORY / "exchanges.json").read_text())
DIFFERENT = {
    ("ApiVersions", 3, "response"): "tags with Apache Kafka's features are dropped",
    ("ApiVersions", 4, "response"): "tags with Apache Kafka's features are dropped",
    ("DescribeConfigs", 1, "request"): "null (all names) becomes an empty list, which is equivalent",
    ("DescribeConfigs", 2, "request"): "null (all names) becomes an empty list, which is equivalent",
    ("DescribeConfigs", 4, "request"): "null (all names) becomes an empty list, which is equivalent",
    ("CreatePartitions", 1, "request"): "null (no assignments) becomes an empty list, which is equivalent",
    ("CreatePartitions", 2, "request"): "null (no assignments) becomes an empty list, which is equivalent",
    ("CreatePartitions", 3, "request"): "null (no assignments) becomes an empty list, which is equivalent",
}

NAMES = sorted(path.stem for path in DIRECTORY.glob("*.request"))


def round_trip(codec: Codec, frame: memoryview, at: int) -> tuple[Any, bytes]:
    """Decode a body completely and return its value and its encoding."""
    value, end = codec.read(frame, at)
    assert end == len(frame)
    out = Out()
    codec.write(out, value)
    return value, b"".join(map(bytes, (*out.parts, out)))


def check(api: Api, version: int, kind: str, codec: Codec, frame: memoryview, at: int) -> None:
    value, written = round_trip(codec, frame, at)
    assert value is not None
    _, twice = round_trip(codec, memoryview(written), 0)
    assert twice == written
    if (api.name, version, kind) in DIFFERENT:
        assert written != bytes(frame[at:]), "remove the entry of DIFFERENT"
    else:
        assert written == bytes(frame[at:])


def test_recorded_exchanges_cover_the_important_apis() -> None:
    recorded = {EXCHANGES[name]["api"] for name in NAMES}
    assert set(EXCHANGES) == set(NAMES)
    assert recorded >= {
        "Produce",
        "Fetch",
        "ListOffsets",
        "Metadata",
        "JoinGroup",
        "SyncGroup",
        "OffsetCommit",
        "OffsetFetch",
    }
    assert len(recorded) >= 20


@pytest.mark.parametrize("name", NAMES)
def test_recorded_requests_survive_a_round_trip(name: str) -> None:
    frame = memoryview((DIRECTORY / f"{name}.request").read_bytes())
    key, version = map(int, name.split("-"))
    api = KAFKA_APIS[key]
    header = read_header(frame, lambda _key, number: number >= api.flexible_since)
    assert (header.key, header.version) == (key, version)
    assert header.client_id == EXCHANGES[name]["client"]
    assert api.decode(frame, header.body, version) is not None
    check(api, version, "request", api.request_codec(version), frame, header.body)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_responses_survive_a_round_trip(name: str) -> None:
    request = (DIRECTORY / f"{name}.request").read_bytes()
    frame = memoryview((DIRECTORY / f"{name}.response").read_bytes())
    key, version = map(int, name.split("-"))
    api = KAFKA_APIS[key]
    assert struct.unpack_from(">i", frame) == struct.unpack_from(">i", request, 4)
    since = api.response_header_flexible_since
    if since is None:
        since = api.flexible_since
    at = skip_tags(frame, 4, [0]) if version >= since else 4
    check(api, version, "response", api.response_codec(version), frame, at)
