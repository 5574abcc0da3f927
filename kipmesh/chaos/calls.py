"""Calls to a cluster from several threads: an interrupted run does not end them, so its end waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from kipmesh.chaos.mesh import ChaosError


class Calls:
    """Counts the calls that are under way. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._are_over = False

    @property
    def are_over(self) -> bool:
        """Whether no more are taken."""
        return self._are_over

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """One call; raises ChaosError when no more are taken."""
        with self._changed:
            if self._are_over:
                raise ChaosError("the run is over: nothing more is done to its cluster")
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def end(self, timeout_s: float) -> bool:
        """Take no more, and wait for those under way; gives whether they ended. Idempotent."""
        with self._changed:
            self._are_over = True
            return self._changed.wait_for(lambda: not self._count, timeout_s)


class Called(Protocol):
    """Whose methods are `counted`."""

    @property
    def calls(self) -> Calls: ...  # noqa: D102


_Mine = TypeVar("_Mine", bound=Called)
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def counted(method: Callable[Concatenate[_Mine, _Given], _Result]) -> Callable[Concatenate[_Mine, _Given], _Result]:
    """A method of a cluster that changes it, and is one of its `calls`."""

    @wraps(method)
    def call(self: _Mine, /, *given: _Given.args, **named: _Given.kwargs) -> _Result:
        with self.calls.under_way():
            return method(self, *given, **named)

    return call
