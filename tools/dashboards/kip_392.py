"""KIP-392: whether consumers read from the replica in their own rack, and what that costs and saves."""

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
        "In short",
        [
            number(
                "Read across racks",
                "Share of the bytes that consumers with a rack read from brokers of another one.",
                Query(f"{all_rate(BYTES, CROSS)} / {all_rate(BYTES, KNOWN)}", "share"),
                unit=parts.SHARE,
                warn=0.2,
                bad=0.5,
                width=6,
            ),
            number(
                "Read across racks",
                "The same in bytes: what a provider charges for.",
                Query(all_rate(BYTES, CROSS), "bytes"),
                unit=parts.BYTES_A_SECOND,
                width=6,
            ),
            number(
                "Served by followers",
                "Share of what consumers read.",
                Query(f"{all_rate(BYTES, FOLLOWER)} / {all_rate(BYTES)}", "share"),
                unit=parts.SHARE,
                width=6,
            ),
            number(
                "Read without a rack",
                "Share of what consumers read where they, or the broker, name no rack: nobody can serve these nearby.",
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
                "same: within the rack; cross: from another one; unknown: one of the two has none.",
                Query(rate(BYTES, "rack"), "{{rack}}"),
                unit=parts.BYTES_A_SECOND,
                stacked=True,
            ),
            graph(
                "Bytes by role",
                "Leaders serve whoever has no replica nearby.",
                Query(rate(BYTES, "role"), "{{role}}"),
                unit=parts.BYTES_A_SECOND,
                stacked=True,
            ),
            graph(
                "Bytes by broker",
                "With the rack that the broker is in.",
                Query(rate(BYTES, "instance", "node_rack", "rack"), "{{instance}} ({{node_rack}}) {{rack}}"),
                unit=parts.BYTES_A_SECOND,
            ),
            graph(
                "Redirects",
                "Partitions of fetches that leaders sent to another replica, by that replica's id.",
                Query(rate("kipmesh_broker_fetch_redirects_total", "replica"), "to {{replica}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "The four cases",
                "Reads at offsets without records: uncommitted and unavailable pass by themselves; too-small and "
                "too-large make the consumer ask the leader.",
                Query(rate(CASES, "case", "role"), "{{case}} at {{role}}s"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Errors of selectors",
                "What replica.selector.class did wrong; the leader was taken instead.",
                Query(
                    rate("kipmesh_broker_replica_selector_errors_total", "instance", "error"), "{{instance}} {{error}}"
                ),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Fetches by who asked",
                "Followers are answered as soon as the high watermark moves (replica.fetch.high.watermark.wakeup), "
                "which costs requests and saves consumers nearby the wait.",
                Query(rate("kipmesh_broker_fetch_requests_total", "role"), "{{role}}s"),
                unit=parts.PER_SECOND,
            ),
        ],
    )


def make() -> Dashboard:
    """The dashboard."""
    text = "Fetching from the closest replica: docs/closest_replica.md and docs/monitoring.md."
    return parts.make("kipmesh-kip-392", "kipmesh: the closest replica (KIP-392)", text, [_summary(), _reads()])
