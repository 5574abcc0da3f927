"""Dashboard of the Kafka protocol: connections, requests, errors, and memory of clients."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.dashboards import parts as p

CONNECTIONS = "kafka_server_socket_server_metrics_connection_"
REQUESTS = "kafka_network_requestmetrics_"
WIRE = "kipmesh_wire_"
SASL = 'reason=~"authentication|unauthenticated"'
NOT_IDLE = 'reason!="idle"'


def _summary() -> p.Row:
    return p.Row(
        "Summary",
        [
            p.number(
                "Connections",
                "Client connections of all brokers.",
                p.Query(f"sum({p.now(f'{CONNECTIONS}count')})", "connections"),
            ),
            p.number(
                "Requests",
                "Responses per second.",
                p.Query(p.all_rate(f"{REQUESTS}requests_total"), "requests"),
                unit=p.PER_SECOND,
            ),
            p.number(
                "Errors",
                "Errors in responses. Some are normal, such as an evicted fetch session or a required member id.",
                p.Query(p.all_rate(f"{REQUESTS}errors_total"), "errors"),
                unit=p.PER_SECOND,
            ),
            p.number(
                "Connections refused",
                "Connections above max.connections or max.connections.per.ip.",
                p.Query(p.all_rate(f"{WIRE}connections_refused_total"), "refused"),
                unit=p.PER_SECOND,
                bad=0.001,
            ),
            p.number(
                "Failed authentications",
                "SASL listeners: wrong password, or no authentication in time.",
                p.Query(p.all_rate(f"{WIRE}connections_ended_total", SASL), "failed"),
                unit=p.PER_SECOND,
                warn=0.001,
                bad=1,
            ),
            p.number(
                "Invalid frames",
                "Malformed frames, and requests with unsupported APIs or versions.",
                p.Query(p.all_rate(f"{WIRE}malformed_frames_total"), "frames"),
                unit=p.PER_SECOND,
                warn=0.001,
            ),
        ],
    )


def _connections() -> p.Row:
    return p.Row(
        "Connections",
        [
            p.graph(
                "Connections by listener",
                "Open connections.",
                p.Query(p.total(f"{CONNECTIONS}count", "instance", "listener"), "{{instance}} {{listener}}"),
                stacked=True,
            ),
            p.per_second(
                "Opened and closed",
                "A high rate indicates clients that fail and reconnect, or applications that do not reuse clients.",
                p.Query(p.rate(f"{CONNECTIONS}creation_total", "instance"), "{{instance}} opened"),
                p.Query(p.rate(f"{CONNECTIONS}close_total", "instance"), "{{instance}} closed"),
            ),
            p.per_second(
                "Closed by brokers",
                "By reason (docs/wire.md). slow: does not read responses; stalled: stops within a request.",
                p.Query(p.rate(f"{WIRE}connections_ended_total", "reason", where=NOT_IDLE), "{{reason}}"),
            ),
            p.per_second(
                "Refused",
                "Refused connections by limit.",
                p.Query(p.rate(f"{WIRE}connections_refused_total", "instance", "limit"), "{{instance}} {{limit}}"),
            ),
            p.per_second(
                "Closed idle connections",
                "Connections idle for connections.max.idle.ms.",
                p.by_instance(p.rate(f"{WIRE}connections_ended_total", "instance", where='reason="idle"')),
            ),
            p.per_second(
                "Client software",
                "Name and version that clients report, by opened connections.",
                p.Query(p.rate(f"{WIRE}client_software_total", "name", "version"), "{{name}} {{version}}"),
            ),
        ],
    )


def _requests() -> p.Row:
    return p.Row(
        "Requests",
        [
            p.per_second(
                "Requests by API",
                "Responses per second.",
                p.Query(p.rate(f"{REQUESTS}requests_total", "request"), "{{request}}"),
            ),
            p.per_second(
                "Errors",
                "Errors in responses, counted per partition and topic, by API and error.",
                p.Query(p.rate(f"{REQUESTS}errors_total", "request", "error"), "{{request}} {{error}}"),
            ),
            p.graph(
                "Request time",
                "99th percentile, including the wait of fetches for bytes and of acks=all for replicas.",
                p.Query(p.quantile(0.99, f"{WIRE}request_seconds", "request"), "{{request}}"),
                unit=p.SECONDS,
            ),
            p.bytes_per_second(
                "Bytes of requests",
                "By API.",
                p.Query(p.rate(f"{REQUESTS}requestbytes_total", "request"), "{{request}}"),
                stacked=True,
            ),
            p.bytes_per_second(
                "Bytes of responses",
                "By API.",
                p.Query(p.rate(f"{REQUESTS}responsebytes_total", "request"), "{{request}}"),
                stacked=True,
            ),
            p.per_second(
                "Versions",
                "Versions of the most frequent APIs, which show outdated clients.",
                p.Query(
                    p.rate(
                        f"{REQUESTS}requests_total", "request", "version", where='request=~"Produce|Fetch|Metadata"'
                    ),
                    "{{request}} {{version}}",
                ),
            ),
        ],
    )


def _memory() -> p.Row:
    return p.Row(
        "Memory",
        [
            p.graph(
                "Requests in flight",
                "Bytes of requests without a response. At queued.max.request.bytes brokers stop reading requests.",
                p.by_instance(p.now(f"{WIRE}queued_request_bytes")),
                unit=p.BYTES,
            ),
            p.graph(
                "Unsent responses",
                "Bytes that clients have not read. Fetch responses share the rest of queued.max.response.bytes.",
                p.by_instance(p.now(f"{WIRE}unsent_response_bytes")),
                unit=p.BYTES,
            ),
        ],
    )


def make() -> Dashboard:
    """Return the dashboard."""
    text = "Clients of the Kafka protocol. See docs/wire.md for the limits and docs/monitoring.md for actions."
    rows = [_summary(), _connections(), _requests(), _memory()]
    return p.make("kipmesh-wire", "kipmesh: Kafka protocol", text, rows)
