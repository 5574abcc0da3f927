"""Finds the errors in responses and creates error responses, based on the declarations.

A response with a top-level `error_code` has the error there. Otherwise every item of the request has it: the lists of
the response repeat those of the request, as declared by `mirrors` (`kipmesh.messages.schema.field`).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from kipmesh.messages.kafka import is_message, item_type
from kipmesh.messages.schema import ITEM, Array, Field, Message, zero_of

_CODE = "error_code"
_MESSAGE = "error_message"


class Place(NamedTuple):
    """Where a message type has error codes."""

    has_code: bool
    """Whether the message itself has an `error_code`."""
    inner: tuple[tuple[Callable[[Any], Any], Place], ...]
    """For each list whose items have error codes: its getter, and the place of an item."""


def error_places(of: type[Message]) -> Place:
    """Return where a message type has error codes: in itself and in the items of its lists, recursively."""
    inner = []
    for each in of.message_fields:
        if isinstance(each.type, Array) and is_message(each.type.of):
            place = error_places(each.type.of)
            if place.has_code or place.inner:
                inner.append((attrgetter(each.name), place))
    return Place(_CODE in of._fields, tuple(inner))


def add_errors(place: Place, value: Any, codes: list[int]) -> None:
    """Append all nonzero error codes of a response, including those of its items, to `codes`."""
    if place.has_code and value.error_code:
        codes.append(value.error_code)
    for items, inner in place.inner:
        if inner.inner:
            for item in items(value) or ():
                add_errors(inner, item, codes)
        else:
            codes += [item.error_code for item in items(value) or () if item.error_code]


def has_success(place: Place, value: Any) -> bool:
    """Return whether any item of a response has no error or, for a type without such items, the response itself."""
    if not place.inner:
        return not value.error_code
    return any(has_success(inner, item) for items, inner in place.inner for item in items(value) or ())


def make_error_response(
    request_type: type[Message],
    response_type: type[Message],
    request: Any,
    code: int,
    message: str | None,
    version: int | None,
) -> Any | None:
    """Return a response to `request` with an error, or None if `version` has no field for it.

    The error is at top level if the response has a field for it there, otherwise in one item for each item of the
    request. Args: code, message: the error; version: version of Kafka's format, None for gRPC.
    """
    lists = [each for each in _present(response_type, version) if each.mirrors is not None]
    own = _find(response_type, _CODE, version)
    if own is not None and own.is_refusal:
        return _blank(response_type, version, {_CODE: code, _MESSAGE: message})
    values: dict[str, Any] = {}
    for each in lists:
        sources = [source for source in each.mirrors or () if _find(request_type, source, version) is not None]
        requested = [item for source in sources for item in getattr(request, source) or ()]
        items = [_refused(each.type.of, item, code, message, version) for item in requested]
        if sources:  # an item in several lists gets one error
            values[each.name] = tuple(dict.fromkeys(items) if len(sources) > 1 else items)
    return _blank(response_type, version, values) if values else None


def _refused(of: type[Message], item: Any, code: int, message: str | None, version: int | None) -> Any:
    """Return the response item with the error for a request item."""
    values: dict[str, Any] = {}
    nested = [each for each in of.message_fields if isinstance(each.type, Array) and each.mirrors is not None]
    for each in of.message_fields:
        if each in nested:
            (source,) = each.mirrors or ()
            inner = getattr(item, source) or ()
            values[each.name] = tuple([_refused(each.type.of, child, code, message, version) for child in inner])
        elif not isinstance(item, Message):
            if each.mirrors is not None and ITEM in each.mirrors:
                values[each.name] = item
        else:
            for source in each.mirrors or _own_name(each):
                if source in item._fields:
                    values[each.name] = getattr(item, source)
    if not nested:
        values |= {_CODE: code, _MESSAGE: message}
    return _blank(of, version, values)


def _own_name(each: Field) -> tuple[str, ...]:
    """Return the name of a field that identifies an item (a scalar with the default zero, empty or None), or ()."""
    is_key = isinstance(each.type, str) and each.default in (zero_of(each.type), None)
    return (each.name,) if is_key else ()


def _present(of: type[Message], version: int | None) -> list[Field]:
    if version is None:
        return [each for each in of.message_fields if each.number is not None]
    return [each for each in of.message_fields if version in each.versions]


def _find(of: type[Message], name: str, version: int | None) -> Field | None:
    return next((each for each in _present(of, version) if each.name == name), None)


def _blank(of: type[Message], version: int | None, values: dict[str, Any]) -> Any:
    """Return a message with those of `values` that it has fields for. Nulls that `version` lacks become empty."""
    known = {name: value for name, value in values.items() if name in of._fields}
    for each in of.message_fields:
        value = known.get(each.name, each.default)
        is_sent = version is not None and version in each.versions and each.tag is None
        if value is None and version is not None and is_sent and version not in each.nullable:
            known[each.name] = _empty(each, version)
    return of(**known)


def _empty(each: Field, version: int) -> Any:
    if isinstance(each.type, Array):
        return ()
    kind = item_type(each)
    return _blank(kind, version, {}) if is_message(kind) else zero_of(kind)
