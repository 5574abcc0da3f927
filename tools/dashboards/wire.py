"""Dashboard of the Kafka protocol: connections, requests, errors, and memory of clients."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.dashboards import parts
from tools.dashboards.parts import Query, Row, all_rate, by_instance, graph, now, number, rate, total

CONNECTIONS = "kafka_server_socket_server_metrics_connection_"
REQUESTS = "kafka_network_requestmetrics_"
WIRE = "kipmesh_wire_"
SASL = 'reason=~"authentication|unauthenticated"'
NOT_IDLE = 'reason!="idle"'


def _summary() -> Row:
    return Row(
        "Summary",
        [
            number(
                "Connections",
                "Client connections of all brokers.",
                Query(f"sum({now(f'{CONNECTIONS}count')})", "connections"),
            ),
            number(
                "Requests",
                "Responses per second.",
                Query(all_rate(f"{REQUESTS}requests_total"), "requests"),
                unit=parts.PER_SECOND,
            ),
            number(
                "Errors",
                "Errors in responses. Some are normal, such as an evicted fetch session or a required member id.",
                Query(all_rate(f"{REQUESTS}errors_total"), "errors"),
                unit=parts.PER_SECOND,
            ),
            number(
                "Connections refused",
                "Connections above max.connections or max.connections.per.ip.",
                Query(all_rate(f"{WIRE}connections_refused_total"), "refused"),
                unit=parts.PER_SECOND,
                bad=0.001,
            ),
            number(
                "Failed authentications",
                "SASL listeners: wrong password, or no authentication in time.",
                Query(all_rate(f"{WIRE}connections_ended_total", SASL), "failed"),
                unit=parts.PER_SECOND,
                warn=0.001,
                bad=1,
            ),
            number(
                "Invalid frames",
                "Malformed frames, and requests with unsupported APIs or versions.",
                Query(all_rate(f"{WIRE}malformed_frames_total"), "frames"),
                unit=parts.PER_SECOND,
                warn=0.001,
            ),
        ],
    )


def _connections() -> Row:
    return Row(
        "Connections",
        [
            graph(
                "Connections by listener",
                "Open connections.",
                Query(total(f"{CONNECTIONS}count", "instance", "listener"), "{{instance}} {{listener}}"),
                stacked=True,
            ),
            graph(
                "Opened and closed",
                "A high rate indicates clients that fail and reconnect, or applications that do not reuse clients.",
                Query(rate(f"{CONNECTIONS}creation_total", "instance"), "{{instance}} opened"),
                Query(rate(f"{CONNECTIONS}close_total", "instance"), "{{instance}} closed"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Closed by brokers",
                "By reason (docs/wire.md). slow: does not read responses; stalled: stops within a request.",
                Query(rate(f"{WIRE}connections_ended_total", "reason", where=NOT_IDLE), "{{reason}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Refused",
                "Refused connections by limit.",
                Query(rate(f"{WIRE}connections_refused_total", "instance", "limit"), "{{instance}} {{limit}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Closed idle connections",
                "Connections idle for connections.max.idle.ms.",
                by_instance(rate(f"{WIRE}connections_ended_total", "instance", where='reason="idle"')),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Client software",
                "Name and version that clients report, by opened connections.",
                Query(rate(f"{WIRE}client_software_total", "name", "version"), "{{name}} {{version}}"),
                unit=parts.PER_SECOND,
            ),
        ],
    )


def _requests() -> Row:
    return Row(
        "Requests",
        [
            graph(
                "Requests by API",
                "Responses per second.",
                Query(rate(f"{REQUESTS}requests_total", "request"), "{{request}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Errors",
                "Errors in responses, counted per partition and topic, by API and error.",
                Query(rate(f"{REQUESTS}errors_total", "request", "error"), "{{request}} {{error}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Request time",
                "99th percentile, including the wait of fetches for bytes and of acks=all for replicas.",
                Query(parts.quantile(0.99, f"{WIRE}request_seconds", "request"), "{{request}}"),
                unit=parts.SECONDS,
            ),
            graph(
                "Bytes of requests",
                "By API.",
                Query(rate(f"{REQUESTS}requestbytes_total", "request"), "{{request}}"),
                unit=parts.BYTES_A_SECOND,
                stacked=True,
            ),
            graph(
                "Bytes of responses",
                "By API.",
                Query(rate(f"{REQUESTS}responsebytes_total", "request"), "{{request}}"),
                unit=parts.BYTES_A_SECOND,
                stacked=True,
            ),
            graph(
                "Versions",
                "Versions of the most frequent APIs, which show outdated clients.",
                Query(
                    rate(f"{REQUESTS}requests_total", "request", "version", where='request=~"Produce|Fetch|Metadata"'),
                    "{{request}} {{version}}",
                ),
                unit=parts.PER_SECOND,
            ),
        ],
    )


def _memory() -> Row:
    return Row(
        "Memory",
        [
            graph(
                "Requests in flight",
                "Bytes of requests without a response. At queued.max.request.bytes brokers stop reading requests.",
                by_instance(now(f"{WIRE}queued_request_bytes")),
                unit=parts.BYTES,
            ),
            graph(
                "Unsent responses",
                "Bytes that clients have not read. Fetch responses share the rest of queued.max.response.bytes.",
                by_instance(now(f"{WIRE}unsent_response_bytes")),
                unit=parts.BYTES,
            ),
        ],
    )


def make() -> Dashboard:
    """Return the dashboard."""
    text = "Clients of the Kafka protocol. See docs/wire.md for the limits and docs/monitoring.md for actions."
    rows = [_summary(), _connections(), _requests(), _memory()]
    return parts.make("kipmesh-wire", "kipmesh: Kafka protocol", text, rows)
