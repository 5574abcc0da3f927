"""Clients behind the HTTP API: one admin client for all requests, and one consumer per stream.

The service closes the admin client; each stream closes its consumer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from kipmesh.client import AdminClient, Consumer, TopicPartition
from kipmesh.client.types import TIMESTAMP_LATEST, TopicMetadata
from kipmesh.core.config import AdminConfig, Config, ConsumerConfig
from kipmesh.core.config.node import ConsumerServiceConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh_consumer.metrics import FetchCollector, ServiceMetrics
from kipmesh_consumer.parameters import Edge
from kipmesh_consumer.streams import MemberStream, Stream, StreamRequest, Streams

CONNECT_RETRY_S_FIRST = 0.05
CONNECT_RETRY_S_LAST = 1.0

log = structlog.get_logger(__name__)


class Backend:
    """The cluster as the HTTP API sees it: topics, offsets and streams.

    Methods raise KafkaError: BROKER_NOT_AVAILABLE before `connect` has succeeded, or an error from the cluster.
    """

    def __init__(self, config: ConsumerServiceConfig, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.streams = Streams(config, ServiceMetrics(registry))
        registry.register(FetchCollector(lambda: self.streams.fetch_stats))
        self.config = config
        self._admin: AdminClient | None = None

    @property
    def ready(self) -> bool:
        """Whether the service is connected to the cluster and not stopping."""
        return self._admin is not None and not self.streams.stopping.is_set()

    async def connect(self) -> None:
        """Connect to the cluster. Retries without a time limit until a broker responds, and logs failures."""
        wait_s = CONNECT_RETRY_S_FIRST
        while self._admin is None:
            admin = AdminClient(self.config.bootstrap_servers, **self._settings(AdminConfig))
            try:
                await admin.start()
                self._admin = admin
            except KafkaError as error:
                log.debug("connecting to the cluster failed", error=str(error))
                with suppress(Exception):
                    await admin.close()
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, CONNECT_RETRY_S_LAST)
        log.info("connected to the cluster", bootstrap=self.config.bootstrap_servers)

    async def topics(self) -> Sequence[TopicMetadata]:
        """Return the metadata of all topics, sorted by name. Raises KafkaError."""
        return await self._connected().list_topics()

    async def partitions(self, topic: str) -> list[int]:
        """Return the partition numbers of a topic, sorted.

        Raises KafkaError: UNKNOWN_TOPIC_OR_PARTITION if the topic does not exist, INVALID_TOPIC_EXCEPTION, or an error
        of the cluster.
        """
        (metadata,) = await self._connected().describe_topics([topic])
        return sorted(metadata.partitions)

    async def end_offsets(self, wanted: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the high watermark of each partition.

        If a topic lacks one of its `wanted` partitions, all its partitions are omitted and their delivered positions
        are removed. Raises KafkaError for other errors.
        """
        ends: dict[TopicPartition, int] = {}
        by_topic: dict[str, list[TopicPartition]] = {}
        for one in wanted:
            by_topic.setdefault(one.topic, []).append(one)
        for topic, partitions in by_topic.items():
            try:
                found = await self._connected().list_offsets(dict.fromkeys(partitions, TIMESTAMP_LATEST))
            except KafkaError as error:
                if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                    raise
                for one in partitions:
                    self.streams.delivered.forget(topic, one.partition)
                continue
            ends |= {one: end.offset for one, end in found.items() if end is not None}
        return ends

    async def open_stream(self, request: StreamRequest) -> Stream:
        """Open a stream with a new consumer, which joins the group if the start is `committed`.

        Raises KafkaError, or StreamsExhaustedError if `streams.max` is reached.
        """
        self._connected()
        settings = self._settings(ConsumerConfig)
        is_member = request.start.edge is Edge.COMMITTED
        if not is_member:
            settings |= {"group.id": None, "auto.offset.reset": "none"}
        kind = MemberStream if is_member else Stream
        return await self.streams.open_stream(
            request, lambda: Consumer(self.config.bootstrap_servers, **settings), kind
        )

    async def close(self) -> None:
        """Close the admin client, if connected. Streams close their own consumers. Idempotent."""
        admin, self._admin = self._admin, None
        if admin is not None:
            await admin.close()

    def _settings(self, kind: type[Config]) -> dict[str, Any]:
        """Return the service's settings that also exist in `kind`, the configuration class of a client."""
        known = frozenset(kind.keys())
        return {key: value for key, value in self.config.as_dict().items() if key in known}

    def _connected(self) -> AdminClient:
        if self._admin is None:
            raise KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, "service is not connected to the cluster yet")
        return self._admin
