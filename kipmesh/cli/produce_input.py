"""Input of `kipmesh produce`: parses files and standard input as lines, NDJSON or CSV into keys and values.

- Inputs are read one after the other; a line does not continue in the next file. Pipes do not block, so signals end
  the wait.
- A line or CSV row longer than `max.request.size` is an error.
- NDJSON: each line is sent unchanged; empty lines are skipped. The key is the field `--key-column`: strings as text,
  other values as JSON, null as no key.
- CSV (RFC 4180): the first row of each file names the columns. Quoted fields may contain line breaks. A value is a JSON
  object of strings in column order. The key is the column `--key-column`.
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
from kipmesh.core.errors import ErrorCode, KafkaError

READ_BYTES = 256 << 10
STANDARD_INPUT = "-"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_FIELD_MAX = 2**31 - 1
"""Largest argument of `csv.field_size_limit` on every platform (a C long)."""


class Pair(NamedTuple):
    """Key and value of a record to send."""

    key: bytes | None
    value: bytes


class Parser(Protocol):
    """Parses the lines of one input into records. Methods raise CommandError if the current line is invalid."""

    def parse(self, line: bytes) -> Pair | None:
        """Return the record that this line completes, or None if it completes none. `line` excludes the line break.

        None is returned for an empty line, a header, or a line within a quoted field.
        """

    def end(self) -> None:
        """Raise CommandError if the input ended within a record."""


class LineParser:
    """Parses each line as a value, or as key and value if there is a separator."""

    def __init__(self, separator: bytes | None) -> None:
        self._separator = separator

    def parse(self, line: bytes) -> Pair:
        """Return the record of the line. Raises CommandError if the separator is missing."""
        if self._separator is None:
            return Pair(None, line)
        key, found, value = line.partition(self._separator)
        if not found:
            text = self._separator.decode(errors="backslashreplace")
            raise CommandError(f"no key separator {text!r} in {_excerpt(line)}")
        return Pair(key, value)

    def end(self) -> None:
        """Do nothing: every line is a complete record."""


class JsonParser:
    """Parses each line as a JSON value (NDJSON)."""

    def __init__(self, key_field: str | None) -> None:
        self._key_field = key_field

    def parse(self, line: bytes) -> Pair | None:
        """Return the record of the line, or None for an empty line.

        Raises CommandError for invalid JSON or a missing key field.
        """
        if not line.strip():
            return None
        try:
            value = json.loads(line, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise CommandError(f"invalid JSON: {error}, in {_excerpt(line)}") from None
        if self._key_field is None:
            return Pair(None, line)
        if not isinstance(value, dict) or self._key_field not in value:
            raise CommandError(f"must be a JSON object with the field {self._key_field!r}, got {_excerpt(line)}")
        return Pair(_key_of(value[self._key_field]), line)

    def end(self) -> None:
        """Do nothing: every line is a complete record."""


class CsvParser:
    """Parses CSV whose first row names the columns. `row_bytes_max` is the maximum size of a row in bytes."""

    def __init__(self, key_column: str | None, delimiter: str, row_bytes_max: int) -> None:
        self._key_column = key_column
        self._key_place = -1
        self._delimiter = delimiter
        self._row_bytes_max = row_bytes_max
        # The limit applies to the whole process. Rows are checked separately, and no field is longer than its row.
        csv.field_size_limit(max(csv.field_size_limit(), min(row_bytes_max, _FIELD_MAX)))
        self._columns: list[str] = []
        self._row_lines: list[bytes] = []
        self._row_bytes = 0
        self._in_quotes = False

    def parse(self, line: bytes) -> Pair | None:
        """Return the record of the row that ends with this line.

        None for the first row, an empty row, or a line within a quoted field. Raises CommandError for an invalid row or
        column names, KafkaError (MESSAGE_TOO_LARGE) for a row of several lines that exceeds the limit.
        """
        if not self._columns and not self._row_lines:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        self._row_lines.append(line)
        self._row_bytes += len(line) + 1
        self._in_quotes ^= line.count(b'"') % 2 == 1
        is_multiline = self._in_quotes or len(self._row_lines) > 1
        if is_multiline and self._row_bytes > self._row_bytes_max + (not self._in_quotes):
            quote = "; a quote is not closed" if self._in_quotes else ""
            text = f"the row is longer than max.request.size ({self._row_bytes_max} bytes){quote}"
            raise KafkaError(ErrorCode.MESSAGE_TOO_LARGE, text)
        if self._in_quotes:
            return None
        row, self._row_lines, self._row_bytes = b"\n".join(self._row_lines), [], 0
        fields = self._fields(row)
        if not fields:
            return None
        if not self._columns:
            self._name_columns(fields)
            return None
        if len(fields) != len(self._columns):
            raise CommandError(f"row has {len(fields)} fields, but {len(self._columns)} columns: {_excerpt(row)}")
        value = json.dumps(dict(zip(self._columns, fields, strict=True)), ensure_ascii=False, separators=(",", ":"))
        return Pair(None if self._key_place < 0 else fields[self._key_place].encode(), value.encode())

    def end(self) -> None:
        """Raise CommandError if the input ended within a quoted field."""
        if self._in_quotes:
            raise CommandError(f"input ends inside a quoted field of the row {_excerpt(self._row_lines[0])}")

    def _fields(self, row: bytes) -> list[str]:
        try:
            text = row.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise CommandError(f"invalid UTF-8: {error.reason}, in {_excerpt(row)}") from None
        try:
            rows = list(csv.reader([text], delimiter=self._delimiter, strict=True))
        except csv.Error as error:
            raise CommandError(f"invalid CSV: {error}, in {_excerpt(row)}") from None
        return rows[0] if rows else []

    def _name_columns(self, names: list[str]) -> None:
        duplicates = {name for name in names if names.count(name) > 1}
        if duplicates:
            raise CommandError(f"two columns are named {min(duplicates)!r}")
        if self._key_column is not None:
            if self._key_column not in names:
                raise CommandError(f"no column {self._key_column!r}; the columns are {', '.join(map(repr, names))}")
            self._key_place = names.index(self._key_column)
        self._columns = names


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _key_of(value: Any) -> bytes | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        raise CommandError(f"the key {value!r} cannot be encoded as UTF-8") from None


def _excerpt(line: bytes) -> str:
    return repr(line[:80].decode(errors="replace"))


class Chunk(NamedTuple):
    """Lines of one input, without line breaks. The last chunk of an input has no lines, and `is_end` is True."""

    input_index: int
    lines: Sequence[bytes]
    is_end: bool = False


class Inputs:
    """The files and standard input to read, in order. `names` are paths, or `-` for standard input, the default.

    Construction raises OSError for a missing file, or CommandError for a directory, an unreadable file or closed
    standard input.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names or [STANDARD_INPUT]
        self._stopped = False
        self._readable = asyncio.Event()
        self.read_bytes = 0
        self.total_bytes: int | None = 0
        """Size of all inputs; None if one is a pipe or terminal."""
        for name in self._names:
            self._add_size(name)

    def _add_size(self, name: str) -> None:
        if name == STANDARD_INPUT:
            if sys.stdin is None:
                raise CommandError("standard input is closed: name a file to read")
            status = os.fstat(sys.stdin.fileno())
            begin = os.lseek(sys.stdin.fileno(), 0, os.SEEK_CUR) if stat.S_ISREG(status.st_mode) else 0
        else:
            status, begin = os.stat(name), 0
            if not os.access(name, os.R_OK):
                raise CommandError(f"{name}: permission denied")
        if stat.S_ISDIR(status.st_mode):
            raise CommandError(f"{name} is a directory: name a file")
        if not stat.S_ISREG(status.st_mode):
            self.total_bytes = None
        elif self.total_bytes is not None:
            self.total_bytes += max(status.st_size - begin, 0)

    def label(self, index: int) -> str:
        """Return the prefix of error messages about an input: its file name, or "" for standard input alone."""
        name = self._names[index]
        return "" if self._names == [STANDARD_INPUT] else f"{Path(name).name if name != STANDARD_INPUT else name}: "

    def stop(self) -> None:
        """Stop reading: `read` ends. Safe in a signal handler of the event loop."""
        self._stopped = True
        self._readable.set()

    async def read(self, line_bytes_max: int) -> AsyncIterator[Chunk]:
        """Yield chunks of lines as they arrive, until the end of the last input or `stop`.

        Raises LineTooLongError for a line over `line_bytes_max`, after yielding the lines before it; LineCutError if
        `stop` was called within a line; OSError if an input cannot be read.
        """
        for index, name in enumerate(self._names):
            if name == STANDARD_INPUT:
                source, is_own = sys.stdin.fileno(), False
            else:
                source, is_own = os.open(name, os.O_RDONLY | os.O_NONBLOCK), True
            try:
                async for chunk in self._lines(index, source, line_bytes_max):
                    yield chunk
            finally:
                if is_own:
                    os.close(source)
            if self._stopped:
                return
            yield Chunk(index, (), is_end=True)

    async def _lines(self, index: int, source: int, line_bytes_max: int) -> AsyncIterator[Chunk]:
        incomplete: list[bytes] = []  # parts of a line whose end was not read yet
        size = 0
        while True:
            await self._wait_readable(source)
            if self._stopped:
                if incomplete:
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
            incomplete.append(first)
            size += len(first)
            if others:
                lines = [b"".join(incomplete), *others[:-1]]
                incomplete, size = ([others[-1]], len(others[-1])) if others[-1] else ([], 0)
                yield Chunk(index, lines)
            if size > line_bytes_max:
                raise LineTooLongError(index)
        if incomplete:
            yield Chunk(index, [b"".join(incomplete)])

    async def _wait_readable(self, source: int) -> None:
        """Wait until `source` is readable; a regular file always is. A thread blocked in `read` would ignore Ctrl-C."""
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
    """A line of the input `input_index` is longer than the limit."""

    def __init__(self, input_index: int) -> None:
        super().__init__(input_index)
        self.input_index = input_index


class LineCutError(Exception):
    """A signal stopped reading in the middle of a line."""
