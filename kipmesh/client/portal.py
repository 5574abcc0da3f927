"""Runs an asynchronous client on an event loop in a daemon thread and exposes blocking methods.

Any thread may call the methods. A started client cannot be used in a forked process. Invariant: after `close` the
thread has ended and the loop is closed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from kipmesh.client.cluster import Client
from kipmesh.transport.grpc import handle_exception

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
ClientT = TypeVar("ClientT", bound=Client)


class Portal:
    """An event loop on a daemon thread named `name`. The constructor starts the thread."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(handle_exception)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # asyncio.Runner would log the errors of tasks that fail when they are cancelled.
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except BaseException:
            log.exception("client event loop failed")
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, block until it ends, and return its result or raise its error.

        Interrupting the caller cancels the coroutine. Raises RuntimeError like `submit`.
        """
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop and return its future.

        Raises RuntimeError if the loop is closed or belongs to another process.
        """
        if self._pid != os.getpid():
            work.close()
            raise RuntimeError(f"client was started by process {self._pid}; create a new client after fork")
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("client is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel all tasks, stop the loop and wait for the thread to end. Does nothing in a forked process."""
        if self._pid == os.getpid() and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


class BlockingClient(Generic[ClientT]):
    """Base class of the blocking clients: owns an asynchronous client and the portal it runs on."""

    def __init__(self, client: ClientT) -> None:
        self._client = client
        self._portal: Portal | None = None
        self._closed = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the thread and connect, unless already done. Optional: the first call of any other method does this.

        Raises KafkaError if no bootstrap server responds, and then closes the client. Raises RuntimeError if the client
        is closed.
        """
        if self._closed:
            raise RuntimeError("client is closed")
        if self._portal is None:
            portal = self._portal = Portal(f"kipmesh-{type(self).__name__.lower()}")
            try:
                portal.call(self._client.start())
            except BaseException:
                self._portal, self._closed = None, True
                portal.close()
                raise

    def close(self) -> None:
        """Close the client and end its thread. Idempotent."""
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
    """Return the blocking version of a coroutine method, with the same parameters, result and documentation.

    Iterator arguments are consumed in the caller's thread, because they may call the client.
    """

    @functools.wraps(method)
    def call(self: BlockingClient[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
        portal = self._running()
        positional = [list(value) if isinstance(value, Iterator) else value for value in args]
        keywords = {name: list(value) if isinstance(value, Iterator) else value for name, value in kwargs.items()}
        return portal.call(method(self._client, *positional, **keywords))  # type: ignore[arg-type]

    return call


def on_loop(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a version of a plain method that runs on the client's event loop and blocks the caller."""

    @functools.wraps(method)
    async def work(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self, *args, **kwargs)

    return blocking(work)
