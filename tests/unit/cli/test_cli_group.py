"""`kipmesh group` with a real broker, and usage errors before any request."""

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

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one event loop besides that of the cluster
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
    result = await kipmesh(bootstrap, *arguments, "--json")
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


async def fill_topic(bootstrap: str, topic: str) -> None:
    """Create a topic with two partitions and append one record per second to each."""
    async with AdminClient(bootstrap) as admin, Producer(bootstrap) as producer:
        await admin.create_topics([NewTopic(topic, 2, 1)])
        for number in range(RECORDS):
            for partition in range(2):
                await producer.send(topic, b"v", partition=partition, timestamp_ms=FIRST_MS + 1000 * number)
        await producer.flush()


async def offsets(bootstrap: str, group: str) -> list[int]:
    async with AdminClient(bootstrap) as admin:
        return [entry.offset for _, entry in sorted((await admin.list_group_offsets(group)).items())]


async def test_describe_and_list_show_group_with_members(bootstrap: str) -> None:
    await fill_topic(bootstrap, "busy")
    # Only the explicit commit changes offsets, however long the test takes.
    config = {"session_timeout_ms": 60_000, "heartbeat_interval_ms": 50, "enable_auto_commit": False}
    consumer = Consumer(bootstrap, group_id="busy", client_id="me", **config)
    async with consumer:
        consumer.subscribe(["busy"])
        async with asyncio.timeout(60):
            while len(consumer.assignment()) < 2:
                await consumer.poll(50)
        await consumer.commit({("busy", 0): 4})
        result = await kipmesh(bootstrap, "describe", "busy")
        summary, titles, *rows = [line.split() for line in result.stdout.splitlines()]
        assert " ".join(summary).startswith("group busy: Stable, range, coordinator 1 (127.0.0.1:")
        assert summary[-2:] == ["1", "member"]
        assert titles[:6] == ["TOPIC", "PARTITION", "CURRENT-OFFSET", "LOG-END-OFFSET", "LAG", "CONSUMER-ID"]
        assert [row[:5] for row in rows] == [["busy", "0", "4", "10", "6"], ["busy", "1", "-", "10", "-"]]
        assert [row[6:] for row in rows] == [["/127.0.0.1", "me"]] * 2
        (group,) = await objects(bootstrap, "describe", "busy")
        assert [partition["lag"] for partition in group["partitions"]] == [6, None]
        (member,) = group["members"]
        assert group["partitions"][0]["member"] == member["member_id"]
        assert member["assignment"] == [{"topic": "busy", "partition": number} for number in range(2)]
        assert {"group_id": "busy", "state": "Stable", "protocol_type": "consumer", "group_type": "classic"} in (
            await objects(bootstrap, "list", "--state", "stable")
        )
        for arguments in (("reset", "busy", "--topic", "busy", "--to-latest"), ("delete", "busy")):
            result = await kipmesh(bootstrap, *arguments)
            assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
            assert "stop the members first" in result.stderr
        assert await offsets(bootstrap, "busy") == [4]


async def test_reset_moves_offsets_by_each_option(bootstrap: str) -> None:
    await fill_topic(bootstrap, "moved")
    for arguments, expected in [
        (("moved", "--to-offset", "7"), [7, 7]),
        (("moved:1", "--to-earliest"), [7, 0]),
        (("moved", "--shift-by", "-3"), [4, 0]),
        (("moved:0,1", "--to-latest"), [10, 10]),
        (("moved", "--to-datetime", "2023-11-14T22:13:25"), [5, 5]),
        (("moved", "--to-datetime", "2023-11-14T23:13:26+01:00"), [6, 6]),
    ]:
        before = await offsets(bootstrap, "moved")
        resets = await objects(bootstrap, "reset", "moved", "--topic", *arguments)
        assert await offsets(bootstrap, "moved") == expected
        assert [reset["new_offset"] for reset in resets] == [expected[reset["partition"]] for reset in resets]
        assert [reset["current_offset"] for reset in resets] == (
            [before[reset["partition"]] for reset in resets] if before else [None, None]
        )
    result = await kipmesh(bootstrap, "reset", "moved", "--topic", "moved", "--to-offset", "99", "--dry-run")
    assert (result.returncode, result.stderr) == (0, "nothing was changed (--dry-run)\n")
    titles, *rows = [line.split() for line in result.stdout.splitlines()]
    assert titles == ["GROUP", "TOPIC", "PARTITION", "CURRENT-OFFSET", "NEW-OFFSET"]
    assert rows == [["moved", "moved", "0", "6", "10"], ["moved", "moved", "1", "6", "10"]]
    assert await offsets(bootstrap, "moved") == [6, 6]
    (group,) = await objects(bootstrap, "describe", "moved")
    assert (group["state"], group["members"]) == ("Empty", [])
    result = await kipmesh(bootstrap, "delete", "moved")
    assert (result.returncode, result.stdout) == (0, "moved: deleted\n")
    assert "moved" not in {listed["group_id"] for listed in await objects(bootstrap, "list")}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("describe", "missing"), "GROUP_ID_NOT_FOUND: group 'missing' does not exist; list groups with: "),
        (("delete", "missing"), "GROUP_ID_NOT_FOUND: group 'missing' does not exist; list groups with: "),
        (("reset", "g", "--topic", "nope", "--to-latest"), "UNKNOWN_TOPIC_OR_PARTITION"),
        (("reset", "g", "--topic", "existing:5", "--to-latest"), "UNKNOWN_TOPIC_OR_PARTITION"),
        (("reset", "g", "--topic", "existing", "--shift-by", "1"), "no committed offset"),
    ],
)
async def test_group_errors_are_reported_in_one_line(bootstrap: str, arguments: tuple[str, ...], error: str) -> None:
    async with AdminClient(bootstrap) as admin:
        if "existing" not in {topic.name for topic in await admin.list_topics()}:
            await admin.create_topics([NewTopic("existing", 1, 1)])
    result = await kipmesh(bootstrap, *arguments)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1), result.stderr
    assert error in result.stderr


def run_group(*arguments: str) -> Result:
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
async def test_invalid_usage_of_reset_exits_with_2(arguments: tuple[str, ...]) -> None:
    result = run_group("reset", "g", *arguments, "--bootstrap", "127.0.0.1:1")
    assert result.exit_code == 2, result.output


async def test_empty_group_id_is_rejected() -> None:
    for arguments in (["describe", ""], ["reset", "", "--topic", "t", "--to-latest"], ["delete", ""]):
        result = run_group(*arguments, "--bootstrap", "127.0.0.1:1")
        assert (result.exit_code, "the group id must not be empty" in result.output) == (2, True)


async def test_help_of_group_commands_has_examples() -> None:
    for command in ("list", "describe", "reset", "delete"):
        assert f"Examples:\n    kipmesh group {command}" in run_group(command, "--help").output
