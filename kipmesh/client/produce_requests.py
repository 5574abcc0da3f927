"""Makes Produce requests of batches: seals, compresses and numbers them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kipmesh.client.accumulator import Batch
from kipmesh.client.metadata import Metadata
from kipmesh.client.records import COMPRESSIONS, Compression, restamped, seal
from kipmesh.core.config import ProducerConfig
from kipmesh.messages import PartitionProduceData, ProduceRequest, TopicProduceData

_COMPRESS_ON_LOOP_BYTES_MAX = 32 << 10


class RequestMaker:
    """One producer's."""

    def __init__(self, config: ProducerConfig, metadata: Metadata) -> None:
        level = {
            "gzip": config.compression_gzip_level,
            "lz4": config.compression_lz4_level,
            "zstd": config.compression_zstd_level,
        }
        self._compression = Compression(
            COMPRESSIONS.index(config.compression_type), level.get(config.compression_type, 0)
        )
        self._acks = config.acks
        self._timeout_ms = config.request_timeout_ms
        self._metadata = metadata

    async def make(self, batches: Sequence[Batch]) -> ProduceRequest:
        """The request of at most one batch a partition; those that were finished meanwhile are left out."""
        await self._seal([batch for batch in batches if batch.payload is None and not batch.finished])
        topics: dict[str, list[PartitionProduceData]] = {}
        for batch in batches:
            if batch.payload is not None:
                if batch.numbers is not None and batch.stamp != batch.numbers.stamp:
                    batch.stamp = batch.numbers.stamp
                    batch.payload = restamped(batch.payload, batch.stamp)
                queue = batch.queue
                topics.setdefault(queue.topic, []).append(PartitionProduceData(queue.partition, batch.payload))
        return ProduceRequest(
            acks=self._acks,
            timeout_ms=self._timeout_ms,
            topic_data=tuple(TopicProduceData(name, self._topic_id(name), parts) for name, parts in topics.items()),
        )

    async def _seal(self, fresh: Sequence[Batch]) -> None:
        for batch in fresh:
            if batch.numbers is not None:
                batch.stamp = batch.numbers.stamp
                batch.builder.set_producer_state(*batch.stamp)
        builders = [batch.builder for batch in fresh]
        if self._compression.number and sum(map(Batch.size_bytes, fresh)) > _COMPRESS_ON_LOOP_BYTES_MAX:
            payloads = await asyncio.to_thread(_seal_all, builders, self._compression)
        else:
            payloads = _seal_all(builders, self._compression)
        for batch, payload in zip(fresh, payloads, strict=True):
            if not batch.finished:
                batch.payload = payload

    def _topic_id(self, name: str) -> bytes:
        metadata = self._metadata.topic(name)
        return metadata.topic_id if metadata is not None else b""


def _seal_all(builders: Sequence[object], compression: Compression) -> list[bytes]:
    return [seal(builder, compression) for builder in builders]
