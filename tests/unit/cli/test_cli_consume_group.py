"""`kipmesh consume --group` against a real broker: it shares, goes on, and commits what it printed."""

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


PATIENT = """
from kipmesh.cli import common, consume_command, main

common.CONNECT_TIMEOUT_S = consume_command.CONNECT_TIMEOUT_S_MIN = 60.0
main.main()
"""
"""The command, which gives brokers on a slow machine more than a second to answer."""


@pytest.fixture(autouse=True)
def interrupts_are_heard() -> Iterator[None]:
    """Whoever runs the tests may ignore SIGINT, and commands inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


async def filled(bootstrap: str, topic: str, first: int = 0, width: int = 1) -> str:
    async with AdminClient(bootstrap) as admin, Producer(bootstrap) as producer:
        if topic not in {one.name for one in await admin.list_topics()}:
            await admin.create_topics([NewTopic(topic, 2, 1)])
        for number in range(first, first + COUNT):
            await producer.send(topic, b"%0*d" % (width, number), partition=number % 2)
    return topic


@asynccontextmanager
async def consuming(bootstrap: str, topic: str, *arguments: str, stdout: int = PIPE) -> AsyncIterator[Process]:
    command = ["-c", PATIENT, "consume", topic, "--bootstrap", bootstrap]
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


async def until_printed(process: Process, count: int, first: int) -> set[int]:
    """So many values from `first` on, as it prints them."""
    assert process.stdout is not None
    values: set[int] = set()
    async with asyncio.timeout(TIMEOUT_S):
        while len(values) < count:
            value = int(await process.stdout.readline())
            values |= {value} if value >= first else set()
    return values


async def printed(bootstrap: str, topic: str, *arguments: str) -> list[int]:
    """All that it prints until it ends by itself."""
    async with consuming(bootstrap, topic, *arguments) as process:
        out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        assert (process.returncode, err) == (0, b"")
        return sorted(int(line) for line in out.splitlines())


async def committed(bootstrap: str, group: str) -> int:
    async with AdminClient(bootstrap) as admin:
        return sum(one.offset for one in (await admin.list_group_offsets(group)).values())


async def loads(admin: AdminClient, group: str) -> list[int]:
    found = await admin.describe_groups([group])
    return [len(member.assignment) for member in found[group].members]


async def test_it_goes_on_where_it_stopped(bootstrap: str) -> None:
    topic = await filled(bootstrap, "goes-on")
    group = ("--group", "goes-on", "--from-beginning")
    first = await printed(bootstrap, topic, *group, "--max-messages", "7")
    assert len(first) == 7
    assert await committed(bootstrap, "goes-on") == 7
    rest = await printed(bootstrap, topic, *group, "--max-messages", str(COUNT - 7))
    assert sorted(first + rest) == list(range(COUNT))
    assert await committed(bootstrap, "goes-on") == COUNT
    assert await printed(bootstrap, topic, "--config", "group.id=goes-on", "--timeout-ms", "300") == []


async def test_without_offsets_it_begins_at_the_end(bootstrap: str) -> None:
    topic = await filled(bootstrap, "at-the-end")
    config = ("--group", "at-the-end", "--config", "auto.commit.interval.ms=100")
    async with consuming(bootstrap, topic, *config) as process:
        async with asyncio.timeout(TIMEOUT_S):
            while await committed(bootstrap, "at-the-end") < COUNT:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        process.terminate()
        assert await asyncio.wait_for(process.communicate(), TIMEOUT_S) == (b"", b"")
    await filled(bootstrap, topic, COUNT)
    found = await printed(bootstrap, topic, "--group", "at-the-end", "--max-messages", "20")
    assert found == list(range(COUNT, 2 * COUNT))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_members_share_and_a_signal_hands_over_at_once(bootstrap: str, number: signal.Signals) -> None:
    name = f"share-{number}"
    topic = await filled(bootstrap, name)
    config = ("--group", name, "--from-beginning")
    async with consuming(bootstrap, topic, *config) as one, consuming(bootstrap, topic, *config) as two:
        async with AdminClient(bootstrap) as admin, asyncio.timeout(TIMEOUT_S):
            while await loads(admin, name) != [1, 1]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await filled(bootstrap, topic, COUNT)
        first, second = await until_printed(one, 10, COUNT), await until_printed(two, 10, COUNT)
        assert first | second == set(range(COUNT, 2 * COUNT))
        two.send_signal(number)
        assert await asyncio.wait_for(two.wait(), TIMEOUT_S) == 128 + number
        await filled(bootstrap, topic, 2 * COUNT)
        assert await until_printed(one, 20, 2 * COUNT) == set(range(2 * COUNT, 3 * COUNT))


async def test_what_was_not_printed_is_not_committed(bootstrap: str) -> None:
    topic = await filled(bootstrap, "unprinted", width=50_000)
    arguments = ("--group", "unprinted", "--from-beginning", "--config", "auto.commit.interval.ms=600000")
    reading, writing = os.pipe()
    try:
        async with consuming(bootstrap, topic, *arguments, stdout=writing) as process:
            assert await asyncio.to_thread(os.read, reading, 1) == b"0"
            process.send_signal(signal.SIGTERM)  # a megabyte does not fit into the pipe
            assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 128 + signal.SIGTERM
    finally:
        os.close(reading)
        os.close(writing)
    assert await committed(bootstrap, "unprinted") < COUNT / 2
