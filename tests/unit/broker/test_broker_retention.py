"""Retention logs uncommitted segments that it cannot delete once per round."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import structlog

from kipmesh.broker.replication.maintenance import Maintenance
from kipmesh.core.config import BrokerConfig


class FakeReplica(NamedTuple):
    topic: str
    partition: int
    removed: int
    held: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"

    def retain(self, _now_ms: int) -> int:
        return self.removed

    def held_back(self, _now_ms: int) -> int:
        return self.held


async def run_round(*replicas: FakeReplica) -> list[Any]:
    keys = {"node.id": "1", "cluster.id": "c", "controller.quorum.voters": "9@127.0.0.1:1"}
    config = BrokerConfig.parse({**keys, "listeners": "MESH://127.0.0.1:0", "log.dirs": "nowhere"})
    unused: Any = None
    partitions: Any = replicas
    maintenance = Maintenance(config, partitions, unused, unused, unused, unused, lambda: 0, lambda: 0)
    with structlog.testing.capture_logs() as lines:
        await maintenance._retain()
    return lines


@pytest.mark.usefixtures("default_structlog")
async def test_retention_logs_one_line_for_all_held_back_segments() -> None:
    lines = await run_round(FakeReplica("a", 0, 2, 0), FakeReplica("b", 1, 0, 3), FakeReplica("c", 2, 0, 1))
    assert [line["event"] for line in lines] == [
        "segments deleted",
        "retention waits for the high watermark",
    ]
    assert (lines[1]["partitions"], lines[1]["example"]) == (2, "b-1")
    assert await run_round(FakeReplica("a", 0, 0, 0)) == []
