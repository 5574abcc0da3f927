"""A mesh whose brokers have a listener of the Kafka protocol, and requests of other clients over it."""

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
from tests.unit.broker.conftest_broker import Mesh

with warnings.catch_warnings(action="ignore"):  # kafka-python 3.0 calls what Python 3.11 deprecates
    from kafka import TopicPartition
    from kafka.admin import KafkaAdminClient

__all__ = ["KafkaMesh", "TopicPartition", "kafka_mesh"]


class KafkaMesh(Mesh):
    """Brokers with the listeners MESH and KAFKA."""

    async def start_broker(self, broker_id: int, **more: Any) -> BrokerNode:
        listeners = f"MESH://127.0.0.1:{self.port_of(broker_id)},KAFKA://127.0.0.1:0"
        return await super().start_broker(broker_id, listeners=listeners, **more)

    def kafka(self, broker_id: int) -> str:
        """The address of the Kafka listener."""
        return f"127.0.0.1:{self.brokers[broker_id].listeners.ports['KAFKA']}"

    async def python(self, method: str, *values: Any, **named: Any) -> Any:
        """Call a method of kafka-python's admin client."""

        def call() -> Any:
            client = KafkaAdminClient(bootstrap_servers=[self.kafka(1), self.kafka(2)])
            try:
                return getattr(client, method)(*values, **named)
            finally:
                client.close()

        return await asyncio.to_thread(call)

    async def kio(self, broker_id: int, request: Any, response: Any) -> Any:
        """Send kio's request of a flexible version; return kio's response."""
        out = io.BytesIO()
        entity_writer(type(request))(out, request)
        head = struct.pack(">hhih", type(request).__api_key__, type(request).__version__, 7, 2) + b"me\0"
        host, port = self.kafka(broker_id).split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(struct.pack(">i", len(head) + len(out.getvalue())) + head + out.getvalue())
        data = await reader.readexactly(struct.unpack(">i", await reader.readexactly(4))[0])
        writer.close()
        assert data[:5] == struct.pack(">iB", 7, 0)
        found, size = entity_reader(response)(data, 5)
        assert 5 + size == len(data)
        return found


@asynccontextmanager
async def kafka_mesh(folder: Path) -> AsyncIterator[KafkaMesh]:
    """Brokers 1 to 3."""
    mesh = KafkaMesh(folder)
    try:
        await mesh.start()
        yield mesh
    finally:
        await mesh.stop()
