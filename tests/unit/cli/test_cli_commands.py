from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from kipmesh.cli.main import app
from kipmesh.client.records import encode_batch
from tests.command import clean_environment, run_command


def commands() -> Iterator[tuple[str, ...]]:
    def walk(command: object, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield path
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, (*path, name))

    yield from walk(typer.main.get_command(app), ())


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_each_command_has_help_with_examples(path: tuple[str, ...]) -> None:
    command = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]  # type: ignore[attr-defined]
    assert command.help, path
    if path[:1] != ("demo",):
        assert "Examples:" in (command.epilog or ""), path


def test_help_imports_no_heavy_modules() -> None:
    code = (
        "import sys; from kipmesh.cli import main; sys.argv = ['kipmesh', '--help']\n"
        "try: main.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'grpc', 'pydantic', 'fastapi', 'aiokafka', 'rich', 'structlog', 'pandas'} & set(sys.modules)\n"
        "print('heavy:', heavy)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "Usage: kipmesh" in result.stdout
    assert result.stdout.endswith("heavy: set()\n")


def test_usage_errors_have_exit_code_2() -> None:
    assert "No such command" in run_command("topic", "creat").stderr
    for arguments in (
        ["topic", "creat"],
        ["topic", "create"],
        ["consume", "t", "--offset", "1"],
        ["consume", "t", "--partition", "0", "--offset", "x"],
        ["topic", "create", "t", "--config", "x"],
        ["topic", "alter", "t"],
        ["local", "up", "--controllers", "2"],
        ["produce", "t", "--key-separator", ""],
        ["topic", "list", "--bootstrap", ""],
        ["consume", "t", "--group", "g", "--partition", "0"],
        ["consume", "t", "--group", "g", "--config", "group.id=h"],
        ["consume", "t", "--group", "g", "--from-beginning", "--config", "auto.offset.reset=latest"],
        ["config", "describe", "client", "1"],
    ):
        assert run_command(*arguments).returncode == 2, arguments


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("topic list --timeout inf", "2147483"),
        ("topic reassign --list --timeout 1e308", "2147483"),
        ("quorum describe --timeout inf", "2147483"),
        ("local up --timeout inf", "2147483"),
        ("local down --timeout nan", "2147483"),
        ("chaos run x.yaml --duration inf", "2147483"),
        ("topic create t --partitions 99999999999", "2147483647"),
        ("topic create t --replication-factor 99999999999", "2147483647"),
        ("topic alter t --partitions 99999999999", "2147483647"),
        ("topic elect t:99999999999", "99999999999 is more than 2147483647"),
        ("topic elect --all t", "conflicts with the names of topics"),
        ("topic reassign t --replicas 0:99999999999", "99999999999 is more than 2147483647"),
        ("broker drain 99999999999", "2147483647"),
        ("broker logdirs 99999999999", "2147483647"),
        ("sessions list --broker 99999999999", "2147483647"),
        ("faults inject --api Fetch --delay-ms 99999999999", "2147483647"),
        ("faults inject --api Fetch --times 99999999999", "2147483647"),
        (f"group reset g --to-latest --topic t:{'9' * 5000}", "is more than 2147483647"),
        ("group reset g --topic t --to-datetime 0001-01-01", "is out of range"),
        ("group list --state foo", "not one of Empty, PreparingRebalance, CompletingRebalance, Stable, Dead"),
        ("consume t --partition 0 --offset 99999999999999999999", "is more than 9223372036854775807"),
        ("consume t --partition 0 --offset 1 --from-beginning", "conflicts with --from-beginning"),
        ("consume t --from-beginning --config auto.offset.reset=latest", "contradicts --from-beginning"),
        ("chaos run x.yaml --inside", "--inside needs --compose"),
        ("faults inject --api Fetch", "give --error, --delay-ms or --drop-connection"),
        ("topic list --bootstrap 127.0.0.1:99999", "the port must be between 1 and 65535, got 99999"),
    ],
    ids=lambda text: text[:60],
)
def test_values_out_of_range_are_usage_errors_that_state_the_limit(arguments: str, error: str) -> None:
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 2, (result.output, result.exception)
    assert error in result.output


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("local down --timeout nan", "'--timeout': must be a number, got nan"),
        ("topic list --timeout 0", "'--timeout': must be at least 0.1, got 0"),
        ("topic create t --partitions abc", "'--partitions': must be an integer, got 'abc'"),
        ("produce t --format xml", "'--format': 'xml' is not one of 'lines', 'ndjson', 'csv'"),
    ],
)
def test_invalid_option_error_states_option_limit_and_value(arguments: str, error: str) -> None:
    result = run_command(*arguments.split())
    assert result.returncode == 2
    assert f"Invalid value for {error}" in result.stderr.splitlines()[-1]


def test_error_about_command_config_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text("no.such.key=1\n")
    result = run_command("--command-config", str(file), "topic", "list", "--bootstrap", "127.0.0.1:1")
    assert (result.returncode, result.stderr) == (
        1,
        f"kipmesh: INVALID_CONFIG: configuration file {file}: unknown configuration key 'no.such.key'\n",
    )


@pytest.mark.parametrize("redirected", [">&-", ">/dev/full"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_failed_write_to_stdout_is_reported_in_one_line(redirected: str, unbuffered: str) -> None:
    command = f"PYTHONUNBUFFERED={unbuffered} {sys.executable} -m kipmesh.cli.main --version {redirected}"
    result = subprocess.run(["/bin/sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("kipmesh: standard output: ")
    assert result.stderr.count("\n") == 1


def test_closed_stderr_is_no_error() -> None:
    command = f"{sys.executable} -m kipmesh.cli.main --version 2>&-"
    result = subprocess.run(["/bin/sh", "-c", command], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout[:8]) == (0, "kipmesh ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["produce", "\udcff"],
        ["produce", "t", "--config", "client.id=\udcff"],
        ["consume", "t\udcff"],
        ["topic", "create", "\udcff"],
        ["topic", "delete", "t", "\udcff"],
        ["topic", "create", "t", "--config", "\udcff=1"],
        ["config", "alter", "topic", "t", "--set", "retention.ms=\udcff"],
        ["topic", "list", "--bootstrap", "\udcff:1"],
    ],
    ids=repr,
)
def test_arguments_must_be_utf8(arguments: list[str]) -> None:
    result = run_command(*arguments, stdin="x\n")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].endswith("is not UTF-8")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--config", "no.such.key=1"], ["--config", "log.level=loud"], ["--leaders", "0", "--followers", "0"]]
)
def test_failed_local_up_leaves_no_directory(tmp_path: Path, arguments: list[str]) -> None:
    result = run_command("local", "up", "--dir", str(tmp_path / "mesh"), *arguments)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert list(tmp_path.iterdir()) == []


def test_missing_cluster_error_names_the_options(tmp_path: Path) -> None:
    result = run_command("topic", "list", "--dir", str(tmp_path / "none"))
    assert result.returncode == 1
    assert result.stderr == (
        f"kipmesh: no local cluster in {tmp_path / 'none'}: give --bootstrap or --dir, or start one with: "
        "kipmesh local up\n"
    )
    for command in (["down"], ["status"], ["kill", "leader-1"]):
        result = run_command("local", *command, "--dir", str(tmp_path))
        assert result.returncode == 1
        assert "no cluster in" in result.stderr
        assert result.stderr.count("\n") == 1


def test_unreachable_broker_is_reported_in_one_line() -> None:
    result = run_command(
        "produce", "t", "--bootstrap", "127.0.0.1:1", "--config", "request.timeout.ms=300", stdin="x\n"
    )
    assert result.returncode == 1
    error, last = result.stderr.splitlines()
    assert error.startswith("kipmesh: NETWORK_EXCEPTION: no broker responds at 127.0.0.1:1")
    assert last.startswith("0 records acknowledged")
    result = run_command("topic", "list", env=clean_environment({"KIPMESH_BOOTSTRAP": "no address"}))
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1, result.stderr


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"cluster_id": "c", "nodes": 5}', '{"cluster_id": "c", "nodes": ["x"]}', '"\\ud800'],
)
def test_malformed_cluster_file_is_reported_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "cluster.json").write_text(text)
    result = run_command("local", "status", "--dir", str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith(f"kipmesh: {tmp_path / 'cluster.json'} is not ")
    assert result.stderr.count("\n") == 1


def test_failed_directory_creation_is_reported_in_one_line() -> None:
    result = run_command("local", "up", "--dir", "/proc/x")
    assert result.returncode == 1
    assert result.stderr.startswith("kipmesh: cannot create the directory /proc/x: ")
    assert result.stderr.count("\n") == 1


def test_version_option_prints_version() -> None:
    assert run_command("--version").stdout.startswith("kipmesh ")


def write_segment(tmp_path: Path, *batches: bytes) -> str:
    file = tmp_path / "00000000000000000000.log"
    file.write_bytes(b"".join(batches))
    return str(file)


def test_log_dump_prints_batches_and_records(tmp_path: Path) -> None:
    first = encode_batch([(b"k", b"v"), (None, b"\xff")], timestamp_ms=5, leader_epoch=3)
    second = encode_batch([(None, b"x" * 500)], timestamp_ms=6, base_offset=2, compression="zstd")
    file = write_segment(tmp_path, first, second)
    out = run_command("log", "dump", file).stdout.splitlines()
    assert len(out) == 2
    assert out[0].startswith("base_offset: 0 last_offset: 1 count: 2 ")
    assert "partition_leader_epoch: 3" in out[0]
    assert "compresscodec: zstd" in out[1]
    out = run_command("log", "dump", file, "--print-records").stdout.splitlines()
    assert out[1] == "| offset: 0 timestamp: 5 key: k value: v headers: []"
    assert out[2] == "| offset: 1 timestamp: 5 key: None value_b64: /w== headers: []"
    assert out[4].startswith("| offset: 2 timestamp: 6 key: None value: xxx")


def test_log_dump_reports_damaged_batches_and_files(tmp_path: Path) -> None:
    batch = bytearray(encode_batch([(None, b"value")], timestamp_ms=5))
    batch[-2] ^= 1
    backwards = encode_batch([(None, b"value")], timestamp_ms=5)
    result = run_command("log", "dump", write_segment(tmp_path, bytes(batch), backwards, b"cut"), "--print-records")
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert "error: wrong CRC" in lines[0]
    assert "error: base offset must be at least 1, got 0" in lines[1]
    assert lines[-1].startswith(f"position: {2 * len(batch)} error: ")
    assert run_command("log", "dump", str(tmp_path / "missing.log")).stderr.endswith("missing.log: no such file\n")
    assert (
        run_command("log", "dump", str(tmp_path)).stderr == f"kipmesh: {tmp_path} is a directory: name a file in it\n"
    )
    assert run_command("log", "dump", "/dev/null").stderr == "kipmesh: /dev/null is not a regular file\n"
    assert run_command("log", "dump", write_segment(tmp_path)).stdout == ""
