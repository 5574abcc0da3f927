"""Apache Kafka's DumpLogSegments reads the metadata log and the snapshots of a cluster of processes that is running."""

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
# The log's start rises, but with one segment its file has everything from offset 0 on.
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
    """How many records of each type."""
    decoded = [json.loads(text) for text in PAYLOAD.findall(output)]
    return Counter(one["type"] for one in decoded if str(one.get("type", "")).endswith("_RECORD"))


def live(mesh: QuorumCluster) -> None:
    """Topics, a failover, a fenced broker and deletions."""
    mesh.run(change(mesh.bootstrap, [f"before-{number}" for number in range(30)], ["before-3", "before-7"]))
    first = mesh.active()
    mesh.kill(first.name)
    mesh.run(change(mesh.bootstrap, [f"after-{number}" for number in range(10)], []))
    mesh.start(first.name)
    mesh.kill("broker-3")
    alive = ",".join(broker.grpc for broker in mesh.brokers if broker.name != "broker-3")

    async def fenced() -> bool:
        async with AdminClient(alive) as admin:
            return {broker.node_id for broker in (await admin.describe_cluster()).brokers} == {1, 2}

    wait_for(lambda: mesh.run(fenced()), "fenced broker")
    mesh.run(change(alive, ["after-the-fencing"], ["after-1"]))
    mesh.wait_caught_up()


def test_kafka_reads_the_metadata_files_of_a_live_cluster(tmp_path: Path, kafka_dump: Callable[..., str]) -> None:
    with QuorumCluster(tmp_path, controllers=3, brokers=3, config=CONFIG) as mesh:
        live(mesh)
        for node in (mesh.active(), mesh.brokers[0]):
            folder = node.data / METADATA
            segments, snapshots = sorted(folder.glob("*.log")), sorted(folder.glob("*.checkpoint"))
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
    changes = [one["data"] for one in payloads if one.get("type") == "BROKER_REGISTRATION_CHANGE_RECORD"]
    assert any(one["brokerId"] == 3 and one["fenced"] == 1 for one in changes)
