"""What a job shows: steps with their seconds, progress bars, PASS and FAIL lines.

On a terminal the bars move; elsewhere each step is a plain line. With ``--json`` all of it goes to standard error,
and standard output holds the summary alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kipmesh.spark.jobs.report import Check, Stage


class Screen:
    """The console of one run, and the seconds of its steps."""

    def __init__(self, *, to_stderr: bool) -> None:
        from rich.console import Console  # as each command's help imports this module

        self._console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
        self.stages: list[Stage] = []

    def line(self, text: str = "") -> None:
        """A line as it is."""
        self._console.print(text, markup=False)

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """A step of the run; `total` gives it a bar, which the function that comes out moves to a number."""
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        begin = time.monotonic()
        columns: list[ProgressColumn] = [SpinnerColumn(finished_text=" "), TextColumn("{task.description:<30}")]
        if total is not None:
            columns += [BarColumn(bar_width=30), MofNCompleteColumn()]
        hidden = not self._console.is_terminal
        with Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True, disable=hidden) as progress:
            task = progress.add_task(name, total=total)
            yield lambda done: progress.update(task, completed=done)
        seconds = time.monotonic() - begin
        self.stages.append(Stage(name, seconds))
        self._console.print(f"  {name:<32}{seconds:6.1f} s", markup=False)

    def check(self, check: Check) -> None:
        """A proof."""
        mark = "[green]PASS[/green]" if check.passed else "[bold red]FAIL[/bold red]"
        self._console.print(f"  {mark}  ", end="")
        self._console.print(f"{check.name}: {check.detail}", markup=False)
