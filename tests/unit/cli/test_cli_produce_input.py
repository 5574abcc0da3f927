"""What `kipmesh produce` makes of lines, NDJSON and CSV, and where it reads them."""

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


def pairs(parser: Parser, text: bytes) -> list[Pair]:
    found = [pair for line in text.removesuffix(b"\n").split(b"\n") if (pair := parser.parse(line)) is not None]
    parser.end()
    return found


def refusal(parser: Parser, text: bytes) -> str:
    with pytest.raises(CommandError) as caught:
        pairs(parser, text)
    return str(caught.value)


def test_lines() -> None:
    assert pairs(LineParser(None), b"a\n\nb") == [(None, b"a"), (None, b""), (None, b"b")]
    assert pairs(LineParser(b":"), b"a:1:2\n:") == [(b"a", b"1:2"), (b"", b"")]


def test_ndjson_goes_as_it_is() -> None:
    text = b'{"id": 1, "v":2}\r\n  \n"text"\n'
    assert pairs(JsonParser(None), text) == [(None, b'{"id": 1, "v":2}\r'), (None, b'"text"')]


@pytest.mark.parametrize(
    ("field", "key"),
    [('"UA"', b"UA"), ("7", b"7"), ("1.50", b"1.5"), ("null", None), ("true", b"true"), ('"\\u00fc"', b"\xc3\xbc")],
)
def test_ndjson_keys(field: str, key: bytes | None) -> None:
    line = f'{{"k":{field}}}'.encode()
    assert pairs(JsonParser("k"), line) == [(key, line)]


def test_ndjson_that_is_none() -> None:
    assert refusal(JsonParser(None), b"{}\nnope").startswith("invalid JSON: ")
    assert "invalid JSON: NaN is not a JSON value" in refusal(JsonParser(None), b"[NaN]")
    assert refusal(JsonParser(None), b"[" * 100_000).startswith("invalid JSON: ")
    assert refusal(JsonParser(None), b'"\xff"').startswith("invalid JSON: ")
    assert refusal(JsonParser("k"), b'{"K":1}') == """must be a JSON object with the field 'k', got '{"K":1}'"""
    assert refusal(JsonParser("k"), b"[1]").startswith("must be a JSON object with the field 'k'")
    assert "cannot be encoded as UTF-8" in refusal(JsonParser("k"), b'{"k":"\\ud800"}')


def test_csv_rows_are_objects() -> None:
    text = b'\xef\xbb\xbfid,carrier,note\r\n1,UA,"a, b"\r\n\r\n2,"D""L","two\nlines"\n3,\xc3\x9c,\n'
    found = pairs(CsvParser("carrier", ",", 1000), text)
    assert [key for key, _ in found] == [b"UA", b'D"L', "Ü".encode()]
    assert [json.loads(value) for _, value in found] == [
        {"id": "1", "carrier": "UA", "note": "a, b"},
        {"id": "2", "carrier": 'D"L', "note": "two\nlines"},
        {"id": "3", "carrier": "Ü", "note": ""},
    ]
    assert found[2].value == '{"id":"3","carrier":"Ü","note":""}'.encode()
    assert pairs(CsvParser(None, ";", 1000), b"a;b\n1;2\n") == [(None, b'{"a":"1","b":"2"}')]


def test_csv_that_is_none() -> None:
    def parser() -> CsvParser:
        return CsvParser("id", ",", 100)

    assert refusal(parser(), b"a,b\n") == "no column 'id'; the columns are 'a', 'b'"
    assert refusal(parser(), b"id,id\n") == "two columns are named 'id'"
    assert refusal(parser(), b"id,b\n1\n") == "row has 1 fields, but 2 columns: '1'"
    assert refusal(parser(), b'id,b\n1,"open\nmore\n') == """input ends inside a quoted field of the row '1,"open'"""
    assert refusal(parser(), b'id,b\n1,"a"b"c"\n').startswith("invalid CSV: ")
    assert refusal(parser(), b"id,b\n1,\xff\n").startswith("invalid UTF-8: ")
    with pytest.raises(KafkaError) as caught:
        pairs(parser(), b'id,b\n1,"' + b"line\n" * 30)
    assert caught.value.code is ErrorCode.MESSAGE_TOO_LARGE


@pytest.fixture
def field_limit() -> Iterator[None]:
    before = csv.field_size_limit(131_072)
    yield
    csv.field_size_limit(before)


@pytest.mark.usefixtures("field_limit")
def test_csv_fields_are_as_long_as_a_request() -> None:
    """`csv` by itself refuses a field above 128 KiB."""
    long = "x" * 200_000
    for field in (long, f'"{long}\n{long}"'):
        found = pairs(CsvParser("id", ",", 1 << 20), f"id,b\n1,{field}\n".encode())
        assert [(key, json.loads(value)["b"]) for key, value in found] == [(b"1", field.strip('"'))]
    for text in (f"{long}\n{long}\n", f'{long}\n{long}"\n'):  # its quote is open, or closed with the last line
        with pytest.raises(KafkaError) as caught:
            pairs(CsvParser("id", ",", 300_000), f'id,b\n1,"{text}'.encode())
        assert caught.value.code is ErrorCode.MESSAGE_TOO_LARGE


@pytest.mark.usefixtures("field_limit")
def test_no_size_of_requests_is_too_large_for_csv() -> None:
    CsvParser("id", ",", 1 << 80)
    CsvParser("id", ",", 10)
    assert csv.field_size_limit() == 2**31 - 1, "it is never made smaller"


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0\r\ufeff"), min_size=1)


@given(
    columns=st.lists(NAMES, min_size=1, max_size=4, unique=True),
    rows=st.lists(st.lists(NAMES, min_size=4, max_size=4), max_size=5),
)
def test_csv_of_any_text_comes_back(columns: list[str], rows: list[list[str]]) -> None:
    """What Python's own writer writes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(columns)
    writer.writerows(row[: len(columns)] for row in rows)
    found = pairs(CsvParser(columns[0], ",", 1 << 20), text.getvalue().encode())
    assert [json.loads(value) for _, value in found] == [dict(zip(columns, row, strict=False)) for row in rows]
    assert [key for key, _ in found] == [row[0].encode() for row in rows]


async def test_files_one_after_the_other(tmp_path: Path) -> None:
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


async def test_a_named_pipe_is_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    inputs = Inputs([str(pipe)])
    assert inputs.total_bytes is None
    chunks = inputs.read(1000)
    reading = asyncio.ensure_future(anext(chunks))
    await asyncio.sleep(0)  # it opens the pipe
    assert not reading.done()
    writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # fails where nobody reads
    os.write(writer, b"a\nb\n")
    assert await reading == Chunk(0, [b"a", b"b"])
    os.close(writer)
    assert [chunk async for chunk in chunks] == [Chunk(0, (), is_end=True)]


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Inputs([str(tmp_path / "none")])
    with pytest.raises(CommandError, match="is a directory"):
        Inputs([str(tmp_path)])
