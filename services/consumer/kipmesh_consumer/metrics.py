"""The consumer service's own metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class ServiceMetrics:
    """What Kafka has no name for: streams and what they delivered."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.streams_open = Gauge("kipmesh_consumer_streams_open", "Streams that are open now", registry=registry)
        self.streams_refused = Counter(
            "kipmesh_consumer_streams_refused_total", "Streams refused for streams.max", registry=registry
        )
        self.streams_ended = Counter(
            "kipmesh_consumer_streams_ended_total", "Streams that ended, by why", ["reason"], registry=registry
        )
        self.records_delivered = Counter(
            "kipmesh_consumer_records_delivered_total", "Records that went to readers", registry=registry
        )
        self.bytes_delivered = Counter(
            "kipmesh_consumer_delivered_bytes_total", "Bytes of bodies that went to readers", registry=registry
        )
