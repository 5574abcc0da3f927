"""A metadata quorum in one event loop: real drivers, gRPC on loopback, real files.

The fetch timeout is far longer than any pause of a slow machine, so no leader changes by chance. A test ends a fetch
timeout explicitly with `Node.expire`; `Quorum.leader` does so for followers of a stopped leader.
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
    """Build a batch for `QuorumDriver.append`."""
    return record_batch.build(
        [(None, value) for value in values], base_offset=0, leader_epoch=0, timestamp_ms=wall_ms()
    )


def values_of(data: bytes) -> list[bytes]:
    """Return the values of all records except control records."""
    values: list[bytes] = []
    for position, header in record_batch.iterate(data, allow_partial=True):
        if not header.is_control:
            values += [record.value or b"" for record in record_batch.read_records(data, position, header)]
    return values


async def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Wait until other tasks make the condition true."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the state of several nodes has no event
            await asyncio.sleep(0.002)


class Listener:
    """Records the events of a driver in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []

    def state_changed(self, state: State, epoch: int, leader_id: int) -> None:
        self.events.append(("state", (state, epoch, leader_id)))

    def committed(self, high_watermark: int) -> None:
        self.events.append(("committed", high_watermark))

    def truncated(self, offset: int) -> None:
        self.events.append(("truncated", offset))

    def snapshot_installed(self, snapshot_id: SnapshotId) -> None:
        self.events.append(("installed", snapshot_id))

    def of(self, kind: str) -> list[object]:
        return [value for name, value in self.events if name == kind]


class Node:
    """One replica of the quorum. `kill` ends it like SIGKILL, `boot` restarts it from its disk."""

    def __init__(self, quorum: Quorum, node_id: int, directory: str, port: int) -> None:
        self.quorum = quorum
        self.node_id = node_id
        self.directory = directory
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
            [self.directory],
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
        """Stop the node like SIGTERM."""
        if self.is_up:
            self.is_up = False
            await self.driver.stop()
            await self.server.stop(0.2)
            await self.pool.close()
            self.manager.close(0)

    async def kill(self) -> None:
        """Stop the node like SIGKILL: no EndQuorumEpoch, no flush."""
        self.is_up = False
        self.driver._end()
        await self.server.stop(0)
        await self.pool.close()
        await self.driver.stop()
        self.manager.abandon()

    @property
    def runs(self) -> bool:
        """Whether the node is up and its driver has not ended."""
        return self.is_up and not self.driver.has_ended

    def expire(self) -> None:
        """End the fetch timeout of a follower, or the check-quorum timeout of a leader."""
        machine = self.driver.machine
        if machine.leadership is not None:
            machine.leadership.check_quorum_deadline_ms = machine.now_ms
        else:
            machine.deadline_ms = machine.now_ms
        self.driver.post(TimerFired())

    @property
    def log_values(self) -> list[bytes]:
        """The values of all records in the log."""
        log = self.replica.log
        return values_of(log.read(log.log_start_offset, 1 << 30, log.log_end_offset, True))


class Quorum:
    """Voters 1 to n, and observers with ids from 101."""

    def __init__(
        self,
        directory: Path,
        voters: int,
        observers: int = 0,
        *,
        fs_of: Callable[[int], FileSystem] = lambda _: RealFileSystem(),
        **timing: Any,
    ) -> None:
        self.fs_of = fs_of
        self.on_boot: Callable[[Node], None] = lambda _: None
        self._ports = ports.PortReservation()  # a restarted voter gets the same port
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
            voter.id: Node(self, voter.id, str(directory / f"voter-{voter.id}"), voter.port) for voter in self.voters
        }
        self.observers = {
            id_: Node(self, id_, str(directory / f"observer-{id_}"), 0) for id_ in range(101, 101 + observers)
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
        """Wait for a leader that has committed the start of its epoch and that all running voters follow.

        A voter that does not know the leader may start another election. Followers of a stopped node time out here.
        """

        def find() -> Node | None:
            for node in self.all:
                machine = node.driver.machine
                if node.runs and machine.state.follows and not self.nodes[machine.election.leader_id].runs:
                    node.expire()
            return next(
                (node for node in self.nodes.values() if node.node_id != other_than and self._leads(node)), None
            )

        await until(find)
        node = find()
        assert node is not None
        return node

    def _leads(self, node: Node) -> bool:
        leadership = node.driver.machine.leadership if node.runs and node.driver.is_leader else None
        if leadership is None or node.driver.high_watermark <= leadership.epoch_start_offset:
            return False
        expected = (node.driver.epoch, node.node_id)
        return all(
            (voter.driver.epoch, voter.driver.election.leader_id) == expected
            for voter in self.nodes.values()
            if voter.runs
        )

    def followers(self, leader: Node) -> list[Node]:
        """Return the other voters."""
        return [node for node in self.nodes.values() if node is not leader]

    async def committed(self, leader: Node, end: int) -> None:
        await until(lambda: leader.driver.high_watermark >= end)

    async def append(self, leader: Node, *values: bytes) -> int:
        """Append a batch, wait until it is committed, and return the log end offset."""
        end = leader.driver.append(batch_of(*values), leader.driver.epoch)
        await self.committed(leader, end)
        return end
