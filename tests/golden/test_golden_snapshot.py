"""Apache Kafka's DumpLogSegments reads metadata snapshots: header, footer and every record."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path

import pytest

from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.core.metadata.image_writer import image_records, image_values
from kipmesh.messages import SnapshotId
from kipmesh.storage.fs import RealFileSystem
from kipmesh.storage.quorum.snapshots import SnapshotStore

pytestmark = [pytest.mark.kafka_tools, pytest.mark.timeout(600)]

NOW = 1_700_000_000_000
TOPIC_ID = bytes(range(16))
DIRECTORY = bytes(range(100, 116))
PAYLOAD = re.compile(r"payload: (\{.*\})$", re.MULTILINE)

RECORDS = [
    r.FeatureLevelRecord("kipmesh.x", 1),
    r.FeatureLevelRecord(r.METADATA_VERSION, r.METADATA_VERSION_LEVEL),
    r.RegisterBrokerRecord(
        1,
        False,
        TOPIC_ID,
        3,
        (r.BrokerEndpoint("MESH", "127.0.0.1", 65535, 0),),
        (r.BrokerFeature("kipmesh.leader", 0, 1),),
        "rack-a",
        False,
        False,
        (DIRECTORY,),
    ),
    r.TopicRecord("flights", TOPIC_ID),
    r.ConfigRecord(2, "flights", "retention.ms", "1000"),
    r.PartitionRecord(0, TOPIC_ID, (1, 2, 3), (1, 2), (), (), 1, 0, 4, 5, (DIRECTORY, bytes(16), bytes(16))),
    r.PartitionRecord(1, TOPIC_ID, (1,), (), (), (), -1, 1, 4, 5, (DIRECTORY,), None, (1,)),
    r.PartitionRecord(2, TOPIC_ID, (1, 2), (1, 2), (2,), (1,), 1, 0, 4, 5, (DIRECTORY, DIRECTORY), (2,), None),
    r.ProducerIdsRecord(1, 3, 1000),
    r.UserScramCredentialRecord("alice", 1, b"salt", b"stored", b"server", 4096),
    r.UserScramCredentialRecord("alice", 2, b"salt", b"stored", b"server", 8192),
]


def image_of_records() -> MetadataImage:
    image = MetadataImage()
    for record in RECORDS:
        image.offset += 1
        image.apply(record, MetadataDelta())
    return image


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_kafka_decodes_every_record_of_a_snapshot(
    tmp_path: Path, kafka_dump: Callable[..., str], compression: str
) -> None:
    image = image_of_records()
    store = SnapshotStore(RealFileSystem(), str(tmp_path))
    snapshot_id = SnapshotId(image.offset + 1, 7)
    writer = store.create(snapshot_id, last_contained_log_timestamp=NOW - 5, now_ms=NOW, compression=compression)
    many = [r.encode_record(r.NoOpRecord())] * 2500
    for _ in writer.write([*image_values(image.capture()), *many]):
        pass
    writer.freeze()
    (file,) = tmp_path.iterdir()
    assert file.name == "00000000000000000011-0000000007.checkpoint"
    output = kafka_dump([file], "--cluster-metadata-decoder")
    assert f'SnapshotHeader {{"version":0,"lastContainedLogTimestamp":{NOW - 5}}}' in output
    assert 'SnapshotFooter {"version":0}' in output
    assert output.index("SnapshotHeader") < output.index("FEATURE_LEVEL_RECORD") < output.index("SnapshotFooter")
    assert output.count("isControl: true") == 2
    assert output.count("isControl: false") == 3
    assert f"compresscodec: {compression}" in output
    assert "partitionLeaderEpoch: 7" in output
    decoded = [record for record in map(json.loads, PAYLOAD.findall(output)) if "type" in record]
    names = [
        re.sub(r"(?<!^)(?=[A-Z])", "_", type(record).__name__).upper() for record in image_records(image.capture())
    ]
    assert len(names) == len(RECORDS)
    assert [record["type"] for record in decoded] == [*names, *["NO_OP_RECORD"] * 2500]
    assert decoded[0]["data"] == {"name": "metadata.version", "featureLevel": 25}
    partitions = [record["data"] for record in decoded if record["type"] == "PARTITION_RECORD"]
    assert [partition["isr"] for partition in partitions] == [[1, 2], [], [1, 2]]
    assert partitions[1]["lastKnownElr"] == [1]
    assert (partitions[2]["removingReplicas"], partitions[2]["addingReplicas"]) == ([2], [1])
    assert partitions[2]["eligibleLeaderReplicas"] == [2]
    assert (
        next(record["data"] for record in decoded if record["type"] == "PRODUCER_IDS_RECORD")["nextProducerId"] == 1000
    )
    credentials = [record["data"] for record in decoded if record["type"] == "USER_SCRAM_CREDENTIAL_RECORD"]
    assert [(user["name"], user["mechanism"], user["iterations"]) for user in credentials] == [
        ("alice", 1, 4096),
        ("alice", 2, 8192),
    ]
    assert {b64decode(user["storedKey"]) for user in credentials} == {b"stored"}
