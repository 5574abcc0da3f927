"""`kipmesh group`: what is wrong is said before anybody is asked; and all of it against a real broker."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kipmesh.cli.main import app
from kipmesh.client import AdminClient, Consumer, NewTopic, Producer
from kipmesh.cluster import LocalCluster
from tests.command import run_command_beside

pytestmark = pytest.mark.asyncio(loop_scope="module")  # beside the cluster's own loop there is one only
CONFIG = {"group.initial.rebalance.delay.ms": "0", "offsets.topic.num.partitions": "2"}
FIRST_MS = 1_700_000_000_000
RECORDS = 10


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with LocalCluster(mode="single", leaders=1, followers=0, config=CONFIG) as cluster:
        yield cluster.bootstrap


async def kipmesh(bootstrap: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await run_command_beside("group", *arguments, "--bootstrap", bootstrap, env={"TZ": "UTC"})


async def objects(bootstrap: str, *arguments: str) -> list[dict[str, Any]]:
    done = await kipmesh(bootstrap, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


async def filled(bootstrap: str, topic: str) -> None:
    """Two partitions, with a record a second."""
    async with AdminClient(bootstrap) as admin, Producer(bootstrap) as producer:
        await admin.create_topics([NewTopic(topic, 2, 1)])
        for number in range(RECORDS):
            for partition in range(2):
                await producer.send(topic, b"v", partition=partition, timestamp_ms=FIRST_MS + 1000 * number)
        await producer.flush()


async def offsets(bootstrap: str, group: str) -> list[int]:
    async with AdminClient(bootstrap) as admin:
        return [one.offset for _, one in sorted((await admin.list_group_offsets(group)).items())]


async def test_a_group_with_members(bootstrap: str) -> None:
    await filled(bootstrap, "busy")
    # Nothing is committed here but what is committed by hand, however long this takes.
    config = {"session_timeout_ms": 60_000, "heartbeat_interval_ms": 50, "enable_auto_commit": False}
    consumer = Consumer(bootstrap, group_id="busy", client_id="me", **config)
    async with consumer:
        consumer.subscribe(["busy"])
        async with asyncio.timeout(60):
            while len(consumer.assignment()) < 2:
                await consumer.poll(50)
        await consumer.commit({("busy", 0): 4})
        done = await kipmesh(bootstrap, "describe", "busy")
        head, titles, *rows = [line.split() for line in done.stdout.splitlines()]
        assert " ".join(head).startswith("group busy: Stable, range, coordinator 1 (127.0.0.1:")
        assert head[-2:] == ["1", "member"]
        assert titles[:6] == ["TOPIC", "PARTITION", "CURRENT-OFFSET", "LOG-END-OFFSET", "LAG", "CONSUMER-ID"]
        assert [row[:5] for row in rows] == [["busy", "0", "4", "10", "6"], ["busy", "1", "-", "10", "-"]]
        assert [row[6:] for row in rows] == [["/127.0.0.1", "me"]] * 2
        (group,) = await objects(bootstrap, "describe", "busy")
        assert [one["lag"] for one in group["partitions"]] == [6, None]
        (member,) = group["members"]
        assert group["partitions"][0]["member"] == member["member_id"]
        assert member["assignment"] == [{"topic": "busy", "partition": number} for number in range(2)]
        assert {"group_id": "busy", "state": "Stable", "protocol_type": "consumer", "group_type": "classic"} in (
            await objects(bootstrap, "list", "--state", "stable")
        )
        for arguments in (("reset", "busy", "--topic", "busy", "--to-latest"), ("delete", "busy")):
            done = await kipmesh(bootstrap, *arguments)
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
            assert "stop them first" in done.stderr
        assert await offsets(bootstrap, "busy") == [4]


async def test_reset(bootstrap: str) -> None:
    await filled(bootstrap, "moved")
    for arguments, expected in [
        (("moved", "--to-offset", "7"), [7, 7]),
        (("moved:1", "--to-earliest"), [7, 0]),
        (("moved", "--shift-by", "-3"), [4, 0]),
        (("moved:0,1", "--to-latest"), [10, 10]),
        (("moved", "--to-datetime", "2023-11-14T22:13:25"), [5, 5]),
        (("moved", "--to-datetime", "2023-11-14T23:13:26+01:00"), [6, 6]),
    ]:
        before = await offsets(bootstrap, "moved")
        found = await objects(bootstrap, "reset", "moved", "--topic", *arguments)
        assert await offsets(bootstrap, "moved") == expected
        assert [one["new_offset"] for one in found] == [expected[one["partition"]] for one in found]
        assert [one["current_offset"] for one in found] == (
            [before[one["partition"]] for one in found] if before else [None, None]
        )
    done = await kipmesh(bootstrap, "reset", "moved", "--topic", "moved", "--to-offset", "99", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "nothing was changed (--dry-run)\n")
    titles, *rows = [line.split() for line in done.stdout.splitlines()]
    assert titles == ["GROUP", "TOPIC", "PARTITION", "CURRENT-OFFSET", "NEW-OFFSET"]
    assert rows == [["moved", "moved", "0", "6", "10"], ["moved", "moved", "1", "6", "10"]]
    assert await offsets(bootstrap, "moved") == [6, 6]
    (group,) = await objects(bootstrap, "describe", "moved")
    assert (group["state"], group["members"]) == ("Empty", [])
    done = await kipmesh(bootstrap, "delete", "moved")
    assert (done.returncode, done.stdout) == (0, "moved: deleted\n")
    assert "moved" not in {one["group_id"] for one in await objects(bootstrap, "list")}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("describe", "nobody"), "GROUP_ID_NOT_FOUND"),
        (("delete", "nobody"), "GROUP_ID_NOT_FOUND"),
        (("reset", "g", "--topic", "nope", "--to-latest"), "UNKNOWN_TOPIC_OR_PARTITION"),
        (("reset", "g", "--topic", "there:5", "--to-latest"), "UNKNOWN_TOPIC_OR_PARTITION"),
        (("reset", "g", "--topic", "there", "--shift-by", "1"), "no committed offset"),
    ],
)
async def test_errors_are_one_line(bootstrap: str, arguments: tuple[str, ...], said: str) -> None:
    async with AdminClient(bootstrap) as admin:
        if "there" not in {topic.name for topic in await admin.list_topics()}:
            await admin.create_topics([NewTopic("there", 1, 1)])
    done = await kipmesh(bootstrap, *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert said in done.stderr


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["group", *arguments])


@pytest.mark.parametrize(
    "arguments",
    [
        ("--to-latest",),
        ("--topic", "t"),
        ("--topic", "t", "--to-latest", "--to-earliest"),
        ("--topic", "t", "--to-latest", "--shift-by", "0"),
        ("--topic", "t:", "--to-latest"),
        ("--topic", ":1", "--to-latest"),
        ("--topic", "t:x", "--to-latest"),
        ("--topic", "t:-1", "--to-latest"),
        ("--topic", "t", "--to-offset", "-1"),
        ("--topic", "t", "--to-datetime", "yesterday"),
    ],
)
async def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    done = invoked("reset", "g", *arguments, "--bootstrap", "127.0.0.1:1")
    assert done.exit_code == 2, done.output


async def test_an_empty_id_is_no_group() -> None:
    for arguments in (["describe", ""], ["reset", "", "--topic", "t", "--to-latest"], ["delete", ""]):
        done = invoked(*arguments, "--bootstrap", "127.0.0.1:1")
        assert (done.exit_code, "the group id must not be empty" in done.output) == (2, True)


async def test_help_has_examples() -> None:
    for command in ("list", "describe", "reset", "delete"):
        assert f"Examples:\n    kipmesh group {command}" in invoked(command, "--help").output
