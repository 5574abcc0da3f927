"""Headers of requests, and frames of SASL that have none."""

from __future__ import annotations

from collections.abc import Callable
from struct import error as struct_error
from struct import unpack_from
from typing import NamedTuple

from kipmesh.messages import SaslAuthenticateResponse
from kipmesh.messages.kafka import MalformedError, Out, skip_tags

HEADER_TAGS_MAX = 100
"""Tagged fields of a request's header; Kafka has none yet."""


class Header(NamedTuple):
    """The beginning of a request."""

    key: int
    version: int
    correlation_id: int
    client_id: str
    body: int
    """The position of the body."""


def read_header(view: memoryview, flexible: Callable[[int, int], bool]) -> Header:
    """Return the header of a frame. Raises MalformedError.

    `flexible` states whether an API key and a version have tagged fields in the header.
    """
    try:
        key, version, correlation_id, size = unpack_from(">hhih", view, 0)
        at = 10 + max(size, 0)
        if size < -1 or at > len(view):
            raise MalformedError(f"a client id of {size} bytes")
        client_id = str(view[10:at], "utf-8")
        if flexible(key, version):
            at = skip_tags(view, at, [HEADER_TAGS_MAX])
    except (struct_error, IndexError, ValueError) as error:
        raise MalformedError(f"a request's header: {error}") from None
    return Header(key, version, correlation_id, client_id, at)


def encode_bare(response: SaslAuthenticateResponse) -> Out:
    """Return the frame of a SASL message without a header; nothing for an error."""
    out = Out()
    if not response.error_code:
        out += len(response.auth_bytes).to_bytes(4, "big")
        out += response.auth_bytes
    return out
