"""Kafka's small files: offset and epoch checkpoints, `partition.metadata`, `meta.properties`, clean-shutdown marker.

Checkpoints are text: a line with the version (0), a line with the number of entries, and a line per entry. Every file
except `partition.metadata` is replaced atomically: after a crash it has its old or its new content.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kipmesh.core.errors import CorruptRecordError
from kipmesh.storage.fs import FileSystem, read_file, write_atomic, write_file

RECOVERY_POINT_CHECKPOINT = "recovery-point-offset-checkpoint"
LOG_START_CHECKPOINT = "log-start-offset-checkpoint"
HIGH_WATERMARK_CHECKPOINT = "replication-offset-checkpoint"
CLEANER_CHECKPOINT = "cleaner-offset-checkpoint"
"""Name of the checkpoint of the offsets below which the logs are compacted."""
OFFSET_CHECKPOINTS = (RECOVERY_POINT_CHECKPOINT, LOG_START_CHECKPOINT, HIGH_WATERMARK_CHECKPOINT)
LEADER_EPOCH_CHECKPOINT = "leader-epoch-checkpoint"
META_PROPERTIES = "meta.properties"
PARTITION_METADATA = "partition.metadata"
CLEAN_SHUTDOWN = ".kafka_cleanshutdown"
_UUID_BYTES = 16

TopicPartition = tuple[str, int]


def _read_entries(fs: FileSystem, path: str, *types: type[str | int]) -> list[tuple[Any, ...]]:
    """Return the entries of a checkpoint as tuples, with fields converted to `types`; [] if it is missing or empty.

    Raises OSError; CorruptRecordError for an unknown version, a wrong number of entries or an invalid entry.
    """
    try:
        lines = read_file(fs, path).decode().splitlines()
        if not lines:  # Kafka creates the file empty
            return []
        version, count = int(lines[0]), int(lines[1])
        words = [line.split() for line in lines[2:] if line.strip()]
        entries = [tuple(kind(word) for kind, word in zip(types, entry, strict=True)) for entry in words]
    except FileNotFoundError:
        return []
    except (ValueError, IndexError) as error:
        raise CorruptRecordError(f"{path} is not a checkpoint with {len(types)} words per entry: {error}") from None
    if version != 0:
        raise CorruptRecordError(f"version of {path} must be 0, got {version}")
    if len(entries) != count:
        raise CorruptRecordError(f"{path} must have {count} entries, got {len(entries)}")
    return entries


def _format_lines(lines: Iterable[str]) -> bytes:
    entries = list(lines)
    return "\n".join(["0", str(len(entries)), *entries, ""]).encode()


def read_offsets(fs: FileSystem, path: str) -> dict[TopicPartition, int]:
    """Return an offset checkpoint as a dict of (topic, partition) to offset; {} if the file is missing or empty.

    Raises OSError, CorruptRecordError.
    """
    return {(topic, partition): offset for topic, partition, offset in _read_entries(fs, path, str, int, int)}


def write_offsets(fs: FileSystem, path: str, offsets: Mapping[TopicPartition, int]) -> None:
    """Replace an offset checkpoint atomically and durably. Raises OSError."""
    write_atomic(fs, path, _format_lines(f"{topic} {part} {offset}" for (topic, part), offset in offsets.items()))


def read_epochs(fs: FileSystem, directory: str) -> tuple[tuple[int, int], ...]:
    """Return the (epoch, start offset) pairs of the log in `directory`; () if there is no checkpoint or it is empty.

    Raises OSError; CorruptRecordError if the checkpoint is invalid or has a negative number.
    """
    path = f"{directory}/{LEADER_EPOCH_CHECKPOINT}"
    entries = tuple((epoch, offset) for epoch, offset in _read_entries(fs, path, int, int))
    if any(epoch < 0 or offset < 0 for epoch, offset in entries):
        raise CorruptRecordError(f"{path} has a negative number")
    return entries


def write_epochs(fs: FileSystem, directory: str, entries: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Replace the leader epoch checkpoint of the log in `directory` atomically. Return `entries`.

    The new file is durable after the caller has synced the directory. Raises OSError.
    """
    lines = _format_lines(f"{epoch} {offset}" for epoch, offset in entries)
    write_atomic(fs, f"{directory}/{LEADER_EPOCH_CHECKPOINT}", lines, sync_dir=False)
    return entries


def uuid_text(identity: bytes) -> str:
    """Return the text of a 16-byte id as Kafka writes it: URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(identity).decode().rstrip("=")


def write_partition_metadata(fs: FileSystem, directory: str, topic_id: bytes) -> None:
    """Write `partition.metadata` with the topic id, without a sync and not atomically. Raises OSError.

    `kipmesh.storage.log.log_loader` explains why this is safe.
    """
    content = f"version: 0\ntopic_id: {uuid_text(topic_id)}".encode()
    write_file(fs, f"{directory}/{PARTITION_METADATA}", content, sync=False)


def parse_uuid(text: str) -> bytes:
    """Return the 16 bytes of an id written by `uuid_text`, or b"" if the text is invalid."""
    try:
        identity = base64.urlsafe_b64decode(text.strip() + "==")
    except ValueError:
        return b""
    return identity if len(identity) == _UUID_BYTES else b""


def parse_partition_metadata(data: bytes) -> bytes:
    """Return the topic id (16 bytes) in the content of `partition.metadata`.

    Returns b"" if the content is invalid or incomplete, which a crash may cause.
    """
    try:
        fields = dict(line.split(": ", 1) for line in data.decode().splitlines() if line)
    except ValueError:
        return b""
    return parse_uuid(fields.get("topic_id", "")) if fields.get("version") == "0" else b""


class MetaProperties(NamedTuple):
    """Content of `meta.properties`: cluster id, node id and id of a data directory ("" if it has no id)."""

    cluster_id: str
    node_id: int
    directory_id: str


def read_meta_properties(fs: FileSystem, directory: str) -> MetaProperties | None:
    """Return the content of `meta.properties` in a data directory, or None if there is no such file.

    Raises OSError; CorruptRecordError if `cluster.id` or `node.id` is missing, or `node.id` is not an integer.
    """
    path = f"{directory}/{META_PROPERTIES}"
    try:
        data = read_file(fs, path)
    except FileNotFoundError:
        return None
    fields = {}
    for line in data.decode(errors="replace").splitlines():
        key, separator, value = line.partition("=")
        if separator and not line.startswith(("#", "!")):
            fields[key.strip()] = value.strip().replace("\\", "")
    try:
        return MetaProperties(fields["cluster.id"], int(fields["node.id"]), fields.get("directory.id", ""))
    except (KeyError, ValueError):
        raise CorruptRecordError(f"{path} lacks cluster.id or node.id") from None


def write_meta_properties(fs: FileSystem, directory: str, properties: MetaProperties) -> None:
    """Replace `meta.properties` durably, which assigns the data directory to a cluster and node. Raises OSError."""
    lines = [
        "#",
        f"cluster.id={properties.cluster_id}",
        f"directory.id={properties.directory_id}",
        f"node.id={properties.node_id}",
        "version=1",
        "",
    ]
    write_atomic(fs, f"{directory}/{META_PROPERTIES}", "\n".join(lines).encode())


def read_clean_shutdown(fs: FileSystem, directory: str) -> int | None:
    """Return the broker epoch in the clean-shutdown marker of a data directory.

    Returns None if there is no marker, because the last stop was unclean, and -1 if the marker has no valid epoch.
    Raises OSError.
    """
    try:
        content = json.loads(read_file(fs, f"{directory}/{CLEAN_SHUTDOWN}"))
        return int(content["brokerEpoch"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return -1


def write_clean_shutdown(fs: FileSystem, directory: str, broker_epoch: int) -> None:
    """Write the clean-shutdown marker durably. Call this only when the directory's files are complete and durable.

    `broker_epoch` is stored in the marker; -1 if unknown. Raises OSError.
    """
    content = json.dumps({"version": 0, "brokerEpoch": broker_epoch}, separators=(",", ":"))
    write_atomic(fs, f"{directory}/{CLEAN_SHUTDOWN}", content.encode())


def remove_clean_shutdown(fs: FileSystem, directory: str) -> None:
    """Remove the clean-shutdown marker durably, if there is one. Raises OSError."""
    if fs.exists(f"{directory}/{CLEAN_SHUTDOWN}"):
        fs.remove(f"{directory}/{CLEAN_SHUTDOWN}")
        fs.sync_dir(os.path.normpath(directory))
