"""Dashboard of KIP-526: metadata requests of producers. Producers export them (`kipmesh.client.producer.exporter`)."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.dashboards import parts
from tools.dashboards.parts import Query, Row, all_rate, by_instance, graph, now, number, rate

NAME = "kipmesh_producer_metadata_"
PRODUCER = "{{instance}} {{client_id}}"


def _summary() -> Row:
    return Row(
        "Summary",
        [
            number(
                "Producers",
                "Producers that export metrics.",
                Query(f"count({now(f'{NAME}cached_topics')})", "producers"),
                width=6,
            ),
            number(
                "Metadata requests",
                "Rate of all producers. Two requests a second by one producer over minutes are too many.",
                Query(all_rate(f"{NAME}requests_total"), "requests"),
                unit=parts.PER_SECOND,
                width=6,
            ),
            number(
                "Topics per request",
                "Average number of topics in a request. KIP-526 keeps it small.",
                Query(f"{all_rate(f'{NAME}topics_total')} / ({all_rate(f'{NAME}requests_total')} > 0)", "topics"),
                width=6,
            ),
            number(
                "Failed requests",
                "Requests without a usable response. The producer tries the next broker.",
                Query(all_rate(f"{NAME}failed_requests_total"), "failed"),
                unit=parts.PER_SECOND,
                warn=0.001,
                bad=0.1,
                width=6,
            ),
        ],
    )


def _producers() -> Row:
    return Row(
        "Producers",
        [
            graph(
                "Requests by urgency",
                "urgent: a record waits for the metadata, or the leader has moved. Others refresh cached metadata.",
                Query(rate(f"{NAME}requests_total", "urgency"), "{{urgency}}"),
                unit=parts.PER_SECOND,
                stacked=True,
            ),
            graph(
                "Requested topics by urgency",
                "A lasting high rate of urgent topics indicates missing topics or leaders that keep moving.",
                Query(rate(f"{NAME}topics_total", "urgency"), "{{urgency}}"),
                unit=parts.PER_SECOND,
                stacked=True,
            ),
            graph(
                "Bytes of metadata",
                "Bytes of requests and responses.",
                Query(rate(f"{NAME}bytes_total", "urgency"), "{{urgency}}"),
                unit=parts.BYTES_A_SECOND,
                stacked=True,
            ),
            graph(
                "Requests by producer",
                "The ten producers with the most requests.",
                Query(f"topk(10, {rate(f'{NAME}requests_total', 'instance', 'client_id')})", PRODUCER),
                unit=parts.PER_SECOND,
            ),
            graph("Cached topics", "Topics in the metadata cache.", Query(now(f"{NAME}cached_topics"), PRODUCER)),
            graph(
                "Evicted topics",
                "Topics to which nothing was sent for metadata.evict.ms.",
                Query(rate(f"{NAME}evictions_total", "instance", "client_id"), PRODUCER),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Time blocked in send",
                "Seconds per second, summed over all calls: 1 equals one task that always waits.",
                Query(rate(f"{NAME}blocked_seconds_total", "instance", "client_id"), PRODUCER),
                unit=parts.SECONDS,
            ),
            graph(
                "Failed requests by producer",
                "Requests without a usable response.",
                Query(rate(f"{NAME}failed_requests_total", "instance", "client_id"), PRODUCER),
                unit=parts.PER_SECOND,
            ),
        ],
    )


def _brokers() -> Row:
    requests = "kipmesh_broker_metadata_requests_total"
    return Row(
        "Brokers",
        [
            graph(
                "Metadata requests by kind",
                "Requests of all clients, by what they request: all topics, only brokers, or some topics.",
                Query(rate(requests, "kind"), "{{kind}}"),
                unit=parts.PER_SECOND,
                stacked=True,
            ),
            graph(
                "Metadata requests by broker",
                "Clients may send them to any broker.",
                by_instance(rate(requests, "instance")),
                unit=parts.PER_SECOND,
                stacked=True,
            ),
            graph(
                "Topics in responses",
                "KIP-526 avoids requests for many topics.",
                by_instance(rate("kipmesh_broker_metadata_topics_total", "instance")),
                unit=parts.PER_SECOND,
            ),
        ],
    )


def make() -> Dashboard:
    """Return the dashboard."""
    text = "Metadata of producers: docs/producer_metadata.md and docs/monitoring.md."
    return parts.make(
        "kipmesh-kip-526", "kipmesh: producer metadata (KIP-526)", text, [_summary(), _producers(), _brokers()]
    )
