"""Nodes of a metadata quorum in one event loop: real drivers, gRPC on loopback, real files.

No test waits for a voter to give its leader up: the timeouts are far longer than any machine stands still, so a leader
stays one until a test wants another. Where one is to be given up the test says so (`Node.expire`); for followers of a
node that does not run any more `Quorum.leader` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from kipmesh.cluster import ports
from kipmesh.core import record_batch
from kipmesh.core.config import TopicConfig, Voter
from kipmesh.core.raft import RaftConfig, State
from kipmesh.core.raft.types import TimerFired
from kipmesh.messages import SnapshotId
from kipmesh.node import wall_ms
from kipmesh.node.quorum.driver import QuorumDriver
from kipmesh.node.quorum.service import QuorumService
from kipmesh.storage.fs import FileSystem, RealFileSystem
from kipmesh.storage.log_manager import LogManager
from kipmesh.storage.quorum.quorum_replica import QuorumReplica
from kipmesh.transport.grpc.client import ConnectionPool
from kipmesh.transport.grpc.server import Server
from kipmesh.transport.pipeline import pipeline_of

CLUSTER_ID = "quorum-under-test"
WAIT_S = 30.0


def batch_of(*values: bytes) -> bytes:
    """A batch for `QuorumDriver.append`."""
    return record_batch.build(
        [(None, value) for value in values], base_offset=0, leader_epoch=0, timestamp_ms=wall_ms()
    )


def values_of(data: bytes) -> list[bytes]:
    """The values of the records, without control records."""
    found: list[bytes] = []
    for position, header in record_batch.iterate(data, allow_partial=True):
        if not header.is_control:
            found += [record.value or b"" for record in record_batch.read_records(data, position, header)]
    return found


async def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Wait for a condition that other tasks of this loop bring about."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - a condition over the state of several nodes
            await asyncio.sleep(0.002)


class Listener:
    """Keeps what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, object]] = []

    def state_changed(self, state: State, epoch: int, leader_id: int) -> None:
        self.told.append(("state", (state, epoch, leader_id)))

    def committed(self, high_watermark: int) -> None:
        self.told.append(("committed", high_watermark))

    def truncated(self, offset: int) -> None:
        self.told.append(("truncated", offset))

    def snapshot_installed(self, snapshot_id: SnapshotId) -> None:
        self.told.append(("installed", snapshot_id))

    def of(self, kind: str) -> list[object]:
        return [what for name, what in self.told if name == kind]


class Node:
    """One replica; `kill` ends it as a killed process would, and `boot` starts it anew on what its disk has."""

    def __init__(self, quorum: Quorum, node_id: int, folder: str, port: int) -> None:
        self.quorum = quorum
        self.node_id = node_id
        self.folder = folder
        self.port = port
        self.fs: FileSystem = quorum.fs_of(node_id)
        self.failures: list[BaseException] = []
        self.listener = Listener()
        self.is_up = False

    async def boot(self) -> Node:
        config = self.quorum.config(self.node_id)
        self.failures, self.listener = [], Listener()
        self.manager = LogManager(
            self.fs,
            [self.folder],
            cluster_id=CLUSTER_ID,
            node_id=self.node_id,
            defaults=TopicConfig(),
        )
        self.manager.load(wall_ms())
        self.replica = QuorumReplica.open(
            self.manager,
            cluster_id=CLUSTER_ID,
            voters=config.voters,
            is_voter=config.is_voter,
            segment_bytes=1 << 20,
            now_ms=wall_ms(),
        )
        self.pool = ConnectionPool(f"node-{self.node_id}")
        self.driver = QuorumDriver(
            config, self.quorum.voters, self.replica, self.pool, self.listener, self.failures.append
        )
        self.service = QuorumService(self.driver)
        self.server = Server(pipeline_of({"Quorum": self.service}))
        bound = await self.server.start("127.0.0.1", self.port)
        assert self.port in (0, bound)
        self.port = bound
        self.quorum.on_boot(self)
        self.driver.start()
        self.is_up = True
        return self

    async def stop(self) -> None:
        """As a process on SIGTERM."""
        if self.is_up:
            self.is_up = False
            await self.driver.stop()
            await self.server.stop(0.2)
            await self.pool.close()
            self.manager.close(0)

    async def kill(self) -> None:
        """As SIGKILL: nobody hears of it, nothing is flushed."""
        self.is_up = False
        self.driver._end()
        await self.server.stop(0)
        await self.pool.close()
        await self.driver.stop()
        self.manager.abandon()

    @property
    def runs(self) -> bool:
        """Whether it takes part: it is up, and nothing ended its driver."""
        return self.is_up and not self.driver.has_ended

    def expire(self) -> None:
        """As if the time were over that it waits for its leader, or as a leader for its quorum."""
        machine = self.driver.machine
        if machine.leadership is not None:
            machine.leadership.check_quorum_deadline_ms = machine.now_ms
        else:
            machine.deadline_ms = machine.now_ms
        self.driver.post(TimerFired())

    @property
    def log_values(self) -> list[bytes]:
        """Everything in its log."""
        log = self.replica.log
        return values_of(log.read(log.log_start_offset, 1 << 30, log.log_end_offset, True))


class Quorum:
    """Voters 1 to n, and observers from 101 on."""

    def __init__(
        self,
        folder: Path,
        voters: int,
        observers: int = 0,
        *,
        fs_of: Callable[[int], FileSystem] = lambda _: RealFileSystem(),
        **timing: Any,
    ) -> None:
        self.fs_of = fs_of
        self.on_boot: Callable[[Node], None] = lambda _: None
        self._ports = ports.PortReservation()  # a voter that is killed finds its own again
        free = self._ports.choose(voters)
        self.voters = tuple(Voter(id=id_, host="127.0.0.1", port=port) for id_, port in enumerate(free, 1))
        self.timing = {
            "election_timeout_ms": 150,
            "fetch_timeout_ms": 600_000,
            "election_backoff_max_ms": 200,
            "fetch_max_wait_ms": 200,
            "request_timeout_ms": 60_000,
            **timing,
        }
        self.nodes = {
            voter.id: Node(self, voter.id, str(folder / f"voter-{voter.id}"), voter.port) for voter in self.voters
        }
        self.observers = {
            id_: Node(self, id_, str(folder / f"observer-{id_}"), 0) for id_ in range(101, 101 + observers)
        }

    def config(self, node_id: int) -> RaftConfig:
        return RaftConfig(node_id, tuple(voter.id for voter in self.voters), CLUSTER_ID, **self.timing)

    async def __aenter__(self) -> Self:
        for node in self.all:
            await node.boot()
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in reversed(self.all):
            await node.stop()
        self._ports.close()

    @property
    def all(self) -> list[Node]:
        return [*self.nodes.values(), *self.observers.values()]

    async def leader(self, other_than: int = -1) -> Node:
        """The active one: it leads, what it began its epoch with is committed, and every voter that runs follows it.

        A voter that does not know it yet may still stand, and depose it. Who follows a node that does not run gives it
        up here.
        """

        def found() -> Node | None:
            for node in self.all:
                machine = node.driver.machine
                if node.runs and machine.state.follows and not self.nodes[machine.election.leader_id].runs:
                    node.expire()
            return next(
                (node for node in self.nodes.values() if node.node_id != other_than and self._leads(node)), None
            )

        await until(found)
        node = found()
        assert node is not None
        return node

    def _leads(self, node: Node) -> bool:
        leadership = node.driver.machine.leadership if node.runs and node.driver.is_leader else None
        if leadership is None or node.driver.high_watermark <= leadership.epoch_start_offset:
            return False
        told = (node.driver.epoch, node.node_id)
        return all(
            (each.driver.epoch, each.driver.election.leader_id) == told for each in self.nodes.values() if each.runs
        )

    def followers(self, leader: Node) -> list[Node]:
        """The other voters."""
        return [node for node in self.nodes.values() if node is not leader]

    async def committed(self, leader: Node, end: int) -> None:
        await until(lambda: leader.driver.high_watermark >= end)

    async def append(self, leader: Node, *values: bytes) -> int:
        """Append and wait until it is committed; gives the log end after it."""
        end = leader.driver.append(batch_of(*values), leader.driver.epoch)
        await self.committed(leader, end)
        return end
