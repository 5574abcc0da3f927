"""The clients behind the API: one for metadata and offsets that all requests share, one consumer a stream.

Invariant: the shared clients belong to the service, a stream's consumer to its stream.
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
from kipmesh_consumer.streams import MemberStream, Request, Stream, Streams

CONNECT_RETRY_S_FIRST = 0.05
CONNECT_RETRY_S_LAST = 1.0

log = structlog.get_logger(__name__)


class Backend:
    """What the API asks; before `connect` has succeeded everything is BROKER_NOT_AVAILABLE."""

    def __init__(self, config: ConsumerServiceConfig, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.streams = Streams(config, ServiceMetrics(registry))
        registry.register(FetchCollector(lambda: self.streams.fetch_stats))
        self.config = config
        self._admin: AdminClient | None = None

    @property
    def ready(self) -> bool:
        """Whether the mesh has answered, and no stop has begun."""
        return self._admin is not None and not self.streams.stopping.is_set()

    async def connect(self) -> None:
        """Try until a broker answers."""
        wait_s = CONNECT_RETRY_S_FIRST
        while self._admin is None:
            admin = AdminClient(self.config.bootstrap_servers, **self._settings(AdminConfig))
            try:
                await admin.start()
                self._admin = admin
            except KafkaError as error:
                log.debug("no broker answers yet", error=str(error))
                with suppress(Exception):
                    await admin.close()
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, CONNECT_RETRY_S_LAST)
        log.info("connected to the mesh", bootstrap=self.config.bootstrap_servers)

    async def topics(self) -> Sequence[TopicMetadata]:
        """All topics by name."""
        return sorted(await self._connected().list_topics(), key=lambda topic: topic.name)

    async def partitions(self, topic: str) -> list[int]:
        """The partitions of a topic; raises KafkaError(UNKNOWN_TOPIC_OR_PARTITION)."""
        found = await self._connected().describe_topics([topic])
        return sorted(found[0].partitions)

    async def end_offsets(self, wanted: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """High watermarks; a partition that is gone is left out, and what was delivered of it is forgotten."""
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
            ends |= {one: place.offset for one, place in found.items() if place is not None}
        return ends

    async def open_stream(self, request: Request) -> Stream:
        """A stream with a consumer of its own; raises StreamsExhaustedError or KafkaError."""
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
        """Disconnect; idempotent."""
        admin, self._admin = self._admin, None
        if admin is not None:
            await admin.close()

    def _settings(self, kind: type[Config]) -> dict[str, Any]:
        """The service's settings that a client of this kind has as well."""
        known = frozenset(kind.keys())
        return {key: value for key, value in self.config.as_dict().items() if key in known}

    def _connected(self) -> AdminClient:
        if self._admin is None:
            raise KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, "no broker has answered yet")
        return self._admin
