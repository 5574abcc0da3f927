"""The flights job: results of a small sample against a sequential computation, and reasons of dead letters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

from kipmesh.cluster import LocalCluster
from kipmesh_jobs.flights import dataset, feed, values
from kipmesh_jobs.flights.job import Options, run
from kipmesh_jobs.frame import JobError, JobRun, Settings
from kipmesh_jobs.report import Page, render

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]
WATERMARK, GAP = pd.Timedelta(minutes=30), pd.Timedelta(hours=4)
RECORDS_PER_BATCH = 150
TABLES = ("wind", "visibility", "plane_age", "destinations", "legs", "rotation_sizes")
GOOD = (
    '{"year":2013,"month":1,"day":1,"dep_time":null,"dep_delay":null,"carrier":"AA","flight":1,"tailnum":null,'
    '"origin":"JFK","dest":"LAX","time_hour":"2013-01-01T10:00:00Z","hour":5,"minute":15}'
)


def job_run(spark: SparkSession, directory: Path) -> JobRun:
    job = JobRun("flights", Settings(directory, as_json=True))
    job.directory.begin()
    job.use(spark)
    return job


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (GOOD, None),
        (None, "no value"),
        (b"\xff\xfe{}", "not UTF-8"),
        ("", "not JSON"),
        ("not json", "not JSON"),
        (GOOD[:-1], "not JSON"),
        ("[1]", "no JSON object"),
        ("7", "no JSON object"),
        ("{}", "lacks carrier, flight, origin, dest, time_hour, minute"),
        (GOOD.replace('"carrier":"AA",', ""), "lacks carrier"),
        (GOOD.replace('"dep_delay":null', '"dep_delay":"late"'), "wrong type of dep_delay"),
        (GOOD.replace('"flight":1,', '"flight":"x",'), "wrong type of flight"),
        (GOOD.replace("2013-01-01T10", "yesterday"), "wrong type of time_hour"),
        (GOOD.replace('"minute":15', '"minute":75'), "minute is not 0 to 59"),
    ],
)
def test_invalid_value_becomes_a_dead_letter_with_a_reason(
    spark: SparkSession, value: str | bytes | None, reason: str
) -> None:
    data = value.encode() if isinstance(value, str) else value
    schema = "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP"
    parsed = values.parse(spark.createDataFrame([(b"AA", data, "t", 3, 14, None)], schema))
    found = values.with_reasons(values.dead_letters(parsed)).collect()
    if reason is None:
        assert found == []
        (flight,) = values.flights(parsed).collect()
        assert (flight["carrier"], flight["minute"], flight["offset"]) == ("AA", 15, 14)
        return
    (dead,) = found
    assert (dead["topic"], dead["partition"], dead["offset"], dead["reason"]) == ("t", 3, 14, reason)
    assert dead["value"] == data
    assert values.flights(parsed).count() == 0


def test_flights_job_equals_a_sequential_computation(
    spark: SparkSession, cluster: LocalCluster, tmp_path: Path
) -> None:
    year = dataset.load_flights(dataset.find_directory(), limit=1200)
    feed.produce(cluster.bootstrap, "flights-sample", feed.encoded(year, 40, 12), lambda _records: None, {})
    options = Options(
        cluster.bootstrap, "flights-sample", watermark="30 minutes", gap="4 hours", max_offsets=RECORDS_PER_BATCH
    )
    outcome = run(job_run(spark, tmp_path), options)
    summary, parquet = outcome.summary, tmp_path / "work" / "parquet"
    assert outcome.passed, summary["checks"]
    assert (summary["records"], summary["flights"], summary["dead_letters"]) == (1212, 1200, 12)
    assert sum(summary["dead_letters_by_reason"].values()) == 12
    assert len(summary["dead_letters_by_reason"]) == len(feed.BROKEN)
    assert summary["cancelled"] == year["dep_delay"].isna().sum()
    assert summary["dep_delay_sum"] == year["dep_delay"].sum()

    def table(name: str) -> Any:
        return spark.read.parquet(str(parquet / name)).toPandas()

    flights, late, windows, rotations = map(table, ("flights", "late", "windows", "rotations"))
    assert set(late["stream"]) == {"windows", "rotations"}
    positions = {
        name: set(zip(rows["partition"], rows["offset"], strict=True)) for name, rows in late.groupby("stream")
    }
    check_windows(windows, flights, positions["windows"])
    check_rotations(rotations, flights[flights["tailnum"].notna()], positions["rotations"])
    check_joins(flights)
    check_tables({name: table(name) for name in TABLES}, flights, rotations)
    assert isinstance(outcome.page, Page)
    page = render(outcome.page, generated=datetime(2026, 1, 1, tzinfo=UTC), stages=[])
    assert page.count("<svg") >= 8
    assert all(f"{reason}</td>" in page for reason in summary["dead_letters_by_reason"])


def batches(flights: pd.DataFrame) -> Iterator[tuple[list[Any], pd.Timestamp, pd.Timestamp]]:
    """Yield rows of each micro-batch, the watermark for late rows, and the watermark that closes windows after it.

    The closing watermark is the latest event time of all previous batches minus the delay. The watermark for late rows
    is the closing watermark of the previous batch.
    """
    latest = late_by = pd.Timestamp(0)
    for number in range(flights["batch"].max() + 1):
        rows = list(flights[flights["batch"] == number].itertuples())
        closing = latest - WATERMARK
        yield rows, late_by, closing
        late_by, latest = closing, max([latest, *(row.event_time for row in rows)])


def check_windows(windows: pd.DataFrame, flights: pd.DataFrame, late: set[tuple[int, int]]) -> None:
    """Compare windows with a sequential aggregation by hour and airport."""
    hour = pd.Timedelta(hours=1)
    plain: dict[Any, list[Any]] = {}
    for rows, late_by, _ in batches(flights):
        for row in rows:
            begin = row.event_time.floor("h")
            is_late = begin + hour <= late_by
            assert is_late == ((row.partition, row.offset) in late), row
            if not is_late:
                plain.setdefault((begin, row.origin), []).append(row.dep_delay)
    found = {
        (row.begin, row.origin): (row.flights, row.departures, row.delay_sum, row.on_time)
        for row in windows.itertuples()
    }
    assert len(found) == len(windows)
    delays = {key: [delay for delay in values if not pd.isna(delay)] for key, values in plain.items()}
    assert found == {
        key: (len(plain[key]), len(known), sum(known), sum(delay <= 15 for delay in known))
        for key, known in delays.items()
    }
    assert (windows["end"] - windows["begin"] == hour).all()
    assert (windows["cancelled"] == windows["flights"] - windows["departures"]).all()
    assert {(row.begin, row.origin): max(delays[row.begin, row.origin]) for row in windows.dropna().itertuples()} == {
        (row.begin, row.origin): row.delay_max for row in windows.dropna().itertuples()
    }


def check_joins(flights: pd.DataFrame) -> None:
    """Compare joined weather, aircraft and airports with the CSV files."""
    directory = dataset.find_directory()
    weather = dataset.load_weather(directory)
    temperature = {(row.origin, pd.Timestamp(row.time_hour)): row.temp for row in weather.itertuples()}
    seats = dict(dataset.load_table(directory, "planes")[["tailnum", "seats"]].itertuples(index=False))
    names = dict(dataset.load_table(directory, "airports")[["faa", "name"]].itertuples(index=False))
    for row in flights.itertuples():
        expected = temperature.get((row.origin, row.time_hour.tz_localize("UTC")))
        assert (pd.isna(row.temp) and (expected is None or pd.isna(expected))) or row.temp == expected
        assert (pd.isna(row.seats) and row.tailnum not in seats) or row.seats == seats[row.tailnum]
        assert (row.dest_name is None and row.dest not in names) or row.dest_name == names[row.dest]


def check_rotations(rotations: pd.DataFrame, flights: pd.DataFrame, late: set[tuple[int, int]]) -> None:
    """Compare rotations with a sequential computation, in which a leg joins all open rotations within the gap."""
    still_open: dict[str, list[list[Any]]] = {}
    closed: list[list[Any]] = []

    def close(until: pd.Timestamp) -> None:
        for tailnum, legs_of in still_open.items():
            over = [max(leg.event_time for leg in legs) + GAP <= until for legs in legs_of]
            closed.extend(legs for legs, is_over in zip(legs_of, over, strict=True) if is_over)
            still_open[tailnum] = [legs for legs, is_over in zip(legs_of, over, strict=True) if not is_over]

    for rows, late_by, closing in batches(flights):
        for row in rows:
            is_late = row.event_time + GAP <= late_by
            assert is_late == ((row.partition, row.offset) in late), row
            if is_late:
                continue
            joined, others = [row], []
            for legs in still_open.get(row.tailnum, []):
                if any(abs(leg.event_time - row.event_time) <= GAP for leg in legs):
                    joined.extend(legs)
                else:
                    others.append(legs)
            still_open[row.tailnum] = [*others, joined]
        close(closing)
    close(pd.Timestamp.max)
    plain = {
        (legs[0].tailnum, tuple(sorted((leg.event_time, leg.partition, leg.offset) for leg in legs))) for legs in closed
    }
    found = {
        (row.tailnum, tuple((leg["event_time"], leg["partition"], leg["offset"]) for leg in row.legs))
        for row in rotations.itertuples()
    }
    assert found == plain
    assert len(found) == len(rotations)
    for row in rotations.itertuples():
        times = [leg["event_time"] for leg in row.legs]
        assert (row.begin, row.last_departure, row.departures) == (times[0], times[-1], len(times))


def check_tables(tables: dict[str, pd.DataFrame], flights: pd.DataFrame, rotations: pd.DataFrame) -> None:
    """Compare flights and delays of each group. Unknown wind or age is a separate group."""

    def floored(value: float, width: int, top: int) -> float | None:
        return None if pd.isna(value) else min(value // width * width, top)

    keys: dict[str, Callable[[Any], Any]] = {
        "wind": lambda row: floored(row.wind_speed, 5, 30),
        "visibility": lambda row: floored(row.visib, 2, 10),
        "plane_age": lambda row: floored(row.date.year - row.plane_year, 5, 30),
        "destinations": lambda row: row.dest,
    }
    for name, key in keys.items():
        plain: dict[Any, list[float]] = {}
        for row in flights.itertuples():
            plain.setdefault(key(row), []).append(row.dep_delay)
        found = {None if pd.isna(row[1]) else row[1]: row for row in tables[name].itertuples()}
        assert {at: row.flights for at, row in found.items()} == {at: len(rows) for at, rows in plain.items()}, name
        for at, rows in plain.items():
            known = pd.Series(rows).dropna()
            assert found[at].departures == len(known)
            if len(known):
                assert (found[at].mean_delay, found[at].p90) == pytest.approx((known.mean(), known.quantile(0.9)))
    assert tables["plane_age"]["age"].isna().any()
    legs: dict[int, list[float]] = {}
    gained: dict[int, list[float]] = {}
    for rotation in rotations.itertuples():
        delays = [leg["dep_delay"] for leg in rotation.legs]
        for at, delay in enumerate(delays, 1):
            legs.setdefault(at, []).append(delay)
            before = delays[at - 2] if at > 1 else None
            gained.setdefault(at, []).append(math.nan if None in (delay, before) else delay - before)
    for row in tables["legs"].itertuples():
        known, more = (pd.Series(of.pop(row.leg), dtype=float) for of in (legs, gained))
        assert (row.flights, row.departures) == (len(known), known.count())
        assert [row.mean_delay, row.gained] == pytest.approx([known.mean(), more.mean()], nan_ok=True)
    assert not legs
    sizes = rotations.groupby("departures")["tailnum"].agg(["size", "nunique"])
    assert {row.departures: (row.rotations, row.aircraft) for row in tables["rotation_sizes"].itertuples()} == {
        at: tuple(row) for at, row in zip(sizes.index, sizes.to_numpy(), strict=True)
    }


def test_flights_job_reports_an_unknown_or_empty_topic(
    spark: SparkSession, cluster: LocalCluster, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    with pytest.raises(JobError, match="nowhere"):
        run(job_run(spark, tmp_path / "a"), Options(cluster.bootstrap, "nowhere"))
    with pytest.raises(JobError, match="has no records"):
        run(job_run(spark, tmp_path / "b"), Options(cluster.bootstrap, new_topic()))
