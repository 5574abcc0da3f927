"""Input of `kipmesh produce`: parsers of lines, NDJSON and CSV, and reading of files."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kipmesh.cli.common import CommandError
from kipmesh.cli.produce_input import (
    Chunk,
    CsvParser,
    Inputs,
    JsonParser,
    LineParser,
    LineTooLongError,
    Pair,
    Parser,
)
from kipmesh.core.errors import ErrorCode, KafkaError


def parse_all(parser: Parser, text: bytes) -> list[Pair]:
    parsed = [pair for line in text.removesuffix(b"\n").split(b"\n") if (pair := parser.parse(line)) is not None]
    parser.end()
    return parsed


def error_of(parser: Parser, text: bytes) -> str:
    with pytest.raises(CommandError) as caught:
        parse_all(parser, text)
    return str(caught.value)


def test_line_parser_splits_keys_at_first_separator() -> None:
    assert parse_all(LineParser(None), b"a\n\nb") == [(None, b"a"), (None, b""), (None, b"b")]
    assert parse_all(LineParser(b":"), b"a:1:2\n:") == [(b"a", b"1:2"), (b"", b"")]


def test_ndjson_values_are_not_changed() -> None:
    text = b'{"id": 1, "v":2}\r\n  \n"text"\n'
    assert parse_all(JsonParser(None), text) == [(None, b'{"id": 1, "v":2}\r'), (None, b'"text"')]


@pytest.mark.parametrize(
    ("field", "key"),
    [('"UA"', b"UA"), ("7", b"7"), ("1.50", b"1.5"), ("null", None), ("true", b"true"), ('"\\u00fc"', b"\xc3\xbc")],
)
def test_ndjson_key_is_the_text_of_its_field(field: str, key: bytes | None) -> None:
    line = f'{{"k":{field}}}'.encode()
    assert parse_all(JsonParser("k"), line) == [(key, line)]


def test_invalid_ndjson_is_rejected() -> None:
    assert error_of(JsonParser(None), b"{}\nnope").startswith("invalid JSON: ")
    assert "invalid JSON: NaN is not a JSON value" in error_of(JsonParser(None), b"[NaN]")
    assert error_of(JsonParser(None), b"[" * 100_000).startswith("invalid JSON: ")
    assert error_of(JsonParser(None), b'"\xff"').startswith("invalid JSON: ")
    assert error_of(JsonParser("k"), b'{"K":1}') == """must be a JSON object with the field 'k', got '{"K":1}'"""
    assert error_of(JsonParser("k"), b"[1]").startswith("must be a JSON object with the field 'k'")
    assert "cannot be encoded as UTF-8" in error_of(JsonParser("k"), b'{"k":"\\ud800"}')


def test_csv_rows_become_json_objects() -> None:
    text = b'\xef\xbb\xbfid,carrier,note\r\n1,UA,"a, b"\r\n\r\n2,"D""L","two\nlines"\n3,\xc3\x9c,\n'
    parsed = parse_all(CsvParser("carrier", ",", 1000), text)
    assert [key for key, _ in parsed] == [b"UA", b'D"L', "Ü".encode()]
    assert [json.loads(value) for _, value in parsed] == [
        {"id": "1", "carrier": "UA", "note": "a, b"},
        {"id": "2", "carrier": 'D"L', "note": "two\nlines"},
        {"id": "3", "carrier": "Ü", "note": ""},
    ]
    assert parsed[2].value == '{"id":"3","carrier":"Ü","note":""}'.encode()
    assert parse_all(CsvParser(None, ";", 1000), b"a;b\n1;2\n") == [(None, b'{"a":"1","b":"2"}')]


def test_invalid_csv_is_rejected() -> None:
    def parser() -> CsvParser:
        return CsvParser("id", ",", 100)

    assert error_of(parser(), b"a,b\n") == "no column 'id'; the columns are 'a', 'b'"
    assert error_of(parser(), b"id,id\n") == "two columns are named 'id'"
    assert error_of(parser(), b"id,b\n1\n") == "row has 1 fields, but 2 columns: '1'"
    assert error_of(parser(), b'id,b\n1,"open\nmore\n') == """input ends inside a quoted field of the row '1,"open'"""
    assert error_of(parser(), b'id,b\n1,"a"b"c"\n').startswith("invalid CSV: ")
    assert error_of(parser(), b"id,b\n1,\xff\n").startswith("invalid UTF-8: ")
    with pytest.raises(KafkaError) as caught:
        parse_all(parser(), b'id,b\n1,"' + b"line\n" * 30)
    assert caught.value.code is ErrorCode.MESSAGE_TOO_LARGE


@pytest.fixture
def field_limit() -> Iterator[None]:
    before = csv.field_size_limit(131_072)
    yield
    csv.field_size_limit(before)


@pytest.mark.usefixtures("field_limit")
def test_csv_fields_are_limited_by_request_size() -> None:
    """The default limit of `csv` is 128 KiB."""
    long = "x" * 200_000
    for field in (long, f'"{long}\n{long}"'):
        parsed = parse_all(CsvParser("id", ",", 1 << 20), f"id,b\n1,{field}\n".encode())
        assert [(key, json.loads(value)["b"]) for key, value in parsed] == [(b"1", field.strip('"'))]
    for text in (f"{long}\n{long}\n", f'{long}\n{long}"\n'):  # the quoted field is open, or ends in the last line
        with pytest.raises(KafkaError) as caught:
            parse_all(CsvParser("id", ",", 300_000), f'id,b\n1,"{text}'.encode())
        assert caught.value.code is ErrorCode.MESSAGE_TOO_LARGE


@pytest.mark.usefixtures("field_limit")
def test_csv_field_limit_is_capped_and_never_lowered() -> None:
    CsvParser("id", ",", 1 << 80)
    CsvParser("id", ",", 10)
    assert csv.field_size_limit() == 2**31 - 1, "the limit is never lowered"


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0\r\ufeff"), min_size=1)


@given(
    columns=st.lists(NAMES, min_size=1, max_size=4, unique=True),
    rows=st.lists(st.lists(NAMES, min_size=4, max_size=4), max_size=5),
)
def test_csv_of_any_text_round_trips(columns: list[str], rows: list[list[str]]) -> None:
    """The text is written by the `csv` module."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(columns)
    writer.writerows(row[: len(columns)] for row in rows)
    parsed = parse_all(CsvParser(columns[0], ",", 1 << 20), text.getvalue().encode())
    assert [json.loads(value) for _, value in parsed] == [dict(zip(columns, row, strict=False)) for row in rows]
    assert [key for key, _ in parsed] == [row[0].encode() for row in rows]


async def test_inputs_read_files_in_order(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"a\nb")
    second.write_bytes(b"c\n" + b"d" * 300_000)
    inputs = Inputs([str(first), str(second)])
    assert inputs.total_bytes == 300_005
    chunks = [chunk async for chunk in inputs.read(1 << 20)]
    assert chunks == [
        Chunk(0, [b"a"]),
        Chunk(0, [b"b"]),
        Chunk(0, (), is_end=True),
        Chunk(1, [b"c"]),
        Chunk(1, [b"d" * 300_000]),
        Chunk(1, (), is_end=True),
    ]
    assert inputs.read_bytes == 300_005
    assert inputs.label(1) == "second: "
    with pytest.raises(LineTooLongError) as caught:
        [chunk async for chunk in Inputs([str(first), str(second)]).read(1000)]
    assert caught.value.input_index == 1


async def test_inputs_wait_for_writer_of_named_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    inputs = Inputs([str(pipe)])
    assert inputs.total_bytes is None
    chunks = inputs.read(1000)
    first_chunk = asyncio.ensure_future(anext(chunks))
    await asyncio.sleep(0)  # lets the task open the pipe
    assert not first_chunk.done()
    writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # fails without a reader
    os.write(writer, b"a\nb\n")
    assert await first_chunk == Chunk(0, [b"a", b"b"])
    os.close(writer)
    assert [chunk async for chunk in chunks] == [Chunk(0, (), is_end=True)]


def test_unreadable_inputs_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Inputs([str(tmp_path / "none")])
    with pytest.raises(CommandError, match="is a directory"):
        Inputs([str(tmp_path)])
