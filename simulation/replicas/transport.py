"""Replacement of gRPC between processes: unary calls, and streams with one request in flight.

A message may arrive late, twice or never. A blocked link drops it without notification. The end of a process breaks its
calls and streams at its peers, if the notification arrives. `SimPool` replaces `ConnectionPool`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, cast

from kipmesh.messages.table import METHODS
from kipmesh.transport.grpc.client import ConnectionPool, TransportError
from kipmesh.transport.grpc.server import RequestContext
from kipmesh.transport.pipeline import Pipeline
from simulation.engine import Action, Engine, Network
from simulation.replicas.loop import SimLoop
from simulation.replicas.settings import address_of


@lru_cache
def _node_of(address: str) -> int:
    return int(address.partition(":")[0].removeprefix("node"))


class Process:
    """A running process of a node, with its open calls and streams."""

    def __init__(self, net: SimNetwork, node_id: int, loop: SimLoop, name: str) -> None:
        self.net = net
        self.node_id = node_id
        self.loop = loop
        self.name = name
        self.pipeline: Pipeline | None = None
        self.served: dict[Call, asyncio.Task[None]] = {}
        """Requests that the process is handling."""
        self.sent: dict[Call, None] = {}
        """Requests of the process without a response."""
        self.streams: dict[SimStream, None] = {}
        """Open streams of the process."""
        self.pool = SimPool(self)

    def end(self) -> None:
        """Kill the process, and notify its peers of the broken calls and streams."""
        self.loop.kill()
        if self.net.processes.get(self.node_id) is self:
            del self.net.processes[self.node_id]
        for call in self.served:
            self.net.notify(self.node_id, call.source, call.fail)
        for call in self.sent:
            if call.target is not None:
                self.net.notify(self.node_id, call.target, call.cancel)
        for stream in self.streams:
            stream.notify_closed()
        self.served, self.sent, self.streams = {}, {}, {}


class SimNetwork(Network):
    """A `Network` that also carries calls and streams between processes."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.processes: dict[int, Process] = {}
        """Listening processes by node id."""
        self.streams = count(1)
        """Numbers of new streams."""

    def notify(self, source: int, target: Process, work: Action) -> None:
        """Run `work` in `target` when it is notified that a connection to `source` is closed.

        If the notification is lost, `target` detects the closed connection later.
        """
        delay_ms = next(iter(self.delays(source, target.node_id)), None)
        if delay_ms is None:
            delay_ms = self.engine.rng.uniform(100, 1500)
        self.engine.after(delay_ms, lambda: target.loop.deliver(work))

    def send(self, source: int, target: int, arrive: Action, broken: Action, copies: int | None = None) -> None:
        """Send a message: run `arrive` for each delivered copy, at most `copies` of them.

        A lost message is retransmitted later, as TCP does, or `broken` runs instead.
        """
        delays = self.delays(source, target)
        for delay_ms in delays[:copies]:
            self.engine.after(delay_ms, arrive)
        if not delays:
            is_repeated = self.engine.rng.random() < 0.5

            def retransmit() -> None:
                (arrive if is_repeated and (source, target) not in self.engine.conditions.blocked else broken)()

            self.engine.after(self.engine.rng.uniform(1, 1500), retransmit)


@dataclass(eq=False)
class Call:
    """One request and its response."""

    source: Process
    target_id: int
    service: str
    method: str
    request: Any
    stream: SimStream | None

    def __post_init__(self) -> None:
        self.context = RequestContext(self.source.name, "", 0 if self.stream is None else self.stream.number)
        self.response: asyncio.Future[Any] = self.source.loop.create_future()
        self.target: Process | None = None

    async def result(self, timeout_s: float) -> Any:
        """Send the request and return the response. Raises TransportError on failure or after `timeout_s` seconds."""
        net, source = self.source.net, self.source
        if source.loop.is_dead:
            raise asyncio.CancelledError
        source.sent[self] = None
        net.send(source.node_id, self.target_id, self._arrive, lambda: source.loop.deliver(self.fail))
        timer = source.loop.call_later(timeout_s, self.fail)
        try:
            return await self.response
        finally:
            timer.cancel()
            source.sent.pop(self, None)
            has_failed = self.response.cancelled() or self.response.exception() is not None
            if self.target is not None and has_failed and not source.loop.is_dead:
                net.notify(source.node_id, self.target, self.cancel)

    def fail(self) -> None:
        """Fail the call at its source, where `result` raises TransportError. Does nothing after a response."""
        if not self.response.done():
            self.response.set_exception(TransportError.no_response(address_of(self.target_id), self.method))

    def _arrive(self) -> None:
        net = self.source.net
        target = net.processes.get(self.target_id)
        if target is None or (self.stream is not None and not self.stream.reaches(target)):
            net.notify(self.target_id, self.source, self.fail)
            return
        self.target = target
        target.loop.deliver(lambda: self._begin(target))

    def _begin(self, target: Process) -> None:
        task = target.loop.create_task(self._serve(target))
        target.served[self] = task

    async def _serve(self, target: Process) -> None:
        api, pipeline, net = METHODS[self.service][self.method].api, target.pipeline, target.net
        try:
            response = None
            if pipeline is not None and api in pipeline.handlers:
                response = await pipeline.handle(api, self.request, self.context)
        except asyncio.CancelledError:
            return
        except Exception as error:
            net.engine.report(f"{self.method} at node {target.node_id} raised {type(error).__name__}: {error}")
            response = None
        target.served.pop(self, None)
        if target.loop.is_dead:
            return
        source = self.source
        net.send(
            target.node_id,
            source.node_id,
            lambda: source.loop.deliver(lambda: self._on_response(response)),
            lambda: source.loop.deliver(self.fail),
            copies=1,
        )

    def _on_response(self, response: Any) -> None:
        if response is None:
            self.fail()
        elif not self.response.done():
            self.response.set_result(response)

    def cancel(self) -> None:
        """Cancel the task that handles the request at its target, because the source no longer waits."""
        if self.target is not None:
            task = self.target.served.pop(self, None)
            if task is not None:
                task.cancel()


class SimStream:
    """A stream to one process. It is unusable once the process has ended or an exchange has failed."""

    def __init__(self, source: Process, target_id: int, service: str, method: str) -> None:
        self.number = next(source.net.streams)
        self._source = source
        self._target_id = target_id
        self._target: Process | None = None
        self._service = service
        self._method = method
        self._call: Call | None = None
        source.streams[self] = None

    def reaches(self, target: Process) -> bool:
        """Return whether this stream leads to `target`. The first call binds the stream to its `target`."""
        if self._target is None:
            self._target = target
        return self._target is target

    async def exchange(self, request: Any, timeout_s: float) -> Any:
        """Send one request and return the response. Closes the stream if the exchange fails.

        Raises TransportError on failure or after `timeout_s` seconds.
        """
        call = self._call = Call(self._source, self._target_id, self._service, self._method, request, self)
        try:
            return await call.result(timeout_s)
        except TransportError:
            self.cancel()
            raise
        finally:
            self._call = None

    def cancel(self) -> None:
        """Close the stream and notify the target. A running exchange fails."""
        if self._call is not None:
            self._call.fail()
        if self in self._source.streams:
            del self._source.streams[self]
            if not self._source.loop.is_dead:
                self.notify_closed()

    def notify_closed(self) -> None:
        """Notify the target that the stream is closed, if it received a request."""
        target = self._target
        if target is not None:
            api = METHODS[self._service][self._method].api
            ended = None if target.pipeline is None else target.pipeline.stream_ended.get(api)
            if ended is not None:
                context = RequestContext(self._source.name, "", self.number)
                self._source.net.notify(self._source.node_id, target, lambda: ended(context))


class SimConnection:
    """Calls from one process to one address. Replaces `kipmesh.transport.grpc.client.Connection`."""

    def __init__(self, source: Process, address: str) -> None:
        self.address = address
        self._source = source
        self._target_id = _node_of(address)
        self._idle: dict[tuple[str, str], SimStream] = {}

    async def call(
        self, service: str, method: str, request: Any, timeout_s: float, wait_for_ready: bool = False
    ) -> Any:
        """Make one unary call and return the response. `wait_for_ready` is ignored.

        Raises TransportError on failure or after `timeout_s` seconds.
        """
        return await Call(self._source, self._target_id, service, method, request, None).result(timeout_s)

    async def exchange(self, service: str, method: str, request: Any, timeout_s: float) -> Any:
        """Send one request on a reused stream and return the response. The stream is closed if this fails.

        Raises TransportError on failure or after `timeout_s` seconds.
        """
        key = (service, method)
        stream = self._idle.pop(key, None) or SimStream(self._source, self._target_id, service, method)
        try:
            response = await stream.exchange(request, timeout_s)
        except BaseException:
            stream.cancel()
            raise
        if key in self._idle:
            stream.cancel()
        else:
            self._idle[key] = stream
        return response

    def fetch_stream(self, service: str) -> SimStream:
        """Return a new stream of Fetch requests and responses."""
        return SimStream(self._source, self._target_id, service, "FetchStream")


class SimPool(ConnectionPool):
    """A `ConnectionPool` of simulated connections, one per address."""

    def __init__(self, source: Process) -> None:
        super().__init__(source.name)
        self._source = source

    def get(self, address: str) -> Any:
        """Return the connection to an address, creating it on the first call."""
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = cast("Any", SimConnection(self._source, address))
        return connection

    async def close(self) -> None:
        """Drop all connections."""
        self._connections.clear()
