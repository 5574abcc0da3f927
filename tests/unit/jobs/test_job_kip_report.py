"""What the job kip-report says of tables whose sums are known, and which options it takes."""

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
    one = ZERO | {
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
        "totals": [one],
        "by_time": [one | {"time": AT}, ZERO | {"time": AT.replace(hour=11)}],
        "by_client": [one | {"client": "<b>reader</b>"}, ZERO | {"client": ""}],
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


def test_shares_and_sums_are_those_of_the_tables() -> None:
    found = job.figures(tables())
    assert found["saved_by_sessions_bytes"] == 1000
    # 300 of requests and 700 of responses beside the records were sent, 1,000 were not.
    assert found["session_saved_share"] == 0.5
    assert (found["same_rack_bytes"], found["cross_rack_bytes"], found["unknown_rack_bytes"]) == (800, 200, 0)
    assert found["cross_rack_saved_share"] == 0.75
    assert found["metadata_bytes_per_record"] == 0.05
    assert (found["entries"], found["dropped_entries"], found["dead_letters"]) == (12, 0, 0)


def test_snapshots_are_compared_where_both_sides_are_known() -> None:
    rows = [
        snapshot("made"),
        snapshot("made", bytes=3000, replay_bytes=55_000, replay_bytes_exact=True),
        snapshot("fetched", records=None),
        snapshot("fetched", records=None, bytes=None, took_ms=None, replay_bytes=None),
    ]
    found = job.figures(tables(snapshots=rows))["snapshots"]
    made = found["made"]
    assert (made["count"], made["bytes"], made["took_ms"]) == (2, 4000, 10)
    assert (made["compared"], made["compared_bytes"], made["replay_bytes"]) == (2, 4000, 100_000)
    assert (made["replay_bytes_estimated"], made["compared_records"], made["replay_records"]) == (1, 60, 1800)
    assert (found["fetched"]["count"], found["fetched"]["compared"], found["fetched"]["bytes"]) == (2, 1, 1000)
    assert found["loaded"]["count"] == 0


def test_nothing_produced_is_no_rate() -> None:
    found = job.figures(tables(totals=[ZERO]))
    assert found["metadata_bytes_per_record"] is None
    assert found["session_saved_share"] is None
    assert found["cross_rack_saved_share"] is None
    assert "–" in job.lines(found)[2]


@pytest.mark.parametrize(
    ("least", "most", "dropped", "said"),
    [
        (1.0, 1.0, 0, "figures are exact."),
        (0.25, 0.25, 0, "25 % of the exchanges were sampled, and figures are scaled up to all of them."),
        (0.1, 1.0, 0, "10 % to 100 % of the exchanges"),
        (1.0, 1.0, 7, "Limits dropped 7 entries"),
        (None, None, 0, "only snapshots"),
    ],
)
def test_sampling_is_said(least: float | None, most: float | None, dropped: int, said: str) -> None:
    status = tables()["status"][0] | {"sample_min": least, "sample_max": most, "dropped_queue": dropped}
    found = job.figures(tables(status=[status]))
    assert said in job.lines(found)[-1]
    assert said in job.make(tables(status=[status]), found, topic="t", interval="hour").values["sampling"]


def test_the_page_has_every_kip_and_escapes_what_clients_are_called() -> None:
    filled = tables(snapshots=[snapshot("made")], dead_letters=[{"reason": "no known kind", "count": 3}])
    made = job.make(filled, job.figures(filled), topic="__mesh_trace", interval="hour")
    html = render(made, generated=AT)
    for kip in ("KIP-227", "KIP-392", "KIP-526", "KIP-630"):
        assert kip in html
    assert "<b>reader" not in html
    assert "&lt;b&gt;reader" in html
    assert html.count("<svg") >= 7
    assert "no known kind" in html


def test_many_clients_are_cut_to_the_largest() -> None:
    rows = [ZERO | {"client": f"c{n:03}", "fetches": n, "consumers_saved_bytes": n} for n in range(100)]
    filled = tables(by_client=rows)
    html = render(job.make(filled, job.figures(filled), topic="t", interval="day"), generated=AT)
    assert "c099" in html
    assert "c050" not in html


def test_what_the_counts_are_of_is_said() -> None:
    filled = tables()
    found = job.figures(filled)
    html = render(job.make(filled, found, topic="t", interval="hour"), generated=AT)
    assert "count from the start of a broker." in html
    made = job.make(filled, found, topic="t", interval="hour", since_ms=1_772_359_200_000)
    assert "started before 2026-03-01 10:00:00 UTC, from its first report" in render(made, generated=AT)


def test_tables_of_which_rows_are_left_out_are_named() -> None:
    filled = tables()
    assert not any("10,000" in line for line in job.lines(job.figures(filled)))
    found = job.figures(filled, ["by_client", "snapshots"])
    assert job.lines(found)[-1].startswith("The page, and figures of single rows, use only 10,000 rows of by_client")
    html = render(job.make(filled, found, topic="t", interval="hour"), generated=AT)
    assert "use only 10,000 rows of by_client, snapshots" in html


def test_it_wants_a_mesh() -> None:
    with pytest.raises(typer.BadParameter, match="is required"):
        Options()
    assert Options(bootstrap="b:1").topic == "__mesh_trace"
    assert JOB.name == "kip-report"
