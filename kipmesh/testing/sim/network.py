"""The network between the nodes: requests and their responses, each on its own way, late, twice or never.

A response reaches only the process that asked, as on a connection; a request may reach a process that was started
after it was sent. A node that is down refuses quickly, as a closed port does, or not at all.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from kipmesh.core.raft.types import RequestFailed, RequestReceived, ResponseReceived, Send
from kipmesh.testing.sim.scheduler import Scheduler

if TYPE_CHECKING:
    from kipmesh.core.raft.types import Response
    from kipmesh.testing.sim.node import SimNode


class Network:
    """See the module; the faults are attributes that the fault plan sets."""

    def __init__(self, scheduler: Scheduler, rng: Random, counts: Counter[str]) -> None:
        self.scheduler = scheduler
        self.rng = rng
        self.counts = counts
        self.nodes: dict[int, SimNode] = {}
        self.blocked: set[tuple[int, int]] = set()
        """(from, to) that nothing passes."""
        self.loss = 0.0
        self.duplication = 0.0
        self.delay_max_ms = 4.0

    def heal(self) -> None:
        """No faults any more."""
        self.blocked.clear()
        self.loss = self.duplication = 0.0
        self.delay_max_ms = 4.0

    def _ways(self, source: int, target: int) -> list[float]:
        """Delays of the copies that arrive."""
        self.counts["messages"] += 1
        rng = self.rng
        if (source, target) in self.blocked or (self.loss and rng.random() < self.loss):
            self.counts["messages lost"] += 1
            return []
        delays = [0.2 + rng.random() * self.delay_max_ms]
        if self.duplication and rng.random() < self.duplication:
            self.counts["messages doubled"] += 1
            delays.append(0.2 + rng.random() * self.delay_max_ms * 3)
        return delays

    def request(self, source: SimNode, sent: Send) -> None:
        """Carry a request."""
        process = source.process
        for delay_ms in self._ways(source.node_id, sent.node_id):
            self.scheduler.after(delay_ms, lambda: self._deliver(source, process, sent))

    def _deliver(self, source: SimNode, process: int, sent: Send) -> None:
        target = self.nodes[sent.node_id]
        if target.machine is None:
            if (target.node_id, source.node_id) not in self.blocked:
                source.deliver(process, RequestFailed(sent.request_id))
            return
        target.deliver_request(source, process, sent)

    def response(self, source: SimNode, target: SimNode, process: int, request_id: int, response: Response) -> None:
        """Carry a response to the process that asked."""
        event = ResponseReceived(request_id, response)
        for delay_ms in self._ways(source.node_id, target.node_id):
            self.scheduler.after(delay_ms, lambda: target.deliver(process, event))


def received(request_id: int, sent: Send) -> RequestReceived:
    """The event that a request is to its target."""
    return RequestReceived(request_id, sent.request)
