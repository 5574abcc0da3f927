"""`kipmesh user` with a real broker: output, passwords and errors."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from kipmesh.cli import security_commands
from kipmesh.cli.common import CommandError
from kipmesh.cli.main import app
from kipmesh.client import AdminClient, ScramCredentialInfo, ScramMechanism
from kipmesh.cluster import LocalCluster
from kipmesh.core.errors import ErrorCode, KafkaError
from tests.command import run_command_beside

pytestmark = pytest.mark.timeout(300)
in_module_loop = pytest.mark.asyncio(loop_scope="module")  # one event loop besides that of the cluster


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with LocalCluster(mode="single", leaders=1, followers=0) as cluster:
        yield cluster.bootstrap


async def user(bootstrap: str, *arguments: str, stdin: bytes = b"pencil\n") -> tuple[int, str, str]:
    result = await run_command_beside("user", *arguments, "--bootstrap", bootstrap, stdin=stdin)
    return result.returncode, result.stdout, result.stderr


@in_module_loop
async def test_users_can_be_added_altered_and_listed(bootstrap: str) -> None:
    assert await user(bootstrap, "list") == (0, "no users\n", "")
    assert await user(bootstrap, "add", "alice") == (0, "alice: SCRAM-SHA-256 set\nalice: SCRAM-SHA-512 set\n", "")
    code, out, _ = await user(bootstrap, "add", "bob", "--mechanism", "SCRAM-SHA-512", "--iterations", "8192", "--json")
    assert (code, json.loads(out)) == (0, {"user": "bob", "mechanism": "SCRAM-SHA-512", "iterations": 8192})
    code, out, _ = await user(bootstrap, "list")
    assert [line.split() for line in out.splitlines()] == [
        ["USER", "MECHANISM", "ITERATIONS"],
        ["alice", "SCRAM-SHA-256", "4096"],
        ["alice", "SCRAM-SHA-512", "4096"],
        ["bob", "SCRAM-SHA-512", "8192"],
    ]
    assert (await user(bootstrap, "alter", "bob", "--iterations", "5000"))[:2] == (0, "bob: SCRAM-SHA-512 set\n")
    code, out, _ = await user(bootstrap, "describe", "bob", "--json")
    assert json.loads(out) == {"user": "bob", "credentials": [{"mechanism": "SCRAM-SHA-512", "iterations": 5000}]}


@in_module_loop
async def test_user_errors_state_reason_and_remediation(bootstrap: str) -> None:
    async with AdminClient(bootstrap) as admin:
        await admin.set_user_scram_credential("erin", ScramMechanism.SCRAM_SHA_512, "pencil")
    for arguments, error in (
        (("add", "erin"), "user 'erin' already has SCRAM-SHA-512; change it with: kipmesh user alter erin"),
        (
            ("alter", "erin", "--mechanism", "SCRAM-SHA-256"),
            "user 'erin' has no SCRAM-SHA-256; create it with: kipmesh user add erin",
        ),
        (("describe", "missing"), "RESOURCE_NOT_FOUND: user 'missing' has no SCRAM credential"),
    ):
        assert await user(bootstrap, *arguments) == (1, "", f"kipmesh: {error}\n")


@in_module_loop
async def test_delete_removes_one_or_all_mechanisms(bootstrap: str) -> None:
    async with AdminClient(bootstrap) as admin:
        for mechanism in ScramMechanism:
            await admin.set_user_scram_credential("fred", mechanism, "pencil")
        result = await user(bootstrap, "delete", "fred", "--mechanism", "SCRAM-SHA-256")
        assert result == (0, "fred: SCRAM-SHA-256 deleted\n", "")
        assert await admin.describe_user_scram_credentials(["fred"]) == {"fred": [ScramCredentialInfo(2, 4096)]}
        result = await user(bootstrap, "delete", "fred", "--json")
        assert result == (0, '{"user":"fred","mechanism":"SCRAM-SHA-512"}\n', "")
        assert "fred" not in await admin.describe_user_scram_credentials()
        assert (await user(bootstrap, "delete", "fred"))[0] == 1


@pytest.mark.parametrize("stdin", [b"", b"\n", b"two\nlines\n", b"x" * 2000, b"\xff\n", b"a\0b"])
def test_invalid_passwords_are_rejected(monkeypatch: pytest.MonkeyPatch, stdin: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    with pytest.raises(CommandError, match="password"):
        security_commands.read_password("carol")


@pytest.mark.parametrize("stdin", [b"pencil", b"pencil\n", b"pencil\r\n"])
def test_password_is_read_without_line_ending(monkeypatch: pytest.MonkeyPatch, stdin: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    assert security_commands.read_password("carol") == "pencil"


@pytest.mark.parametrize(
    "arguments",
    [
        ("add",),
        ("add", "carol", "--iterations", "4095"),
        ("add", "carol", "--iterations", "16385"),
        ("add", "carol", "--mechanism", "PLAIN"),
        ("add", "carol", "pencil"),
    ],
)
def test_invalid_usage_of_user_exits_with_2(arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, ["user", *arguments, "--bootstrap", "127.0.0.1:1"]).exit_code == 2


@in_module_loop
async def test_admin_client_manages_scram_credentials(bootstrap: str) -> None:
    async with AdminClient(bootstrap) as admin:
        await admin.set_user_scram_credential("dora", ScramMechanism.SCRAM_SHA_256, "pencil", iterations=4097)
        expected = {"dora": [ScramCredentialInfo(1, 4097)]}
        assert await admin.describe_user_scram_credentials(["dora", "dora"]) == expected
        assert await admin.describe_user_scram_credentials([]) == {}
        assert (await admin.describe_user_scram_credentials())["dora"] == expected["dora"]
        for iterations, password, name in ((4095, "p", "dora"), (4096, "", "dora"), (4096, "p", "")):
            with pytest.raises(KafkaError) as caught:
                await admin.set_user_scram_credential(
                    name, ScramMechanism.SCRAM_SHA_256, password, iterations=iterations
                )
            assert caught.value.code is ErrorCode.UNACCEPTABLE_CREDENTIAL
        await admin.delete_user_scram_credential("dora", ScramMechanism.SCRAM_SHA_256)
        with pytest.raises(KafkaError) as caught:
            await admin.delete_user_scram_credential("dora", ScramMechanism.SCRAM_SHA_256)
        assert caught.value.code is ErrorCode.RESOURCE_NOT_FOUND
