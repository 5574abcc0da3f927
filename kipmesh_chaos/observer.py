"""Looks at a mesh while it is broken: who leads what, asked of every broker by itself, and plain fetches.

Answers that contradict each other are normal: a broker that is cut off does not know better. Of a partition the
highest leader epoch counts, then what its leader itself says, then what most say.
"""

from __future__ import annotations

import asyncio
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

ASK_TIMEOUT_S = 1.0
POLL_INTERVAL_S = 0.25
PROBE_INTERVAL_S = 0.5
PROBE_BYTES = 64 << 10


def _believed(versions: Sequence[tuple[int, PartitionView]]) -> PartitionView:
    """Of what brokers, by their ids, say about a partition."""
    said = [found for _, found in versions]
    _, best = max(versions, key=lambda one: (one[1].leader_epoch, one[1].leader == one[0], said.count(one[1])))
    return best


class Observer:
    """Sees the mesh; `run` keeps looking and records changes. One event loop."""

    def __init__(self, nodes: Callable[[], Sequence[Node]], clients: RunClients, group: str | None = None) -> None:
        """Raises InvalidConfigError."""
        self._nodes = nodes
        self._topic = clients.topic
        self._group = group
        self._recorder = clients.recorder
        self._security = ClientSslConfig.parse(clients.config)
        self.pool = ConnectionPool.of("kipmesh-chaos", self._security)
        """To be closed at the end."""
        self._topic_id = b""
        self._controller = -1
        self.partitions: dict[int, PartitionView] = {}

    async def run(self) -> None:
        """Record each change of leaders and of the active controller, until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_INTERVAL_S)

    def _running_brokers(self) -> list[Node]:
        return [node for node in self._nodes() if is_broker(node) and node.pid is not None and node.grpc]

    async def poll(self) -> None:
        """Ask every broker now; what nobody answers stays as it was."""
        brokers = self._running_brokers()
        answers = await asyncio.gather(*(self._ask(str(node.grpc)) for node in brokers))
        controllers: list[int] = []
        told: dict[int, list[tuple[int, PartitionView]]] = {}
        for node, answer in zip(brokers, answers, strict=True):
            if answer is None:
                continue
            controllers.append(answer.controller_id)
            for topic in answer.topics:
                if topic.error_code or topic.name != self._topic:
                    continue
                self._topic_id = topic.topic_id
                for one in topic.partitions:
                    found = PartitionView(
                        one.leader_id, tuple(one.isr_nodes), tuple(one.replica_nodes), one.leader_epoch
                    )
                    told.setdefault(one.partition_index, []).append((node.node_id or -1, found))
        for number, versions in told.items():
            self._learned(number, _believed(versions))
        if controllers and self._controller not in controllers:
            self._controller = max(controllers, key=controllers.count)
            self._recorder.add(Controller(self._recorder.now, self._controller, -1))

    async def view(self) -> View:
        """Everything, for choosing targets; the active controller is asked of the controllers themselves."""
        await self.poll()
        nodes = self._nodes()
        controllers = [node.grpc for node in nodes if is_controller(node) and node.grpc]
        active = -1
        with suppress(KafkaError, TransportError):  # nobody answers: nobody is active
            described = await describe_quorum(controllers, timeout_s=ASK_TIMEOUT_S, security=self._security)
            active = described.leader_id
        return View(nodes, dict(self.partitions), active, await self._coordinator())

    def out_of_sync(self) -> list[str]:
        """What is not as it should be: partitions without a leader, or with replicas that are not in sync."""
        told = []
        for number, one in sorted(self.partitions.items()):
            if one.leader < 0:
                told.append(f"partition {number} has no leader")
            elif set(one.isr) != set(one.replicas):
                missing = sorted(set(one.replicas) - set(one.isr))
                told.append(f"replicas {missing} of partition {number} are not in sync")
        return told or ([] if self.partitions else ["nothing is known of the topic"])

    async def _coordinator(self) -> int:
        """The broker that most brokers name as the group's coordinator; -1 for none."""
        if self._group is None:
            return -1
        request = m.FindCoordinatorRequest(coordinator_keys=[self._group])

        async def ask(address: str) -> list[int]:
            try:
                answer = await self.pool.get(address).call("Groups", "FindCoordinator", request, ASK_TIMEOUT_S)
            except TransportError:
                return []
            return [one.node_id for one in answer.coordinators if not one.error_code]

        answers = await asyncio.gather(*(ask(str(node.grpc)) for node in self._running_brokers()))
        named = [node_id for answer in answers for node_id in answer]
        return max(named, key=named.count, default=-1)

    async def _ask(self, address: str) -> m.MetadataResponse | None:
        request = m.MetadataRequest([m.MetadataRequestTopic(name=self._topic)])
        try:
            response: m.MetadataResponse = await self.pool.get(address).call(
                "Broker", "Metadata", request, ASK_TIMEOUT_S
            )
        except TransportError:
            return None
        return None if response.error_code else response

    def _learned(self, number: int, found: PartitionView) -> None:
        known = self.partitions.get(number)
        if known is not None and (found == known or found.leader_epoch < known.leader_epoch):
            return
        self.partitions[number] = found
        self._recorder.add(Led(self._recorder.now, number, found.leader, found.leader_epoch, found.isr))

    # -- plain fetches

    async def probe(self, node: Node, starts: Callable[[str], int]) -> None:
        """Fetch from one broker, of each partition where it stopped, until cancelled; `starts` counts its processes.

        The request names the leader epoch: an answer is of that leadership or an error. Errors are no observation.
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
            asked = [
                m.FetchPartition(number, epoch, cursors.get(number, 0), partition_max_bytes=PROBE_BYTES)
                for number, epoch in epochs.items()
            ]
            request = m.FetchRequest(
                max_bytes=PROBE_BYTES, topics=[m.FetchTopic(self._topic, self._topic_id, asked)], session_epoch=-1
            )
            try:
                response: m.FetchResponse = await self.pool.get(address).call("Broker", "Fetch", request, ASK_TIMEOUT_S)
            except TransportError:
                continue
            if self._process(node.name, starts) == found:
                self._probed(node, response, cursors, epochs, sessions.setdefault(process, len(sessions)))

    def _process(self, name: str, starts: Callable[[str], int]) -> tuple[str, tuple[int, int | None]] | None:
        """Where a broker is, and which process it is; None while it does not run.

        By the number of the process as well: on Kubernetes one that ended by itself is started again by others.
        """
        for one in self._nodes():
            if one.name == name and one.pid is not None and one.grpc:
                return one.grpc, (starts(name), one.pid)
        return None

    def _probed(
        self, node: Node, response: m.FetchResponse, cursors: dict[int, int], epochs: dict[int, int], session: int
    ) -> None:
        for one in [one for topic in response.responses for one in topic.partitions if not one.error_code]:
            number, start = one.partition_index, cursors.get(one.partition_index, 0)
            records = []
            try:
                for _header, found in decode_batches(one.records, allow_partial=True):
                    records += [(offset, value) for offset, value in found if offset >= start]
            except KafkaError as error:
                self._recorder.note(f"{node.name} answered a fetch with what is no batch: {error}")
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
