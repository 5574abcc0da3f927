"""What clients of others and a real Apache Kafka said to each other (`tools/capture_wire.py`), through our codecs.

Each frame is read to its end and written again, to the same bytes. `DIFFERENT` has what is written otherwise, and why;
what is no longer different has to go from it.
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

FOLDER = Path(__file__).resolve().parent / "wire"
EXCHANGES = json.loads((FOLDER / "exchanges.json").read_text())
DIFFERENT = {
    ("ApiVersions", 3, "response"): "Apache Kafka's features are in tags that are not kept",
    ("ApiVersions", 4, "response"): "Apache Kafka's features are in tags that are not kept",
    ("DescribeConfigs", 1, "request"): "null for all names becomes an empty list, which means the same here",
    ("DescribeConfigs", 2, "request"): "null for all names becomes an empty list, which means the same here",
    ("DescribeConfigs", 4, "request"): "null for all names becomes an empty list, which means the same here",
    ("CreatePartitions", 1, "request"): "null for no assignments becomes an empty list, which means the same here",
    ("CreatePartitions", 2, "request"): "null for no assignments becomes an empty list, which means the same here",
    ("CreatePartitions", 3, "request"): "null for no assignments becomes an empty list, which means the same here",
}

NAMES = sorted(path.stem for path in FOLDER.glob("*.request"))


def again(codec: Codec, frame: memoryview, at: int) -> tuple[Any, bytes]:
    """The value of a body, all of which has to be read, and the bytes that it is written as."""
    value, end = codec.read(frame, at)
    assert end == len(frame)
    out = Out()
    codec.write(out, value)
    return value, b"".join(map(bytes, (*out.parts, out)))


def check(api: Api, version: int, kind: str, codec: Codec, frame: memoryview, at: int) -> None:
    value, written = again(codec, frame, at)
    assert value is not None
    _, twice = again(codec, memoryview(written), 0)
    assert twice == written
    if (api.name, version, kind) in DIFFERENT:
        assert written != bytes(frame[at:]), "no longer different"
    else:
        assert written == bytes(frame[at:])


def test_recorded_exchanges_cover_the_important_apis() -> None:
    """Those whose exchanges are worth something; others are rarely asked for by these clients."""
    heard = {EXCHANGES[name]["api"] for name in NAMES}
    assert set(EXCHANGES) == set(NAMES)
    assert heard >= {
        "Produce",
        "Fetch",
        "ListOffsets",
        "Metadata",
        "JoinGroup",
        "SyncGroup",
        "OffsetCommit",
        "OffsetFetch",
    }
    assert len(heard) >= 20


@pytest.mark.parametrize("name", NAMES)
def test_recorded_requests_survive_a_round_trip(name: str) -> None:
    frame = memoryview((FOLDER / f"{name}.request").read_bytes())
    key, version = map(int, name.split("-"))
    api = KAFKA_APIS[key]
    header = read_header(frame, lambda _key, number: number >= api.flexible_since)
    assert (header.key, header.version) == (key, version)
    assert header.client_id == EXCHANGES[name]["client"]
    assert api.decode(frame, header.body, version) is not None
    check(api, version, "request", api.request_codec(version), frame, header.body)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_responses_survive_a_round_trip(name: str) -> None:
    asked = (FOLDER / f"{name}.request").read_bytes()
    frame = memoryview((FOLDER / f"{name}.response").read_bytes())
    key, version = map(int, name.split("-"))
    api = KAFKA_APIS[key]
    assert struct.unpack_from(">i", frame) == struct.unpack_from(">i", asked, 4)
    since = api.response_header_flexible_since
    if since is None:
        since = api.flexible_since
    at = skip_tags(frame, 4, [0]) if version >= since else 4
    check(api, version, "response", api.response_codec(version), frame, at)
