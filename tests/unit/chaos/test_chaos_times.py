"""When timed faults come: as the file says, and later when an earlier one took longer to undo than it says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from kipmesh_chaos.experiment import Experiment, Fault
from kipmesh_chaos.recorder import Recorder
from kipmesh_chaos.runner import _Run


class SlowInjector:
    """Faults whose undoing takes so long, by target."""

    def __init__(self, undo_s: dict[str, float]) -> None:
        self.stop = asyncio.Event()
        self.spans: dict[str, tuple[float, float]] = {}
        self._undo_s = undo_s

    async def run(self, fault: Fault, for_s: float) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert not self.stop.is_set()
        await asyncio.sleep(for_s + self._undo_s.get(fault.target, 0))
        self.spans[fault.target] = began, loop.time()


class IdleWorkload:
    def check(self) -> None:
        pass


async def spans(folder: Path, undo_s: dict[str, float]) -> tuple[dict[str, tuple[float, float]], float]:
    """Of three faults, the second of which is in the middle of the first, and how long all took."""
    faults = [
        {"kind": "pause", "target": f"node:leader-{number}", "at_s": at_s, "for_s": for_s}
        for number, at_s, for_s in ((1, 0.1, 0.4), (2, 0.2, 0.1), (3, 0.7, 0.1))
    ]
    document: dict[str, Any] = {"name": "times", "hypothesis": "In time.", "duration_s": 0.9, "faults": faults}
    recorder = Recorder(folder / "history.jsonl")
    injector: Any = SlowInjector(undo_s)
    loop, nobody = asyncio.get_running_loop(), IdleWorkload()
    run = _Run(Experiment.model_validate(document), folder, 1, recorder, lambda *_: None)
    began = loop.time()
    await run._faults(injector, nobody, nobody)  # type: ignore[arg-type]
    recorder.close()
    return {
        target.removeprefix("node:leader-"): (begin - began, end - began)
        for target, (begin, end) in injector.spans.items()
    }, loop.time() - began


async def test_faults_overlap_as_the_file_says(tmp_path: Path) -> None:
    found, took_s = await spans(tmp_path, {})
    assert 0.09 <= found["1"][0] < found["2"][0]
    assert found["3"][0] - found["1"][1] >= 0.19
    assert took_s >= 0.89


async def test_who_is_late_makes_the_next_one_late_and_the_run_longer(tmp_path: Path) -> None:
    found, took_s = await spans(tmp_path, {"node:leader-1": 1.0})
    assert found["2"][0] < found["1"][1]
    assert found["3"][0] - found["1"][1] >= 0.19
    assert took_s >= 1.8
