"""The consumer group of the workload against real brokers: clean runs have no findings, changed offsets are found."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kipmesh.client import AdminClient, NewTopic, TopicPartition
from kipmesh.cluster import LocalCluster
from kipmesh.testing import until
from kipmesh_chaos import dumps
from kipmesh_chaos.experiment import WorkloadPart
from kipmesh_chaos.faults import PartitionView
from kipmesh_chaos.history import (
    Assigned,
    Begin,
    CommitOk,
    Event,
    Kind,
    Limits,
    Note,
    OffsetsFetched,
    Phase,
    PhaseBegan,
    read_history,
)
from kipmesh_chaos.history_checker import Verdict, check
from kipmesh_chaos.observer import Observer
from kipmesh_chaos.recorder import Recorder, RunClients
from kipmesh_chaos.target_cluster import Node
from kipmesh_chaos.workload import GROUP, OBSERVER, Workload, consumer_names

PART = WorkloadPart.model_validate(
    {
        "partitions": 3,
        "replication_factor": 1,
        "producers": 3,
        "records_per_s": 50,
        "racks": [],
        "group": {
            "members": 3,
            "commit_interval_s": 0.05,
            "config": {"heartbeat.interval.ms": 50, "session.timeout.ms": 60_000},
        },
    }
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    config = {
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "1000",
        "offsets.topic.num.partitions": "1",
    }
    with LocalCluster(mode="single", followers=0, config=config) as it:
        yield it


NO_REPLICAS = PartitionView(-1, ())
"""Log directories are not read."""

Spoil = Callable[[AdminClient, list[TopicPartition]], Awaitable[object]]


async def run_group(
    bootstrap: str, topic: str, directory: Path, churn_s: float | None = None, spoil: Spoil | None = None
) -> tuple[Verdict, list[Event]]:
    """Return the verdict on a run and its history. `spoil` changes committed offsets after all members have left."""
    assert PART.group is not None
    changes: dict[str, object] = {"churn_s": churn_s}
    if churn_s is not None:  # members that die expire quickly
        changes["config"] = {**PART.group.config, "session.timeout.ms": "1500"}
    part = PART.model_copy(update={"group": PART.group.model_copy(update=changes)})
    async with AdminClient(bootstrap) as admin:
        await admin.create_topics([NewTopic(topic, part.partitions, 1)])
    recorder = Recorder(directory / "history.jsonl")
    recorder.add(Begin(0, "test", 1, part.partitions, Limits(), consumer_names(part), (), True))
    recorder.add(PhaseBegan(recorder.now, Phase.FAULTS))
    clients = RunClients(bootstrap, topic, recorder)
    async with Workload(clients, part, seed=1) as workload:
        assert workload.members is not None
        workload.members.start_churning()
        wanted = 20 if churn_s is None else 100
        await until(
            lambda: (
                workload.check() is None
                and min((workload.positions[GROUP].get(number, 0) for number in range(3)), default=0) >= wanted
            ),
            "records that the group has read",
            100,
        )
        recorder.add(PhaseBegan(recorder.now, Phase.RECOVERY))
        await workload.members.stop_churning()
        await workload.stop_producing()
        ends = await dumps.final_read(clients, part.partitions, 60)
        assert await workload.catch_up(ends, 60)
        await workload.members.close()
        await workload.members.record_end()
        if spoil is not None:
            async with AdminClient(bootstrap) as admin:
                await spoil(admin, [TopicPartition(topic, number) for number in range(3)])
            await workload.members.record_end()
    dumps.record_ends(recorder, ends, dict.fromkeys(range(3), NO_REPLICAS))
    recorder.add(PhaseBegan(recorder.now, Phase.END))
    recorder.close()
    events = list(read_history(recorder.file))
    return check(events), events


async def test_group_reads_and_commits_all_records(cluster: LocalCluster, tmp_path: Path) -> None:
    verdict, events = await run_group(cluster.bootstrap, "quiet", tmp_path)
    assert verdict.findings == ()
    assert verdict.figures.commits == sum(isinstance(event, CommitOk) for event in events) > 0
    assert verdict.figures.read == verdict.figures.acknowledged
    assert len({event.member for event in events if isinstance(event, Assigned)}) == 3
    last = [event for event in events if isinstance(event, OffsetsFetched)][-1]
    assert last.reader == OBSERVER
    assert sum(offset for _, offset in last.offsets) == verdict.figures.acknowledged


async def test_leaving_and_dying_members_are_no_anomaly(cluster: LocalCluster, tmp_path: Path) -> None:
    verdict, events = await run_group(cluster.bootstrap, "churning", tmp_path, 1)
    assert verdict.findings == ()
    assert verdict.figures.generations > 1
    actions = {event.text.split()[-1] for event in events if isinstance(event, Note)}
    assert "leaves" in actions or "dies" in actions


async def test_checker_finds_deleted_and_altered_group_offsets(cluster: LocalCluster, tmp_path: Path) -> None:
    def delete(admin: AdminClient, partitions: list[TopicPartition]) -> Awaitable[object]:
        return admin.delete_group_offsets(GROUP, partitions)

    def alter(admin: AdminClient, partitions: list[TopicPartition]) -> Awaitable[object]:
        return admin.alter_group_offsets(GROUP, dict.fromkeys(partitions, 10_000))

    wanted: list[tuple[str, Spoil, Kind]] = [
        ("forgotten", delete, Kind.COMMIT_WENT_BACK),
        ("moved", alter, Kind.COMMIT_PHANTOM),
    ]
    for topic, spoil, kind in wanted:
        verdict, _ = await run_group(cluster.bootstrap, topic, tmp_path, spoil=spoil)
        assert {finding.kind for finding in verdict.findings} == {kind}
        assert {finding.partition for finding in verdict.findings} == {0, 1, 2}


async def test_observer_finds_coordinator_of_group(cluster: LocalCluster, tmp_path: Path) -> None:
    def nodes() -> list[Node]:
        return [replace(node, pid=1) for node in cluster.nodes]  # all nodes run in this process

    recorder = Recorder(tmp_path / "history.jsonl")
    for group, wanted in ((None, -1), (GROUP, 1)):
        observer = Observer(nodes, RunClients(cluster.bootstrap, "quiet", recorder), group)
        assert (await observer.view()).coordinator == wanted
        await observer.pool.close()
    recorder.close()
