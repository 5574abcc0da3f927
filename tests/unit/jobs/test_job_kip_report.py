"""Job kip-report: figures, page and lines of small tables, and its options."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
import typer

from kipmesh_jobs.kip_report import job
from kipmesh_jobs.kip_report.job import JOB, Options
from kipmesh_jobs.report import render

ZERO = dict.fromkeys(
    (
        *("entries", "fetches", "incremental_fetches", "session_errors", "fetch_request_bytes", "fetch_response_bytes"),
        *("fetched_record_bytes", "followers_saved_bytes", "consumers_saved_bytes", "saved_cross_rack_bytes"),
        *(
            f"{relation}_rack_{role}_bytes"
            for relation in ("same", "cross", "unknown")
            for role in ("leader", "follower")
        ),
        *("metadata_requests", "metadata_topics_asked", "metadata_requests_for_all", "metadata_bytes"),
        *("produce_requests", "produced_records", "produced_bytes"),
    ),
    0,
)
AT = datetime(2026, 3, 1, 10, tzinfo=UTC)


def tables(**changes: Any) -> dict[str, list[dict[str, Any]]]:
    totals = ZERO | {
        "fetches": 10,
        "fetch_request_bytes": 300,
        "fetch_response_bytes": 1700,
        "fetched_record_bytes": 1000,
        "followers_saved_bytes": 600,
        "consumers_saved_bytes": 400,
        "same_rack_follower_bytes": 700,
        "same_rack_leader_bytes": 100,
        "saved_cross_rack_bytes": 600,
        "cross_rack_leader_bytes": 200,
        "metadata_bytes": 50,
        "metadata_requests": 2,
        "produced_records": 1000,
    }
    return {
        "totals": [totals],
        "by_time": [totals | {"time": AT}, ZERO | {"time": AT.replace(hour=11)}],
        "by_client": [totals | {"client": "<b>reader</b>"}, ZERO | {"client": ""}],
        "snapshots": [],
        "status": [
            {
                "broker": 1,
                "started": 1_772_359_200_000,
                "sampled": 12,
                "entries": 12,
                "dropped_rate": 0,
                "dropped_queue": 0,
                "dropped_write": 0,
                "sample_min": 1.0,
                "sample_max": 1.0,
            }
        ],
        "dead_letters": [],
        **changes,
    }


def snapshot(event: str, **changes: Any) -> dict[str, Any]:
    return {
        "at": AT,
        "broker": 1,
        "event": event,
        "end_offset": 900,
        "records": 30,
        "bytes": 1000,
        "took_ms": 5,
        "replay_records": 900,
        "replay_bytes": 45_000,
        "replay_bytes_exact": False,
        **changes,
    }


def test_figures_are_sums_and_shares_of_the_tables() -> None:
    figures = job.figures(tables())
    assert figures["saved_by_sessions_bytes"] == 1000
    # Sent: 300 bytes of requests, 700 of responses besides the records. Saved: 1,000.
    assert figures["session_saved_share"] == 0.5
    assert (figures["same_rack_bytes"], figures["cross_rack_bytes"], figures["unknown_rack_bytes"]) == (800, 200, 0)
    assert figures["cross_rack_saved_share"] == 0.75
    assert figures["metadata_bytes_per_record"] == 0.05
    assert (figures["entries"], figures["dropped_entries"], figures["dead_letters"]) == (12, 0, 0)


def test_snapshots_are_compared_with_replay_only_if_both_sizes_are_known() -> None:
    rows = [
        snapshot("made"),
        snapshot("made", bytes=3000, replay_bytes=55_000, replay_bytes_exact=True),
        snapshot("fetched", records=None),
        snapshot("fetched", records=None, bytes=None, took_ms=None, replay_bytes=None),
    ]
    figures = job.figures(tables(snapshots=rows))["snapshots"]
    created = figures["made"]
    assert (created["count"], created["bytes"], created["took_ms"]) == (2, 4000, 10)
    assert (created["compared"], created["compared_bytes"], created["replay_bytes"]) == (2, 4000, 100_000)
    assert (created["replay_bytes_estimated"], created["compared_records"], created["replay_records"]) == (1, 60, 1800)
    assert (figures["fetched"]["count"], figures["fetched"]["compared"], figures["fetched"]["bytes"]) == (2, 1, 1000)
    assert figures["loaded"]["count"] == 0


def test_figures_without_traffic_have_no_rates() -> None:
    figures = job.figures(tables(totals=[ZERO]))
    assert figures["metadata_bytes_per_record"] is None
    assert figures["session_saved_share"] is None
    assert figures["cross_rack_saved_share"] is None
    assert "–" in job.lines(figures)[2]


@pytest.mark.parametrize(
    ("least", "most", "dropped", "text"),
    [
        (1.0, 1.0, 0, "figures are exact."),
        (0.25, 0.25, 0, "25 % of the exchanges were sampled, and figures are scaled up to all of them."),
        (0.1, 1.0, 0, "10 % to 100 % of the exchanges"),
        (1.0, 1.0, 7, "Limits dropped 7 entries"),
        (None, None, 0, "only snapshots"),
    ],
)
def test_page_and_lines_state_sampling_and_limits(
    least: float | None, most: float | None, dropped: int, text: str
) -> None:
    status = tables()["status"][0] | {"sample_min": least, "sample_max": most, "dropped_queue": dropped}
    figures = job.figures(tables(status=[status]))
    assert text in job.lines(figures)[-1]
    assert text in job.make(tables(status=[status]), figures, topic="t", interval="hour").values["sampling"]


def test_page_has_each_kip_and_escapes_client_names() -> None:
    job_tables = tables(snapshots=[snapshot("made")], dead_letters=[{"reason": "no known kind", "count": 3}])
    report_page = job.make(job_tables, job.figures(job_tables), topic="__mesh_trace", interval="hour")
    html = render(report_page, generated=AT)
    for kip in ("KIP-227", "KIP-392", "KIP-526", "KIP-630"):
        assert kip in html
    assert "<b>reader" not in html
    assert "&lt;b&gt;reader" in html
    assert html.count("<svg") >= 7
    assert "no known kind" in html


def test_page_lists_only_the_largest_clients() -> None:
    rows = [ZERO | {"client": f"c{n:03}", "fetches": n, "consumers_saved_bytes": n} for n in range(100)]
    job_tables = tables(by_client=rows)
    html = render(job.make(job_tables, job.figures(job_tables), topic="t", interval="day"), generated=AT)
    assert "c099" in html
    assert "c050" not in html


def test_page_states_start_of_the_counts() -> None:
    job_tables = tables()
    figures = job.figures(job_tables)
    html = render(job.make(job_tables, figures, topic="t", interval="hour"), generated=AT)
    assert "count from the start of a broker." in html
    report_page = job.make(job_tables, figures, topic="t", interval="hour", since_ms=1_772_359_200_000)
    assert "started before 2026-03-01 10:00:00 UTC, from its first report" in render(report_page, generated=AT)


def test_page_names_tables_with_omitted_rows() -> None:
    job_tables = tables()
    assert not any("10,000" in line for line in job.lines(job.figures(job_tables)))
    figures = job.figures(job_tables, ["by_client", "snapshots"])
    assert job.lines(figures)[-1].startswith("The page, and figures of single rows, use only 10,000 rows of by_client")
    html = render(job.make(job_tables, figures, topic="t", interval="hour"), generated=AT)
    assert "use only 10,000 rows of by_client, snapshots" in html


def test_options_require_bootstrap() -> None:
    with pytest.raises(typer.BadParameter, match="is required"):
        Options()
    assert Options(bootstrap="b:1").topic == "__mesh_trace"
    assert JOB.name == "kip-report"
