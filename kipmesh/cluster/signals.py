"""Handling of SIGINT, SIGTERM and SIGHUP in a process that starts and stops other processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

TERMINATING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """A KeyboardInterrupt caused by SIGTERM or SIGHUP. `number` is that signal, which decides the exit code."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """Raise `Terminated` in the main thread on SIGTERM and SIGHUP, so that the block can clean up.

    A signal that is ignored (SIGHUP under nohup) or already has a handler is left as it is. Raises ValueError outside
    the main thread.
    """

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        raise Terminated(number)

    with _handled([one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL], end):
        yield


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Delay SIGINT, SIGTERM and SIGHUP that arrive in the block until it ends, even if it raises.

    Ignored signals stay ignored. Does nothing outside the main thread. Replaces the handlers instead of blocking the
    signals, because child processes inherit blocked signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)

    try:
        with _handled([one for one in TERMINATING if signal.getsignal(one) not in (signal.SIG_IGN, None)], note):
            yield
    finally:
        for one in dict.fromkeys(arrived):
            signal.raise_signal(one)
