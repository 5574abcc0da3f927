"""The figures of the tables, and the page that shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from kipmesh.spark.jobs.report import (
    Bar,
    BarChart,
    Line,
    LineChart,
    Note,
    Page,
    Section,
    Table,
    Tile,
    binary_size,
    number,
    percent,
)

Row = Mapping[str, Any]
Tables = Mapping[str, Sequence[Row]]

ROWS_MAX: Final = 10_000
"""Of one table that the driver holds, for the page."""
CLIENTS_MAX: Final = 20
"""Clients in a chart, those with the largest values."""
EVENTS: Final = ("made", "fetched", "loaded")


def figures(tables: Tables, cut: Sequence[str] = ()) -> dict[str, Any]:
    """What summary.json holds: the totals, what follows from them, and how much of the trace there is.

    `cut` names the tables of which these are not all rows.
    """
    totals = tables["totals"][0] if tables["totals"] else {}
    found: dict[str, Any] = {name: int(value or 0) for name, value in totals.items()}
    status = tables["status"]
    found["entries"] = sum(row["entries"] for row in status)
    samples = [row[name] for row in status for name in ("sample_min", "sample_max") if row[name] is not None]
    found["sample_min"], found["sample_max"] = (min(samples), max(samples)) if samples else (None, None)
    found["sampled_entries"] = sum(row["sampled"] for row in status)
    found["dropped_entries"] = sum(
        row[name] for row in status for name in ("dropped_rate", "dropped_queue", "dropped_write")
    )
    found["dead_letters"] = sum(row["count"] for row in tables["dead_letters"])
    found["saved_by_sessions_bytes"] = found.get("followers_saved_bytes", 0) + found.get("consumers_saved_bytes", 0)
    for relation in ("same", "cross", "unknown"):
        found[f"{relation}_rack_bytes"] = rack_bytes(found, relation)
    found["session_saved_share"] = saved_share(found)
    found["cross_rack_saved_share"] = _ratio(
        found.get("saved_cross_rack_bytes", 0), found.get("saved_cross_rack_bytes", 0) + found["cross_rack_bytes"]
    )
    found["metadata_bytes_per_record"] = _ratio(found.get("metadata_bytes", 0), found.get("produced_records", 0))
    found["tables_cut"] = list(cut)
    found["snapshots"] = {event: snapshot_figures(tables["snapshots"], event) for event in EVENTS}
    return found


def rack_bytes(row: Row, relation: str) -> int:
    """Bytes that consumers of this relation to the broker's rack read, whatever its role."""
    return int(row.get(f"{relation}_rack_leader_bytes") or 0) + int(row.get(f"{relation}_rack_follower_bytes") or 0)


def saved_share(row: Row) -> float | None:
    """Of all bytes that fetches without sessions would have beside their records, those that sessions saved."""
    saved = (row.get("followers_saved_bytes") or 0) + (row.get("consumers_saved_bytes") or 0)
    sent = (row.get("fetch_request_bytes") or 0) + (row.get("fetch_response_bytes") or 0)
    return _ratio(saved, saved + sent - (row.get("fetched_record_bytes") or 0))


def snapshot_figures(rows: Sequence[Row], event: str) -> dict[str, Any]:
    """Sums over the snapshots of an event. The replay's are over those of which both sides are known."""
    mine = [row for row in rows if row["event"] == event]
    both = [row for row in mine if row["bytes"] is not None and row["replay_bytes"] is not None]
    with_records = [row for row in mine if row["records"] is not None]
    return {
        "count": len(mine),
        "bytes": sum(row["bytes"] or 0 for row in mine),
        "took_ms": sum(row["took_ms"] or 0 for row in mine),
        "compared": len(both),
        "compared_bytes": sum(row["bytes"] for row in both),
        "replay_bytes": sum(row["replay_bytes"] for row in both),
        "replay_bytes_estimated": sum(not row["replay_bytes_exact"] for row in both),
        "compared_records": sum(row["records"] for row in with_records),
        "replay_records": sum(row["replay_records"] for row in with_records),
    }


def lines(found: Mapping[str, Any]) -> tuple[str, ...]:
    """For the terminal."""
    return (
        f"KIP-227: sessions saved {binary_size(found['saved_by_sessions_bytes'])} in {found['fetches']:,} fetches",
        f"KIP-392: {binary_size(found['saved_cross_rack_bytes'])} stayed in their racks,"
        f" {binary_size(found['cross_rack_bytes'])} crossed them",
        f"KIP-526: {_per_record(found['metadata_bytes_per_record'])} of metadata a record,"
        f" {number(found['metadata_requests'])} requests",
        "KIP-630: snapshots " + ", ".join(f"{found['snapshots'][event]['count']} {event}" for event in EVENTS),
        _sampling(found),
        *_cut(tables_cut=found["tables_cut"]),
    )


def _cut(tables_cut: Sequence[str]) -> tuple[str, ...]:
    if not tables_cut:
        return ()
    return (
        f"Of {', '.join(tables_cut)} only {ROWS_MAX:,} rows each are in the page and in figures that are of single"
        " rows: the newest, or of the clients with the most entries. The Parquet has all.",
    )


def make(tables: Tables, found: Mapping[str, Any], *, topic: str, interval: str, since_ms: int | None = None) -> Page:
    """The page."""
    snapshots = found["snapshots"]["made"]
    tiles = [
        Tile("saved by sessions", binary_size(found["saved_by_sessions_bytes"]), "KIP-227, at least"),
        Tile("kept in the rack", binary_size(found["saved_cross_rack_bytes"]), "KIP-392, of consumers"),
        Tile("metadata a record", _per_record(found["metadata_bytes_per_record"]), "KIP-526"),
        Tile("log for a snapshot's byte", _times(snapshots), "KIP-630, bytes of replay"),
    ]
    sections = [
        _sessions(tables, found, interval),
        _racks(tables, found, interval),
        _metadata(tables, found, interval),
        _snapshots(tables, found),
        _trace(tables, found, topic, since_ms),
    ]
    return Page("kip-report", "What the KIPs save", _sampling(found), sections, tiles)


def _sessions(tables: Tables, found: Mapping[str, Any], interval: str) -> Section:
    def saved(row: Row) -> int:
        return int(row["followers_saved_bytes"] + row["consumers_saved_bytes"])

    rows = [
        [
            row["client"],
            row["fetches"],
            row["incremental_fetches"],
            row["fetch_request_bytes"],
            row["fetch_response_bytes"] - row["fetched_record_bytes"],
            saved(row),
            _percent(saved_share(row)),
        ]
        for row in _largest(tables["by_client"], lambda row: row["fetches"])
    ]
    titles = ["client", "fetches", "incremental", "request bytes", "response bytes but records", "bytes saved", "share"]
    return Section(
        "Fetch sessions (KIP-227)",
        f"Full fetches would have had {number(found['saved_by_sessions_bytes'])} bytes more at least:"
        f" {_percent(found['session_saved_share'])} of what is no record. Names of topics are not counted.",
        [
            _by_time(
                tables,
                interval,
                "bytes saved",
                {
                    "followers": lambda row: row["followers_saved_bytes"],
                    "consumers": lambda row: row["consumers_saved_bytes"],
                },
                binary_size,
            ),
            _by_client(tables, "bytes saved by client", saved, binary_size),
            Table(titles, rows),
        ],
    )


def _racks(tables: Tables, found: Mapping[str, Any], interval: str) -> Section:
    titles = ["client", "in the rack", "of it kept by a follower", "across racks", "rack not known"]
    rows = [
        [
            row["client"],
            rack_bytes(row, "same"),
            row["saved_cross_rack_bytes"],
            rack_bytes(row, "cross"),
            rack_bytes(row, "unknown"),
        ]
        for row in _largest(
            tables["by_client"], lambda row: sum(rack_bytes(row, one) for one in ("same", "cross", "unknown"))
        )
    ]
    return Section(
        "The closest replica (KIP-392)",
        f"{number(found['saved_cross_rack_bytes'])} bytes were read from a follower in the client's rack while the"
        f" leader is in another; {number(found['cross_rack_bytes'])} crossed racks.",
        [
            _by_time(
                tables,
                interval,
                "bytes read",
                {
                    "within the rack": lambda row: rack_bytes(row, "same"),
                    "across racks": lambda row: rack_bytes(row, "cross"),
                    "rack not known": lambda row: rack_bytes(row, "unknown"),
                    "would have crossed": lambda row: row["saved_cross_rack_bytes"],
                },
                binary_size,
            ),
            _by_client(
                tables, "cross-rack bytes saved by client", lambda row: row["saved_cross_rack_bytes"], binary_size
            ),
            Table(titles, rows),
        ],
    )


def _metadata(tables: Tables, found: Mapping[str, Any], interval: str) -> Section:
    def per_record(row: Row) -> float | None:
        return _ratio(row["metadata_bytes"], row["produced_records"])

    titles = ["client", "requests", "topics asked", "for all topics", "bytes", "records produced", "bytes a record"]
    rows = [
        [
            row["client"],
            row["metadata_requests"],
            row["metadata_topics_asked"],
            row["metadata_requests_for_all"],
            row["metadata_bytes"],
            row["produced_records"],
            per_record(row),
        ]
        for row in _largest(tables["by_client"], lambda row: row["metadata_bytes"] + row["produced_records"])
    ]
    return Section(
        "Metadata (KIP-526)",
        f"{number(found['metadata_requests'])} metadata requests, {number(found['metadata_requests_for_all'])} of them"
        f" for all topics, beside {number(found['produced_records'])} produced records:"
        f" {_per_record(found['metadata_bytes_per_record'])} a record.",
        [
            _by_time(tables, interval, "metadata bytes a record", {"all clients": per_record}, number),
            _by_client(tables, "metadata bytes by client", lambda row: row["metadata_bytes"], binary_size),
            Table(titles, rows),
        ],
    )


def _snapshots(tables: Tables, found: Mapping[str, Any]) -> Section:
    bars = []
    for group, event in enumerate(EVENTS):
        one = found["snapshots"][event]
        if one["compared"]:
            bars.append(Bar(f"{event}: snapshots", one["compared_bytes"], group=2 * group))
            bars.append(Bar(f"{event}: the log instead", one["replay_bytes"], group=2 * group + 1))
    titles = [
        "at",
        "broker",
        "event",
        "end offset",
        "records",
        "bytes",
        "ms",
        "records of replay",
        "bytes of replay",
        "exact",
    ]
    rows = [
        [
            f"{row['at']:%Y-%m-%d %H:%M:%S}",
            row["broker"],
            row["event"],
            *(row[name] for name in ("end_offset", "records", "bytes", "took_ms", "replay_records", "replay_bytes")),
            row["replay_bytes_exact"] if row["replay_bytes"] is not None else None,
        ]
        for row in tables["snapshots"]
    ]
    return Section(
        "Snapshots (KIP-630)",
        "Beside each snapshot of the metadata stands the log from offset 0 to its end, which would have to be kept,"
        " sent and replayed without it. Where the log's beginning is gone its bytes are estimated by the mean of"
        " what is there; snapshots are always traced, they are not sampled.",
        [BarChart(bars, "bytes", binary_size), Table(titles, rows)],
    )


def _trace(tables: Tables, found: Mapping[str, Any], topic: str, since_ms: int | None) -> Section:
    titles = ["broker", "started", "sampled", "dropped: rate", "queue", "write", "here", "sample from", "to"]
    rows = [
        [
            row["broker"],
            "unknown"
            if row["started"] is None
            else f"{datetime.fromtimestamp(row['started'] / 1000, UTC):%Y-%m-%d %H:%M:%S}",
            *(row[name] for name in ("sampled", "dropped_rate", "dropped_queue", "dropped_write", "entries")),
            *(row[name] for name in ("sample_min", "sample_max")),
        ]
        for row in sorted(tables["status"], key=lambda row: (row["broker"], row["started"] or 0))
    ]
    dead = [[row["reason"], row["count"]] for row in tables["dead_letters"]]
    counted = "Sampled and dropped are a broker's counts since it started"
    if since_ms is not None:
        since = datetime.fromtimestamp(since_ms / 1000, UTC)
        counted += f"; of one that had started before {since:%Y-%m-%d %H:%M:%S} UTC, since its first report after that"
    return Section(
        "The trace",
        f"{number(found['entries'])} entries of topic {topic}. What a limit dropped is counted here and not made up for"
        " in the figures; exchanges that only move the trace itself are not in it.",
        [
            Table(titles, rows),
            Note(f"{counted}. What retention has deleted of the trace is in them."),
            *map(Note, _cut(found["tables_cut"])),
            Note("Values that are no entries:"),
            Table(["reason", "values"], dead),
        ],
    )


def _by_time(
    tables: Tables,
    interval: str,
    label: str,
    values: Mapping[str, Callable[[Row], float | None]],
    form: Callable[[float], str],
) -> LineChart:
    rows = sorted(tables["by_time"], key=lambda row: row["time"])
    times = [_utc(row["time"]).timestamp() for row in rows]
    shown = [
        Line(name, [(at, value(row)) for at, row in zip(times, rows, strict=True)]) for name, value in values.items()
    ]
    text = "%d %b" if interval == "day" else "%d %b %H:%M"
    return LineChart(shown, f"{interval}, UTC", label, lambda at: f"{datetime.fromtimestamp(at, UTC):{text}}", form)


def _by_client(tables: Tables, label: str, value: Callable[[Row], float], form: Callable[[float], str]) -> BarChart:
    rows = [row for row in _largest(tables["by_client"], value) if value(row)]
    return BarChart([Bar(row["client"] or "(no name)", value(row)) for row in rows], label, form)


def _largest(rows: Sequence[Row], value: Callable[[Row], float]) -> list[Row]:
    return sorted(rows, key=lambda row: (-value(row), row["client"] or ""))[:CLIENTS_MAX]


def _utc(time: datetime) -> datetime:
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _percent(share: float | None) -> str:
    return "–" if share is None else percent(share)


def _per_record(value: float | None) -> str:
    return "–" if value is None else f"{number(value)} B"


def _times(snapshots: Mapping[str, Any]) -> str:
    share = _ratio(snapshots["replay_bytes"], snapshots["compared_bytes"])
    return "–" if share is None else f"{number(share)} B"


def _sampling(found: Mapping[str, Any]) -> str:
    least, most = found["sample_min"], found["sample_max"]
    if least is None:
        return "No exchange is in this trace, snapshots only."
    if least == 1:
        text = "Every exchange was sampled: figures are exact"
    else:
        shares = percent(least) if least == most else f"{percent(least)} to {percent(most)}"
        text = f"{shares} of the exchanges were sampled, and figures are scaled up to all of them"
    dropped = found["dropped_entries"]
    missing = (
        f", but for {number(dropped)} entries that limits dropped: figures are too small by so much."
        if dropped
        else "."
    )
    return text + missing
