"""A cluster whose brokers have a Kafka listener, with helpers for requests of third-party clients."""

from __future__ import annotations

import asyncio
import io
import struct
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kio.serial import entity_reader, entity_writer

from kipmesh.broker import BrokerNode
from tests.unit.broker.broker_cluster import BrokerCluster

with warnings.catch_warnings(action="ignore"):  # kafka-python 3.0 uses functions that Python 3.11 deprecates
    from kafka import TopicPartition
    from kafka.admin import KafkaAdminClient

__all__ = ["KafkaCluster", "TopicPartition", "kafka_cluster"]


class KafkaCluster(BrokerCluster):
    """A cluster whose brokers have the listeners MESH and KAFKA."""

    async def start_broker(self, broker_id: int, **more: Any) -> BrokerNode:
        listeners = f"MESH://127.0.0.1:{self.port_of(broker_id)},KAFKA://127.0.0.1:0"
        return await super().start_broker(broker_id, listeners=listeners, **more)

    def bootstrap(self, broker_id: int) -> str:
        """Return the address of the broker's Kafka listener."""
        return f"127.0.0.1:{self.brokers[broker_id].listeners.ports['KAFKA']}"

    async def kafka_python(self, method: str, *values: Any, **named: Any) -> Any:
        """Call a method of the admin client of kafka-python."""

        def call() -> Any:
            client = KafkaAdminClient(bootstrap_servers=[self.bootstrap(1), self.bootstrap(2)])
            try:
                return getattr(client, method)(*values, **named)
            finally:
                client.close()

        return await asyncio.to_thread(call)

    async def kio(self, broker_id: int, request: Any, response_type: Any) -> Any:
        """Send a request of a flexible version, encoded by kio, and return the response that kio decodes."""
        out = io.BytesIO()
        entity_writer(type(request))(out, request)
        head = struct.pack(">hhih", type(request).__api_key__, type(request).__version__, 7, 2) + b"me\0"
        host, port = self.bootstrap(broker_id).split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(struct.pack(">i", len(head) + len(out.getvalue())) + head + out.getvalue())
        data = await reader.readexactly(struct.unpack(">i", await reader.readexactly(4))[0])
        writer.close()
        assert data[:5] == struct.pack(">iB", 7, 0)
        decoded, size = entity_reader(response_type)(data, 5)
        assert 5 + size == len(data)
        return decoded


@asynccontextmanager
async def kafka_cluster(directory: Path) -> AsyncIterator[KafkaCluster]:
    """Run brokers 1 to 3 with Kafka listeners."""
    cluster = KafkaCluster(directory)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()
