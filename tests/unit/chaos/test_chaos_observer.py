"""Observer: probes of one broker process form one session, whoever restarts the broker."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kipmesh.messages import FetchableTopicResponse, FetchResponse, PartitionData
from kipmesh_chaos import observer as observer_module
from kipmesh_chaos.faults import PartitionView
from kipmesh_chaos.history import Read, read_history
from kipmesh_chaos.observer import Observer
from kipmesh_chaos.recorder import Recorder, RunClients


@dataclass(frozen=True)
class FakeNode:
    name: str = "follower-1"
    node_id: int | None = 101
    rack: str = ""
    pid: int | None = 7
    grpc: str | None = "127.0.0.1:1"
    dir: str = ""


class ProbedBroker:
    """A broker that returns the given high watermarks. Each response may replace the node, like a restart."""

    def __init__(self, directory: Path) -> None:
        self.node = FakeNode()
        self.starts: Counter[str] = Counter()
        self.file = directory / "history.jsonl"
        self.responses: list[tuple[int, FakeNode]] = []
        self.done = asyncio.Event()

    def get(self, _address: str) -> ProbedBroker:
        return self

    async def call(self, *_: Any) -> FetchResponse:
        if not self.responses:
            self.done.set()
            await asyncio.Event().wait()
        high_watermark, self.node = self.responses.pop(0)
        data = PartitionData(0, high_watermark=high_watermark)
        return FetchResponse(responses=[FetchableTopicResponse("t", partitions=[data])])

    async def reads(self) -> list[tuple[int, int]]:
        """Return session and high watermark of each recorded read."""
        recorder = Recorder(self.file)
        observer = Observer(lambda: [self.node], RunClients("", "t", recorder))
        observer.pool, pool = self, observer.pool  # type: ignore[assignment]
        observer.partitions[0] = PartitionView(1, (1, 101), (1, 101), 0)
        probing = asyncio.create_task(observer.probe(self.node, lambda name: self.starts[name]))
        await asyncio.wait_for(self.done.wait(), 60)
        probing.cancel()
        with suppress(asyncio.CancelledError):
            await probing
        await pool.close()
        recorder.close()
        return [(event.session, event.high_watermark) for event in read_history(self.file) if isinstance(event, Read)]


async def test_restarted_broker_process_starts_new_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer_module, "PROBE_INTERVAL_S", 0.0)
    probed = ProbedBroker(tmp_path)
    old, new = probed.node, replace(probed.node, pid=8)
    # The third response may come from either process, so it is not recorded.
    probed.responses = [(100, old), (120, old), (121, new), (72, new), (122, new)]
    assert await probed.reads() == [(0, 100), (0, 120), (1, 72), (1, 122)]
