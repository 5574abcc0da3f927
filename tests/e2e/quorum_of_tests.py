"""What the tests of the metadata quorum share: what brokers say, what is on controllers' disks, what /metrics has."""

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

from bench.creations import Creations
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
"""Who is killed is fenced because its connection broke: brokers that only stand still must not be."""
CLEANED_AT_ONCE = {**SMALL_SNAPSHOTS, "metadata.max.retention.bytes": "1", "metadata.log.segment.bytes": "16384"}
"""The log starts at the newest snapshot, whatever replicas may still need of it."""


# -- what brokers say


async def _all_topics(address: str) -> MetadataResponse:
    pool = ConnectionPool("test")
    try:
        response: MetadataResponse = await pool.get(address).call("Broker", "Metadata", MetadataRequest(None), 60)
        return response
    finally:
        await pool.close()


def topics_at(mesh: QuorumCluster, broker: QuorumNode) -> dict[str, bytes]:
    """Name -> topic id as this one broker describes all topics; each name and each id once."""
    topics = mesh.run(_all_topics(broker.grpc)).topics
    found = {topic.name or "": topic.topic_id for topic in topics}
    assert len(found) == len(topics), "a topic is described twice"
    assert len(set(found.values())) == len(topics), "two topics have one id"
    return found


def missing(wanted: Mapping[str, bytes], found: Mapping[str, bytes]) -> list[str]:
    """Names that are not there, or under another id than was acknowledged (empty: any)."""
    return [name for name, topic_id in wanted.items() if name not in found or topic_id not in (b"", found[name])]


def check_broker(mesh: QuorumCluster, broker: QuorumNode, wanted: Mapping[str, bytes]) -> None:
    """The broker describes every topic that was acknowledged."""
    wait_for(
        lambda: not missing(wanted, topics_at(mesh, broker)),
        lambda: f"{missing(wanted, topics_at(mesh, broker))[:5]} at {broker.name}",
    )


def check_brokers(mesh: QuorumCluster, wanted: Mapping[str, bytes]) -> None:
    """Every broker describes every topic that was acknowledged, and all describe the same."""
    for broker in mesh.brokers:
        check_broker(mesh, broker, wanted)

    def differing() -> list[str]:
        first, *others = [topics_at(mesh, broker) for broker in mesh.brokers]
        return sorted({name for other in others for name, _ in first.items() ^ other.items()})

    wait_for(lambda: not differing(), lambda: f"agreement of the brokers on {differing()[:5]}")


def create(mesh: QuorumCluster, names: Iterable[str], *, partitions: int = 1, replicas: int = 1, **config: Any) -> None:
    """Create topics, in requests of their own, so that each is a batch of its own in the metadata log."""

    async def work() -> None:
        async with AdminClient(mesh.bootstrap, **config) as admin:
            for name in names:
                await admin.create_topics([NewTopic(name, partitions, replicas)], wait=False)

    mesh.run(work())


def delete(mesh: QuorumCluster, names: Iterable[str]) -> None:
    """Delete topics, one by one."""

    async def work() -> None:
        async with AdminClient(mesh.bootstrap) as admin:
            for name in names:
                await admin.delete_topics([name], wait=False)

    mesh.run(work())


# -- what is on disk


def dump(command: str, file: Path) -> list[dict[str, Any]]:
    """`kipmesh log|snapshot dump FILE --json`, which finds nothing wrong."""
    done = CliRunner().invoke(app, [command, "dump", str(file), "--json"])
    assert done.exit_code == 0, f"{file}: {done.output[-500:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def segments(node: QuorumNode) -> list[Path]:
    """Segment files of its metadata log, oldest first."""
    return sorted(node.metadata.glob("*.log"))


def snapshots(node: QuorumNode) -> list[Path]:
    """Its snapshots, oldest first."""
    return sorted(node.metadata.glob("*.checkpoint"))


def topics_on_disk(node: QuorumNode) -> dict[str, bytes]:
    """Name -> topic id by the newest snapshot and the log after it; a topic that is made twice fails the test.

    A node that runs writes, and deletes what a newer snapshot makes needless: what was read while it did is read again.
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
    """By name, of those that are still there when they are looked at."""
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
        _play(found, dump("snapshot", newest))
    for segment in segments(node):
        _play(found, (one for one in dump("log", segment) if one.get("offset", -1) >= start))
    return found


def _play(found: dict[str, bytes], lines: Iterable[dict[str, Any]]) -> None:
    for payload in filter(None, (line.get("payload") for line in lines)):
        match payload["type"]:
            case "TopicRecord":
                name, topic_id = payload["data"]["name"], _topic_id(payload["data"]["topic_id"])
                assert name not in found, f"{name} is there twice"
                assert topic_id not in found.values(), f"{name} has the id of another topic"
                found[name] = topic_id
            case "RemoveTopicRecord":
                gone = _topic_id(payload["data"]["topic_id"])
                (name,) = [name for name, topic_id in found.items() if topic_id == gone]
                del found[name]


def _topic_id(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "==")


def check_disks(mesh: QuorumCluster, wanted: Mapping[str, bytes]) -> None:
    """Each controller's own files have each acknowledged topic once, and what brokers describe, no more."""
    mesh.wait_caught_up()
    described = topics_at(mesh, mesh.brokers[0])
    for controller in mesh.controllers:
        found = topics_on_disk(controller)
        assert not missing(wanted, found)
        assert found == described, controller.name


def acknowledged(creations: Iterable[Creations]) -> dict[str, bytes]:
    """All topics that several creations were told of."""
    return {name: topic_id for each in creations for name, topic_id in each.acknowledged.items()}


# -- what nodes say of themselves


def metrics(node: QuorumNode) -> dict[str, float]:
    """What /metrics has: `name`, or `name{label=value}` for what has labels."""
    with urllib.request.urlopen(f"http://{node.http}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return dict(_samples(text))


def _samples(text: str) -> Iterator[tuple[str, float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            yield (f"{sample.name}{{{labels}}}" if labels else sample.name), sample.value


def state_of(node: QuorumNode) -> str:
    """What it is to the quorum, by its /metrics: `leader`, `follower` ..."""
    states = [name for name, value in metrics(node).items() if name.startswith(f"{RAFT}current_state") and value]
    assert len(states) == 1, states
    return states[0].partition("=")[2].rstrip("}")


def lines_of(node: QuorumNode, offset: int = 0) -> list[str]:
    """What a node wrote to its log after `offset` bytes, without a line that it has not ended yet."""
    return node.log.read_bytes()[offset:].rpartition(b"\n")[0].decode().splitlines()


def log_end(node: QuorumNode) -> int:
    """Bytes of a node's log so far."""
    return node.log.stat().st_size


def wait_metric(node: QuorumNode, name: str, above: float) -> float:
    """Until this metric is above a number; its value then."""
    wait_for(lambda: metrics(node).get(name, above) > above, lambda: f"{name} > {above:g} at {node.name}")
    return metrics(node)[name]
