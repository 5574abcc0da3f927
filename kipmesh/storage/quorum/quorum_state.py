"""`quorum-state`: the epoch, the leader and the vote of a replica of the metadata quorum, as Kafka writes it.

One line of JSON with Kafka's names and a `data_version`: 0 has the cluster id and the voters, 1 the voted directory.
We write 0, the version of a fixed set of voters, with the cluster id in it, and read both. The file is replaced
atomically and durably; what is in it was never told to anybody before.

A file of another cluster, of other voters or one that cannot be read is an error of one line, never a silent reset: a
voter that forgets its vote may vote twice, and voters that nobody ever agreed on would decide without those that were.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import closing
from typing import Any

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.raft.types import ElectionState
from kipmesh.storage.fs import FileSystem, write_atomic

QUORUM_STATE = "quorum-state"

WAY_OUT = (
    "this node does not start, for others may rely on it. If the other voters are a majority and are running, move its "
    "metadata folder away and start it again: it then fetches everything from the leader"
)

_SIZE_MAX = 1 << 16


def encode(election: ElectionState, cluster_id: str, voters: tuple[int, ...]) -> bytes:
    """The file's content, `data_version` 0."""
    fields = {
        "clusterId": cluster_id,
        "leaderId": election.leader_id,
        "leaderEpoch": election.epoch,
        "votedId": election.voted_id,
        "appliedOffset": 0,
        "currentVoters": [{"voterId": voter} for voter in voters],
        "data_version": 0,
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def decode(data: bytes, cluster_id: str, voters: tuple[int, ...], path: str = QUORUM_STATE) -> ElectionState:
    """The election in a file; KafkaError in one line when it is none, or another cluster's or other voters'.

    A file that names no voters, as Kafka writes it when it has a version 1, is taken for any.
    """
    try:
        fields: Any = json.loads(data.decode())
        version = fields["data_version"]
        if version not in (0, 1):
            raise _unusable(path, f"data_version {version!r} is neither 0 nor 1")
        numbers = [fields["leaderEpoch"], fields.get("leaderId", -1), fields.get("votedId", -1)]
        told = fields.get("clusterId", "") if version == 0 else ""
        told_voters = [voter["voterId"] for voter in fields.get("currentVoters") or ()] if version == 0 else []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unusable(path, f"it is not Kafka's JSON ({type(error).__name__}: {error})") from None
    if not all(type(number) is int and number >= -1 for number in [*numbers, *told_voters]):
        raise _unusable(path, "epoch, leader, vote and voters are not numbers from -1 on")
    if told not in ("", cluster_id):
        raise KafkaError(ErrorCode.INCONSISTENT_CLUSTER_ID, f"{path} is of cluster {told}, this is {cluster_id}")
    if told_voters and set(told_voters) != set(voters):
        raise KafkaError(
            ErrorCode.INCONSISTENT_VOTER_SET,
            f"{path} is of the voters {_ids(told_voters)}, but controller.quorum.voters names {_ids(voters)}: "
            "a cluster's voters cannot be changed, set them as they were",
        )
    return ElectionState(max(numbers[0], 0), numbers[1], numbers[2])


def _ids(voters: Iterable[int]) -> str:
    return ", ".join(str(voter) for voter in sorted(set(voters)))


def read(fs: FileSystem, directory: str, cluster_id: str, voters: tuple[int, ...]) -> ElectionState | None:
    """The election in a directory; None when there is no file. KafkaError, OSError.

    What it gives is durable: a process that was killed within `write` may have left what a power cut would take back.
    """
    path = f"{directory}/{QUORUM_STATE}"
    try:
        file = fs.open(path)
    except FileNotFoundError:
        return None
    with closing(file):
        file.sync()
        size = file.size()
        if size > _SIZE_MAX:
            raise _unusable(path, f"{size} bytes are too many")
        data = file.read_at(size, 0)
    fs.sync_dir(directory)
    return decode(data, cluster_id, voters, path)


def write(fs: FileSystem, directory: str, election: ElectionState, cluster_id: str, voters: tuple[int, ...]) -> None:
    """Replace the file durably. OSError."""
    write_atomic(fs, f"{directory}/{QUORUM_STATE}", encode(election, cluster_id, voters))


def _unusable(path: str, why: str) -> KafkaError:
    return KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, f"cannot use {path}: {why}; {WAY_OUT}")
