"""Helpers for tests of the metadata quorum: topics of brokers, files of controllers, /metrics and logs of nodes."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from bench.continuous_load import Creations
from bench.quorum_cluster import QuorumCluster, QuorumNode, wait_for
from kipmesh.cli.main import app
from kipmesh.client import AdminClient
from kipmesh.client.types import NewTopic
from kipmesh.messages import MetadataRequest, MetadataResponse
from kipmesh.transport.grpc.client import ConnectionPool

RAFT = "kafka_server_raftmetrics_"
CONTROLLER = "kafka_controller_kafkacontroller_"
LOG_START = "kipmesh_metadata_log_start_offset"

SMALL_SNAPSHOTS = {
    "metadata.snapshot.min.changed_records.ratio": "0",
    "metadata.log.max.record.bytes.between.snapshots": "4000",
    "broker.session.timeout.ms": "15000",
}
"""Frequent snapshots. The session outlasts pauses: only killed brokers are fenced, when their connection breaks."""
CLEANED_AT_ONCE = {**SMALL_SNAPSHOTS, "metadata.max.retention.bytes": "1", "metadata.log.segment.bytes": "16384"}
"""The log starts at the newest snapshot, even if replicas still need earlier records."""


# -- topics of brokers


async def _all_topics(address: str) -> MetadataResponse:
    pool = ConnectionPool("test")
    try:
        response: MetadataResponse = await pool.get(address).call("Broker", "Metadata", MetadataRequest(None), 60)
        return response
    finally:
        await pool.close()


def topics_at(cluster: QuorumCluster, broker: QuorumNode) -> dict[str, bytes]:
    """Return name -> topic id of all topics in the broker's metadata; asserts that names and ids are unique."""
    topics = cluster.run(_all_topics(broker.grpc)).topics
    found = {topic.name or "": topic.topic_id for topic in topics}
    assert len(found) == len(topics), "a topic is described twice"
    assert len(set(found.values())) == len(topics), "two topics have one id"
    return found


def missing(wanted: Mapping[str, bytes], found: Mapping[str, bytes]) -> list[str]:
    """Return names that `found` lacks or has with another id. An empty id in `wanted` matches any."""
    return [name for name, topic_id in wanted.items() if name not in found or topic_id not in (b"", found[name])]


def check_broker(cluster: QuorumCluster, broker: QuorumNode, wanted: Mapping[str, bytes]) -> None:
    """Wait until the broker has every acknowledged topic."""
    wait_for(
        lambda: not missing(wanted, topics_at(cluster, broker)),
        lambda: f"{missing(wanted, topics_at(cluster, broker))[:5]} at {broker.name}",
    )


def check_brokers(cluster: QuorumCluster, wanted: Mapping[str, bytes]) -> None:
    """Wait until every broker has every acknowledged topic and all brokers have the same topics."""
    for broker in cluster.brokers:
        check_broker(cluster, broker, wanted)

    def differing() -> list[str]:
        first, *others = [topics_at(cluster, broker) for broker in cluster.brokers]
        return sorted({name for other in others for name, _ in first.items() ^ other.items()})

    wait_for(lambda: not differing(), lambda: f"agreement of the brokers on {differing()[:5]}")


def create(
    cluster: QuorumCluster, names: Iterable[str], *, partitions: int = 1, replicas: int = 1, **config: Any
) -> None:
    """Create topics, one per request, so that each is a separate batch in the metadata log."""

    async def work() -> None:
        async with AdminClient(cluster.bootstrap, **config) as admin:
            for name in names:
                await admin.create_topics([NewTopic(name, partitions, replicas)], wait=False)

    cluster.run(work())


def delete(cluster: QuorumCluster, names: Iterable[str]) -> None:
    """Delete topics, one per request."""

    async def work() -> None:
        async with AdminClient(cluster.bootstrap) as admin:
            for name in names:
                await admin.delete_topics([name], wait=False)

    cluster.run(work())


# -- files of nodes


def dump(command: str, file: Path) -> list[dict[str, Any]]:
    """Output of `kipmesh log|snapshot dump FILE --json`; asserts that the file is valid."""
    done = CliRunner().invoke(app, [command, "dump", str(file), "--json"])
    assert done.exit_code == 0, f"{file}: {done.output[-500:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def segments(node: QuorumNode) -> list[Path]:
    """Segments of the node's metadata log, oldest first."""
    return sorted(node.metadata.glob("*.log"))


def snapshots(node: QuorumNode) -> list[Path]:
    """Metadata snapshots of the node, oldest first."""
    return sorted(node.metadata.glob("*.checkpoint"))


def topics_on_disk(node: QuorumNode) -> dict[str, bytes]:
    """Return name -> topic id from the newest snapshot and the log after it; asserts that no topic is created twice.

    A running node writes and deletes files: the read is repeated if the files changed during it.
    """
    while True:
        before = _files(node)
        try:
            found = _topics_on_disk(node)
        except (AssertionError, OSError):
            if _files(node) == before:
                raise
        else:
            if _files(node) == before:
                return found


def _files(node: QuorumNode) -> dict[str, int]:
    return sizes((*segments(node), *snapshots(node)))


def sizes(files: Iterable[Path]) -> dict[str, int]:
    """Return name -> bytes of the files that still exist."""
    found = {}
    for file in files:
        with suppress(FileNotFoundError):
            found[file.name] = file.stat().st_size
    return found


def _topics_on_disk(node: QuorumNode) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    start = 0
    if snapshots(node):
        newest = snapshots(node)[-1]
        start = int(newest.name.partition("-")[0])
        _replay(found, dump("snapshot", newest))
    for segment in segments(node):
        _replay(found, (line for line in dump("log", segment) if line.get("offset", -1) >= start))
    return found


def _replay(found: dict[str, bytes], lines: Iterable[dict[str, Any]]) -> None:
    for payload in filter(None, (line.get("payload") for line in lines)):
        match payload["type"]:
            case "TopicRecord":
                name, topic_id = payload["data"]["name"], _topic_id(payload["data"]["topic_id"])
                assert name not in found, f"{name} is created twice"
                assert topic_id not in found.values(), f"{name} has the id of another topic"
                found[name] = topic_id
            case "RemoveTopicRecord":
                gone = _topic_id(payload["data"]["topic_id"])
                (name,) = [name for name, topic_id in found.items() if topic_id == gone]
                del found[name]


def _topic_id(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "==")


def check_disks(cluster: QuorumCluster, wanted: Mapping[str, bytes]) -> None:
    """Assert that each controller's files have all acknowledged topics and exactly the topics of the brokers."""
    cluster.wait_caught_up()
    described = topics_at(cluster, cluster.brokers[0])
    for controller in cluster.controllers:
        found = topics_on_disk(controller)
        assert not missing(wanted, found)
        assert found == described, controller.name


def acknowledged(creations: Iterable[Creations]) -> dict[str, bytes]:
    """Return name -> topic id of all topics that the cluster acknowledged."""
    return {name: topic_id for creation in creations for name, topic_id in creation.acknowledged.items()}


# -- metrics and logs of nodes


def metrics(node: QuorumNode) -> dict[str, float]:
    """Return the samples of /metrics by `name` or `name{label=value}`."""
    with urllib.request.urlopen(f"http://{node.http}/metrics", timeout=60) as response:
        text = response.read().decode()
    return dict(_samples(text))


def _samples(text: str) -> Iterator[tuple[str, float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            yield (f"{sample.name}{{{labels}}}" if labels else sample.name), sample.value


def state_of(node: QuorumNode) -> str:
    """Return the quorum state of the node from its /metrics: `leader`, `follower` ..."""
    states = [name for name, value in metrics(node).items() if name.startswith(f"{RAFT}current_state") and value]
    assert len(states) == 1, states
    return states[0].partition("=")[2].rstrip("}")


def lines_of(node: QuorumNode, offset: int = 0) -> list[str]:
    """Return complete lines of the node's log after `offset` bytes."""
    return node.log.read_bytes()[offset:].rpartition(b"\n")[0].decode().splitlines()


def log_end(node: QuorumNode) -> int:
    """Size of the node's log in bytes."""
    return node.log.stat().st_size


def wait_metric(node: QuorumNode, name: str, above: float) -> float:
    """Wait until the metric is above a number and return its value."""
    wait_for(lambda: metrics(node).get(name, above) > above, lambda: f"{name} > {above:g} at {node.name}")
    return metrics(node)[name]
