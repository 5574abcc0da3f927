"""What `kipmesh produce` reads: files and standard input, as lines, NDJSON or CSV, turned into keys and values.

Rules:
- Files are read one after the other; a line does not go on in the next file. A pipe (also a named one) is waited for
  without blocking, so that a signal ends it.
- No line, and no row of CSV, is held that is longer than `max.request.size`.
- NDJSON: each line is one JSON value, and goes as it is; empty lines are none. The key is the field `--key-column`:
  text as it is, other values as JSON, null as no key.
- CSV (RFC 4180): each file begins with the names of its columns; a row may go on over lines inside quotes. A value is a
  JSON object of all columns in their order, as text. The key is the column `--key-column`.
"""

from __future__ import annotations

import asyncio
import csv
import json
import os
import stat
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kipmesh.cli.common import CommandError

READ_BYTES = 256 << 10
STANDARD_INPUT = "-"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_FIELD_MAX = 2**31 - 1
"""What `csv.field_size_limit` takes on every platform (a C long)."""


class Pair(NamedTuple):
    """A record to be."""

    key: bytes | None
    value: bytes


class Parser(Protocol):
    """Makes records of the lines of one input. What it raises (CommandError) is about the line that it was given."""

    def parse(self, line: bytes) -> Pair | None:
        """The record that ends with this line; None when none does."""

    def end(self) -> None:
        """No line follows."""


class LineParser:
    """Each line is a value, or a key and a value around a separator."""

    def __init__(self, separator: bytes | None) -> None:
        self._separator = separator

    def parse(self, line: bytes) -> Pair:
        """See Parser."""
        if self._separator is None:
            return Pair(None, line)
        key, found, value = line.partition(self._separator)
        if not found:
            text = self._separator.decode(errors="backslashreplace")
            raise CommandError(f"no key separator {text!r} in {_begin(line)}")
        return Pair(key, value)

    def end(self) -> None:
        """See Parser."""


class JsonParser:
    """NDJSON."""

    def __init__(self, key_field: str | None) -> None:
        self._key_field = key_field

    def parse(self, line: bytes) -> Pair | None:
        """See Parser."""
        if not line.strip():
            return None
        try:
            value = json.loads(line, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise CommandError(f"no JSON: {error}, in {_begin(line)}") from None
        if self._key_field is None:
            return Pair(None, line)
        if not isinstance(value, dict) or self._key_field not in value:
            raise CommandError(f"no object with a field {self._key_field!r}: {_begin(line)}")
        return Pair(_key_of(value[self._key_field]), line)

    def end(self) -> None:
        """See Parser."""


class CsvParser:
    """CSV with the names of its columns in the first row."""

    def __init__(self, key_column: str | None, delimiter: str, row_bytes_max: int) -> None:
        self._key_column = key_column
        self._key_place = -1
        self._delimiter = delimiter
        self._row_bytes_max = row_bytes_max
        # Of the whole process, which is this command. A row in full is no longer than that, so no field is.
        csv.field_size_limit(max(csv.field_size_limit(), min(row_bytes_max, _FIELD_MAX)))
        self._columns: list[str] = []
        self._begin: list[bytes] = []  # of a row that goes on
        self._begin_bytes = 0
        self._is_open = False  # inside quotes

    def parse(self, line: bytes) -> Pair | None:
        """See Parser."""
        from kipmesh.core.errors import ErrorCode, KafkaError

        if not self._columns and not self._begin:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        self._begin.append(line)
        self._begin_bytes += len(line) + 1
        self._is_open ^= line.count(b'"') % 2 == 1
        goes_on = self._is_open or len(self._begin) > 1
        if goes_on and self._begin_bytes > self._row_bytes_max + (not self._is_open):
            quote = "; a quote is open" if self._is_open else ""
            text = f"the row is longer than max.request.size ({self._row_bytes_max} bytes){quote}"
            raise KafkaError(ErrorCode.MESSAGE_TOO_LARGE, text)
        if self._is_open:
            return None
        row, self._begin, self._begin_bytes = b"\n".join(self._begin), [], 0
        fields = self._fields(row)
        if not fields:
            return None
        if not self._columns:
            self._name_columns(fields)
            return None
        if len(fields) != len(self._columns):
            raise CommandError(f"fields: {len(fields)}, columns: {len(self._columns)}, in {_begin(row)}")
        value = json.dumps(dict(zip(self._columns, fields, strict=True)), ensure_ascii=False, separators=(",", ":"))
        return Pair(None if self._key_place < 0 else fields[self._key_place].encode(), value.encode())

    def end(self) -> None:
        """See Parser."""
        if self._is_open:
            raise CommandError(f"a quote is open at the end, since {_begin(self._begin[0])}")

    def _fields(self, row: bytes) -> list[str]:
        try:
            text = row.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise CommandError(f"no UTF-8: {error.reason}, in {_begin(row)}") from None
        try:
            rows = list(csv.reader([text], delimiter=self._delimiter, strict=True))
        except csv.Error as error:
            raise CommandError(f"no CSV: {error}, in {_begin(row)}") from None
        return rows[0] if rows else []

    def _name_columns(self, names: list[str]) -> None:
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise CommandError(f"two columns have the name {min(twice)!r}")
        if self._key_column is not None:
            if self._key_column not in names:
                raise CommandError(f"no column {self._key_column!r}: there are {', '.join(map(repr, names))}")
            self._key_place = names.index(self._key_column)
        self._columns = names


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _key_of(value: Any) -> bytes | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:  # half a pair of surrogates
        raise CommandError(f"the key {value!r} is no Unicode text") from None


def _begin(line: bytes) -> str:
    return repr(line[:80].decode(errors="replace"))


class Chunk(NamedTuple):
    """Some lines of one input, without their ends; none of them and `is_end` at its end."""

    place: int
    """Of the input, from 0."""
    lines: Sequence[bytes]
    is_end: bool = False


class Inputs:
    """Files and standard input, in order."""

    def __init__(self, names: Sequence[str]) -> None:
        """Raises OSError and CommandError for a file that cannot be read."""
        self._names = names or [STANDARD_INPUT]
        self._stopped = False
        self._readable = asyncio.Event()
        self.read_bytes = 0
        self.total_bytes: int | None = 0
        """None where a pipe or a terminal does not say."""
        for name in self._names:
            self._count(name)

    def _count(self, name: str) -> None:
        if name == STANDARD_INPUT:
            if sys.stdin is None:
                raise CommandError("there is no standard input")
            about = os.fstat(sys.stdin.fileno())
            begin = os.lseek(sys.stdin.fileno(), 0, os.SEEK_CUR) if stat.S_ISREG(about.st_mode) else 0
        else:
            about, begin = os.stat(name), 0
            if not os.access(name, os.R_OK):
                raise CommandError(f"{name}: permission denied")
        if stat.S_ISDIR(about.st_mode):
            raise CommandError(f"{name}: is a directory")
        if not stat.S_ISREG(about.st_mode):
            self.total_bytes = None
        elif self.total_bytes is not None:
            self.total_bytes += max(about.st_size - begin, 0)

    def label(self, place: int) -> str:
        """What to call an input in an error, to be followed by the line; nothing for standard input alone."""
        name = self._names[place]
        return "" if self._names == [STANDARD_INPUT] else f"{Path(name).name if name != STANDARD_INPUT else name}: "

    def stop(self) -> None:
        """Read no more."""
        self._stopped = True
        self._readable.set()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    async def read(self, line_bytes_max: int) -> AsyncIterator[Chunk]:
        """Lines as they come. Raises LineTooLongError after the lines before it, LineCutError after `stop`, OSError."""
        for place, name in enumerate(self._names):
            if name == STANDARD_INPUT:
                source, is_own = sys.stdin.fileno(), False
            else:
                source, is_own = os.open(name, os.O_RDONLY | os.O_NONBLOCK), True
            try:
                async for chunk in self._lines(place, source, line_bytes_max):
                    yield chunk
            finally:
                if is_own:
                    os.close(source)
            if self._stopped:
                return
            yield Chunk(place, (), is_end=True)

    async def _lines(self, place: int, source: int, line_bytes_max: int) -> AsyncIterator[Chunk]:
        begin: list[bytes] = []  # of a line whose end is yet to come
        size = 0
        while True:
            await self._wait_readable(source)
            if self._stopped:
                if begin:
                    raise LineCutError
                return
            try:
                chunk = os.read(source, READ_BYTES)
            except BlockingIOError:
                continue
            if not chunk:
                break
            self.read_bytes += len(chunk)
            first, *others = chunk.split(b"\n")
            begin.append(first)
            size += len(first)
            if others:
                lines = [b"".join(begin), *others[:-1]]
                begin, size = ([others[-1]], len(others[-1])) if others[-1] else ([], 0)
                yield Chunk(place, lines)
            if size > line_bytes_max:
                raise LineTooLongError(place)
        if begin:
            yield Chunk(place, [b"".join(begin)])

    async def _wait_readable(self, source: int) -> None:
        """Wait for input; a plain file always has some. (A thread in `read` would outlive Ctrl-C.)"""
        loop = asyncio.get_running_loop()
        try:
            loop.add_reader(source, self._readable.set)
        except (PermissionError, ValueError):
            await asyncio.sleep(0)
            return
        try:
            await self._readable.wait()
        finally:
            loop.remove_reader(source)
            if not self._stopped:
                self._readable.clear()


class LineTooLongError(Exception):
    """A line of the input at this place (from 0) is longer than it may be; its end was not seen."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


class LineCutError(Exception):
    """A signal ended the reading in the middle of a line."""
