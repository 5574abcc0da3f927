"""Apache Kafka's DumpLogSegments reads the metadata logs and snapshots of a running cluster."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.quorum_cluster import METADATA, QuorumCluster, wait_for
from kipmesh.client import AdminClient
from kipmesh.client.types import NewTopic

pytestmark = [pytest.mark.kafka_tools, pytest.mark.timeout(600)]

PAYLOAD = re.compile(r"payload: (\{.*\})$", re.MULTILINE)
# The log start offset advances, but the only segment still has all records from offset 0.
CONFIG = {
    "broker.session.timeout.ms": "8000",
    "broker.heartbeat.interval.ms": "500",
    "metadata.snapshot.min.changed_records.ratio": "0",
    "metadata.log.max.record.bytes.between.snapshots": "4000",
}


async def change(bootstrap: str, create: list[str], delete: list[str]) -> None:
    async with AdminClient(bootstrap) as admin:
        for name in create:
            await admin.create_topics([NewTopic(name, 3, 2, configs={"retention.ms": "60000"})])
        for name in delete:
            await admin.delete_topics([name])


def records_of(output: str) -> Counter[str]:
    """Count the records by type."""
    decoded = [json.loads(text) for text in PAYLOAD.findall(output)]
    return Counter(record["type"] for record in decoded if str(record.get("type", "")).endswith("_RECORD"))


def change_metadata(cluster: QuorumCluster) -> None:
    """Create and delete topics, fail over the active controller and fence a broker."""
    cluster.run(change(cluster.bootstrap, [f"before-{number}" for number in range(30)], ["before-3", "before-7"]))
    first = cluster.active()
    cluster.kill(first.name)
    cluster.run(change(cluster.bootstrap, [f"after-{number}" for number in range(10)], []))
    cluster.start(first.name)
    cluster.kill("broker-3")
    alive = ",".join(broker.grpc for broker in cluster.brokers if broker.name != "broker-3")

    async def fenced() -> bool:
        async with AdminClient(alive) as admin:
            return {broker.node_id for broker in (await admin.describe_cluster()).brokers} == {1, 2}

    wait_for(lambda: cluster.run(fenced()), "fenced broker")
    cluster.run(change(alive, ["after-the-fencing"], ["after-1"]))
    cluster.wait_caught_up()


def test_kafka_reads_the_metadata_files_of_a_live_cluster(tmp_path: Path, kafka_dump: Callable[..., str]) -> None:
    with QuorumCluster(tmp_path, controllers=3, brokers=3, config=CONFIG) as cluster:
        change_metadata(cluster)
        for node in (cluster.active(), cluster.brokers[0]):
            directory = node.data / METADATA
            segments, snapshots = sorted(directory.glob("*.log")), sorted(directory.glob("*.checkpoint"))
            assert segments
            assert snapshots
            log = kafka_dump(segments, "--cluster-metadata-decoder")
            snapshot = kafka_dump(snapshots[-1:], "--cluster-metadata-decoder")
            check_snapshot(snapshot)
            check_log(log)


def check_snapshot(output: str) -> None:
    assert output.count("SnapshotHeader") == output.count("SnapshotFooter") == 1
    found = records_of(output)
    assert found["REGISTER_BROKER_RECORD"] == 3
    assert found["TOPIC_RECORD"] >= 28
    assert found["PARTITION_RECORD"] == 3 * found["TOPIC_RECORD"]
    assert found["CONFIG_RECORD"] == found["TOPIC_RECORD"]


def check_log(output: str) -> None:
    found = records_of(output)
    assert found["REMOVE_TOPIC_RECORD"] == 3
    assert found["TOPIC_RECORD"] == 41
    assert found["PARTITION_RECORD"] == 3 * found["TOPIC_RECORD"]
    assert output.count("LeaderChange") >= 2
    assert len(set(re.findall(r"partitionLeaderEpoch: (\d+)", output))) >= 2
    assert "FEATURE_LEVEL_RECORD" in found
    payloads = [json.loads(text) for text in PAYLOAD.findall(output)]
    changes = [payload["data"] for payload in payloads if payload.get("type") == "BROKER_REGISTRATION_CHANGE_RECORD"]
    assert any(change["brokerId"] == 3 and change["fenced"] == 1 for change in changes)
