"""Decoders of all APIs and versions accept mutated and random bytes or raise MalformedError."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from kipmesh.messages.kafka import MalformedError, Out
from kipmesh.messages.table import KAFKA_APIS, Api
from kipmesh.transport.kafka.framing import read_header
from tests.unit.transport.kafka.kio_of_tests import random_value

CASES = [pytest.param(api, id=api.name) for api in KAFKA_APIS.values()]


def _is_flexible(key: int, version: int) -> bool:
    api = KAFKA_APIS.get(key)
    return api is not None and version >= api.flexible_since


def _mutated(source: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 8))):
        at = source.randrange(len(changed) + 1)
        match source.randrange(4):
            case 0 if changed:
                changed[at % len(changed)] = source.choice((0, 1, 0x7F, 0x80, 0xFF, source.randrange(256)))
            case 1:
                changed[at:at] = source.randbytes(source.randrange(1, 9))
            case 2:
                del changed[at : at + source.randrange(1, 9)]
            case _:
                changed[at : at + 4] = source.choice((b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x80\0\0\0"))
    return bytes(changed)


@pytest.mark.parametrize("api", CASES)
def test_mutated_requests_decode_or_are_malformed(api: Api) -> None:
    source = random.Random(api.name)
    for version in range(api.versions.first, api.versions.last + 1):
        codec = api.request_codec(version)
        for _ in range(40):
            out = Out()
            codec.write(out, random_value(source, api.request, version))
            data = b"".join((*out.parts, out))
            for _ in range(5):
                with suppress(MalformedError):
                    api.decode(memoryview(_mutated(source, data)), 0, version)


@pytest.mark.parametrize("api", CASES)
def test_random_bytes_decode_or_are_malformed(api: Api) -> None:
    source = random.Random(api.name)
    for _ in range(300):
        version = source.randint(*api.versions)
        with suppress(MalformedError):
            api.decode(memoryview(source.randbytes(source.randrange(64))), 0, version)


def test_random_headers_decode_or_are_malformed() -> None:
    source = random.Random(1)
    read = 0
    for _ in range(5000):
        data = bytearray(source.randbytes(source.randrange(40)))
        data[:4] = bytes((0, source.choice(list(KAFKA_APIS)), 0, source.randrange(14)))
        data[8:10] = source.choice((b"\xff\xff", b"\0\0", b"\0\1", b"\0\3", data[8:10]))
        with suppress(MalformedError):
            header = read_header(memoryview(data), _is_flexible)
            assert 10 <= header.body <= len(data)
            read += 1
    assert read > 100


@pytest.mark.parametrize(
    ("version", "data"),
    [
        (1, b"\x7f\xff\xff\xff"),
        (9, b"\xff\xff\xff\xff\x0f"),
        (9, b"\xff\xff\xff\xff\xff\x01"),
        (1, b"\xff\xff\xff\xfe"),
        (10, b"\x02\0"),
    ],
)
def test_list_with_impossible_length_is_malformed(version: int, data: bytes) -> None:
    metadata = KAFKA_APIS[3]
    with pytest.raises(MalformedError, match=r"Metadata\w* v|length|five bytes"):
        metadata.decode(memoryview(data), 0, version)
