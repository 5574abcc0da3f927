"""One API of Kafka's protocol: its key, its versions, its messages, and what answers it.

An API is a module of `kipmesh.wire.apis` with one `Api`, named in `kipmesh.wire.registry`. docs/wire.md says how one
is added.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from struct import error as struct_error
from struct import unpack_from
from typing import Any, NamedTuple

from kipmesh.core.context import RequestContext
from kipmesh.core.messages.limits import MAX_INT32
from kipmesh.wire.codec import ITEMS_MAX, Codec, MalformedError, Out, skip_tags
from kipmesh.wire.error_counts import errors_of
from kipmesh.wire.limits import ResponseMemory
from kipmesh.wire.sasl import SaslState
from kipmesh.wire.schema import Struct, Versions
from kipmesh.wire.services import Services

NO_ANSWER = None
"""What a handler returns for a request that gets no response."""
API_VERSIONS_KEY = 18
HEADER_TAGS_MAX = 100
"""Tagged fields of a request's header; Kafka has none yet."""


class HangUp(Exception):  # noqa: N818 - nothing is wrong with the request
    """A handler's way to end the connection instead of an answer."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(slots=True)
class Session:
    """What a connection has said of itself; made with it and gone with it."""

    on_software: Callable[[str, str], None]
    """Told the software's name and version, if the client says them."""
    client_software_name: str = "unknown"
    client_software_version: str = "unknown"
    sasl: SaslState | None = None
    """How far it has shown who it is, on a listener that asks for it."""


class Call(NamedTuple):
    """One request on its way: who asks, in which version, on which connection."""

    context: RequestContext
    version: int
    session: Session
    unsent: ResponseMemory = ResponseMemory(MAX_INT32)
    """Where large responses find how many bytes they should have at most."""


Handle = Callable[[Services, Any, Call], Awaitable[Any]]
"""From the request's value to the response's, or NO_ANSWER. What it raises ends the connection."""


@dataclass(frozen=True, slots=True)
class Api:
    """An API as this listener speaks it."""

    key: int
    name: str
    """Kafka's name of the request, without `Request`."""
    supported: Versions
    flexible_since: int
    """The first version with tagged fields."""
    request: Struct
    response: Struct
    handle: Handle
    is_pipelined: bool = False
    """The next request of this API on the connection begins while this one waits; answers stay in order."""
    request_bytes_max: int | None = None
    """Largest request, if the configured limits are not less; `socket.request.other.max.bytes` if it says none."""
    response_flexible_since: int | None = None
    """If the response's header is not as its version says (ApiVersions)."""
    errors: Callable[[Any], list[int]] = field(init=False, repr=False, compare=False)
    """The error codes of a response, without those that are 0."""
    _codecs: dict[tuple[bool, int], Codec] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "errors", errors_of(self.response))

    def reader(self, version: int) -> Codec:
        """The codec of requests of a version."""
        return self._codec(self.request, True, version)

    def writer(self, version: int) -> Codec:
        """The codec of responses of a version."""
        return self._codec(self.response, False, version)

    def _codec(self, of: Struct, is_request: bool, version: int) -> Codec:
        found = self._codecs.get((is_request, version))
        if found is None:
            found = Codec(of, version, flexible=version >= self.flexible_since)
            self._codecs[is_request, version] = found
        return found

    def decode(self, view: memoryview, at: int, version: int, items_max: int = ITEMS_MAX) -> Any:
        """The request whose body begins at `at`; raises MalformedError. What comes after it is ignored, as in Kafka."""
        codec = self.reader(version)
        try:
            return codec.read(view, at, items_max)[0]
        except (struct_error, IndexError, ValueError) as error:
            raise MalformedError(f"{self.name} v{version}: {error}") from None

    def encode(self, correlation_id: int, version: int, response: Any) -> Out:
        """The whole frame, its length included."""
        out = Out()
        out += bytes(4)
        out += correlation_id.to_bytes(4, "big", signed=True)
        since = self.flexible_since if self.response_flexible_since is None else self.response_flexible_since
        if version >= since:
            out.append(0)
        self.writer(version).write(out, response)
        size = sum(map(len, out.parts)) + len(out) - 4
        if out.parts:
            out.parts[0] = size.to_bytes(4, "big") + bytes(out.parts[0])[4:]
        else:
            out[:4] = size.to_bytes(4, "big")
        return out


class Header(NamedTuple):
    """The beginning of a request."""

    key: int
    version: int
    correlation_id: int
    client_id: str
    body: int
    """Where the body begins."""


def read_header(view: memoryview, flexible: Callable[[int, int], bool]) -> Header:
    """The header of a frame; `flexible` says whether a key and version have tagged fields. Raises MalformedError."""
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
