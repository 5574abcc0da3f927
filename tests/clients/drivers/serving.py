"""Request loop and codecs of drivers in Python. A driver exposes one client library by verbs that all drivers share.

A driver is a process. It reads one JSON object per line from standard input, `{"verb": V, ...arguments}`, and writes
the responses in order to standard output: `{"ok": result}` or `{"error": Kafka's error code or -1, "text": reason}`.
The command line has the bootstrap address and a JSON object of options (`{"rack": ..}`). Keys and values of records are
base64. The offsets -2 and -1 are the beginning and the end. docs/clients.md lists the verbs.
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
    """An error of the client or the cluster, with Kafka's error code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def data(text: str | None) -> bytes | None:
    """Decode a key or a value."""
    return None if text is None else base64.b64decode(text)


def text(value: bytes | None) -> str | None:
    """Encode a key or a value."""
    return None if value is None else base64.b64encode(value).decode()


def record(
    partition: int, offset: int, key: bytes | None, value: bytes | None, timestamp: int, headers: Any
) -> dict[str, Any]:
    """Return the JSON form of a consumed record."""
    return {
        "partition": partition,
        "offset": offset,
        "key": text(key),
        "value": text(value),
        "timestamp": timestamp,
        "headers": [[name, text(found)] for name, found in headers or []],
    }


def headers_of(record: dict[str, Any]) -> list[tuple[str, bytes]]:
    """Return the decoded headers of a record to produce."""
    return [(name, base64.b64decode(value)) for name, value in record.get("headers", [])]


def serve(make: Callable[[str, dict[str, Any]], Any], code_of: Callable[[BaseException], int | None]) -> None:
    """Serve requests until standard input ends. `code_of` returns Kafka's error code of an exception of the library."""
    out = sys.stdout
    sys.stdout = sys.stderr  # output of the library must not mix with responses
    driver = make(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
    try:
        for line in sys.stdin:
            request = json.loads(line)
            verb = request.pop("verb")
            try:
                method = getattr(driver, verb, None)
                response = {"ok": method(**request)} if method else {"error": -1, "text": f"no verb {verb}"}
            except Exception as error:
                code = error.code if isinstance(error, VerbError) else code_of(error)
                if code is None:
                    traceback.print_exc()
                response = {"error": -1 if code is None else code, "text": f"{type(error).__name__}: {error}"}
            out.write(json.dumps(response) + "\n")
            out.flush()
    finally:
        driver.close()
