"""The event loop of a blocking client, on a daemon thread, and the life of a client on it.

Calls may come from any thread. A client belongs to the process that started it; after a fork make a new one (a client
that was not started yet is fine). Invariant: after `close` the thread has ended and the loop is closed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from kipmesh.client.cluster import Client
from kipmesh.transport.grpc import handle_exception

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
ClientT = TypeVar("ClientT", bound=Client)


class Portal:
    """An event loop on a daemon thread."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(handle_exception)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except BaseException:
            log.exception("the event loop of a client failed")
        finally:
            self._cancel_all()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def _cancel_all(self) -> None:
        """Nobody waits for a loop that has ended."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it; an interrupt of the caller cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop."""
        if self._pid != os.getpid() or self._loop.is_closed():
            work.close()
            gone = "is closed" if self._pid == os.getpid() else "belongs to another process: make one after the fork"
            raise RuntimeError(f"this client {gone}")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stop the loop and wait for the thread."""
        if self._pid == os.getpid() and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


class BlockingClient(Generic[ClientT]):
    """An asynchronous client and its portal."""

    def __init__(self, client: ClientT) -> None:
        self._client = client
        self._portal: Portal | None = None
        self._closed = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the thread and connect, which calls do by themselves; KafkaError when no bootstrap address answers."""
        if self._closed:
            raise RuntimeError("this client is closed")
        if self._portal is None:
            portal = self._portal = Portal(f"kipmesh-{type(self).__name__.lower()}")
            try:
                portal.call(self._client.start())
            except BaseException:
                self._portal, self._closed = None, True  # `close` after this has nothing to do
                portal.close()
                raise

    def close(self) -> None:
        """Close the client and end the thread; may be called again."""
        portal, self._closed = self._portal, True
        if portal is not None:
            self._portal = None
            try:
                portal.call(self._client.close())
            finally:
                portal.close()

    def _running(self) -> Portal:
        if self._portal is None:
            self.start()
        assert self._portal is not None
        return self._portal


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """The blocking form of a client's coroutine method: the same parameters, result and documentation.

    Iterators are consumed in the caller's thread, because they may call the client themselves.
    """

    @functools.wraps(method)
    def call(self: BlockingClient[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
        portal = self._running()
        given = [list(value) if isinstance(value, Iterator) else value for value in args]
        named = {name: list(value) if isinstance(value, Iterator) else value for name, value in kwargs.items()}
        return portal.call(method(self._client, *given, **named))  # type: ignore[arg-type]

    return call


def on_loop(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """The form of a client's plain method that runs on the client's event loop."""

    @functools.wraps(method)
    async def work(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self, *args, **kwargs)

    return blocking(work)
