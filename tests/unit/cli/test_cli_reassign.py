"""`kipmesh topic reassign` and `kipmesh broker`: what is wrong is said before anybody is asked."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kipmesh.cli.common import CommandError
from kipmesh.cli.main import app
from kipmesh.cli.reassign_command import throttled
from kipmesh.client import AdminClient


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
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    done = kipmesh("topic", "reassign", *arguments, "--bootstrap", "127.0.0.1:1")
    assert done.exit_code == 2, done.output


@pytest.mark.parametrize(
    "plan",
    [
        "",
        "[]",
        "{}",
        '{"partitions": []}',
        '{"partitions": [{"topic": "t"}]}',
        '{"partitions": [{"topic": "t", "partition": 0, "replicas": "1"}]}',
        '{"partitions": [{"topic": "t", "partition": 0, "replicas": [1.5]}]}',
        '{"partitions": [{"topic": "u", "partition": 0, "replicas": [1]}]}',
        json.dumps({"partitions": [{"topic": "t", "partition": 0, "replicas": [1]}] * 2}),
    ],
)
def test_plans_that_are_none(tmp_path: Path, plan: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plan)
    done = kipmesh("topic", "reassign", "t", "--file", str(file), "--bootstrap", "127.0.0.1:1")
    assert isinstance(done.exception, CommandError)
    assert str(done.exception).startswith(str(file))


def test_help_has_examples() -> None:
    for command in (("topic", "reassign"), ("broker", "list"), ("broker", "drain"), ("broker", "decommission")):
        done = kipmesh(*command, "--help")
        assert f"Examples:\n    kipmesh {' '.join(command)}" in done.output


def test_whoever_is_interrupted_hears_that_the_throttle_stays(capsys: pytest.CaptureFixture[str]) -> None:
    """What was begun goes on, and as slowly, until somebody takes the throttle back."""

    class Admin:
        async def describe_configs(self, resources: list[Any]) -> dict[Any, dict[str, Any]]:
            return {resource: {} for resource in resources}

        async def alter_configs(self, alterations: object) -> None:
            pass

    async def interrupted() -> None:
        async with throttled(cast("AdminClient", Admin()), 1000, lift=True):
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    assert "the throttle stays until `kipmesh config alter broker all --delete" in capsys.readouterr().err
