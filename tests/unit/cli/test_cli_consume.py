"""`kipmesh consume` when it is told to stop, when nobody answers, and when its topic goes away."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from kipmesh.cli import consume_command
from kipmesh.client import Consumer
from kipmesh.client.records import encode_batch
from kipmesh.testing import until
from kipmesh.testing.fake_broker import FakeCluster

TIMEOUT_S = 60.0
PATIENT = """
from kipmesh.cli import common, consume_command, main
from kipmesh.client.consumer import fetcher

common.CONNECT_TIMEOUT_S = consume_command.CONNECT_TIMEOUT_S_MIN = fetcher.CLOSE_SECONDS_MAX = 60.0
main.main()
"""
"""The command, which gives brokers on a slow machine more than a second to answer: they are in this process."""


@pytest.fixture(autouse=True)
def signals_are_heard() -> Iterator[None]:
    """Whoever runs the tests may ignore them (as under `nohup`), and commands inherit that."""
    before = {one: signal.signal(one, lambda *_: None) for one in (signal.SIGHUP, signal.SIGINT)}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


@asynccontextmanager
async def consuming(cluster: FakeCluster, *arguments: str, stdout: int = PIPE) -> AsyncIterator[Process]:
    begin = () if "auto.offset.reset=earliest" in arguments else ("--from-beginning",)
    command = ["-c", PATIENT, "consume", "t", *begin, "--bootstrap", cluster.bootstrap]
    environment = {"GRPC_VERBOSITY": "NONE"}  # as the command says itself; above it is imported before that
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, *arguments, stdout=stdout, stderr=PIPE, env=environment
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def first_line(process: Process) -> bytes:
    assert process.stdout is not None
    return await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S)


async def error_line(process: Process) -> str:
    assert process.stderr is not None
    return (await asyncio.wait_for(process.stderr.readline(), TIMEOUT_S)).decode()


def with_record(cluster: FakeCluster, size: int = 1, count: int = 1) -> None:
    log = cluster.create_topic("t").partitions[0]
    for _ in range(count):
        log.append(encode_batch([(None, b"x" * size)], timestamp_ms=0))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
async def test_a_signal_ends_the_fetch_session(number: signal.Signals) -> None:
    async with FakeCluster() as cluster:
        with_record(cluster)
        async with consuming(cluster) as process:
            assert await first_line(process) == b"x\n"
            broker = cluster.brokers[1]
            await until(broker.sessions.list, "a fetch session")
            process.send_signal(number)
            assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 128 + number
            assert not broker.sessions.list()
            assert await error_line(process) == ""


async def test_it_begins_where_auto_offset_reset_says_when_no_option_does() -> None:
    async with FakeCluster() as cluster:
        with_record(cluster)
        async with consuming(cluster, "--config", "auto.offset.reset=earliest", "--max-messages", "1") as process:
            assert await first_line(process) == b"x\n"
            assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0


async def test_a_signal_ends_it_while_nobody_reads_the_output() -> None:
    async with FakeCluster() as cluster:
        with_record(cluster, size=100_000, count=20)
        reading, writing = os.pipe()
        try:
            async with consuming(cluster, stdout=writing) as process:
                assert await asyncio.to_thread(os.read, reading, 10) == b"x" * 10
                await until(cluster.brokers[1].sessions.list, "a fetch session")
                await asyncio.sleep(0.3)  # the pipe is full by now, most likely; if not, the test before has it
                process.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 128 + signal.SIGTERM
                assert not cluster.brokers[1].sessions.list()
        finally:
            os.close(reading)
            os.close(writing)


async def test_it_says_once_that_nobody_answers_and_goes_on_when_somebody_does() -> None:
    async with FakeCluster() as cluster:
        with_record(cluster)
        async with consuming(cluster) as process:
            assert await first_line(process) == b"x\n"
            await cluster.brokers[1].stop()
            said = await error_line(process)
            assert said == f"kipmesh: no broker responds at {cluster.bootstrap}; waiting\n"
            await cluster.brokers[1].start()
            cluster.topics["t"].partitions[0].append(encode_batch([(None, b"y")], timestamp_ms=0))
            assert await first_line(process) == b"y\n"
            process.terminate()
            assert await error_line(process) == ""


async def test_a_deleted_topic_ends_it_with_a_clear_line() -> None:
    async with FakeCluster() as cluster:
        with_record(cluster)
        async with consuming(cluster) as process:
            assert await first_line(process) == b"x\n"
            del cluster.topics["t"]
            assert await error_line(process) == "kipmesh: UNKNOWN_TOPIC_OR_PARTITION: topic 't' does not exist\n"
            assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 1


async def test_it_says_at_the_end_which_partitions_have_no_leader() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 4)
        for partition in cluster.topics["t"].partitions:
            partition.append(encode_batch([(None, b"x")], timestamp_ms=0))
        for number in (1, 3):
            cluster.move_leader("t", number, -1)

        async def told(arguments: tuple[str, ...], lines: int, said: str) -> None:
            async with consuming(cluster, "--timeout-ms", "4000", *arguments) as process:
                out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
                assert (process.returncode, out.count(b"x\n"), err.decode()) == (0, lines, said)

        found = []
        for arguments, lines, said in (
            ((), 2, "kipmesh: no leader for partitions 1, 3 of topic 't': their records are missing\n"),
            (("--partition", "3"), 0, "kipmesh: no leader for partition 3 of topic 't': their records are missing\n"),
            (("--partition", "2"), 1, ""),
            (("--max-messages", "2"), 2, ""),
        ):
            found.append(told(arguments, lines, said))
        await asyncio.gather(*found)  # each waits for the time in which no record may come


async def test_silence_is_told_once_each_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(consume_command, "CHECK_INTERVAL_S", 0.001)
    silences = iter([0, 3, 5, 6, 0, 2, 7, 8, 9])
    over = asyncio.Event()

    class Silent:
        @property
        def unreachable_s(self) -> float:
            value = next(silences, None)
            if value is None:
                over.set()
            return 0 if value is None else value

    telling = asyncio.create_task(consume_command._warn_unreachable(Silent(), "here"))  # type: ignore[arg-type]
    await asyncio.wait_for(over.wait(), TIMEOUT_S)
    telling.cancel()
    assert capsys.readouterr().err == "kipmesh: no broker responds at here; waiting\n" * 2


async def test_how_long_nobody_has_answered() -> None:
    async with FakeCluster() as cluster:
        with_record(cluster)
        config = {"retry.backoff.ms": 5, "retry.backoff.max.ms": 20, "auto.offset.reset": "earliest"}
        async with Consumer(cluster.bootstrap, **config) as consumer:
            consumer.assign([("t", 0)])
            assert await consumer.poll(30_000)
            assert consumer.unreachable_s == 0
            await cluster.brokers[1].stop()
            await until(lambda: consumer.unreachable_s > 0.05, "silence")
            await cluster.brokers[1].start()
            await until(lambda: consumer.unreachable_s == 0, "an answer")
