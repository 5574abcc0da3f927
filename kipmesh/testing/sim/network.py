"""The network between the nodes: requests and their responses, each on its own way, late, twice or never.

A response reaches only the process that asked, as on a connection; a request may reach a process that was started
after it was sent. A node that is down refuses quickly, as a closed port does, or not at all. FetchSnapshot is carried
apart from raft's requests, as it is in production; its bytes may be changed on the way, which CRCs then have to find.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from kipmesh.core.raft.types import RequestFailed, RequestReceived, ResponseReceived, Send
from kipmesh.messages import FetchSnapshotRequest, FetchSnapshotResponse
from kipmesh.testing.sim.scheduler import Scheduler

if TYPE_CHECKING:
    from kipmesh.core.raft.types import Response
    from kipmesh.testing.sim.node import SimNode
    from kipmesh.testing.sim.transfer import Transfer


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
        self.corruption = 0.0
        """Share of the FetchSnapshot responses that come with a flipped bit."""
        self.delay_max_ms = 4.0

    def heal(self) -> None:
        """No faults any more."""
        self.blocked.clear()
        self.loss = self.duplication = self.corruption = 0.0
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

    # -- FetchSnapshot

    def snapshot_request(self, transfer: Transfer, number: int, request: FetchSnapshotRequest) -> None:
        """Carry the `number`-th request of a transfer."""
        target = self.nodes[transfer.leader_id]
        for delay_ms in self._ways(transfer.node.node_id, target.node_id):
            self.scheduler.after(delay_ms, lambda: target.serve_snapshot(transfer, number, request))

    def snapshot_response(self, source: SimNode, transfer: Transfer, number: int, said: FetchSnapshotResponse) -> None:
        """Carry its answer."""
        for delay_ms in self._ways(source.node_id, transfer.node.node_id):
            answer = self._changed(said) if self.corruption and self.rng.random() < self.corruption else said
            self.scheduler.after(delay_ms, partial(transfer.answered, number, answer))

    def _changed(self, response: FetchSnapshotResponse) -> FetchSnapshotResponse:
        topics = []
        for topic in response.topics:
            answers = []
            for answer in topic.partitions:
                data = bytearray(answer.unaligned_records)
                if data:
                    self.counts["snapshot bytes changed on the way"] += 1
                    data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
                answers.append(answer._replace(unaligned_records=bytes(data)))
            topics.append(topic._replace(partitions=tuple(answers)))
        return response._replace(topics=tuple(topics))


def received(request_id: int, sent: Send) -> RequestReceived:
    """The event that a request is to its target."""
    return RequestReceived(request_id, sent.request)
