"""Framer and RequestMemory: frames from chunks, and their memory limits."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kipmesh.transport.kafka.framing import FIRST_BYTES, HEADER_BYTES_MIN, STAGING_BYTES, Framer, RefusedError
from kipmesh.transport.kafka.limits import ConnectionCounts, RequestMemory

STAGING = bytearray(STAGING_BYTES)


def _feed(framer: Framer, data: bytes, cuts: list[int]) -> list[bytes]:
    frames: list[bytes] = []
    at = 0
    for end in [*sorted(cut for cut in cuts if cut < len(data)), len(data)]:
        while at < end:
            view = framer.buffer()
            number = min(len(view), end - at)
            view[:number] = data[at : at + number]
            at += number
            frames += [bytes(frame) for frame in framer.received(number)]
            while framer.is_full:
                frames += [bytes(frame) for frame in framer.resume()]
    return frames


def _stream(frames: list[bytes]) -> bytes:
    return b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)


def _takes_all(_size: int, _key: int, _wanted: int) -> bool:
    return True


def _all_of(_step: int, rest: int) -> int:
    return rest


SIZES = (STAGING_BYTES - 4, STAGING_BYTES, 3 * STAGING_BYTES)
sizes = st.one_of(st.integers(HEADER_BYTES_MIN, 60), st.sampled_from(SIZES))


@given(st.lists(sizes, max_size=6), st.lists(st.integers(0, 4 * STAGING_BYTES), max_size=12), st.randoms())
def test_framer_returns_same_frames_for_any_chunks(lengths: list[int], cuts: list[int], source: object) -> None:
    frames = [bytes([index + 1]) * length for index, length in enumerate(lengths)]
    assert _feed(Framer(bytearray(STAGING_BYTES), _takes_all, _all_of), _stream(frames), cuts) == frames


@given(st.lists(sizes, min_size=1, max_size=6), st.lists(st.integers(0, 4 * STAGING_BYTES), max_size=12))
def test_framer_reserves_each_frame_once_in_order(lengths: list[int], cuts: list[int]) -> None:
    reserved: list[int] = []
    calls = 0

    def reserve_every_second_time(size: int, _key: int, _wanted: int) -> bool:
        nonlocal calls
        calls += 1
        if calls % 2:
            return False
        reserved.append(size)
        return True

    frames = [bytes(length) for length in lengths]
    assert _feed(Framer(bytearray(STAGING_BYTES), reserve_every_second_time, _all_of), _stream(frames), cuts) == frames
    assert reserved == lengths


def test_framer_accepts_single_bytes() -> None:
    frames = [b"\x00\x03" + bytes(20), b"\x00\x01" + bytes(70_000)]
    data = _stream(frames)
    assert _feed(Framer(bytearray(STAGING_BYTES), _takes_all, _all_of), data, list(range(30))) == frames


def test_framer_receives_large_frame_in_place() -> None:
    framer = Framer(STAGING, _takes_all, _all_of)
    data = _stream([bytes(1 << 20)])
    framer.buffer()[:100] = data[:100]
    assert framer.received(100) == []
    assert framer.granted == FIRST_BYTES  # a length without data gets no more memory
    assert len(framer.buffer()) == FIRST_BYTES - 96
    framer.buffer()[:] = data[100 : 4 + FIRST_BYTES]
    assert framer.received(FIRST_BYTES - 96) == []
    assert framer.granted == 1 << 20
    assert len(framer.buffer()) == (1 << 20) - FIRST_BYTES


@given(st.lists(sizes, max_size=4), st.lists(st.integers(0, 4 * STAGING_BYTES), max_size=12), st.randoms())
def test_framer_returns_same_frames_with_scarce_memory(lengths: list[int], cuts: list[int], source: Random) -> None:
    calls = 0

    def grant_sometimes(step: int, rest: int) -> int:
        nonlocal calls
        calls += 1
        return source.choice((0, min(step, rest, source.randint(1, 30_000))))

    frames = [bytes([index + 1]) * length for index, length in enumerate(lengths)]
    framer = Framer(bytearray(STAGING_BYTES), _takes_all, grant_sometimes)
    assert _feed(framer, _stream(frames), cuts) == frames
    assert calls or all(length <= STAGING_BYTES for length in lengths)
    assert not framer.granted


def test_framer_keeps_bytes_while_memory_is_exhausted() -> None:
    grants = [0, 0, 100_000, 0, 100_000]
    framer = Framer(bytearray(STAGING_BYTES), _takes_all, lambda _step, rest: min(rest, grants.pop(0)))
    data = _stream([b"\1" * 150_000, b"\2" * 30])
    frames, at = [], 0
    while at < len(data):
        view = framer.buffer()
        number = min(len(view), len(data) - at)
        view[:number] = data[at : at + number]
        at += number
        frames += framer.received(number)
    while framer.is_full:
        frames += framer.resume()
    assert frames == [b"\1" * 150_000, b"\2" * 30]


@pytest.mark.parametrize("size", [-1, 0, HEADER_BYTES_MIN - 1, -(2**31)])
def test_framer_refuses_invalid_length_after_previous_frames(size: int) -> None:
    framer = Framer(bytearray(STAGING_BYTES), _takes_all, _all_of)
    data = _stream([bytes(12)]) + size.to_bytes(4, "big", signed=True) + bytes(20)
    view = framer.buffer()
    view[: len(data)] = data
    assert framer.received(len(data)) == [bytes(12)]
    assert framer.is_full
    with pytest.raises(RefusedError) as caught:
        framer.resume()
    assert caught.value.reason == "length"


@pytest.mark.parametrize("size", [-1, 0, HEADER_BYTES_MIN - 1])
def test_framer_refuses_invalid_length_without_following_bytes(size: int) -> None:
    framer = Framer(bytearray(STAGING_BYTES), _takes_all, _all_of)
    framer.buffer()[:4] = size.to_bytes(4, "big", signed=True)
    with pytest.raises(RefusedError) as caught:
        framer.received(4)
    assert caught.value.reason == "length"


@given(st.lists(st.integers(0, 12), max_size=8), st.lists(st.integers(0, 120), max_size=12))
def test_framer_accepts_any_length_without_header(lengths: list[int], cuts: list[int]) -> None:
    frames = [bytes([index + 1]) * length for index, length in enumerate(lengths)]
    assert _feed(Framer(bytearray(STAGING_BYTES), _takes_all, _all_of, 0), _stream(frames), cuts) == frames


def test_framer_reserves_no_memory_for_refused_frame() -> None:
    def refuse(size: int, key: int, _wanted: int) -> bool:
        assert (size, key) == (2**31 - 1, 7)
        raise RefusedError("size", "too large")

    framer = Framer(bytearray(STAGING_BYTES), refuse, _all_of)
    framer.buffer()[:6] = (2**31 - 1).to_bytes(4, "big") + b"\x00\x07"
    with pytest.raises(RefusedError, match="too large"):
        framer.received(6)
    assert not framer.is_within_frame


# -- memory


def test_request_memory_serves_waiters_in_order() -> None:
    memory = RequestMemory(100)
    order: list[str] = []

    def waiter(name: str, size: int) -> Callable[[], None]:
        def wake() -> None:
            if memory.reserve(size):
                order.append(name)
            else:
                memory.wait(wake)

        return wake

    assert memory.reserve(90)
    assert not memory.reserve(60)
    memory.wait(waiter("large", 60))
    assert not memory.reserve(5)  # enough memory is free, but an earlier request waits
    memory.wait(waiter("small", 5))
    memory.release(30)
    assert order == []
    memory.release(60)
    assert order == ["large", "small"]
    assert memory.bytes_used == 65
    assert memory.waiting == 0


def test_request_memory_admits_single_large_request_and_skips_cancelled_waiter() -> None:
    memory = RequestMemory(100)
    assert memory.reserve(1000)
    admitted: list[int] = []

    def never() -> None:
        memory.wait(never)

    def second() -> None:
        assert memory.reserve(10)
        admitted.append(10)

    memory.wait(never)
    memory.wait(second)
    memory.release(1000)
    assert admitted == []
    memory.cancel_wait(never)
    assert admitted == [10]


def test_request_memory_prefers_started_frames_and_lets_one_exceed_limit() -> None:
    memory = RequestMemory(100)
    order: list[str] = []

    def begin() -> None:
        if memory.reserve(10):
            order.append("new")
        else:
            memory.wait(begin)

    def extend_frame() -> None:
        got = memory.extend(10, 500)
        if got:
            order.append(f"second {got}")
        else:
            memory.wait(extend_frame, is_within_frame=True)

    assert memory.reserve(60)
    assert memory.reserve(40)
    begin()
    assert memory.extend(10, 300) == 300  # all requests wait: the first gets all that it needs
    extend_frame()
    assert memory.waiting == 2
    assert memory.extend(10, 20) == 0
    memory.release(350)
    assert memory.bytes_used == 50 + 10 + 10
    assert order == ["second 10", "new"]
    memory.wait(extend_frame, is_within_frame=True)
    memory.cancel_wait(extend_frame)
    assert memory.waiting == 0


def test_connection_counts_limit_total_and_address() -> None:
    counts = ConnectionCounts(3, 2)
    assert [counts.add("a"), counts.add("a"), counts.add("a")] == ["", "", "max.connections.per.ip"]
    assert [counts.add("b"), counts.add("b")] == ["", "max.connections"]
    counts.remove("a")
    assert counts.add("a") == ""
    assert counts.total == 3
