"""Fetches one snapshot from the leader into the store (630-12): the task of the effect `FetchSnapshot`.

A broken transfer resumes at its position, but only with the same leader in the same epoch: snapshots with the same id
may differ in their bytes between nodes. Validating a large file takes longer than a fetch timeout. Meanwhile the task
requests single bytes as keepalives, so that the leader keeps its quorum and this replica does not start an election.

The result is reported once, in the event loop, to a `SnapshotFetchListener`. A cancelled transfer reports only a
complete snapshot and leaves no `.part` file. The next transfer waits until its validation thread has ended.
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
"""Maximum bytes of one request, so that a transfer blocks the event loop for a few ms only."""
KEEPALIVES_PER_TIMEOUT = 4
"""Number of keepalives per fetch timeout while the snapshot is validated."""
FAILED_PAUSE_S = 0.2
"""Time before a failure is reported. Its cause (a full disk, a corrupt snapshot) would probably fail the retry too."""


class SnapshotFetchListener(Protocol):
    """Receives the progress and the result of a snapshot transfer, in the event loop."""

    def snapshot_progressed(self) -> None:
        """Called for each response that shows that the leader is alive."""
        ...

    def snapshot_received(self, snapshot_id: SnapshotId) -> Awaitable[bool]:
        """Called when the snapshot is in the store. The result is False if it is obsolete and must be deleted."""
        ...

    def snapshot_failed(self, *, corrupt: bool) -> None:
        """Called when the transfer has failed; `corrupt` is True if the received snapshot was invalid."""
        ...


class _TransferError(Exception):
    def __init__(self, reason: str, *, corrupt: bool = False) -> None:
        super().__init__(reason)
        self.corrupt = corrupt


@dataclass(eq=False, repr=False)
class SnapshotFetcher:
    """The transfer of one snapshot from the leader, from `start` until its result is reported or `cancel` is called."""

    config: RaftConfig
    replica: QuorumReplica
    connection: Connection
    effect: FetchSnapshot
    listener: SnapshotFetchListener

    def __post_init__(self) -> None:
        self.snapshot_id = self.effect.snapshot_id
        self.started_ms = monotonic_ms()
        self._task: asyncio.Task[None] | None = None
        self._keepalives: asyncio.Task[None] | None = None
        self._is_received = False

    def start(self, after: SnapshotFetcher | None, on_defect: Callable[[BaseException], None]) -> None:
        """Start the transfer once `after`, the previous one, has ended. `on_defect` receives unexpected errors."""

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                on_defect(error)

        self._task = asyncio.create_task(self._run(after))
        self._task.add_done_callback(ended)

    def cancel(self) -> None:
        """Abandon the transfer when the leader changes or the node stops. A running validation still completes."""
        if self._keepalives is not None:
            self._keepalives.cancel()
        if self._task is not None and not self._is_received:
            self._task.cancel()

    async def ended(self) -> None:
        """Wait until the transfer has completed, failed or been cancelled."""
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
            self._is_received = True
            await self._complete(received)
        except _TransferError as error:
            await self._fail(error)
        finally:
            received.discard()

    async def _fail(self, error: _TransferError) -> None:
        # The usual reason is that the leader has replaced the snapshot by a newer one.
        (log.error if error.corrupt else log.warning)(
            "fetching a metadata snapshot failed", snapshot_id=self.snapshot_id, error=str(error)
        )
        self._is_received = False
        await asyncio.sleep(FAILED_PAUSE_S)
        self.listener.snapshot_failed(corrupt=error.corrupt)

    async def _transfer(self, received: ReceivedSnapshot) -> None:
        config = self.config
        fetch = SnapshotFetch(CLUSTER_METADATA_TOPIC, 0, self.snapshot_id, received.size_bytes)
        broken_at = -1
        while fetch.state is FetchState.FETCHING:
            try:
                response = await self._request(fetch, FETCH_BYTES)
            except TransportError as error:
                if broken_at != fetch.position:
                    log.info("metadata snapshot transfer interrupted", position=fetch.position, error=str(error))
                broken_at = fetch.position
                await asyncio.sleep(config.retry_backoff_ms / 1000)
                continue
            await self._process(fetch, received, response)

    async def _request(self, fetch: SnapshotFetch, max_bytes: int) -> FetchSnapshotResponse:
        """Request the next bytes from the leader. Raises TransportError."""
        config = self.config
        request = fetch_request(config.cluster_id, config.node_id, max_bytes, [(fetch, self.effect.epoch)])
        response: FetchSnapshotResponse = await self.connection.call(
            SERVICE, "FetchSnapshot", request, config.request_timeout_ms / 1000
        )
        return response

    async def _process(self, fetch: SnapshotFetch, received: ReceivedSnapshot, response: FetchSnapshotResponse) -> None:
        for _, step in steps([fetch], response):
            match step:
                case WriteBytes(position, data):
                    try:
                        received.write(position, data)
                    except StorageError as error:
                        raise _TransferError(error.message) from error
                    fetch.written()
                    self.listener.snapshot_progressed()
                case Ended(code, reason):
                    raise _TransferError(f"{reason}: {code.name}")
                case Ignored(reason):
                    log.info("response of a metadata snapshot transfer ignored", reason=reason)
                    await asyncio.sleep(self.config.retry_backoff_ms / 1000)

    async def _send_keepalives(self) -> None:
        """Request single bytes until cancelled. A SNAPSHOT_NOT_FOUND response also shows that the leader is alive."""
        while True:
            await asyncio.sleep(self.config.fetch_timeout_ms / 1000 / KEEPALIVES_PER_TIMEOUT)
            with contextlib.suppress(TransportError):
                response = await self._request(SnapshotFetch(CLUSTER_METADATA_TOPIC, 0, self.snapshot_id), 1)
                codes = {part.error_code for topic in response.topics for part in topic.partitions}
                if not response.error_code and codes and codes <= {ErrorCode.NONE, ErrorCode.SNAPSHOT_NOT_FOUND}:
                    self.listener.snapshot_progressed()

    async def _complete(self, received: ReceivedSnapshot) -> None:
        self._keepalives = asyncio.create_task(self._send_keepalives())
        try:
            await asyncio.to_thread(received.complete)
        except CorruptRecordError as error:
            raise _TransferError(error.message, corrupt=True) from error
        except StorageError as error:
            raise _TransferError(error.message) from error
        finally:
            self._keepalives.cancel()
        if not await self.listener.snapshot_received(self.snapshot_id):
            await self._delete()

    async def _delete(self) -> None:
        try:
            await asyncio.to_thread(self.replica.discard, self.snapshot_id)
        except KafkaError as error:  # it is valid and committed, so the next start can load it
            log.warning("deleting a metadata snapshot failed", snapshot_id=self.snapshot_id, error=error.message)
