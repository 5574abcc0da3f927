"""The `quorum-state` file: Kafka's JSON format, durable, and never reset silently."""

from __future__ import annotations

import json
from random import Random

import pytest

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.raft import ElectionState
from kipmesh.storage.quorum import quorum_state
from simulation.faulty_fs import FaultyFileSystem

DIRECTORY = "/data/__cluster_metadata-0"


def test_quorum_state_version_0_has_kafka_fields() -> None:
    data = quorum_state.encode(ElectionState(5, voted_id=2), "c1", (1, 2, 3))
    assert json.loads(data) == {
        "clusterId": "c1",
        "leaderId": -1,
        "leaderEpoch": 5,
        "votedId": 2,
        "appliedOffset": 0,
        "currentVoters": [{"voterId": 1}, {"voterId": 2}, {"voterId": 3}],
        "data_version": 0,
    }
    assert quorum_state.decode(data, "c1", (1, 2, 3)) == ElectionState(5, voted_id=2)


def test_quorum_state_version_1_and_kafka_file_are_read() -> None:
    version_1 = (
        b'{"leaderId":-1,"leaderEpoch":2,"votedId":1,"votedDirectoryId":"J8aAPcfLQt2bqs1JT_rMgQ","data_version":1}'
    )
    assert quorum_state.decode(version_1, "c1", (1, 2, 3)) == ElectionState(2, voted_id=1)
    version_0 = b'{"clusterId":"","leaderId":1,"leaderEpoch":2,"votedId":-1,"currentVoters":[],"data_version":0}'
    assert quorum_state.decode(version_0, "c1", (1, 2, 3)) == ElectionState(2, 1)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", ErrorCode.KAFKA_STORAGE_ERROR),
        (b"[]", ErrorCode.KAFKA_STORAGE_ERROR),
        (b"\xff", ErrorCode.KAFKA_STORAGE_ERROR),
        (b'{"leaderEpoch":1}', ErrorCode.KAFKA_STORAGE_ERROR),
        (b'{"leaderEpoch":1,"data_version":2}', ErrorCode.KAFKA_STORAGE_ERROR),
        (b'{"leaderEpoch":"1","data_version":1}', ErrorCode.KAFKA_STORAGE_ERROR),
        (b'{"leaderEpoch":1,"clusterId":"c2","data_version":0}', ErrorCode.INCONSISTENT_CLUSTER_ID),
    ],
)
def test_invalid_quorum_state_raises_one_line_error(data: bytes, code: ErrorCode) -> None:
    with pytest.raises(KafkaError) as caught:
        quorum_state.decode(data, "c1", (1, 2, 3))
    assert caught.value.code is code
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", range(20))
def test_quorum_state_survives_power_cut(seed: int) -> None:
    fs = FaultyFileSystem()
    fs.make_dirs(DIRECTORY)
    fs.sync_dir("/data")
    fs.sync_dir("/")
    assert quorum_state.read(fs, DIRECTORY, "c1", (1, 2, 3)) is None
    for epoch in range(1, 4):
        quorum_state.write(fs, DIRECTORY, ElectionState(epoch, voted_id=1), "c1", (1, 2, 3))
    fs.crash(Random(seed))
    assert quorum_state.read(fs, DIRECTORY, "c1", (1, 2, 3)) == ElectionState(3, voted_id=1)


def test_quorum_state_that_was_read_is_durable() -> None:
    """Found by simulation seeds 515 and 20199: a process ended before the directory was synced."""
    fs = FaultyFileSystem()
    fs.make_dirs(DIRECTORY)
    fs.sync_dir("/data")
    fs.sync_dir("/")
    quorum_state.write(fs, DIRECTORY, ElectionState(1), "c1", (1,))
    fs.fail("sync_dir")
    with pytest.raises(OSError, match="Input/output error"):
        quorum_state.write(fs, DIRECTORY, ElectionState(2, voted_id=1), "c1", (1,))
    found = quorum_state.read(fs, DIRECTORY, "c1", (1,))
    fs.crash()
    assert quorum_state.read(fs, DIRECTORY, "c1", (1,)) == found == ElectionState(2, voted_id=1)
