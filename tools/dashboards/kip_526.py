"""Dashboard of KIP-526: metadata requests of producers. Producers export them (`kipmesh.client.producer.exporter`)."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.dashboards import parts as p

NAME = "kipmesh_producer_metadata_"
PRODUCER = "{{instance}} {{client_id}}"


def _summary() -> p.Row:
    return p.Row(
        "Summary",
        [
            p.number(
                "Producers",
                "Producers that export metrics.",
                p.Query(f"count({p.now(f'{NAME}cached_topics')})", "producers"),
                width=6,
            ),
            p.number(
                "Metadata requests",
                "Rate of all producers. Two requests a second by one producer over minutes are too many.",
                p.Query(p.all_rate(f"{NAME}requests_total"), "requests"),
                unit=p.PER_SECOND,
                width=6,
            ),
            p.number(
                "Topics per request",
                "Average number of topics in a request. KIP-526 keeps it small.",
                p.Query(f"{p.all_rate(f'{NAME}topics_total')} / ({p.all_rate(f'{NAME}requests_total')} > 0)", "topics"),
                width=6,
            ),
            p.number(
                "Failed requests",
                "Requests without a usable response. The producer tries the next broker.",
                p.Query(p.all_rate(f"{NAME}failed_requests_total"), "failed"),
                unit=p.PER_SECOND,
                warn=0.001,
                bad=0.1,
                width=6,
            ),
        ],
    )


def _producers() -> p.Row:
    return p.Row(
        "Producers",
        [
            p.per_second(
                "Requests by urgency",
                "urgent: a record waits for the metadata, or the leader has moved. Others refresh cached metadata.",
                p.Query(p.rate(f"{NAME}requests_total", "urgency"), "{{urgency}}"),
                stacked=True,
            ),
            p.per_second(
                "Requested topics by urgency",
                "A lasting high rate of urgent topics indicates missing topics or leaders that keep moving.",
                p.Query(p.rate(f"{NAME}topics_total", "urgency"), "{{urgency}}"),
                stacked=True,
            ),
            p.bytes_per_second(
                "Bytes of metadata",
                "Bytes of requests and responses.",
                p.Query(p.rate(f"{NAME}bytes_total", "urgency"), "{{urgency}}"),
                stacked=True,
            ),
            p.per_second(
                "Requests by producer",
                "The ten producers with the most requests.",
                p.Query(f"topk(10, {p.rate(f'{NAME}requests_total', 'instance', 'client_id')})", PRODUCER),
            ),
            p.graph("Cached topics", "Topics in the metadata cache.", p.Query(p.now(f"{NAME}cached_topics"), PRODUCER)),
            p.per_second(
                "Evicted topics",
                "Topics to which nothing was sent for metadata.evict.ms.",
                p.Query(p.rate(f"{NAME}evictions_total", "instance", "client_id"), PRODUCER),
            ),
            p.graph(
                "Time blocked in send",
                "Seconds per second, summed over all calls: 1 equals one task that always waits.",
                p.Query(p.rate(f"{NAME}blocked_seconds_total", "instance", "client_id"), PRODUCER),
                unit=p.SECONDS,
            ),
            p.per_second(
                "Failed requests by producer",
                "Requests without a usable response.",
                p.Query(p.rate(f"{NAME}failed_requests_total", "instance", "client_id"), PRODUCER),
            ),
        ],
    )


def _brokers() -> p.Row:
    requests = "kipmesh_broker_metadata_requests_total"
    return p.Row(
        "Brokers",
        [
            p.per_second(
                "Metadata requests by kind",
                "Requests of all clients, by what they request: all topics, only brokers, or some topics.",
                p.Query(p.rate(requests, "kind"), "{{kind}}"),
                stacked=True,
            ),
            p.per_second(
                "Metadata requests by broker",
                "Clients may send them to any broker.",
                p.by_instance(p.rate(requests, "instance")),
                stacked=True,
            ),
            p.per_second(
                "Topics in responses",
                "KIP-526 avoids requests for many topics.",
                p.by_instance(p.rate("kipmesh_broker_metadata_topics_total", "instance")),
            ),
        ],
    )


def make() -> Dashboard:
    """Return the dashboard."""
    text = "Metadata of producers: docs/producer_metadata.md and docs/monitoring.md."
    return p.make(
        "kipmesh-kip-526", "kipmesh: producer metadata (KIP-526)", text, [_summary(), _producers(), _brokers()]
    )
