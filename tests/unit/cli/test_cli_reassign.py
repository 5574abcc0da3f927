"""`kipmesh topic reassign` and `kipmesh broker`: usage errors, plans, timeouts and progress."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import typer
from typer.testing import CliRunner, Result

from kipmesh.cli import reassignment
from kipmesh.cli.common import AdminConnection, CommandError
from kipmesh.cli.main import app
from kipmesh.cli.reassignment import Deadline, throttled, wait_moved
from kipmesh.client import AdminClient, ClusterDescription, Node, TopicPartition
from kipmesh.client.admin.reassignments import DrainProgress, PartitionReassignment
from kipmesh.core.errors import ErrorCode, KafkaError


def kipmesh(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("t",),
        ("t", "--list", "--cancel"),
        ("t", "--replicas", "0:1", "--file", "plan.json"),
        ("--replicas", "0:1"),
        ("t", "--replicas", "1,2"),
        ("t", "--replicas", "x:1"),
        ("t", "--replicas", "0:"),
        ("t", "--replicas", "0:1,-2"),
        ("t", "--replicas", "0:1", "--replicas", "0:2"),
        ("t", "--list", "--wait"),
        ("t", "--cancel", "--throttle", "5"),
        ("t", "--replicas", "0:1", "--throttle", "0"),
    ],
)
def test_invalid_usage_of_reassign_exits_with_2(arguments: tuple[str, ...]) -> None:
    result = kipmesh("topic", "reassign", *arguments, "--bootstrap", "127.0.0.1:1")
    assert result.exit_code == 2, result.output


@pytest.mark.parametrize(
    "plan",
    [
        "",
        "[]",
        "{}",
        '{"partitions": []}',
        '{"partitions": {}}',
        '{"partitions": [{"topic": "t", "partition": Infinity, "replicas": [1]}]}',
        '{"partitions": [{"topic": "t", "partition": 0, "replicas": [99999999999]}]}',
        '{"partitions": [{"topic": "t"}]}',
        '{"partitions": [{"topic": "t", "partition": 0, "replicas": "1"}]}',
        '{"partitions": [{"topic": "t", "partition": 0, "replicas": [1.5]}]}',
        '{"partitions": [{"topic": "u", "partition": 0, "replicas": [1]}]}',
        json.dumps({"partitions": [{"topic": "t", "partition": 0, "replicas": [1]}] * 2}),
    ],
)
def test_invalid_plans_are_rejected(tmp_path: Path, plan: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plan)
    result = kipmesh("topic", "reassign", "t", "--file", str(file), "--bootstrap", "127.0.0.1:1")
    assert isinstance(result.exception, CommandError)
    assert str(result.exception).startswith(str(file))


def test_help_of_reassign_and_broker_commands_has_examples() -> None:
    for command in (("topic", "reassign"), ("broker", "list"), ("broker", "drain"), ("broker", "decommission")):
        result = kipmesh(*command, "--help")
        assert f"Examples:\n    kipmesh {' '.join(command)}" in result.output


class FakeAdmin:
    """Admin client of a cluster whose reassignments never end. Broker 2 is alive, broker 3 is fenced."""

    def __init__(self) -> None:
        self.running = {
            TopicPartition("t", 0): PartitionReassignment((2, 1), (2,), (1,)),
            TopicPartition("t", 1): PartitionReassignment((3, 1), (3,), (1,)),
            TopicPartition("other", 0): PartitionReassignment((3, 2), (3,), (2,)),
        }
        self.is_active = True

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def describe_configs(self, resources: list[Any]) -> dict[Any, dict[str, Any]]:
        return {resource: {} for resource in resources}

    async def alter_configs(self, alterations: object) -> None:
        pass

    async def alter_partition_reassignments(self, targets: dict[Any, Any]) -> dict[TopicPartition, KafkaError | None]:
        return {TopicPartition(*topic_partition): None for topic_partition in targets}

    async def list_partition_reassignments(self, partitions: Any = None) -> dict[TopicPartition, PartitionReassignment]:
        if not self.is_active:
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, "no active controller")
        return {
            topic_partition: moves
            for topic_partition, moves in self.running.items()
            if partitions is None or topic_partition in partitions
        }

    async def wait_reassigned(self, partitions: list[TopicPartition], on_moved: Callable[[int, int], None]) -> None:
        on_moved(len(partitions) - len(await self.list_partition_reassignments(partitions)), len(partitions))
        await asyncio.Event().wait()

    async def describe_cluster(self) -> ClusterDescription:
        return ClusterDescription("c", 100, [Node(1, "h", 1, None), Node(2, "h", 2, None)])

    async def drain_broker(
        self, broker_id: int, *, wait: bool, on_progress: Callable[[DrainProgress], None]
    ) -> DrainProgress:
        on_progress(DrainProgress(5, 2, 2))
        await asyncio.Event().wait()
        raise AssertionError


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> FakeAdmin:
    fake_admin = FakeAdmin()
    monkeypatch.setattr("kipmesh.client.AdminClient", lambda *_, **__: fake_admin)
    return fake_admin


CONTINUES = (
    ". The moves continue in the background: run the same command to wait again, `kipmesh topic reassign --list` to "
    "see them, or `kipmesh topic reassign --cancel` to cancel them"
)


@pytest.mark.parametrize("command", ["drain", "decommission"])
@pytest.mark.usefixtures("admin")
def test_timeout_applies_to_whole_drain(command: str) -> None:
    result = kipmesh("broker", command, "1", "--timeout", "0.2", "--throttle", "9", "--bootstrap", "127.0.0.1:1")
    assert isinstance(result.exception, CommandError)
    expected = "timed out after 0.2 s: 2 of 5 replicas of broker 1 left to move; broker 3 is fenced and blocks 1"
    assert str(result.exception) == expected + CONTINUES
    assert "the throttle stays; remove it with: " in result.stderr


def test_timeout_applies_to_wait_for_reassignment(admin: FakeAdmin) -> None:
    plan = ("topic", "reassign", "t", "--replicas", "0:2", "--replicas", "1:3", "--replicas", "2:2")
    result = kipmesh(*plan, "--wait", "--timeout", "0.2", "--bootstrap", "127.0.0.1:1")
    expected = "timed out after 0.2 s: 2 of 3 partitions left to move; broker 3 is fenced and blocks 1"
    assert str(result.exception) == expected + CONTINUES
    admin.running[TopicPartition("t", 1)] = admin.running[TopicPartition("t", 0)]
    result = kipmesh(*plan, "--wait", "--timeout", "0.2", "--bootstrap", "127.0.0.1:1")
    assert str(result.exception) == "timed out after 0.2 s: 2 of 3 partitions left to move" + CONTINUES


def test_partitions_without_reassignment_are_reported_as_moved(admin: FakeAdmin) -> None:
    plan = ("topic", "reassign", "t", "--replicas", "0:2", "--replicas", "2:2", "--bootstrap", "127.0.0.1:1")
    assert kipmesh(*plan).stdout.split()[3:] == ["t", "0", "moving", "t", "2", "moved"]
    admin.is_active = False
    assert kipmesh(*plan).stdout.split()[3:] == ["t", "0", "moving", "t", "2", "moving"]


def test_wait_reports_remaining_moves_periodically(
    admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reassignment, "REPORT_INTERVAL_S", 0.01)

    async def report_lines(count: int) -> list[str]:
        lines: list[str] = []

        async def work(on_moved: Callable[[int, int], None]) -> None:
            on_moved(3, 5)
            while len(lines) < count:
                await asyncio.sleep(0.001)
                lines.extend(capsys.readouterr().err.splitlines())

        await wait_moved(
            cast("AdminClient", admin),
            "replicas",
            lambda _, reassignment_of_partition: 1 in reassignment_of_partition.removing_replicas,
            work,
            Deadline(None),
        )
        return lines

    assert set(asyncio.run(report_lines(2))) == {
        "kipmesh: 2 of 5 replicas left to move; broker 3 is fenced and blocks 1"
    }
    del admin.running[TopicPartition("t", 1)]
    assert set(asyncio.run(report_lines(1))) == {"kipmesh: 2 of 5 replicas left to move"}
    admin.is_active = False
    assert set(asyncio.run(report_lines(1))) == {
        "kipmesh: 2 of 5 replicas left to move; no active controller responds, so the reason is unknown"
    }


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_reassignment_reports_that_throttle_stays(
    signal_number: signal.Signals, admin: FakeAdmin, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reassignment continues with the throttle until the throttle is removed."""

    async def run_throttled(client: AdminClient) -> None:
        assert cast("Any", client) is admin
        async with throttled(client, 1000, lift=True):
            os.kill(os.getpid(), signal_number)
            await asyncio.Event().wait()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # the test process may ignore SIGINT
    try:
        with pytest.raises((typer.Exit, KeyboardInterrupt)) as exit_info:
            AdminConnection("127.0.0.1:1", Path(), None).run_stoppable(run_throttled)
    finally:
        signal.signal(signal.SIGINT, before)
    assert getattr(exit_info.value, "exit_code", 128 + signal.SIGINT) == 128 + signal_number
    assert "the throttle stays; remove it with: kipmesh config alter broker all --delete" in capsys.readouterr().err
