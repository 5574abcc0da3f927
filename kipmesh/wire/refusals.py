"""The response with which an API refuses a request, in the fields that the version has for errors.

An API with an error of the whole response has it there. Others have one for each item that was asked for: the
response mirrors the request's lists, and each item at the end has the error. A fetch is refused partition by
partition, for its response's own error is of its session alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kipmesh.core.errors import ErrorCode
from kipmesh.wire.api import Api
from kipmesh.wire.schema import Array, Field, Struct

_ZEROS: Mapping[str, Any] = {"string": "", "bytes": b"", "records": b"", "uuid": b"", "bool": False, "float64": 0.0}


class _Mirror(NamedTuple):
    """A list of the response that is made from one of the request."""

    asked: str
    answered: str
    names: Mapping[str, str]
    """The answer's field -> the asked item's; the empty text is the item itself."""
    inner: _Mirror | None = None


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_INDEX = _same("partition_index")
_RESOURCES = _same("resource_type", "resource_name")
_MIRRORS: Mapping[str, tuple[_Mirror, ...]] = {
    "Produce": (
        _Mirror(
            "topic_data",
            "responses",
            _same("name", "topic_id"),
            _Mirror("partition_data", "partition_responses", _same("index")),
        ),
    ),
    "Fetch": (
        _Mirror(
            "topics",
            "responses",
            _same("topic", "topic_id"),
            _Mirror("partitions", "partitions", {"partition_index": "partition"}),
        ),
    ),
    "ListOffsets": (_Mirror("topics", "topics", _same("name"), _Mirror("partitions", "partitions", _INDEX)),),
    "OffsetForLeaderEpoch": (
        _Mirror("topics", "topics", _same("topic"), _Mirror("partitions", "partitions", _same("partition"))),
    ),
    "FindCoordinator": (_Mirror("coordinator_keys", "coordinators", {"key": ""}),),
    "OffsetCommit": (_Mirror("topics", "topics", _same("name"), _Mirror("partitions", "partitions", _INDEX)),),
    "OffsetFetch": (
        _Mirror("groups", "groups", _same("group_id")),
        _Mirror(
            "topics",
            "topics",
            _same("name"),
            _Mirror("partition_indexes", "partitions", {"partition_index": ""}),
        ),
    ),
    "DescribeGroups": (_Mirror("groups", "groups", {"group_id": ""}),),
    "DeleteGroups": (_Mirror("groups_names", "results", {"group_id": ""}),),
    "CreateTopics": (_Mirror("topics", "topics", _same("name")),),
    "DeleteTopics": (
        _Mirror("topics", "responses", _same("name", "topic_id")),
        _Mirror("topic_names", "responses", {"name": ""}),
    ),
    "CreatePartitions": (_Mirror("topics", "results", _same("name")),),
    "DeleteRecords": (_Mirror("topics", "topics", _same("name"), _Mirror("partitions", "partitions", _INDEX)),),
    "DescribeConfigs": (_Mirror("resources", "results", _RESOURCES),),
    "IncrementalAlterConfigs": (_Mirror("resources", "responses", _RESOURCES),),
    "ElectLeaders": (
        _Mirror(
            "topic_partitions",
            "replica_election_results",
            _same("topic"),
            _Mirror("partitions", "partition_result", {"partition_id": ""}),
        ),
    ),
    "DescribeTopicPartitions": (_Mirror("topics", "topics", _same("name")),),
    "AlterUserScramCredentials": (
        _Mirror("deletions", "results", {"user": "name"}),
        _Mirror("upsertions", "results", {"user": "name"}),
    ),
}
_BY_PARTITION = frozenset({"Fetch"})
"""Have an error of the response, which is of something else."""


def refusal(api: Api, version: int, request: Any, code: ErrorCode) -> Any | None:
    """The response's value; None where the version has no field for the error."""
    response = api.response
    has_own = _field(response, "error_code", version) is not None and api.name not in _BY_PARTITION
    if has_own:
        return _blank(response, version, error_code=code)
    lists: dict[str, list[Any]] = {}
    for mirror in _MIRRORS.get(api.name, ()):
        if _field(api.request, mirror.asked, version) is None:
            continue
        items = _mirrored(response, version, mirror, getattr(request, mirror.asked), code)
        lists.setdefault(mirror.answered, []).extend(items)
    return _blank(response, version, **lists) if lists else None


def _mirrored(of: Struct, version: int, mirror: _Mirror, asked: Any, code: ErrorCode) -> list[Any]:
    each = next(one for one in of.fields if one.name == mirror.answered)
    assert isinstance(each.type, Array)
    struct = each.type.of
    assert isinstance(struct, Struct)
    items = []
    for item in asked or ():
        values = {name: getattr(item, source) if source else item for name, source in mirror.names.items()}
        if mirror.inner is None:
            values["error_code"] = code
        else:
            values[mirror.inner.answered] = _mirrored(
                struct, version, mirror.inner, getattr(item, mirror.inner.asked), code
            )
        items.append(_blank(struct, version, **values))
    return items


def _field(of: Struct, name: str, version: int) -> Field | None:
    return next((one for one in of.fields if one.name == name and version in one.versions), None)


def _blank(of: Struct, version: int, **values: Any) -> Any:
    """A value with what is given, its defaults, and nothing or zero in the rest and where a version has no null."""
    known = {**of.value._field_defaults, **{name: one for name, one in values.items() if name in of.value._fields}}
    for each in of.fields:
        if each.name in of.value._fields and (each.name not in known or known[each.name] is None):
            is_null = version in each.nullable or version not in each.versions
            known[each.name] = None if is_null else _nothing(each.type, version)
    return of.value(**known)


def _nothing(kind: str | Struct | Array, version: int) -> Any:
    if isinstance(kind, Array):
        return ()
    return _blank(kind, version) if isinstance(kind, Struct) else _ZEROS.get(kind, 0)
