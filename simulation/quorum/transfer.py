"""FetchSnapshot between two simulated nodes (630-09 to 630-12): transfer and install.

One small request is in flight at a time, so that a transfer needs several. A request without response is repeated from
the current position. Completing and installing take time; the process may crash or observe another leader at each step.
"""

from __future__ import annotations

from functools import partial

from kipmesh import messages as m
from kipmesh.core.errors import CorruptRecordError
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC
from kipmesh.core.raft import Machine, State
from kipmesh.core.raft.types import FetchSnapshot, SnapshotFetchFailed, SnapshotFetchProgress, SnapshotServed
from kipmesh.core.snapshot.transfer import (
    FetchState,
    Part,
    ServedPartition,
    SnapshotFetch,
    WriteBytes,
    fetch_request,
    plan_fetch_snapshot,
    steps,
)
from kipmesh.storage.fs import StorageError
from kipmesh.storage.quorum.quorum_replica import QuorumReplica
from kipmesh.storage.quorum.snapshots import ReceivedSnapshot
from simulation.quorum.host import Host
from simulation.quorum.state import SimState

REQUEST_TIMEOUT_MS = 400
RESPONSE_BYTES_MAX = 600


class Transfer:
    """One transfer of a snapshot, until the snapshot is installed or the transfer failed or was dropped."""

    def __init__(self, state: SimState, leader: Host, effect: FetchSnapshot) -> None:
        self.state = state
        self.node = state.node
        self.leader = leader
        self.process = state.node.process
        self.snapshot_id: m.SnapshotId = effect.snapshot_id
        self._epoch = effect.epoch
        self._number = 0
        self._received: ReceivedSnapshot | None = None
        self._fetch = SnapshotFetch(CLUSTER_METADATA_TOPIC, 0, effect.snapshot_id)
        self._is_complete = False

    def begin(self) -> None:
        """Send the first request, from the end of the bytes already received. Does nothing after `drop`."""
        if not self._is_current:
            return
        self.node.counts["snapshot fetches started"] += 1
        try:
            self._received = self.node.the_replica.receive(self.snapshot_id)
        except StorageError:
            self._fail()
            return
        self._fetch.position = self._received.size_bytes
        self._send_request()

    @property
    def _is_current(self) -> bool:
        return self.node.transfer is self and self.node.process == self.process

    def _send_request(self) -> None:
        node = self.node
        self._number += 1
        number = self._number
        bytes_max = node.rng.randint(100, RESPONSE_BYTES_MAX)
        request = fetch_request(node.config.cluster_id, node.node_id, bytes_max, [(self._fetch, self._epoch)])
        leader = self.leader
        node.network.transmit(
            node.node_id,
            leader.node_id,
            lambda: leader.at_process(leader.process, lambda: self._serve(number, request)),
        )
        node.later(REQUEST_TIMEOUT_MS, lambda: self._timed_out(number))

    def _timed_out(self, number: int) -> None:
        if self._is_current and number == self._number and self._fetch.state is FetchState.FETCHING:
            self.node.counts["snapshot fetches resumed"] += self._fetch.position > 0
            self._send_request()

    def _serve(self, number: int, request: m.FetchSnapshotRequest) -> None:
        """Respond as the leader. Bytes may be corrupted in transit, which CRCs must detect."""
        leader, node = self.leader, self.node
        if leader.machine is None:
            return
        with leader.ending_on_failure():
            response = respond(leader.machine, leader.the_replica, request)
            leader.step(SnapshotServed(request.replica_id))
            rng, share = node.engine.rng, node.engine.conditions.corruption
            for delay_ms in node.network.delays(leader.node_id, node.node_id):
                arriving = self._corrupted(response) if share and rng.random() < share else response
                deliver = partial(self._on_response, number, arriving)
                node.engine.after(delay_ms, partial(node.at_process, self.process, deliver))

    def _corrupted(self, response: m.FetchSnapshotResponse) -> m.FetchSnapshotResponse:
        rng, topics = self.node.engine.rng, []
        for topic in response.topics:
            partitions = []
            for partition in topic.partitions:
                data = bytearray(partition.unaligned_records)
                if data:
                    self.node.counts["snapshot bytes corrupted in transit"] += 1
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                partitions.append(partition._replace(unaligned_records=bytes(data)))
            topics.append(topic._replace(partitions=tuple(partitions)))
        return response._replace(topics=tuple(topics))

    def _on_response(self, number: int, response: m.FetchSnapshotResponse) -> None:
        if not self._is_current or number != self._number or self._received is None:
            return
        _, step = steps([self._fetch], response)[0]
        if not isinstance(step, WriteBytes):
            if self._fetch.state is FetchState.ENDED:
                self._fail()
            elif self._fetch.state is FetchState.FETCHING:
                self.node.later(20, lambda: self._timed_out(number))
            return
        try:
            self._received.write(step.position, step.data)
        except StorageError:
            self._fail()
            return
        state = self._fetch.written()
        if self.node.crashed_at("snapshot partly received"):
            return
        self.node.step(SnapshotFetchProgress())
        if not self._is_current:
            return
        if state is FetchState.WHOLE:
            self.node.later(self.node.rng.uniform(0.2, 20), self._complete)
        else:
            self._send_request()

    def _complete(self) -> None:
        if not self._is_current or self._received is None:
            return
        node = self.node
        try:
            self._received.complete()
        except CorruptRecordError:
            node.counts["received snapshots corrupt"] += 1
            self._fail()
            return
        except StorageError:
            self._fail()
            return
        self._is_complete = True
        if not node.crashed_at("snapshot fully received"):
            node.later(node.rng.uniform(0.0, 5), self._install)

    def _install(self) -> None:
        if not self._is_current:
            return
        node = self.node
        node.transfer = None
        self.state.checker.check_install(node, self.snapshot_id)
        with node.ending_on_failure():
            event = node.the_replica.install(self.snapshot_id)
            node.base = node.durable_floor = self.snapshot_id.end_offset
            node.entries = []
            node.counts["snapshots fetched"] += 1
            if not node.crashed_at("snapshot installed"):
                self.state.load()
                if node.machine is not None:
                    node.step(event)

    def _fail(self) -> None:
        node = self.node
        node.transfer = None
        node.counts["snapshot fetches failed"] += 1
        self._discard()
        node.step(SnapshotFetchFailed())

    def drop(self) -> None:
        """Drop the transfer and discard the received snapshot, because the leader changed."""
        self.node.transfer = None
        self.node.counts["snapshot fetches dropped"] += 1
        with self.node.ending_on_failure():
            self._discard()

    def _discard(self) -> None:
        if self._is_complete:
            self.node.the_replica.discard(self.snapshot_id)
        elif self._received is not None:
            self._received.discard()


def respond(machine: Machine, replica: QuorumReplica, request: m.FetchSnapshotRequest) -> m.FetchSnapshotResponse:
    """Return the response of a node to a FetchSnapshot request. Raises StorageError."""
    election = machine.advertised_election
    leader = m.LeaderIdAndEpoch(election.leader_id, election.epoch)
    partition = ServedPartition(leader, machine.state is State.LEADER, replica.store.size)
    plan = plan_fetch_snapshot(
        request, machine.config.cluster_id, {(CLUSTER_METADATA_TOPIC, 0): partition}, RESPONSE_BYTES_MAX
    )

    def read(part: Part) -> bytes:
        return replica.store.read(part.snapshot_id, part.position, part.size) or b""

    return plan.filled(read)
