"""`kipmesh topic reassign` and `kipmesh broker`: what is wrong is said before anybody is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kipmesh.cli.common import CommandError
from kipmesh.cli.main import app


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
