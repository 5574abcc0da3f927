"""Dashboard of KIP-392: how much consumers read from replicas in their own rack."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.dashboards import parts
from tools.dashboards.parts import Query, Row, all_rate, graph, number, rate

BYTES = "kipmesh_broker_consumer_fetched_bytes_total"
CASES = "kipmesh_broker_fetch_offset_cases_total"
CROSS, KNOWN, UNKNOWN = 'rack="cross"', 'rack=~"same|cross"', 'rack="unknown"'
FOLLOWER = 'role="follower"'


def _summary() -> Row:
    return Row(
        "Summary",
        [
            number(
                "Read across racks",
                "Share of bytes that consumers with a rack read from brokers in another rack.",
                Query(f"{all_rate(BYTES, CROSS)} / {all_rate(BYTES, KNOWN)}", "share"),
                unit=parts.SHARE,
                warn=0.2,
                bad=0.5,
                width=6,
            ),
            number(
                "Read across racks",
                "Bytes read across racks, for which cloud providers charge.",
                Query(all_rate(BYTES, CROSS), "bytes"),
                unit=parts.BYTES_A_SECOND,
                width=6,
            ),
            number(
                "Served by followers",
                "Share of bytes that consumers read from followers.",
                Query(f"{all_rate(BYTES, FOLLOWER)} / {all_rate(BYTES)}", "share"),
                unit=parts.SHARE,
                width=6,
            ),
            number(
                "Read without a rack",
                "Share of bytes read where the consumer or the broker has no rack.",
                Query(f"{all_rate(BYTES, UNKNOWN)} / {all_rate(BYTES)}", "share"),
                unit=parts.SHARE,
                width=6,
            ),
        ],
    )


def _reads() -> Row:
    return Row(
        "Reads",
        [
            graph(
                "Bytes by rack",
                "same: within the rack; cross: from another rack; unknown: the consumer or broker has no rack.",
                Query(rate(BYTES, "rack"), "{{rack}}"),
                unit=parts.BYTES_A_SECOND,
                stacked=True,
            ),
            graph(
                "Bytes by role",
                "Leaders serve consumers that have no replica in their rack.",
                Query(rate(BYTES, "role"), "{{role}}"),
                unit=parts.BYTES_A_SECOND,
                stacked=True,
            ),
            graph(
                "Bytes by broker",
                "With the rack of the broker.",
                Query(rate(BYTES, "instance", "node_rack", "rack"), "{{instance}} ({{node_rack}}) {{rack}}"),
                unit=parts.BYTES_A_SECOND,
            ),
            graph(
                "Redirects",
                "Partitions for which the leader returned a preferred read replica, by its id.",
                Query(rate("kipmesh_broker_fetch_redirects_total", "replica"), "to {{replica}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Fetch offset cases",
                "Reads at offsets without records. uncommitted and unavailable are temporary; after too-small and "
                "too-large the consumer queries the leader.",
                Query(rate(CASES, "case", "role"), "{{case}} at {{role}}s"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Replica selector errors",
                "Errors of replica.selector.class. The leader served the consumer instead.",
                Query(
                    rate("kipmesh_broker_replica_selector_errors_total", "instance", "error"), "{{instance}} {{error}}"
                ),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Fetches by role of the client",
                "replica.fetch.high.watermark.wakeup completes fetches of followers when the high watermark advances. "
                "It increases the number of fetches and reduces the delay of consumers that read from followers.",
                Query(rate("kipmesh_broker_fetch_requests_total", "role"), "{{role}}s"),
                unit=parts.PER_SECOND,
            ),
        ],
    )


def make() -> Dashboard:
    """Return the dashboard."""
    text = "Fetching from the closest replica: docs/closest_replica.md and docs/monitoring.md."
    return parts.make("kipmesh-kip-392", "kipmesh: the closest replica (KIP-392)", text, [_summary(), _reads()])
