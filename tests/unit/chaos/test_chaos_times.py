"""Start times of timed faults. A revert that takes longer than planned delays later faults."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from kipmesh_chaos.experiment import Experiment, Fault
from kipmesh_chaos.recorder import Recorder
from kipmesh_chaos.runner import _Run


class SlowInjector:
    """Injector whose reverts take `undo_s` seconds, by target."""

    def __init__(self, undo_s: dict[str, float]) -> None:
        self.stop = asyncio.Event()
        self.spans: dict[str, tuple[float, float]] = {}
        self._undo_s = undo_s

    async def run(self, fault: Fault, for_s: float) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        assert not self.stop.is_set()
        await asyncio.sleep(for_s + self._undo_s.get(fault.target, 0))
        self.spans[fault.target] = start, loop.time()


class IdleWorkload:
    def check(self) -> None:
        pass


async def spans(directory: Path, undo_s: dict[str, float]) -> tuple[dict[str, tuple[float, float]], float]:
    """Return begin and end of each of three faults and the total time. The second fault lies within the first."""
    faults = [
        {"kind": "pause", "target": f"node:leader-{number}", "at_s": at_s, "for_s": for_s}
        for number, at_s, for_s in ((1, 0.1, 0.4), (2, 0.2, 0.1), (3, 0.7, 0.1))
    ]
    document: dict[str, Any] = {"name": "times", "hypothesis": "In time.", "duration_s": 0.9, "faults": faults}
    recorder = Recorder(directory / "history.jsonl")
    injector: Any = SlowInjector(undo_s)
    loop, idle = asyncio.get_running_loop(), IdleWorkload()
    run = _Run(Experiment.model_validate(document), directory, 1, recorder, lambda *_: None)
    start = loop.time()
    await run._faults(injector, idle, idle)  # type: ignore[arg-type]
    recorder.close()
    return {
        target.removeprefix("node:leader-"): (begin - start, end - start)
        for target, (begin, end) in injector.spans.items()
    }, loop.time() - start


async def test_faults_overlap_as_specified(tmp_path: Path) -> None:
    found, took_s = await spans(tmp_path, {})
    assert 0.09 <= found["1"][0] < found["2"][0]
    assert found["3"][0] - found["1"][1] >= 0.19
    assert took_s >= 0.89


async def test_slow_revert_delays_next_fault_and_prolongs_run(tmp_path: Path) -> None:
    found, took_s = await spans(tmp_path, {"node:leader-1": 1.0})
    assert found["2"][0] < found["1"][1]
    assert found["3"][0] - found["1"][1] >= 0.19
    assert took_s >= 1.8
