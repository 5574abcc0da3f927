"""`kipmesh consume`: signals, outages of brokers, deleted topics and partitions without leader."""

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
PATIENT_COMMAND = """
from kipmesh.cli import common, consume_command, main
from kipmesh.client.consumer import fetcher

common.CONNECT_TIMEOUT_S = consume_command.CONNECT_TIMEOUT_S_MIN = fetcher.CLOSE_SECONDS_MAX = 60.0
main.main()
"""
"""The command with long timeouts: the brokers run in this process, which may be slow."""


@pytest.fixture(autouse=True)
def restore_signal_handlers() -> Iterator[None]:
    """The test process may ignore these signals (like under `nohup`), and its commands would inherit that."""
    before = {
        signal_to_restore: signal.signal(signal_to_restore, lambda *_: None)
        for signal_to_restore in (signal.SIGHUP, signal.SIGINT)
    }
    yield
    for signal_to_restore, handler in before.items():
        signal.signal(signal_to_restore, handler)


@asynccontextmanager
async def run_consume(cluster: FakeCluster, *arguments: str, stdout: int = PIPE) -> AsyncIterator[Process]:
    start_options = () if "auto.offset.reset=earliest" in arguments else ("--from-beginning",)
    command = ["-c", PATIENT_COMMAND, "consume", "t", *start_options, "--bootstrap", cluster.bootstrap]
    environment = {"GRPC_VERBOSITY": "NONE"}  # the command sets it too late here: gRPC is imported first
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


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
async def test_signal_closes_the_fetch_session(signal_number: signal.Signals) -> None:
    async with FakeCluster() as cluster:
        with_record(cluster)
        async with run_consume(cluster) as process:
            assert await first_line(process) == b"x\n"
            broker = cluster.brokers[1]
            await until(broker.sessions.list, "a fetch session")
            process.send_signal(signal_number)
            assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 128 + signal_number
            assert not broker.sessions.list()
            assert await error_line(process) == ""


async def test_consume_starts_at_auto_offset_reset_without_options() -> None:
    async with FakeCluster() as cluster:
        with_record(cluster)
        async with run_consume(cluster, "--config", "auto.offset.reset=earliest", "--max-messages", "1") as process:
            assert await first_line(process) == b"x\n"
            assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0


async def test_signal_ends_consume_while_output_is_blocked() -> None:
    async with FakeCluster() as cluster:
        with_record(cluster, size=100_000, count=20)
        reading, writing = os.pipe()
        try:
            async with run_consume(cluster, stdout=writing) as process:
                assert await asyncio.to_thread(os.read, reading, 10) == b"x" * 10
                await until(cluster.brokers[1].sessions.list, "a fetch session")
                await asyncio.sleep(0.3)  # the pipe is probably full; otherwise this repeats another test
                process.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 128 + signal.SIGTERM
                assert not cluster.brokers[1].sessions.list()
        finally:
            os.close(reading)
            os.close(writing)


async def test_consume_warns_once_and_resumes_after_broker_outage() -> None:
    async with FakeCluster() as cluster:
        with_record(cluster)
        async with run_consume(cluster) as process:
            assert await first_line(process) == b"x\n"
            await cluster.brokers[1].stop()
            error = await error_line(process)
            assert error == f"kipmesh: no broker responds at {cluster.bootstrap}; waiting\n"
            await cluster.brokers[1].start()
            cluster.topics["t"].partitions[0].append(encode_batch([(None, b"y")], timestamp_ms=0))
            assert await first_line(process) == b"y\n"
            process.terminate()
            assert await error_line(process) == ""


async def test_consume_ends_with_error_when_topic_is_deleted() -> None:
    async with FakeCluster() as cluster:
        with_record(cluster)
        async with run_consume(cluster) as process:
            assert await first_line(process) == b"x\n"
            del cluster.topics["t"]
            assert await error_line(process) == "kipmesh: UNKNOWN_TOPIC_OR_PARTITION: topic 't' does not exist\n"
            assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 1


async def test_consume_names_partitions_without_leader_at_its_end() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 4)
        for partition in cluster.topics["t"].partitions:
            partition.append(encode_batch([(None, b"x")], timestamp_ms=0))
        for partition_number in (1, 3):
            cluster.move_leader("t", partition_number, -1)

        async def assert_output(arguments: tuple[str, ...], lines: int, error: str) -> None:
            async with run_consume(cluster, "--timeout-ms", "4000", *arguments) as process:
                out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
                assert (process.returncode, out.count(b"x\n"), err.decode()) == (0, lines, error)

        checks = []
        for arguments, lines, error in (
            ((), 2, "kipmesh: no leader for partitions 1, 3 of topic 't': their records are missing\n"),
            (("--partition", "3"), 0, "kipmesh: no leader for partition 3 of topic 't': their records are missing\n"),
            (("--partition", "2"), 1, ""),
            (("--max-messages", "2"), 2, ""),
        ):
            checks.append(assert_output(arguments, lines, error))
        await asyncio.gather(*checks)  # each waits for the full timeout


async def test_each_outage_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(consume_command, "CHECK_INTERVAL_S", 0.001)
    silences = iter([0, 3, 5, 6, 0, 2, 7, 8, 9])
    is_exhausted = asyncio.Event()

    class Silent:
        @property
        def unreachable_s(self) -> float:
            value = next(silences, None)
            if value is None:
                is_exhausted.set()
            return 0 if value is None else value

    warning = asyncio.create_task(consume_command._warn_unreachable(Silent(), "here"))  # type: ignore[arg-type]
    await asyncio.wait_for(is_exhausted.wait(), TIMEOUT_S)
    warning.cancel()
    assert capsys.readouterr().err == "kipmesh: no broker responds at here; waiting\n" * 2


async def test_consumer_measures_unreachable_time() -> None:
    async with FakeCluster() as cluster:
        with_record(cluster)
        config = {"retry.backoff.ms": 5, "retry.backoff.max.ms": 20, "auto.offset.reset": "earliest"}
        async with Consumer(cluster.bootstrap, **config) as consumer:
            consumer.assign([("t", 0)])
            assert await consumer.poll(30_000)
            assert consumer.unreachable_s == 0
            await cluster.brokers[1].stop()
            await until(lambda: consumer.unreachable_s > 0.05, "an unreachable broker")
            await cluster.brokers[1].start()
            await until(lambda: consumer.unreachable_s == 0, "a response")
