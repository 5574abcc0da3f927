"""Errors in responses, derived from the declarations: which a response has, and the response that refuses a request.

A response whose declaration has an `error_code` of its own carries the error there. Otherwise each item that the
request names carries it: the response's lists mirror the request's. A list or field that has another name in the
request states it (`mirrors` in `kipmesh.messages.schema.field`).
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
    """The errors in a message: its own, and those of the items in its lists."""

    has_code: bool
    inner: tuple[tuple[Callable[[Any], Any], Place], ...]


def error_places(of: type[Message]) -> Place:
    """Return where a response has errors."""
    inner = []
    for each in of.message_fields:
        if isinstance(each.type, Array) and is_message(each.type.of):
            place = error_places(each.type.of)
            if place.has_code or place.inner:
                inner.append((attrgetter(each.name), place))
    return Place(_CODE in of._fields, tuple(inner))


def add_errors(place: Place, value: Any, found: list[int]) -> None:
    """Add the error codes other than 0 of a response, one for each place that has one."""
    if place.has_code and value.error_code:
        found.append(value.error_code)
    for items, inner in place.inner:
        if inner.inner:
            for item in items(value) or ():
                add_errors(inner, item, found)
        else:
            found += [item.error_code for item in items(value) or () if item.error_code]


def has_success(place: Place, value: Any) -> bool:
    """Whether an item of a response has no error."""
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
    """Return the response that refuses `request`; None if `version` has no field for the error."""
    lists = [each for each in _present(response_type, version) if each.mirrors is not None]
    own = _find(response_type, _CODE, version)
    if own is not None and own.is_refusal:
        return _blank(response_type, version, {_CODE: code, _MESSAGE: message})
    values: dict[str, Any] = {}
    for each in lists:
        sources = [source for source in each.mirrors or () if _find(request_type, source, version) is not None]
        named = [item for source in sources for item in getattr(request, source) or ()]
        items = [_refused(each.type.of, item, code, message, version) for item in named]
        if sources:  # an item in several lists is refused once
            values[each.name] = tuple(dict.fromkeys(items) if len(sources) > 1 else items)
    return _blank(response_type, version, values) if values else None


def _refused(of: type[Message], item: Any, code: int, message: str | None, version: int | None) -> Any:
    """Return the item of a response that has the error, for an item of a request."""
    values: dict[str, Any] = {}
    nested = [each for each in of.message_fields if isinstance(each.type, Array) and each.mirrors is not None]
    for each in of.message_fields:
        if each in nested:
            (source,) = each.mirrors or ()
            inner = getattr(item, source) or ()
            values[each.name] = tuple([_refused(each.type.of, one, code, message, version) for one in inner])
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
    """Return the field's name if it identifies an item: a scalar whose default is zero, empty or None."""
    is_key = isinstance(each.type, str) and each.default in (zero_of(each.type), None)
    return (each.name,) if is_key else ()


def _present(of: type[Message], version: int | None) -> list[Field]:
    if version is None:
        return [each for each in of.message_fields if each.number is not None]
    return [each for each in of.message_fields if version in each.versions]


def _find(of: type[Message], name: str, version: int | None) -> Field | None:
    return next((each for each in _present(of, version) if each.name == name), None)


def _blank(of: type[Message], version: int | None, values: dict[str, Any]) -> Any:
    """Return a message with the values that it has fields for, and no None where a version has no null."""
    known = {name: value for name, value in values.items() if name in of._fields}
    for each in of.message_fields:
        value = known.get(each.name, each.default)
        is_sent = version is not None and version in each.versions and each.tag is None
        if value is None and version is not None and is_sent and version not in each.nullable:
            known[each.name] = _nothing(each, version)
    return of(**known)


def _nothing(each: Field, version: int) -> Any:
    if isinstance(each.type, Array):
        return ()
    kind = item_type(each)
    return _blank(kind, version, {}) if is_message(kind) else zero_of(kind)
