"""`kipmesh consume --group` with a real broker: members share partitions and commit printed records."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from kipmesh.client import AdminClient, NewTopic, Producer
from kipmesh.cluster import LocalCluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("cli-consume-group")]
CONFIG = {"group.initial.rebalance.delay.ms": "0", "offsets.topic.num.partitions": "1"}
TIMEOUT_S = 60.0
COUNT = 20


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with LocalCluster(mode="single", leaders=1, followers=0, config=CONFIG) as cluster:
        yield cluster.bootstrap


PATIENT_COMMAND = """
from kipmesh.cli import common, consume_command, main

common.CONNECT_TIMEOUT_S = consume_command.CONNECT_TIMEOUT_S_MIN = 60.0
main.main()
"""
"""The command with long timeouts for slow machines."""


@pytest.fixture(autouse=True)
def restore_interrupt_handler() -> Iterator[None]:
    """The test process may ignore SIGINT, and its commands would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


async def fill_topic(bootstrap: str, topic: str, first: int = 0, width: int = 1) -> str:
    async with AdminClient(bootstrap) as admin, Producer(bootstrap) as producer:
        if topic not in {existing.name for existing in await admin.list_topics()}:
            await admin.create_topics([NewTopic(topic, 2, 1)])
        for value in range(first, first + COUNT):
            await producer.send(topic, b"%0*d" % (width, value), partition=value % 2)
    return topic


@asynccontextmanager
async def run_consume(bootstrap: str, topic: str, *arguments: str, stdout: int = PIPE) -> AsyncIterator[Process]:
    command = ["-c", PATIENT_COMMAND, "consume", topic, "--bootstrap", bootstrap]
    config = ["--config", "heartbeat.interval.ms=50", "--config", "session.timeout.ms=60000"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, *config, *arguments, stdout=stdout, stderr=PIPE, env={}
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def read_values(process: Process, count: int, first: int) -> set[int]:
    """Read printed values until `count` are at least `first`."""
    assert process.stdout is not None
    values: set[int] = set()
    async with asyncio.timeout(TIMEOUT_S):
        while len(values) < count:
            value = int(await process.stdout.readline())
            values |= {value} if value >= first else set()
    return values


async def all_values(bootstrap: str, topic: str, *arguments: str) -> list[int]:
    """Return all values that the command prints until it ends."""
    async with run_consume(bootstrap, topic, *arguments) as process:
        out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        assert (process.returncode, err) == (0, b"")
        return sorted(int(line) for line in out.splitlines())


async def committed(bootstrap: str, group: str) -> int:
    async with AdminClient(bootstrap) as admin:
        return sum(entry.offset for entry in (await admin.list_group_offsets(group)).values())


async def assignment_sizes(admin: AdminClient, group: str) -> list[int]:
    groups = await admin.describe_groups([group])
    return [len(member.assignment) for member in groups[group].members]


async def test_group_resumes_at_committed_offsets(bootstrap: str) -> None:
    topic = await fill_topic(bootstrap, "resumed")
    group = ("--group", "resumed", "--from-beginning")
    first = await all_values(bootstrap, topic, *group, "--max-messages", "7")
    assert len(first) == 7
    assert await committed(bootstrap, "resumed") == 7
    rest = await all_values(bootstrap, topic, *group, "--max-messages", str(COUNT - 7))
    assert sorted(first + rest) == list(range(COUNT))
    assert await committed(bootstrap, "resumed") == COUNT
    assert await all_values(bootstrap, topic, "--config", "group.id=resumed", "--timeout-ms", "300") == []


async def test_group_without_offsets_starts_at_log_end(bootstrap: str) -> None:
    topic = await fill_topic(bootstrap, "at-the-end")
    config = ("--group", "at-the-end", "--config", "auto.commit.interval.ms=100")
    async with run_consume(bootstrap, topic, *config) as process:
        async with asyncio.timeout(TIMEOUT_S):
            while await committed(bootstrap, "at-the-end") < COUNT:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        process.terminate()
        assert await asyncio.wait_for(process.communicate(), TIMEOUT_S) == (b"", b"")
    await fill_topic(bootstrap, topic, COUNT)
    values = await all_values(bootstrap, topic, "--group", "at-the-end", "--max-messages", "20")
    assert values == list(range(COUNT, 2 * COUNT))


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
async def test_members_share_partitions_and_signal_hands_them_over(
    bootstrap: str, signal_number: signal.Signals
) -> None:
    name = f"share-{signal_number}"
    topic = await fill_topic(bootstrap, name)
    config = ("--group", name, "--from-beginning")
    async with (
        run_consume(bootstrap, topic, *config) as first_process,
        run_consume(bootstrap, topic, *config) as second_process,
    ):
        async with AdminClient(bootstrap) as admin, asyncio.timeout(TIMEOUT_S):
            while await assignment_sizes(admin, name) != [1, 1]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await fill_topic(bootstrap, topic, COUNT)
        first, second = await read_values(first_process, 10, COUNT), await read_values(second_process, 10, COUNT)
        assert first | second == set(range(COUNT, 2 * COUNT))
        second_process.send_signal(signal_number)
        assert await asyncio.wait_for(second_process.wait(), TIMEOUT_S) == 128 + signal_number
        await fill_topic(bootstrap, topic, 2 * COUNT)
        assert await read_values(first_process, 20, 2 * COUNT) == set(range(2 * COUNT, 3 * COUNT))


async def test_unprinted_records_are_not_committed(bootstrap: str) -> None:
    topic = await fill_topic(bootstrap, "unprinted", width=50_000)
    arguments = ("--group", "unprinted", "--from-beginning", "--config", "auto.commit.interval.ms=600000")
    reading, writing = os.pipe()
    try:
        async with run_consume(bootstrap, topic, *arguments, stdout=writing) as process:
            assert await asyncio.to_thread(os.read, reading, 1) == b"0"
            process.send_signal(signal.SIGTERM)  # the pipe cannot hold a megabyte
            assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 128 + signal.SIGTERM
    finally:
        os.close(reading)
        os.close(writing)
    assert await committed(bootstrap, "unprinted") < COUNT / 2
