"""Job flights without Spark: options, input of the temporary cluster, and late records by the checkpoint."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typer

from kipmesh_jobs.flights import feed
from kipmesh_jobs.flights.dataset import Flight
from kipmesh_jobs.flights.job import JOB, Options, interval_ms
from kipmesh_jobs.flights.results import BatchEnd, read_batches, spans
from kipmesh_jobs.frame import JobError


@pytest.mark.parametrize(
    ("text", "ms"), [("1 second", 1000), ("90 minutes", 5_400_000), ("2 hours", 7_200_000), ("7 days", 604_800_000)]
)
def test_interval_text_converts_to_milliseconds(text: str, ms: int) -> None:
    assert interval_ms(text, "--gap") == ms


@pytest.mark.parametrize("option", ["window", "watermark", "gap"])
@pytest.mark.parametrize("text", ["", "1", "hours", "0 hours", "-1 hours", "1 month", "1 hour; drop", "1.5 hours"])
def test_invalid_interval_error_names_the_option(option: str, text: str) -> None:
    options: dict[str, Any] = {option: text}
    with pytest.raises(typer.BadParameter) as refused:
        Options(**options)
    assert refused.value.param_hint == f"--{option}"


def test_limit_is_rejected_for_external_cluster() -> None:
    with pytest.raises(typer.BadParameter) as refused:
        Options(bootstrap="127.0.0.1:9092", limit=5)
    assert refused.value.param_hint == "--limit"


def test_job_flights_has_name_and_examples() -> None:
    assert JOB.name == "flights"
    assert "--bootstrap" in JOB.examples


# --- input of the temporary cluster


def year(days: int, per_day: int = 4) -> pd.DataFrame:
    at = [(day, hour) for day in range(days) for hour in range(per_day)]
    return pd.DataFrame(
        {
            "time_hour": [f"{pd.Timestamp('2013-01-01') + pd.Timedelta(days=d):%Y-%m-%d}T{h:02}:00:00Z" for d, h in at],
            "minute": [0] * len(at),
            "number": range(len(at)),
        }
    )


def test_held_back_flights_move_later_and_others_keep_their_order() -> None:
    flights = year(400)
    found = feed.hold_back(flights, 10)
    assert sorted(found["number"]) == list(flights["number"])
    order = list(found["number"])
    moved = [n for index, n in enumerate(order) if index and n < max(order[:index])]
    assert 8 <= len(moved) <= 10
    assert [n for n in order if n not in moved] == sorted(set(order) - set(moved))
    for number in moved:
        before = max(order[: order.index(number)])
        assert (before - number) / 4 >= feed.HELD_BACK_DAYS_MAX - 1
    assert feed.hold_back(flights, 0) is flights


def test_short_data_is_held_back_by_part_of_its_duration() -> None:
    found = feed.hold_back(year(40), 4)
    order = list(found["number"])
    assert order != sorted(order)
    assert feed.hold_back(year(0), 4).empty


@pytest.mark.parametrize(("total", "count"), [(100, 7), (10, 10), (10, 25), (5, 0), (1, 1)])
def test_with_broken_inserts_the_given_number_of_broken_values(total: int, count: int) -> None:
    flights = [Flight(b"AA", b"%d" % number) for number in range(total)]
    found = list(feed.with_broken(flights, total, count))
    broken = [value for _, value in found if value in feed.BROKEN]
    assert len(broken) == min(total, count)
    assert [value for _, value in found if value not in feed.BROKEN] == [flight.value for flight in flights]


# --- late records by the checkpoint


def write_checkpoint(directory: Path, batches: list[BatchEnd], topic: str = "t") -> None:
    (directory / "offsets").mkdir(parents=True)
    (directory / "offsets" / ".9.crc").write_bytes(b"crc")
    for batch in batches:
        metadata = {"batchWatermarkMs": batch.watermark_ms, "batchTimestampMs": 1, "conf": {}}
        ends = {topic: {str(partition): end for partition, end in batch.ends.items()}}
        lines = ["v1", json.dumps(metadata), json.dumps(ends), '{"logOffset":0}']
        (directory / "offsets" / str(batch.number)).write_text("\n".join(lines))


def test_checkpoint_batches_are_read_in_order(tmp_path: Path) -> None:
    batches = [BatchEnd(n, 10 * n, {0: 5 * n + 5, 3: 2 * n}) for n in range(12)]
    write_checkpoint(tmp_path, batches)
    assert read_batches(tmp_path, "t") == batches
    assert all(not batch.ends for batch in read_batches(tmp_path, "another"))


def test_unknown_version_of_offset_log_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "0").write_text("v2\n{}\n")
    with pytest.raises(ValueError, match="not an offset log of version 1"):
        read_batches(tmp_path, "t")


@pytest.mark.parametrize("seed", range(20))
def test_spans_match_a_scan_of_all_batches(seed: int) -> None:
    rng = random.Random(seed)
    ends: dict[int, int] = {}
    watermark = 0
    batches: list[BatchEnd] = []
    for number in range(rng.randrange(1, 8)):
        ends = ends | {rng.randrange(3): 0}
        ends = {partition: end + rng.choice((0, rng.randrange(6))) for partition, end in ends.items()}
        batches.append(BatchEnd(number, watermark, dict(ends)))
        watermark += rng.choice((0, 100))
    found = {
        (span.partition, offset): (span.batch, span.watermark_ms)
        for span in spans(batches)
        for offset in range(span.begin, span.end)
    }
    expected: dict[tuple[int, int], tuple[int, int]] = {}
    for index, batch in enumerate(batches):
        for partition, end in batch.ends.items():
            for offset in range(end):
                before = batches[index - 1].watermark_ms if index else 0
                expected.setdefault((partition, offset), (batch.number, before))
    assert found == expected


def test_earlier_cluster_with_unreadable_state_is_deleted(tmp_path: Path) -> None:
    directory = tmp_path / "cluster"
    (directory / "cluster.json").mkdir(parents=True)
    assert feed.remove_cluster(directory) == 0
    assert not directory.exists()


def test_earlier_cluster_with_invalid_state_is_kept(tmp_path: Path) -> None:
    directory = tmp_path / "cluster"
    directory.mkdir()
    (directory / "cluster.json").write_text("{")
    with pytest.raises(JobError, match="did not stop"):
        feed.remove_cluster(directory)
    assert directory.exists()
