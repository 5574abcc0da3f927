"""Dashboard of KIP-392: how much consumers read from replicas in their own rack."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.dashboards import parts as p

BYTES = "kipmesh_broker_consumer_fetched_bytes_total"
CASES = "kipmesh_broker_fetch_offset_cases_total"
CROSS, KNOWN, UNKNOWN = 'rack="cross"', 'rack=~"same|cross"', 'rack="unknown"'
FOLLOWER = 'role="follower"'


def _summary() -> p.Row:
    return p.Row(
        "Summary",
        [
            p.number(
                "Read across racks",
                "Share of bytes that consumers with a rack read from brokers in another rack.",
                p.Query(f"{p.all_rate(BYTES, CROSS)} / {p.all_rate(BYTES, KNOWN)}", "share"),
                unit=p.SHARE,
                warn=0.2,
                bad=0.5,
                width=6,
            ),
            p.number(
                "Read across racks",
                "Bytes read across racks, for which cloud providers charge.",
                p.Query(p.all_rate(BYTES, CROSS), "bytes"),
                unit=p.BYTES_A_SECOND,
                width=6,
            ),
            p.number(
                "Served by followers",
                "Share of bytes that consumers read from followers.",
                p.Query(f"{p.all_rate(BYTES, FOLLOWER)} / {p.all_rate(BYTES)}", "share"),
                unit=p.SHARE,
                width=6,
            ),
            p.number(
                "Read without a rack",
                "Share of bytes read where the consumer or the broker has no rack.",
                p.Query(f"{p.all_rate(BYTES, UNKNOWN)} / {p.all_rate(BYTES)}", "share"),
                unit=p.SHARE,
                width=6,
            ),
        ],
    )


def _reads() -> p.Row:
    return p.Row(
        "Reads",
        [
            p.bytes_per_second(
                "Bytes by rack",
                "same: within the rack; cross: from another rack; unknown: the consumer or broker has no rack.",
                p.Query(p.rate(BYTES, "rack"), "{{rack}}"),
                stacked=True,
            ),
            p.bytes_per_second(
                "Bytes by role",
                "Leaders serve consumers that have no replica in their rack.",
                p.Query(p.rate(BYTES, "role"), "{{role}}"),
                stacked=True,
            ),
            p.bytes_per_second(
                "Bytes by broker",
                "With the rack of the broker.",
                p.Query(p.rate(BYTES, "instance", "node_rack", "rack"), "{{instance}} ({{node_rack}}) {{rack}}"),
            ),
            p.per_second(
                "Redirects",
                "Partitions for which the leader returned a preferred read replica, by its id.",
                p.Query(p.rate("kipmesh_broker_fetch_redirects_total", "replica"), "to {{replica}}"),
            ),
            p.per_second(
                "Fetch offset cases",
                "Reads at offsets without records. uncommitted and unavailable are temporary; after too-small and "
                "too-large the consumer queries the leader.",
                p.Query(p.rate(CASES, "case", "role"), "{{case}} at {{role}}s"),
            ),
            p.per_second(
                "Replica selector errors",
                "Errors of replica.selector.class. The leader served the consumer instead.",
                p.Query(
                    p.rate("kipmesh_broker_replica_selector_errors_total", "instance", "error"),
                    "{{instance}} {{error}}",
                ),
            ),
            p.per_second(
                "Fetches by role of the client",
                "replica.fetch.high.watermark.wakeup completes fetches of followers when the high watermark advances. "
                "It increases the number of fetches and reduces the delay of consumers that read from followers.",
                p.Query(p.rate("kipmesh_broker_fetch_requests_total", "role"), "{{role}}s"),
            ),
        ],
    )


def make() -> Dashboard:
    """Return the dashboard."""
    text = "Fetching from the closest replica: docs/closest_replica.md and docs/monitoring.md."
    return p.make("kipmesh-kip-392", "kipmesh: the closest replica (KIP-392)", text, [_summary(), _reads()])
