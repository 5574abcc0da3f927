"""A broker with a failed log directory reports the lost replicas before the directory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kipmesh import messages as m
from kipmesh.broker.replication.log_dirs import LogDirs
from kipmesh.broker.replication.replica import Disk
from kipmesh.core.config import TopicConfig
from kipmesh.core.metadata.image import PartitionKey
from kipmesh.core.metadata.states import LOST_DIRECTORY
from kipmesh.messages.table import Api
from kipmesh.storage.fs import StorageError
from kipmesh.storage.log_manager import LogManager
from simulation.faulty_fs import FaultyFileSystem
from tests.unit.broker.broker_cluster import eventually

ID = bytes(range(16))
EARLY, LATE = (ID, 0), (ID, 1)


async def test_broker_reports_failed_log_dir_after_all_its_replicas(tmp_path: Path) -> None:
    manager = LogManager(FaultyFileSystem(), ["/a", "/b"], cluster_id="c", node_id=1, defaults=TopicConfig())
    manager.load(0)
    ids = {directory.path: directory.directory_id for directory in manager.directories}
    reported: list[dict[bytes, list[PartitionKey]]] = []
    refusals = [m.AssignReplicasToDirsResponse(error_code=41)] * 2
    changes: list[Any] = []

    async def call(_api: Api, request: Any, _timeout_s: float) -> Any:
        assert not changes, "the controller could drop the directory before it marks its replicas lost"
        if refusals:
            log_dirs.report_lost(LATE)
            return refusals.pop()
        reported.append(
            {each.id: [(t.topic_id, p[0]) for t in each.topics for p in t.partitions] for each in request.directories}
        )
        responses = [
            m.AssignReplicasToDirsDirectoryResponse(
                each.id,
                [
                    m.AssignReplicasToDirsTopicResponse(
                        t.topic_id, [m.AssignReplicasToDirsPartitionResponse(p[0], 0) for p in t.partitions]
                    )
                    for t in each.topics
                ],
            )
            for each in request.directories
        ]
        return m.AssignReplicasToDirsResponse(directories=responses)

    disk = Disk("test")
    channel: Any = SimpleNamespace(call=call)
    log_dirs = LogDirs(
        broker_id=1,
        log_manager=manager,
        disk=disk,
        channel=channel,
        broker_epoch=lambda: 7,
        on_failure=lambda error: None,
        on_change=lambda: changes.append(log_dirs.offline_ids),
    )
    task = asyncio.create_task(log_dirs.run(lambda: [EARLY]))
    try:
        log_dirs.directory_failed("/b", StorageError("the disk is gone"))
        await eventually(lambda: bool(changes), "the directory is reported")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        disk.close()
        manager.abandon()
    assert reported == [{LOST_DIRECTORY: [EARLY, LATE]}]
    assert changes == [[ids["/b"]]]
