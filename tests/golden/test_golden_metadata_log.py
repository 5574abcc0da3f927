"""Apache Kafka's DumpLogSegments decodes every record type of the metadata log."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kipmesh.core import record_batch
from kipmesh.core.config import TopicConfig
from kipmesh.core.control_records import LeaderChange, leader_change_batch
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.fencing import FENCING_FEATURE, FENCING_LEVEL
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID
from kipmesh.storage.fs import RealFileSystem
from kipmesh.storage.log_manager import LogManager
from kipmesh.storage.quorum.quorum_replica import log_config

pytestmark = [pytest.mark.kafka_tools, pytest.mark.timeout(600)]

NOW = 1_700_000_000_000
TOPIC_ID = bytes(range(16))
DIRECTORY = bytes(range(100, 116))
PAYLOAD = re.compile(r"payload: (\{.*\})$", re.MULTILINE)

RECORDS = [
    r.FeatureLevelRecord(FENCING_FEATURE, FENCING_LEVEL),
    r.FeatureLevelRecord(r.METADATA_VERSION, r.METADATA_VERSION_LEVEL),
    r.RegisterBrokerRecord(
        1,
        False,
        TOPIC_ID,
        3,
        (r.BrokerEndpoint("MESH", "127.0.0.1", 65535, 0),),
        (r.BrokerFeature("kipmesh.leader", 0, 1),),
        "rack-a",
        True,
        False,
        (DIRECTORY,),
    ),
    r.BrokerRegistrationChangeRecord(1, 3, fenced=-1),
    r.BrokerRegistrationChangeRecord(1, 3, fenced=1, in_controlled_shutdown=1),
    r.BrokerRegistrationChangeRecord(1, 3, proven=True),
    r.BrokerRegistrationChangeRecord(1, 3, fenced=1, also_gone=(2, 3)),
    r.TopicRecord("flights", TOPIC_ID),
    r.ConfigRecord(2, "flights", "retention.ms", "1000"),
    r.ConfigRecord(2, "flights", "retention.ms", None),
    r.PartitionRecord(0, TOPIC_ID, (1, 2, 3), (1, 2), (), (), 1, 0, 4, 5, (DIRECTORY, bytes(16), bytes(16))),
    r.PartitionRecord(1, TOPIC_ID, (1,), (), (), (), -1, 1, 4, 5, (DIRECTORY,), (2,), (1,)),
    r.PartitionChangeRecord(0, TOPIC_ID, isr=(), leader=-1, last_known_elr=(1, 2)),
    r.PartitionChangeRecord(0, TOPIC_ID, isr=(2,), leader=2, leader_recovery_state=1, last_known_elr=()),
    r.RemoveTopicRecord(TOPIC_ID),
    r.UnregisterBrokerRecord(1, 3),
    r.FenceBrokerRecord(1, 3),
    r.UnfenceBrokerRecord(1, 3),
    r.ProducerIdsRecord(1, 3, 1000),
    r.RegisterControllerRecord(1001, TOPIC_ID, False, (r.BrokerEndpoint("MESH", "h", 1, 0),), ()),
    r.DelegationTokenRecord("o", "r", ("a", "b"), 1, 2, 3, "t"),
    r.UserScramCredentialRecord("u", 1, b"s", b"k", b"v", 4096),
    r.ClientQuotaRecord((r.EntityData("user", None),), "producer_byte_rate", 1.5, False),
    r.AccessControlEntryRecord(TOPIC_ID, 2, "t", 3, "User:a", "*", 3, 3),
    r.RemoveAccessControlEntryRecord(TOPIC_ID),
    r.RemoveUserScramCredentialRecord("u", 1),
    r.RemoveDelegationTokenRecord("t"),
    r.ZkMigrationStateRecord(0),
    r.BeginTransactionRecord("n"),
    r.AbortTransactionRecord("why"),
    r.EndTransactionRecord(),
    r.NoOpRecord(),
]


def test_kafka_decodes_every_record_of_the_metadata_log(tmp_path: Path, kafka_dump: Callable[..., str]) -> None:
    manager = LogManager(
        RealFileSystem(), (str(tmp_path),), cluster_id="c", node_id=1001, defaults=TopicConfig.parse({})
    )
    manager.load(NOW)
    log = manager.create(CLUSTER_METADATA_TOPIC, 0, CLUSTER_METADATA_TOPIC_ID, log_config(1 << 20), NOW)
    for epoch, voters, records in ((1, (1001,), RECORDS[:8]), (2, (1001, 1002), RECORDS[8:])):
        log.append_as_leader(leader_change_batch(LeaderChange(1001, voters, voters), epoch, NOW), epoch, NOW)
        batch = record_batch.build(
            [(None, r.encode_record(record)) for record in records],
            base_offset=log.log_end_offset,
            leader_epoch=epoch,
            timestamp_ms=NOW,
        )
        log.append_as_leader(batch, epoch, NOW)
    manager.close(2)
    (file,) = tmp_path.glob("__cluster_metadata-0/*.log")
    output = kafka_dump([file], "--cluster-metadata-decoder")
    decoded = [json.loads(text) for text in PAYLOAD.findall(output)]
    names = [
        re.sub(r"(?<!^)(?=[A-Z])", "_", type(record).__name__.removesuffix("Record")).upper() for record in RECORDS
    ]
    names = [f"{name}_RECORD" for name in names]
    assert [record["type"] for record in decoded if record.get("type", "").endswith("_RECORD")] == names
    assert output.count("LeaderChange") == 2
    by_type = {record["type"]: record["data"] for record in decoded if "type" in record}
    assert by_type["FEATURE_LEVEL_RECORD"] == {"name": "metadata.version", "featureLevel": 25}
    # kipmesh's fields are in tags, which Kafka skips.
    assert by_type["BROKER_REGISTRATION_CHANGE_RECORD"] == {"brokerId": 1, "brokerEpoch": 3, "fenced": 1}
    broker = by_type["REGISTER_BROKER_RECORD"]
    assert (broker["brokerId"], broker["brokerEpoch"], broker["rack"], broker["fenced"]) == (1, 3, "rack-a", True)
    assert broker["endPoints"] == [{"name": "MESH", "host": "127.0.0.1", "port": 65535, "securityProtocol": 0}]
    assert broker["features"] == [{"name": "kipmesh.leader", "minSupportedVersion": 0, "maxSupportedVersion": 1}]
    partition = by_type["PARTITION_RECORD"]
    assert (partition["leader"], partition["eligibleLeaderReplicas"], partition["lastKnownElr"]) == (-1, [2], [1])
    change = by_type["PARTITION_CHANGE_RECORD"]
    assert (change["isr"], change["leader"], change["leaderRecoveryState"], change["lastKnownElr"]) == ([2], 2, 1, [])
    assert by_type["USER_SCRAM_CREDENTIAL_RECORD"] == {
        "name": "u",
        "mechanism": 1,
        "salt": "cw==",
        "storedKey": "aw==",
        "serverKey": "dg==",
        "iterations": 4096,
    }
    assert by_type["REMOVE_USER_SCRAM_CREDENTIAL_RECORD"] == {"name": "u", "mechanism": 1}
    assert "partitionLeaderEpoch: 2" in output
