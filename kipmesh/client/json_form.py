"""JSON form of records, shared by the command line and the consumer service.

Fields have Kafka's names in snake case. Bytes become text, or base64 in `<name>_b64` if they are not UTF-8. The output
is always one line of valid JSON.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from kipmesh.client.types import ConsumerRecord

TIMESTAMP_TYPES = ("CreateTime", "LogAppendTime")


def put_bytes(target: dict[str, Any], name: str, value: bytes | None) -> None:
    """Set `target[name]` to `value` as a str or None, or `target[name_b64]` to its base64 if it is not UTF-8."""
    if value is None:
        target[name] = None
        return
    try:
        target[name] = str(value, "utf-8")
    except UnicodeDecodeError:
        target[name + "_b64"] = base64.b64encode(value).decode()


def record_object(record: ConsumerRecord) -> dict[str, Any]:
    """Return the JSON object of a consumed record: the fields of ConsumerRecord, with the timestamp type's name."""
    known_type = 0 <= record.timestamp_type < len(TIMESTAMP_TYPES)
    out: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "timestamp_type": TIMESTAMP_TYPES[record.timestamp_type] if known_type else "NoTimestampType",
    }
    put_bytes(out, "key", record.key)
    put_bytes(out, "value", record.value)
    out["headers"] = [header_object(name, value) for name, value in record.headers]
    out["leader_epoch"] = record.leader_epoch
    return out


def header_object(name: str, value: bytes | None) -> dict[str, Any]:
    """Return the JSON object of a record header: `key`, and `value` or `value_b64`."""
    out: dict[str, Any] = {"key": name}
    put_bytes(out, "value", value)
    return out


def to_line(value: Mapping[str, Any]) -> str:
    """Return `value` as one line of JSON without a newline.

    Nested bytes become hexadecimal, sets become lists, and objects of other types become strings.
    """
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    return str(value)
