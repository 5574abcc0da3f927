"""One snapshot on its way from the leader to the store (630-12): the task behind the effect `FetchSnapshot`.

A broken transfer goes on at the position that was reached, with the same leader in the same epoch: two nodes'
snapshots of one id need not have the same bytes. So what was received goes with the task.

The check of a large file takes longer than a fetch timeout. Meanwhile the leader is asked for a byte now and then: so
it keeps its quorum, and this replica does not take it for dead.

The end is told once, in the event loop, by a call of `SnapshotFetcherOwner`. A transfer that was given up tells nothing
but of a snapshot that was whole by then, and leaves no `.part` file; it ends when the thread that checks the file did,
and the next transfer waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from kipmesh.core.errors import CorruptRecordError, ErrorCode, KafkaError
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC
from kipmesh.core.raft import RaftConfig
from kipmesh.core.raft.types import FetchSnapshot
from kipmesh.core.snapshot.transfer import Ended, FetchState, Ignored, SnapshotFetch, WriteBytes, fetch_request, steps
from kipmesh.messages import FetchSnapshotResponse, SnapshotId
from kipmesh.node import monotonic_ms
from kipmesh.node.quorum.transport import SERVICE
from kipmesh.storage.fs import StorageError
from kipmesh.storage.quorum.quorum_replica import QuorumReplica
from kipmesh.storage.quorum.snapshots import ReceivedSnapshot
from kipmesh.transport.grpc.client import Connection, TransportError

log = structlog.get_logger(__name__)

FETCH_BYTES = 1 << 20
"""Of one request: a transfer takes the event loop for a few ms at a time."""
TOUCHES_A_TIMEOUT = 4
"""How often the leader is asked for a byte in a fetch timeout, while the snapshot is checked."""
FAILED_PAUSE_S = 0.2
"""Before Fetch is asked again for what will probably fail again: a full disk, a corrupt snapshot."""


class SnapshotFetcherOwner(Protocol):
    """Who has the transfer done."""

    def snapshot_progressed(self) -> None:
        """Bytes came: the leader lives."""
        ...

    def snapshot_received(self, snapshot_id: SnapshotId) -> Awaitable[bool]:
        """It is one of the store's. Gives whether it is wanted; if not, it is deleted again."""
        ...

    def snapshot_failed(self, *, corrupt: bool) -> None:
        """It is not to be had; `corrupt`: it came, and was no snapshot."""
        ...


class _TransferError(Exception):
    def __init__(self, reason: str, *, corrupt: bool = False) -> None:
        super().__init__(reason)
        self.corrupt = corrupt


@dataclass(eq=False, repr=False)
class SnapshotFetcher:
    """One transfer; begun by `start`, given up by `cancel`."""

    config: RaftConfig
    replica: QuorumReplica
    connection: Connection
    wanted: FetchSnapshot
    owner: SnapshotFetcherOwner

    def __post_init__(self) -> None:
        self.snapshot_id = self.wanted.snapshot_id
        self.begun_ms = monotonic_ms()
        self._task: asyncio.Task[None] | None = None
        self._touching: asyncio.Task[None] | None = None
        self._is_whole = False

    def start(self, after: SnapshotFetcher | None, on_defect: Callable[[BaseException], None]) -> None:
        """Begin, once the transfer before has ended."""

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                on_defect(error)

        self._task = asyncio.create_task(self._run(after))
        self._task.add_done_callback(ended)

    def cancel(self) -> None:
        """The leader is another, or the node stops: drop what is there. What a thread does goes on to its end."""
        if self._touching is not None:
            self._touching.cancel()
        if self._task is not None and not self._is_whole:
            self._task.cancel()

    async def ended(self) -> None:
        """Wait for the end, whichever it is."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self, after: SnapshotFetcher | None) -> None:
        if after is not None:
            await after.ended()
        try:
            received = self.replica.receive(self.snapshot_id)
        except (StorageError, ValueError) as error:
            await self._fail(_TransferError(str(error)))
            return
        try:
            await self._transfer(received)
            self._is_whole = True
            await self._complete(received)
        except _TransferError as error:
            await self._fail(error)
        finally:
            received.discard()

    async def _fail(self, error: _TransferError) -> None:
        # Most often the leader has a newer one by now, and this one no more.
        (log.error if error.corrupt else log.warning)(
            "metadata snapshot not received", snapshot_id=self.snapshot_id, error=str(error)
        )
        self._is_whole = False
        await asyncio.sleep(FAILED_PAUSE_S)
        self.owner.snapshot_failed(corrupt=error.corrupt)

    async def _transfer(self, received: ReceivedSnapshot) -> None:
        config = self.config
        fetch = SnapshotFetch(CLUSTER_METADATA_TOPIC, 0, self.snapshot_id, received.size_bytes)
        broken_at = -1
        while fetch.state is FetchState.FETCHING:
            try:
                response = await self._ask(fetch, FETCH_BYTES)
            except TransportError as error:
                if broken_at != fetch.position:
                    log.info("metadata snapshot transfer broken", position=fetch.position, error=str(error))
                broken_at = fetch.position
                await asyncio.sleep(config.retry_backoff_ms / 1000)
                continue
            await self._take(fetch, received, response)

    async def _ask(self, fetch: SnapshotFetch, max_bytes: int) -> FetchSnapshotResponse:
        """TransportError."""
        config = self.config
        request = fetch_request(config.cluster_id, config.node_id, max_bytes, [(fetch, self.wanted.epoch)])
        response: FetchSnapshotResponse = await self.connection.call(
            SERVICE, "FetchSnapshot", request, config.request_timeout_ms / 1000
        )
        return response

    async def _take(self, fetch: SnapshotFetch, received: ReceivedSnapshot, response: FetchSnapshotResponse) -> None:
        for _, step in steps([fetch], response):
            match step:
                case WriteBytes(position, data):
                    try:
                        received.write(position, data)
                    except StorageError as error:
                        raise _TransferError(error.message) from error
                    fetch.written()
                    self.owner.snapshot_progressed()
                case Ended(code, reason):
                    raise _TransferError(f"{reason}: {code.name}")
                case Ignored(reason):
                    log.info("answer of a metadata snapshot transfer ignored", reason=reason)
                    await asyncio.sleep(self.config.retry_backoff_ms / 1000)

    async def _keep_in_touch(self) -> None:
        """Until it is cancelled; the leader's word that it has this snapshot no more is one as well."""
        while True:
            await asyncio.sleep(self.config.fetch_timeout_ms / 1000 / TOUCHES_A_TIMEOUT)
            with contextlib.suppress(TransportError):
                response = await self._ask(SnapshotFetch(CLUSTER_METADATA_TOPIC, 0, self.snapshot_id), 1)
                codes = {answer.error_code for topic in response.topics for answer in topic.partitions}
                if not response.error_code and codes and codes <= {ErrorCode.NONE, ErrorCode.SNAPSHOT_NOT_FOUND}:
                    self.owner.snapshot_progressed()

    async def _complete(self, received: ReceivedSnapshot) -> None:
        self._touching = asyncio.create_task(self._keep_in_touch())
        try:
            await asyncio.to_thread(received.complete)
        except CorruptRecordError as error:
            raise _TransferError(error.message, corrupt=True) from error
        except StorageError as error:
            raise _TransferError(error.message) from error
        finally:
            self._touching.cancel()
        if not await self.owner.snapshot_received(self.snapshot_id):
            await self._delete()

    async def _delete(self) -> None:
        try:
            await asyncio.to_thread(self.replica.discard, self.snapshot_id)
        except KafkaError as error:  # it stays, whole and committed: the next start finds it
            log.warning("metadata snapshot not deleted", snapshot_id=self.snapshot_id, error=error.message)
