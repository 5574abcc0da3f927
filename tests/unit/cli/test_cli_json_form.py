from __future__ import annotations

import base64
import json

from hypothesis import given
from hypothesis import strategies as st

from kipmesh.client.json_form import record_object, to_line
from kipmesh.client.types import ConsumerRecord


def record(key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]) -> ConsumerRecord:
    return ConsumerRecord("t", 1, 2, 3, 1, key, value, headers, 4)


def test_a_record() -> None:
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


def test_what_is_not_utf_8_is_base_64() -> None:
    out = record_object(record(None, b"\xff", [("h", b"\xfe")]))
    assert "value" not in out
    assert (out["key"], out["value_b64"], out["headers"]) == (None, "/w==", [{"key": "h", "value_b64": "/g=="}])


@given(st.none() | st.binary(), st.none() | st.binary())
def test_a_line_gives_back_every_byte(key: bytes | None, value: bytes | None) -> None:
    line = to_line(record_object(record(key, value, [])))
    assert "\n" not in line
    back = json.loads(line)
    for name, given_bytes in (("key", key), ("value", value)):
        text = back.get(name)
        got = base64.b64decode(back[name + "_b64"]) if name + "_b64" in back else text and text.encode()
        assert got == given_bytes or (given_bytes == b"" and text == "")
