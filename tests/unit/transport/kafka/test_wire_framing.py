"""Frames out of chunks, and the memory that they take."""

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
def test_any_chunks_of_the_bytes_give_the_same_frames(lengths: list[int], cuts: list[int], source: object) -> None:
    frames = [bytes([index + 1]) * length for index, length in enumerate(lengths)]
    assert _feed(Framer(bytearray(STAGING_BYTES), _takes_all, _all_of), _stream(frames), cuts) == frames


@given(st.lists(sizes, min_size=1, max_size=6), st.lists(st.integers(0, 4 * STAGING_BYTES), max_size=12))
def test_each_frame_is_asked_for_once_that_is_taken_and_in_order(lengths: list[int], cuts: list[int]) -> None:
    asked: list[int] = []
    turns = 0

    def every_second_time(size: int, _key: int, _wanted: int) -> bool:
        nonlocal turns
        turns += 1
        if turns % 2:
            return False
        asked.append(size)
        return True

    frames = [bytes(length) for length in lengths]
    assert _feed(Framer(bytearray(STAGING_BYTES), every_second_time, _all_of), _stream(frames), cuts) == frames
    assert asked == lengths


def test_one_byte_at_a_time() -> None:
    frames = [b"\x00\x03" + bytes(20), b"\x00\x01" + bytes(70_000)]
    data = _stream(frames)
    assert _feed(Framer(bytearray(STAGING_BYTES), _takes_all, _all_of), data, list(range(30))) == frames


def test_a_large_frame_is_received_in_place() -> None:
    framer = Framer(STAGING, _takes_all, _all_of)
    data = _stream([bytes(1 << 20)])
    framer.buffer()[:100] = data[:100]
    assert framer.received(100) == []
    assert framer.granted == FIRST_BYTES  # its length alone is no reason to give it more
    assert len(framer.buffer()) == FIRST_BYTES - 96
    framer.buffer()[:] = data[100 : 4 + FIRST_BYTES]
    assert framer.received(FIRST_BYTES - 96) == []
    assert framer.granted == 1 << 20
    assert len(framer.buffer()) == (1 << 20) - FIRST_BYTES


@given(st.lists(sizes, max_size=4), st.lists(st.integers(0, 4 * STAGING_BYTES), max_size=12), st.randoms())
def test_frames_are_the_same_when_there_is_seldom_room(lengths: list[int], cuts: list[int], source: Random) -> None:
    asked = 0

    def now_and_then(step: int, rest: int) -> int:
        nonlocal asked
        asked += 1
        return source.choice((0, min(step, rest, source.randint(1, 30_000))))

    frames = [bytes([index + 1]) * length for index, length in enumerate(lengths)]
    framer = Framer(bytearray(STAGING_BYTES), _takes_all, now_and_then)
    assert _feed(framer, _stream(frames), cuts) == frames
    assert asked or all(length <= STAGING_BYTES for length in lengths)
    assert not framer.granted


def test_bytes_that_come_while_there_is_no_room_are_not_lost() -> None:
    room = [0, 0, 100_000, 0, 100_000]
    framer = Framer(bytearray(STAGING_BYTES), _takes_all, lambda _step, rest: min(rest, room.pop(0)))
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
def test_a_length_that_cannot_be_is_refused_after_the_frames_before_it(size: int) -> None:
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
def test_such_a_length_is_refused_though_nothing_follows_it(size: int) -> None:
    framer = Framer(bytearray(STAGING_BYTES), _takes_all, _all_of)
    framer.buffer()[:4] = size.to_bytes(4, "big", signed=True)
    with pytest.raises(RefusedError) as caught:
        framer.received(4)
    assert caught.value.reason == "length"


@given(st.lists(st.integers(0, 12), max_size=8), st.lists(st.integers(0, 120), max_size=12))
def test_frames_without_headers_may_be_of_any_length(lengths: list[int], cuts: list[int]) -> None:
    frames = [bytes([index + 1]) * length for index, length in enumerate(lengths)]
    assert _feed(Framer(bytearray(STAGING_BYTES), _takes_all, _all_of, 0), _stream(frames), cuts) == frames


def test_what_may_not_be_taken_gets_no_memory() -> None:
    def refuse(size: int, key: int, _wanted: int) -> bool:
        assert (size, key) == (2**31 - 1, 7)
        raise RefusedError("size", "too large")

    framer = Framer(bytearray(STAGING_BYTES), refuse, _all_of)
    framer.buffer()[:6] = (2**31 - 1).to_bytes(4, "big") + b"\x00\x07"
    with pytest.raises(RefusedError, match="too large"):
        framer.received(6)
    assert not framer.is_within_frame


# --- memory


def test_those_who_wait_for_memory_are_let_in_in_their_order() -> None:
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
    assert not memory.reserve(5)  # there is room, but somebody was before
    memory.wait(waiter("small", 5))
    memory.release(30)
    assert order == []
    memory.release(60)
    assert order == ["large", "small"]
    assert memory.bytes_used == 65
    assert memory.waiting == 0


def test_one_request_alone_always_has_room_and_who_leaves_lets_others_in() -> None:
    memory = RequestMemory(100)
    assert memory.reserve(1000)
    entered: list[int] = []

    def never() -> None:
        memory.wait(never)

    def second() -> None:
        assert memory.reserve(10)
        entered.append(10)

    memory.wait(never)
    memory.wait(second)
    memory.release(1000)
    assert entered == []
    memory.cancel_wait(never)
    assert entered == [10]


def test_those_within_a_frame_go_on_before_others_begin_and_one_passes_the_limit() -> None:
    memory = RequestMemory(100)
    order: list[str] = []

    def begin() -> None:
        if memory.reserve(10):
            order.append("new")
        else:
            memory.wait(begin)

    def go_on() -> None:
        got = memory.extend(10, 500)
        if got:
            order.append(f"second {got}")
        else:
            memory.wait(go_on, is_within_frame=True)

    assert memory.reserve(60)
    assert memory.reserve(40)
    begin()
    assert memory.extend(10, 300) == 300  # all wait: the first gets all that it needs
    go_on()
    assert memory.waiting == 2
    assert memory.extend(10, 20) == 0
    memory.release(350)
    assert memory.bytes_used == 50 + 10 + 10
    assert order == ["second 10", "new"]
    memory.wait(go_on, is_within_frame=True)
    memory.cancel_wait(go_on)
    assert memory.waiting == 0


def test_connections_are_counted_in_all_and_by_address() -> None:
    counts = ConnectionCounts(3, 2)
    assert [counts.add("a"), counts.add("a"), counts.add("a")] == ["", "", "max.connections.per.ip"]
    assert [counts.add("b"), counts.add("b")] == ["", "max.connections"]
    counts.remove("a")
    assert counts.add("a") == ""
    assert counts.total == 3
