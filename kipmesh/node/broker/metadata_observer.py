"""A broker as an observer of the metadata quorum: follows `__cluster_metadata` by Fetch and keeps an image of it.

Records are applied up to the high watermark, in order, once. What they changed is published in one delta a fetch; the
first only when the image has this broker's own registration, so that a restarted broker never acts on a leadership
that it has lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from kipmesh.core.config import BrokerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.messages import EpochEndOffset, FetchPartition, FetchRequest, FetchTopic, PartitionData
from kipmesh.core.metadata.image import (
    CLUSTER_METADATA_TOPIC,
    CLUSTER_METADATA_TOPIC_ID,
    MetadataDelta,
    MetadataImage,
)
from kipmesh.core.replica.follower import truncation_offset
from kipmesh.node.broker.controller_channel import ControllerChannel
from kipmesh.rpc.client import Connection, FetchStream, TransportError
from kipmesh.storage.log import Log

log = structlog.get_logger(__name__)

MAX_WAIT_MS = 1000
FETCH_MAX_BYTES = 8 << 20
APPLY_BYTES = 1 << 20
RETRY_BACKOFF_S = 0.1


class MetadataObserver:
    """Owns the metadata image of one broker."""

    def __init__(
        self,
        config: BrokerConfig,
        metadata_log: Log,
        channel: ControllerChannel,
        publish: Callable[[MetadataImage, MetadataDelta], Awaitable[None]],
        on_published: Callable[[], Awaitable[None]],
        idle: Callable[[], Awaitable[None]],
        now_ms: Callable[[], int],
    ) -> None:
        """`idle` is called by the same task as `publish`, after each fetch: at least every second or so."""
        self.image = MetadataImage()
        self.high_watermark = 0
        self._config = config
        self._log = metadata_log
        self._channel = channel
        self._publish = publish
        self._on_published = on_published
        self._idle = idle
        self._now_ms = now_ms
        self._delta = MetadataDelta()
        self.published_offset = -1
        """The offset of the last record whose effects are published, -1 before the first."""
        self._stream: FetchStream | None = None
        self._connection: Connection | None = None

    async def run(self, broker_epoch: int) -> None:
        """Fetch and apply for ever; publish once the record at offset `broker_epoch`, our registration, is applied.

        Raises CorruptRecordError for a record that cannot be understood.
        """
        while True:
            try:
                data = await self._fetch()
            except TransportError as error:
                log.debug("metadata fetch failed", error=str(error))
                self._drop_stream()
                self._channel.try_next()
                await asyncio.sleep(RETRY_BACKOFF_S)
                continue
            if data is None or not self._store(data):
                self._drop_stream()
                await asyncio.sleep(RETRY_BACKOFF_S)
                continue
            await self._apply(broker_epoch)
            await self._idle()

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    async def _fetch(self) -> PartitionData | None:
        connection = self._channel.connection()
        if self._stream is None or connection is not self._connection:
            self._drop_stream()
            self._connection = connection
            self._stream = connection.fetch_stream("Quorum")
        asked = FetchPartition(
            partition=0,
            fetch_offset=self._log.log_end_offset,
            last_fetched_epoch=self._log.latest_epoch,
            log_start_offset=self._log.log_start_offset,
            partition_max_bytes=FETCH_MAX_BYTES,
        )
        request = FetchRequest(
            cluster_id=self._config.cluster_id,
            replica_id=self._config.node_id,
            # Until the first answer the high watermark is unknown: ask for it without waiting.
            max_wait_ms=MAX_WAIT_MS if self.high_watermark else 0,
            min_bytes=1,
            max_bytes=FETCH_MAX_BYTES,
            topics=[FetchTopic(CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, [asked])],
        )
        response = await self._stream.exchange(request, (MAX_WAIT_MS + self._config.broker_session_timeout_ms) / 1000)
        answers: list[PartitionData] = [data for topic in response.responses for data in topic.partitions]
        data = answers[0] if answers else None
        code = ErrorCode.of(response.error_code or (data.error_code if data else ErrorCode.UNKNOWN_SERVER_ERROR))
        if code:
            log.warning("metadata fetch refused", error=code.name)
            self._channel.try_next()
            return None
        return data

    def _store(self, data: PartitionData) -> bool:
        """Keep what the controller sent; False when a full disk or damaged bytes ask for another try."""
        try:
            if data.diverging_epoch is not None:
                self._truncate(data.diverging_epoch)
                return True
            if data.records:
                self._log.append_as_follower(data.records, self._now_ms())
        except KafkaError as error:
            if self._log.failed is not None or error.code == ErrorCode.INCONSISTENT_CLUSTER_ID:
                raise
            log.warning("metadata cannot be stored", error=str(error))
            return False
        self.high_watermark = max(self.high_watermark, data.high_watermark)
        return True

    def _truncate(self, diverging: EpochEndOffset) -> None:
        local = self._log.end_offset_for_epoch(diverging.epoch)
        offset = truncation_offset(diverging, local, self._log.log_end_offset)
        if offset <= self.image.offset:
            raise KafkaError(
                ErrorCode.INCONSISTENT_CLUSTER_ID,
                f"the controller's metadata log ends at {offset} where this broker has applied offset "
                f"{self.image.offset}: it is not the log that this broker belongs to",
            )
        log.warning("metadata log truncated", before=self._log.log_end_offset, log_end_offset=offset)
        self._log.truncate_to(offset)

    async def _apply(self, broker_epoch: int) -> None:
        end = min(self.high_watermark, self._log.log_end_offset)
        while self.image.offset + 1 < end:
            start = max(self.image.offset + 1, self._log.log_start_offset)
            self.image.replay(self._log.read(start, APPLY_BYTES, end, True), self._delta)
            await asyncio.sleep(0)
        offset = self.image.offset
        if offset >= broker_epoch and offset > self.published_offset:
            delta, self._delta = self._delta, MetadataDelta()
            await self._publish(self.image, delta)
            self.published_offset = offset
            await self._on_published()

    def close(self) -> None:
        """Drop the stream."""
        self._drop_stream()
