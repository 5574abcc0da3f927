"""The Kafka protocol: who is connected, what they ask, what goes wrong, and what they make the brokers hold."""

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
        "In short",
        [
            number(
                "Connections",
                "Of clients, to all brokers.",
                Query(f"sum({now(f'{CONNECTIONS}count')})", "connections"),
            ),
            number(
                "Requests",
                "Answered in a second.",
                Query(all_rate(f"{REQUESTS}requests_total"), "requests"),
                unit=parts.PER_SECOND,
            ),
            number(
                "Errors",
                "In answers. Some belong to the protocol: a fetch session is gone, a member id is required.",
                Query(all_rate(f"{REQUESTS}errors_total"), "errors"),
                unit=parts.PER_SECOND,
            ),
            number(
                "Connections refused",
                "Beyond max.connections or max.connections.per.ip.",
                Query(all_rate(f"{WIRE}connections_refused_total"), "refused"),
                unit=parts.PER_SECOND,
                bad=0.001,
            ),
            number(
                "Failed authentications",
                "Of listeners with SASL: a wrong password, or none in time.",
                Query(all_rate(f"{WIRE}connections_ended_total", SASL), "failed"),
                unit=parts.PER_SECOND,
                warn=0.001,
                bad=1,
            ),
            number(
                "No requests",
                "Frames that are none, or of APIs and versions that are not supported.",
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
                "Those that are open.",
                Query(total(f"{CONNECTIONS}count", "instance", "listener"), "{{instance}} {{listener}}"),
                stacked=True,
            ),
            graph(
                "Opened and closed",
                "A client that connects again and again does not get what it wants, or is new for each thing it does.",
                Query(rate(f"{CONNECTIONS}creation_total", "instance"), "{{instance}} opened"),
                Query(rate(f"{CONNECTIONS}close_total", "instance"), "{{instance}} closed"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Closed by brokers",
                "Why: docs/wire.md. Slow ones do not take their answers, stalled ones stop within a request.",
                Query(rate(f"{WIRE}connections_ended_total", "reason", where=NOT_IDLE), "{{reason}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Refused",
                "By the limit that was reached.",
                Query(rate(f"{WIRE}connections_refused_total", "instance", "limit"), "{{instance}} {{limit}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Idle ones closed",
                "After connections.max.idle.ms.",
                by_instance(rate(f"{WIRE}connections_ended_total", "instance", where='reason="idle"')),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Software",
                "What clients say they are, by connections that were opened.",
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
                "Answered.",
                Query(rate(f"{REQUESTS}requests_total", "request"), "{{request}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Errors",
                "In answers, each partition's and topic's, by API and error.",
                Query(rate(f"{REQUESTS}errors_total", "request", "error"), "{{request}} {{error}}"),
                unit=parts.PER_SECOND,
            ),
            graph(
                "Time of requests",
                "99 % are answered within this, with the time that a fetch waits for bytes, or acks=all for replicas.",
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
                "Of what is asked most: old clients are seen here.",
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
                "Bytes that are received or not answered yet; all wait at queued.max.request.bytes.",
                by_instance(now(f"{WIRE}queued_request_bytes")),
                unit=parts.BYTES,
            ),
            graph(
                "Responses not taken",
                "Bytes that clients do not read. A fetch gets what they leave of queued.max.response.bytes.",
                by_instance(now(f"{WIRE}unsent_response_bytes")),
                unit=parts.BYTES,
            ),
        ],
    )


def make() -> Dashboard:
    """The dashboard."""
    text = "Clients of Kafka's own protocol. docs/wire.md says what each limit does, docs/monitoring.md what to do."
    rows = [_summary(), _connections(), _requests(), _memory()]
    return parts.make("kipmesh-wire", "kipmesh: the Kafka protocol", text, rows)
