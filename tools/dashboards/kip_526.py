"""KIP-526: what producers ask of metadata. The numbers are the producers' own (`kipmesh.client.producer.exporter`)."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.dashboards import parts
from tools.dashboards.parts import Query, Row, all_rate, by_instance, graph, now, number, rate

NAME = "kipmesh_producer_metadata_"
PRODUCER = "{{instance}} {{client_id}}"


def _summary() -> Row:
    return Row(
        "In short",
        [
            number(
                "Producers",
                "That export their numbers.",
                Query(f"count({now(f'{NAME}cached_topics')})", "producers"),
                width=6,
            ),
            number(
                "Metadata requests",
                "Of all of them. Two a second of one producer, for long, is a storm.",
                Query(all_rate(f"{NAME}requests_total"), "requests"),
                unit=parts.PER_SECOND,
                width=6,
            ),
            number(
                "Topics in each request",
                "Metadata is asked for a few topics at a time.",
                Query(f"{all_rate(f'{NAME}topics_total')} / ({all_rate(f'{NAME}requests_total')} > 0)", "topics"),
                width=6,
            ),
            number(
                "Failed requests",
                "Without a usable answer; the producer asks the next broker.",
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
                "Urgent: a record waits for the answer, or the topic's leader moved. Others keep metadata fresh.",
                Query(rate(f"{NAME}requests_total", "urgency"), "{{urgency}}"),
                unit=parts.PER_SECOND,
                stacked=True,
            ),
            graph(
                "Topics asked for, by urgency",
                "Many urgent ones for long: topics that do not exist, or leaders that keep moving.",
                Query(rate(f"{NAME}topics_total", "urgency"), "{{urgency}}"),
                unit=parts.PER_SECOND,
                stacked=True,
            ),
            graph(
                "Bytes of metadata",
                "Requests and answers.",
                Query(rate(f"{NAME}bytes_total", "urgency"), "{{urgency}}"),
                unit=parts.BYTES_A_SECOND,
                stacked=True,
            ),
            graph(
                "Requests by producer",
                "The ten that ask most.",
                Query(f"topk(10, {rate(f'{NAME}requests_total', 'instance', 'client_id')})", PRODUCER),
                unit=parts.PER_SECOND,
            ),
            graph("Topics that are known", "Cached metadata.", Query(now(f"{NAME}cached_topics"), PRODUCER)),
            graph(
                "Topics forgotten",
                "Nothing was sent to them for metadata.evict.ms.",
                Query(rate(f"{NAME}evictions_total", "instance", "client_id"), PRODUCER),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Time that send waited",
                "Seconds of waiting in a second, all calls together: 1 is one task that does nothing else.",
                Query(rate(f"{NAME}blocked_seconds_total", "instance", "client_id"), PRODUCER),
                unit=parts.SECONDS,
            ),
            graph(
                "Failed requests by producer",
                "Without a usable answer.",
                Query(rate(f"{NAME}failed_requests_total", "instance", "client_id"), PRODUCER),
                unit=parts.PER_SECOND,
            ),
        ],
    )


def _brokers() -> Row:
    asked = "kipmesh_broker_metadata_requests_total"
    return Row(
        "As brokers see it",
        [
            graph(
                "Metadata requests by kind",
                "Of all clients, those that export nothing too: for all topics, the brokers alone, or some topics.",
                Query(rate(asked, "kind"), "{{kind}}"),
                unit=parts.PER_SECOND,
                stacked=True,
            ),
            graph(
                "Metadata requests by broker",
                "Clients ask any broker.",
                by_instance(rate(asked, "instance")),
                unit=parts.PER_SECOND,
                stacked=True,
            ),
            graph(
                "Topics told",
                "In the answers. Many in each is what KIP-526 is there to avoid.",
                by_instance(rate("kipmesh_broker_metadata_topics_total", "instance")),
                unit=parts.PER_SECOND,
            ),
        ],
    )


def make() -> Dashboard:
    """The dashboard."""
    text = "Producers' metadata: docs/producer_metadata.md and docs/monitoring.md."
    return parts.make(
        "kipmesh-kip-526", "kipmesh: producers' metadata (KIP-526)", text, [_summary(), _producers(), _brokers()]
    )
