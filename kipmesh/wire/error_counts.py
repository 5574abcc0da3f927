"""Which errors a response has, wherever its table has an `error_code`: the whole response's, and those of its items."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from kipmesh.wire.schema import Array, Struct

_CODE = "error_code"


class _Place(NamedTuple):
    """What has errors in a value of one Struct."""

    has_code: bool
    inner: tuple[tuple[Callable[[Any], Any], _Place], ...]
    """Lists within it whose items have errors, or lists with them."""


def errors_of(of: Struct) -> Callable[[Any], list[int]]:
    """A function from a response's value to its error codes that are not 0, one for each place that has one."""
    place = _place(of)

    def errors(response: Any) -> list[int]:
        return list(_errors(place, response))

    return errors


def _place(of: Struct) -> _Place:
    inner = []
    for each in of.fields:
        if isinstance(each.type, Array) and isinstance(each.type.of, Struct) and each.name in of.value._fields:
            place = _place(each.type.of)
            if place.has_code or place.inner:
                inner.append((attrgetter(each.name), place))
    has_code = _CODE in of.value._fields and any(each.name == _CODE for each in of.fields)
    return _Place(has_code, tuple(inner))


def _errors(place: _Place, value: Any) -> Iterator[int]:
    if place.has_code and value.error_code:
        yield value.error_code
    for items, inner in place.inner:
        if inner.inner:
            for item in items(value) or ():
                yield from _errors(inner, item)
        else:
            for item in items(value) or ():
                if item.error_code:
                    yield item.error_code
