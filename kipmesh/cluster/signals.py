"""Signals that ask this process to end, while it starts and stops others."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """A signal asked this process to end; as Ctrl-C but for its number, which the exit code tells."""

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
def ending_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `Terminated` in the main thread, so that what was begun is undone.

    A signal that is ignored (SIGHUP under nohup) stays so.
    """

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        raise Terminated(number)

    with _handled([one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL], end):
        yield


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Signals that would end the process come after the block, also when it raises.

    Handlers are replaced instead of signals blocked: a started process inherits what is blocked, not handlers. Only the
    main thread gets signals, in others this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)

    try:
        with _handled([one for one in ENDING if signal.getsignal(one) not in (signal.SIG_IGN, None)], note):
            yield
    finally:
        for one in dict.fromkeys(arrived):
            signal.raise_signal(one)
