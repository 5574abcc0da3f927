"""The frame of a driver in Python: one client library behind the verbs that every driver of this folder knows.

A driver is a process of its own. Standard input brings a JSON object a line, `{"verb": V, ...arguments}`, standard
output takes the answer to each in order: `{"ok": result}`, or `{"error": Kafka's number or -1, "text": why}`. The
command line is the bootstrap address and a JSON object of options (`{"rack": ..}`). Keys and values of records are
base64 in both directions; offsets -2 and -1 are the beginning and the end. docs/clients.md lists the verbs.
"""

from __future__ import annotations

import base64
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

BEGINNING, END = -2, -1


class VerbError(Exception):
    """What the client or the cluster said, with Kafka's number of it."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def data(text: str | None) -> bytes | None:
    """Of a key or a value."""
    return None if text is None else base64.b64decode(text)


def text(value: bytes | None) -> str | None:
    """The other way."""
    return None if value is None else base64.b64encode(value).decode()


def record(
    partition: int, offset: int, key: bytes | None, value: bytes | None, timestamp: int, headers: Any
) -> dict[str, Any]:
    """A record that was read."""
    return {
        "partition": partition,
        "offset": offset,
        "key": text(key),
        "value": text(value),
        "timestamp": timestamp,
        "headers": [[name, text(found)] for name, found in headers or []],
    }


def headers_of(one: dict[str, Any]) -> list[tuple[str, bytes]]:
    """Of a record to produce."""
    return [(name, base64.b64decode(value)) for name, value in one.get("headers", [])]


def serve(make: Callable[[str, dict[str, Any]], Any], code_of: Callable[[BaseException], int | None]) -> None:
    """Answer until standard input ends; `code_of` gives Kafka's number of the library's exceptions."""
    out = sys.stdout
    sys.stdout = sys.stderr  # a library that prints does not disturb the answers
    driver = make(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
    try:
        for line in sys.stdin:
            request = json.loads(line)
            verb = request.pop("verb")
            try:
                method = getattr(driver, verb, None)
                answer = {"ok": method(**request)} if method else {"error": -1, "text": f"no verb {verb}"}
            except Exception as error:
                code = error.code if isinstance(error, VerbError) else code_of(error)
                if code is None:
                    traceback.print_exc()
                answer = {"error": -1 if code is None else code, "text": f"{type(error).__name__}: {error}"}
            out.write(json.dumps(answer) + "\n")
            out.flush()
    finally:
        driver.close()
