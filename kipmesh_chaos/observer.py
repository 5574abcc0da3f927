"""Observes a cluster under faults: leaders and ISRs from Metadata of every broker, and plain fetches.

Contradicting responses are normal, because an isolated broker has old metadata. For each partition the highest leader
epoch wins, then the response of the leader itself, then the majority.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress

from kipmesh import messages as m
from kipmesh.client.admin.quorum import describe_quorum
from kipmesh.core.config.security import ClientSslConfig
from kipmesh.core.errors import KafkaError
from kipmesh.transport.grpc.client import ConnectionPool, TransportError
from kipmesh_chaos.faults import PartitionView, View
from kipmesh_chaos.history import Controller, Led, Read, ReaderKind
from kipmesh_chaos.recorder import RunClients
from kipmesh_chaos.target_cluster import Node, is_broker, is_controller
from kipmesh_chaos.workload import decode_batches

REQUEST_TIMEOUT_S = 1.0
POLL_INTERVAL_S = 0.25
PROBE_INTERVAL_S = 0.5
PROBE_BYTES = 64 << 10


def _most_credible(versions: Sequence[tuple[int, PartitionView]]) -> PartitionView:
    """Return the most credible of several brokers' views of a partition. `versions` are (broker id, view)."""
    views = [view for _, view in versions]
    _, best = max(versions, key=lambda one: (one[1].leader_epoch, one[1].leader == one[0], views.count(one[1])))
    return best


class Observer:
    """Observes the cluster and records changes. Belongs to one event loop. The constructor raises InvalidConfigError
    for invalid TLS settings.

    `nodes` returns the current nodes. `group` is the consumer group whose coordinator `view` includes, or None.
    """

    def __init__(self, nodes: Callable[[], Sequence[Node]], clients: RunClients, group: str | None = None) -> None:
        self._nodes = nodes
        self._topic = clients.topic
        self._group = group
        self._recorder = clients.recorder
        self._security = ClientSslConfig.parse(clients.config)
        self.pool = ConnectionPool.of("kipmesh-chaos", self._security)
        """Connections of the observer. The caller closes the pool at the end."""
        self._topic_id = b""
        self._controller = -1
        self.partitions: dict[int, PartitionView] = {}

    async def run(self) -> None:
        """Poll the cluster and record every change of leaders, ISRs and active controller, until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_INTERVAL_S)

    def _running_brokers(self) -> list[Node]:
        return [node for node in self._nodes() if is_broker(node) and node.pid is not None and node.grpc]

    async def poll(self) -> None:
        """Request Metadata from every running broker and record changes. Brokers that do not respond are ignored; if
        none responds, the state is unchanged.
        """
        brokers = self._running_brokers()
        responses = await asyncio.gather(*(self._request_metadata(str(node.grpc)) for node in brokers))
        controllers: list[int] = []
        versions: defaultdict[int, list[tuple[int, PartitionView]]] = defaultdict(list)
        for node, response in zip(brokers, responses, strict=True):
            if response is None:
                continue
            controllers.append(response.controller_id)
            for topic in response.topics:
                if topic.error_code or topic.name != self._topic:
                    continue
                self._topic_id = topic.topic_id
                for one in topic.partitions:
                    found = PartitionView(
                        one.leader_id, tuple(one.isr_nodes), tuple(one.replica_nodes), one.leader_epoch
                    )
                    versions[one.partition_index].append((node.node_id or -1, found))
        for number, views in versions.items():
            self._observed(number, _most_credible(views))
        if controllers and self._controller not in controllers:
            self._controller = max(controllers, key=controllers.count)
            self._recorder.add(Controller(self._recorder.now, self._controller, -1))

    async def view(self) -> View:
        """Poll the cluster and return its state for choosing targets. The quorum names the active controller, which is
        -1 if the quorum does not respond.
        """
        await self.poll()
        nodes = self._nodes()
        controllers = [node.grpc for node in nodes if is_controller(node) and node.grpc]
        active = -1
        with suppress(KafkaError, TransportError):  # no quorum, no active controller
            described = await describe_quorum(controllers, timeout_s=REQUEST_TIMEOUT_S, security=self._security)
            active = described.leader_id
        return View(nodes, dict(self.partitions), active, await self._coordinator())

    def out_of_sync(self) -> list[str]:
        """Return a line for each partition without a leader or with replicas out of sync, as of the last poll. The list
        is empty if all are in sync, and has one line if no broker has returned metadata.
        """
        if not self.partitions:
            return ["no broker returned metadata of the topic"]
        lines = []
        for number, one in sorted(self.partitions.items()):
            if one.leader < 0:
                lines.append(f"partition {number} has no leader")
            elif set(one.isr) != set(one.replicas):
                missing = sorted(set(one.replicas) - set(one.isr))
                lines.append(f"replicas {missing} of partition {number} are not in sync")
        return lines

    async def _coordinator(self) -> int:
        """Return the id of the broker that most brokers name as the group's coordinator; -1 if none does or there is no
        group.
        """
        if self._group is None:
            return -1
        request = m.FindCoordinatorRequest(coordinator_keys=[self._group])

        async def find(address: str) -> list[int]:
            try:
                response = await self.pool.get(address).call("Groups", "FindCoordinator", request, REQUEST_TIMEOUT_S)
            except TransportError:
                return []
            return [one.node_id for one in response.coordinators if not one.error_code]

        responses = await asyncio.gather(*(find(str(node.grpc)) for node in self._running_brokers()))
        named = [node_id for response in responses for node_id in response]
        return max(named, key=named.count, default=-1)

    async def _request_metadata(self, address: str) -> m.MetadataResponse | None:
        request = m.MetadataRequest([m.MetadataRequestTopic(name=self._topic)])
        try:
            response: m.MetadataResponse = await self.pool.get(address).call(
                "Broker", "Metadata", request, REQUEST_TIMEOUT_S
            )
        except TransportError:
            return None
        return None if response.error_code else response

    def _observed(self, number: int, found: PartitionView) -> None:
        known = self.partitions.get(number)
        if known is not None and (found == known or found.leader_epoch < known.leader_epoch):
            return
        self.partitions[number] = found
        self._recorder.add(Led(self._recorder.now, number, found.leader, found.leader_epoch, found.isr))

    # -- plain fetches

    async def probe(self, node: Node, starts: Callable[[str], int]) -> None:
        """Fetch all partitions from one broker and record the results, each from its last position, until cancelled.

        Requests contain the leader epoch, so a response belongs to that leadership. Errors are not recorded. `starts`
        returns how often a node was started or stopped, which separates the sessions of its processes.
        """
        cursors: dict[int, int] = {}
        sessions: dict[tuple[int, int | None], int] = {}
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S)
            found = self._process(node.name, starts)
            if found is None or not self.partitions:
                continue
            address, process = found
            epochs = {number: one.leader_epoch for number, one in self.partitions.items()}
            partitions = [
                m.FetchPartition(number, epoch, cursors.get(number, 0), partition_max_bytes=PROBE_BYTES)
                for number, epoch in epochs.items()
            ]
            request = m.FetchRequest(
                max_bytes=PROBE_BYTES, topics=[m.FetchTopic(self._topic, self._topic_id, partitions)], session_epoch=-1
            )
            try:
                response: m.FetchResponse = await self.pool.get(address).call(
                    "Broker", "Fetch", request, REQUEST_TIMEOUT_S
                )
            except TransportError:
                continue
            if self._process(node.name, starts) == found:
                self._record_fetch(node, response, cursors, epochs, sessions.setdefault(process, len(sessions)))

    def _process(self, name: str, starts: Callable[[str], int]) -> tuple[str, tuple[int, int | None]] | None:
        """Return a broker's address and (starts, pid), which identifies its process; None while it is not running.

        Kubernetes restarts a process that ends without a fault, so `starts` alone does not identify it.
        """
        for one in self._nodes():
            if one.name == name and one.pid is not None and one.grpc:
                return one.grpc, (starts(name), one.pid)
        return None

    def _record_fetch(
        self, node: Node, response: m.FetchResponse, cursors: dict[int, int], epochs: dict[int, int], session: int
    ) -> None:
        for one in [one for topic in response.responses for one in topic.partitions if not one.error_code]:
            number, start = one.partition_index, cursors.get(one.partition_index, 0)
            records = []
            try:
                for _header, found in decode_batches(one.records, allow_partial=True):
                    records += [(offset, value) for offset, value in found if offset >= start]
            except KafkaError as error:
                self._recorder.note(f"{node.name} returned an invalid batch for a fetch: {error}")
            if records:
                cursors[number] = records[-1][0] + 1
            self._recorder.add(
                Read(
                    self._recorder.now,
                    f"probe-{node.name}",
                    ReaderKind.REPLICA,
                    number,
                    records,
                    one.high_watermark,
                    node.node_id if node.node_id is not None else -1,
                    epochs[number],
                    session,
                )
            )
