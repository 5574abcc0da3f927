"""What plain fetches of a broker are taken for: observations of one process, whoever started it."""

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
class NodeOfTests:
    name: str = "follower-1"
    node_id: int | None = 101
    rack: str = ""
    pid: int | None = 7
    grpc: str | None = "127.0.0.1:1"
    dir: str = ""


class Probed:
    """A broker that answers with these high watermarks; `then` may change the node while it does."""

    def __init__(self, folder: Path) -> None:
        self.node = NodeOfTests()
        self.starts: Counter[str] = Counter()
        self.file = folder / "history.jsonl"
        self.answers: list[tuple[int, NodeOfTests]] = []
        self.done = asyncio.Event()

    def get(self, _address: str) -> Probed:
        return self

    async def call(self, *_: Any) -> FetchResponse:
        if not self.answers:
            self.done.set()
            await asyncio.Event().wait()
        high_watermark, self.node = self.answers.pop(0)
        data = PartitionData(0, high_watermark=high_watermark)
        return FetchResponse(responses=[FetchableTopicResponse("t", partitions=[data])])

    async def reads(self) -> list[tuple[int, int]]:
        """Session and high watermark of each that was recorded."""
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
        return [(one.session, one.high_watermark) for one in read_history(self.file) if isinstance(one, Read)]


async def test_a_process_that_others_started_again_is_another_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer_module, "PROBE_INTERVAL_S", 0.0)
    probed = Probed(tmp_path)
    old, new = probed.node, replace(probed.node, pid=8)
    # The third is answered by one of both, nobody knows which.
    probed.answers = [(100, old), (120, old), (121, new), (72, new), (122, new)]
    assert await probed.reads() == [(0, 100), (0, 120), (1, 72), (1, 122)]
