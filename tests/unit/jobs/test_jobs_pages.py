"""Pages of the jobs audit, flights and demo from small tables: all sections exist, hostile text is escaped."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

from kipmesh_jobs.audit import job as audit
from kipmesh_jobs.audit.inventory import Finding
from kipmesh_jobs.demo.run import make_page as demo_page
from kipmesh_jobs.flights.job import Options
from kipmesh_jobs.flights.job import make_page as flights_page
from kipmesh_jobs.flights.results import Samples
from kipmesh_jobs.report import Check, Page, Stage, render

NOW = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
HOSTILE = "<b>$x$&</b>"
DAYS = [date(2013, 1, 1) + timedelta(days=n) for n in range(30)]
CHECKS = [Check("Sums are equal", True, HOSTILE), Check("Nothing is missing", False, "1 of 2")]


def render_checked(page: Page) -> str:
    html = render(page, generated=NOW)
    assert "<b>$x$" not in html
    assert "&lt;b&gt;$x$&amp;" in html
    return html


def group(**keys: Any) -> dict[str, Any]:
    """A row of a table of delays."""
    measures = {"flights": 40, "departures": 38, "cancelled": 2, "mean_delay": 7.5, "on_time": 30, "miles": 900}
    return {**keys, **measures, "p10": -4.0, "p50": 1.0, "p75": 9.0, "p90": 31.0, "p99": 80.0}


def tables() -> dict[str, list[dict[str, Any]]]:
    nothing_left = dict.fromkeys(("mean_delay", "p10", "p50", "p75", "p90", "p99"))
    return {
        "daily": [group(origin=origin, date=day) for origin in ("EWR", "JFK") for day in DAYS],
        "daily_all": [group(date=day) for day in DAYS],
        "origins": [group(origin=origin) for origin in ("EWR", "JFK")],
        "carriers": [
            group(carrier="AA", airline=HOSTILE),
            group(carrier="ZZ", airline=None) | nothing_left | {"departures": 0},
        ],
        "clock": [group(weekday=day, hour=hour) for day in range(7) for hour in (None, 6, 18)][1:],
        "destinations": [group(dest="LAX", dest_name="Los Angeles"), group(dest="YYY", dest_name=None)],
        "wind": [group(wind_speed=speed) for speed in (None, 0, 30)],
        "visibility": [group(visib=miles) for miles in (None, 0, 10)],
        "rain": [group(rain=name) for name in ("heavy rain", None, "dry")],
        "plane_age": [group(age=age) for age in (None, 0, 30)],
        "legs": [{"leg": leg, "mean_delay": 3.0 * leg, "gained": 1.0 if leg > 1 else None} for leg in (1, 2, 3)],
        "rotation_sizes": [{"departures": count, "rotations": 9} for count in (1, 2, 20)],
        "windows_daily": [
            {"day": day, "origin": "JFK", "departures": 9 if day.day > 2 else 0, "delay_sum": 90, "cancelled": day.day}
            for day in DAYS
        ],
    }


def test_audit_page_shows_divergence_and_findings() -> None:
    location = {"file": "/a/0.log", "position": 61, "digest": "ab" * 16, "leader_epoch": 3, "crc_ok": False}
    first = {
        "topic": HOSTILE,
        "partition": 0,
        "offset": 7,
        "replicas": [
            {"replica": "a", **location},
            {"replica": "b", "file": None, "position": None, "digest": None},
        ],
    }
    findings = [
        Finding("divergence", "a", HOSTILE, 0, 7, "/a/0.log", "they differ", 61, "b"),
        Finding("torn", "a", "t", 1, None, "/a/1.log", "12 bytes"),
    ]
    counts = ("batches", "bytes", "segments", "logs", "errors", "warnings", "pairs", "pairs_agreed", "snapshots")
    summary = {
        **dict.fromkeys(counts, 1_234),
        "passed": False,
        "replicas": ["a", "b"],
        "first_divergence": first,
        "findings": {"divergence": 1, "torn": 1},
    }
    pair = ("from", "to", "agrees_to", "must_agree_to", "equal", "differences", "is_violated")
    agreement = [{"topic": "t", "partition": 0, "a": "a", "b": "b", **dict.fromkeys(pair, 5)}]
    log = ("start", "end", "high_watermark", "cleaned_to", "batches", "bytes")
    logs = [{"topic": "t", "partition": 0, "replica": name, **dict.fromkeys(log, 2_048)} for name in ("a", "a", "b")]
    html = render_checked(audit.make_page(summary, findings, logs, agreement))
    for text in (
        "Replicas differ or are damaged",
        "1,234 batches (1.21 KiB) in 1,234 segments",
        "First divergence",
        "has abababababab at /a/0.log:61 (wrong CRC); b has no batch",
        '<td class="text">a, b</td>',
        "replicas differ where they must be",
        "4 KiB",
        "The audited files were not changed.",
    ):
        assert text in html
    assert html.count("<h2>") == 4
    assert html.count("<svg") == 2


def test_flights_page_has_all_sections() -> None:
    record = {"topic": "flights", "partition": 2, "offset": 9}
    shown_rows = Samples(
        dead=[{**record, "reason": "not JSON", "key": b"AA", "value": HOSTILE.encode() + b"\xff" * 100}],
        dead_reasons=[{"reason": "not JSON", "count": 3}],
        late=[
            {
                **record,
                "stream": "windows",
                "carrier": "AA",
                "flight": 1,
                "event_time": NOW,
                "watermark": NOW,
                "late_by": "1 day, 0:00:00",
            }
        ],
        rotations=[{"tailnum": "N1", "begin": NOW, "departures": 2, "way": "JFK→LAX", "delays": "1, –"}],
    )
    names = ("flights", "cancelled", "rotations", "late_windows", "late_rotations", "dead_letters")
    html = render_checked(flights_page(tables(), dict.fromkeys(names, 1_500), CHECKS, shown_rows, Options()))
    for text in (
        "1,500 flights of topic flights of a temporary cluster",
        "Windows of 1 hour of the scheduled departure, closed 7 days",
        "flights-2 @ 9",
        "2026-01-02 03:04",
        "1 day, 0:00:00",
        "JFK→LAX",
        "20 departures or more",
        "Los Angeles",
        "7.50 min",
        "1 of 2",
        "30+ mph",
        "…</td>",
    ):
        assert text in html
    assert html.count("<h2>") == 8
    assert html.count("<svg") == 12
    assert "No values" not in html


def test_demo_page_shows_flights_and_run() -> None:
    partition = {"partition": 0, "records": 60, "size_bytes": 9_000, "high_watermark": 60, "identical": True}
    facts = {
        "passed": True,
        "topic": "flights",
        "replication_factor": 3,
        "records": 60,
        "payload_bytes": 5e6,
        "stream_batches": 4,
        "total_seconds": 12.5,
        "read_records_per_second": 1e5,
        "sample_url": "GET http://x/",
        "produce_records_per_second": 2e5,
        "produce_mb_per_second": 31.0,
        "stream_records_per_second": 3e4,
        "checks": [check._asdict() for check in CHECKS],
        "nodes": [{"name": "leader-1", "role": "leader", "rack": "rack-1"}],
        "partitions": [{**partition, "replicas": ["leader-1", "follower-1"], "sha256": "c" * 64}],
    }
    stages = [Stage("Produce, acks=all", 1.5), Stage("Prove it", 2.0)]
    html = render_checked(demo_page(tables(), facts, stages, ['{"a": 1}']))
    for text in (
        "<title>30 days of flights out of New York</title>",
        "80 scheduled departures from 01 Jan 2013 to 30 Jan 2013",
        "200,000/s",
        "31.0 MB/s, acknowledged by all",
        "EWR Newark",
        "0–5: 5 % cancelled",
        "30+: 5 % cancelled",
        "c" * 16 + "<",
        "leader-1, follower-1",
        "1.5 s",
        "{&#34;a&#34;: 1}",
        'id="smoothing3"',
    ):
        assert text in html
    assert "c" * 17 not in html
    assert html.count("<svg") == 10
    assert "<script src" not in html
    assert "default-src 'none'" in html
