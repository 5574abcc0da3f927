"""`quorum-state`: epoch, leader and vote of a replica of the metadata quorum, in Kafka's format.

One line of JSON with a `data_version`: 0 has the cluster id and the voters, 1 the voted directory. We write 0, for a
fixed set of voters, and read both. The file is replaced atomically and durably before its content is sent to other
replicas.

A file that is unreadable, or of another cluster or voter set, is an error and never reset. A voter that lost its vote
could vote twice, and a different voter set could decide without the original voters.
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

REMEDIATION = (
    "this node does not start, because it may have the only copy of committed records; if a majority of the voters is "
    "running without it, move its metadata directory away and restart it: it then fetches everything from the leader"
)

_SIZE_MAX = 1 << 16


def encode(election: ElectionState, cluster_id: str, voters: tuple[int, ...]) -> bytes:
    """Return the content of `quorum-state`, with `data_version` 0."""
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
    """Return the election state in the content of `quorum-state`. `path` is for messages.

    `data_version` 1 has no cluster id and no voters, so these are not checked. Raises KafkaError: KAFKA_STORAGE_ERROR
    (unreadable), INCONSISTENT_CLUSTER_ID or INCONSISTENT_VOTER_SET.
    """
    try:
        fields: Any = json.loads(data.decode())
        version = fields["data_version"]
        if version not in (0, 1):
            raise _unusable(path, f"data_version must be 0 or 1, got {version!r}")
        numbers = [fields["leaderEpoch"], fields.get("leaderId", -1), fields.get("votedId", -1)]
        stored_cluster_id = fields.get("clusterId", "") if version == 0 else ""
        stored_voters = [voter["voterId"] for voter in fields.get("currentVoters") or ()] if version == 0 else []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unusable(path, f"it is not Kafka's JSON ({type(error).__name__}: {error})") from None
    if not all(type(number) is int and number >= -1 for number in [*numbers, *stored_voters]):
        raise _unusable(path, "epoch, leader, vote and voters must be integers of at least -1")
    if stored_cluster_id not in ("", cluster_id):
        raise KafkaError(
            ErrorCode.INCONSISTENT_CLUSTER_ID,
            f"{path} belongs to cluster {stored_cluster_id}, but cluster.id is {cluster_id}",
        )
    if stored_voters and set(stored_voters) != set(voters):
        raise KafkaError(
            ErrorCode.INCONSISTENT_VOTER_SET,
            f"{path} has the voters {_ids(stored_voters)}, but controller.quorum.voters has {_ids(voters)}; "
            "the voters of a cluster cannot be changed, restore the previous setting",
        )
    return ElectionState(max(numbers[0], 0), numbers[1], numbers[2])


def _ids(voters: Iterable[int]) -> str:
    return ", ".join(str(voter) for voter in sorted(set(voters)))


def read(fs: FileSystem, directory: str, cluster_id: str, voters: tuple[int, ...]) -> ElectionState | None:
    """Return the election state in `quorum-state`, or None if there is no file.

    Syncs the file first, because a process killed during `write` may have left it unsynced. Raises OSError, and the
    errors of `decode`, with KAFKA_STORAGE_ERROR also for a file that is too large.
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
            raise _unusable(path, f"its size must be at most {_SIZE_MAX} bytes, got {size}")
        data = file.read_at(size, 0)
    fs.sync_dir(directory)
    return decode(data, cluster_id, voters, path)


def write(fs: FileSystem, directory: str, election: ElectionState, cluster_id: str, voters: tuple[int, ...]) -> None:
    """Replace `quorum-state` atomically and durably. Raises OSError."""
    write_atomic(fs, f"{directory}/{QUORUM_STATE}", encode(election, cluster_id, voters))


def _unusable(path: str, why: str) -> KafkaError:
    return KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, f"cannot use {path}: {why}; {REMEDIATION}")
