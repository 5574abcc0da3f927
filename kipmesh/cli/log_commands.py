"""`kipmesh log` and `kipmesh snapshot`: what is in a segment file, and in a snapshot of the metadata."""

from __future__ import annotations

import base64
import mmap
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kipmesh.cli.common import AsJson, CommandError, command, make_app, option, print_json

if TYPE_CHECKING:
    from kipmesh.core.record_batch import BatchHeader, Buffer

METADATA_PREFIX = "__cluster_metadata-"
SNAPSHOT_NAME = re.compile(r"\.checkpoint(\.part|\.deleted)?$")

app = make_app("Dump log files.", "kipmesh log dump mesh/leader-1/data/flights-0/00000000000000000000.log")


snapshot_app = make_app(
    "Dump snapshots of the metadata.",
    "kipmesh snapshot dump mesh/controller-1/data/__cluster_metadata-0/00000000000000000100-0000000003.checkpoint",
)


@command(app)
def dump(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A segment file: <20 digits>.log")],
    print_records: Annotated[
        bool | None,
        option("--print-records/--batches", "Print records, or only batches. Default: records only for metadata."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the record batches of a segment, one per line, and check their CRCs.

    Errors are printed where they occur and set exit code 1. Records of the metadata log and its snapshots are decoded,
    including control records.

    Examples:
    kipmesh log dump data/flights-0/00000000000000000000.log
    kipmesh log dump data/flights-0/00000000000000000000.log --print-records
    kipmesh log dump data/__cluster_metadata-0/00000000000000000000.log --json
    """
    _check_file(file)
    is_metadata = file.absolute().parent.name.startswith(METADATA_PREFIX) or bool(SNAPSHOT_NAME.search(file.name))
    with_records = is_metadata if print_records is None else print_records
    if not _print_dump(file, print_records=with_records, is_metadata=is_metadata, as_json=as_json):
        raise typer.Exit(1)


@command(snapshot_app, "dump")
def dump_snapshot(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="<end offset>-<epoch>.checkpoint, or a .part of one")],
    batches_only: Annotated[bool, option("--batches", "Print only batches, no records.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the batches and decoded records of a snapshot, one per line, and check that it is complete and valid.

    Errors set exit code 1.

    Examples:
    kipmesh snapshot dump data/__cluster_metadata-0/00000000000000000100-0000000003.checkpoint
    kipmesh snapshot dump data/__cluster_metadata-0/00000000000000000100-0000000003.checkpoint --json
    kipmesh snapshot dump data/__cluster_metadata-0/00000000000000000100-0000000003.checkpoint --batches
    """
    from kipmesh.core.errors import CorruptRecordError
    from kipmesh.storage.quorum.snapshot_file import SnapshotReader

    _check_file(file)
    if not _print_dump(file, print_records=not batches_only, is_metadata=True, as_json=as_json):
        raise typer.Exit(1)
    with file.open("rb") as stream:
        try:
            SnapshotReader(_ReadOnly(stream.fileno()), file.name).check()
        except CorruptRecordError as error:
            raise CommandError(error.message) from None


class _ReadOnly:
    """A file opened only for reading, because Apache Kafka makes its snapshots read-only."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read_at(self, size: int, position: int) -> bytes:
        return os.pread(self._descriptor, size, position)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size


def _check_file(file: Path) -> None:
    """Raise CommandError unless `file` is a regular file."""
    if file.is_dir():
        raise CommandError(f"{file} is a directory: name a file in it")
    if not file.exists():
        raise CommandError(f"{file}: no such file")
    if not file.is_file():
        raise CommandError(f"{file} is not a regular file")


def _print_dump(file: Path, *, print_records: bool, is_metadata: bool, as_json: bool) -> bool:
    """Print the record batches of a file and return whether it has no errors. True for an empty file."""
    if file.stat().st_size == 0:
        return True
    errors = 0
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        view = memoryview(data)
        try:
            for one in _objects(view, print_records=print_records, is_metadata=is_metadata):
                errors += "error" in one
                print_json(one) if as_json else print(_text(one))
        finally:
            view.release()
    return not errors


def _objects(data: Buffer, *, print_records: bool, is_metadata: bool) -> Iterator[dict[str, Any]]:
    from kipmesh.core.errors import KafkaError
    from kipmesh.core.record_batch import check_crc, iterate

    position = 0
    expected = -1
    batches = iterate(data)
    while True:
        try:
            following = next(batches, None)
        except KafkaError as error:
            yield {"position": position, "error": error.message}
            return
        if following is None:
            return
        position, header = following
        one = _batch_object(position, header)
        try:
            if header.base_offset < expected:
                one["error"] = f"base offset must be at least {expected}, got {header.base_offset}"
            check_crc(data, position, header)
            records = _record_objects(data, position, header, is_metadata=is_metadata) if print_records else []
        except KafkaError as error:
            one["error"] = error.message
            records = []
        yield one
        yield from records
        expected = header.next_offset
        position += header.size_bytes


def _batch_object(position: int, header: BatchHeader) -> dict[str, Any]:
    from kipmesh.client.compression import COMPRESSIONS

    codec = header.compression
    return {
        "base_offset": header.base_offset,
        "last_offset": header.last_offset,
        "count": header.record_count,
        "base_sequence": header.base_sequence,
        "producer_id": header.producer_id,
        "producer_epoch": header.producer_epoch,
        "partition_leader_epoch": header.partition_leader_epoch,
        "is_transactional": header.is_transactional,
        "is_control": header.is_control,
        "position": position,
        "timestamp_type": "LogAppendTime" if header.is_log_append_time else "CreateTime",
        "base_timestamp": header.base_timestamp,
        "max_timestamp": header.max_timestamp,
        "size": header.size_bytes,
        "magic": header.magic,
        "compresscodec": COMPRESSIONS[codec] if codec < len(COMPRESSIONS) else str(codec),
        "crc": header.crc,
    }


def _record_objects(data: Buffer, position: int, header: BatchHeader, *, is_metadata: bool) -> list[dict[str, Any]]:
    from kipmesh.client.json_form import header_object, put_bytes
    from kipmesh.client.records import read_batch

    objects = []
    for record in read_batch(data, position, header):
        one: dict[str, Any] = {"offset": record.offset, "timestamp": record.timestamp}
        if is_metadata and header.is_control:
            one["control"] = _control_object(record.key, record.value)
        elif is_metadata:
            put_bytes(one, "key", record.key)
            one["payload"] = _metadata_object(record.value)
        else:
            put_bytes(one, "key", record.key)
            put_bytes(one, "value", record.value)
        one["headers"] = [header_object(name, value) for name, value in record.headers]
        objects.append(one)
    return objects


def _control_object(key: bytes | None, value: bytes | None) -> dict[str, Any]:
    from kipmesh.core import control_records as control
    from kipmesh.core.control_records import decode_leader_change
    from kipmesh.core.errors import CorruptRecordError

    decoders: dict[int, Callable[[], Any]] = {
        control.ControlType.LEADER_CHANGE: lambda: decode_leader_change(key, value),
        control.ControlType.SNAPSHOT_HEADER: lambda: control.decode_control(control.SnapshotHeader, value),
        control.ControlType.SNAPSHOT_FOOTER: lambda: control.decode_control(control.SnapshotFooter, value),
    }
    try:
        number = control.control_type(key)
        kind = control.ControlType(number) if number in control.ControlType.__members__.values() else None
        named: dict[str, Any] = {"type": str(number) if kind is None else kind.name}
        decode = decoders.get(number)
        if decode is None:
            named["value"] = _plain(value)
        else:
            named["data"] = _plain(decode())
    except CorruptRecordError as error:
        return {"error": error.message}
    return named


def _metadata_object(value: bytes) -> dict[str, Any]:
    from kipmesh.core.errors import CorruptRecordError
    from kipmesh.core.metadata.records import decode_record

    try:
        record = decode_record(value)
    except CorruptRecordError as error:
        return {"error": error.message}
    return {"type": type(record).__name__, "data": _plain(record)}


def _plain(value: Any) -> Any:
    """Convert a decoded record for JSON: named tuples to dicts, bytes to Kafka's text form of ids."""
    if hasattr(value, "_asdict"):
        return {name: _plain(field) for name, field in value._asdict().items()}
    if isinstance(value, bytes):
        return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _text(one: dict[str, Any]) -> str:
    mark = "| " if "offset" in one else ""
    return mark + " ".join(f"{name}: {value}" for name, value in one.items())
