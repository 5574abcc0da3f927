from __future__ import annotations

import base64
import json

from hypothesis import given
from hypothesis import strategies as st

from kipmesh.client.json_form import record_object, to_line
from kipmesh.client.types import ConsumerRecord


def record(key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]) -> ConsumerRecord:
    return ConsumerRecord("t", 1, 2, 3, 1, key, value, headers, 4)


def test_record_object_has_all_fields() -> None:
    assert record_object(record(b"k", "ü".encode(), [("h", None)])) == {
        "topic": "t",
        "partition": 1,
        "offset": 2,
        "timestamp": 3,
        "timestamp_type": "LogAppendTime",
        "key": "k",
        "value": "ü",
        "headers": [{"key": "h", "value": None}],
        "leader_epoch": 4,
    }


def test_binary_key_and_value_are_base64() -> None:
    rendered = record_object(record(None, b"\xff", [("h", b"\xfe")]))
    assert "value" not in rendered
    assert (rendered["key"], rendered["value_b64"], rendered["headers"]) == (
        None,
        "/w==",
        [{"key": "h", "value_b64": "/g=="}],
    )


@given(st.none() | st.binary(), st.none() | st.binary())
def test_json_line_preserves_key_and_value_bytes(key: bytes | None, value: bytes | None) -> None:
    line = to_line(record_object(record(key, value, [])))
    assert "\n" not in line
    decoded = json.loads(line)
    for name, expected in (("key", key), ("value", value)):
        text = decoded.get(name)
        actual = base64.b64decode(decoded[name + "_b64"]) if name + "_b64" in decoded else text and text.encode()
        assert actual == expected or (expected == b"" and text == "")
