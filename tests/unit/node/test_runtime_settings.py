"""Configuration of a process: voters, listeners, properties files, environment variables and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from kipmesh.core.config import BrokerConfig, ControllerConfig
from kipmesh.core.errors import InvalidConfigError
from kipmesh.node import settings

REQUIRED = ["node.id=1", "cluster.id=c", "controller.quorum.voters=1001@127.0.0.1:1", "log.dirs=data"]


@pytest.mark.parametrize(
    ("voters", "message"),
    [
        ("", "must name at least one voter"),
        (",", "must name at least one voter"),
        ("1001@h", "'1001@h' is not id@host:port"),
        ("a@h:1", "'a@h:1' is not id@host:port"),
        ("1001@h:1,1001@h:2", "voter 1001 appears more than once"),
        ("1001@h:1,1002@h:1", "voters 1001 and 1002 have the same address h:1"),
        ("1001@h:99999", "'1001@h:99999': a port must be between 1 and 65535"),
        ("1001@h:0", "a port must be between 1 and 65535"),
        ("4000000000@h:1", "'4000000000@h:1': an id must be at most 2147483647"),
    ],
)
def test_invalid_voters_are_refused(voters: str, message: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        BrokerConfig.parse({"node.id": 1, "cluster.id": "c", "log.dirs": "d", "controller.quorum.voters": voters})
    assert message in str(caught.value)
    assert str(caught.value).startswith("INVALID_CONFIG: controller.quorum.voters")


def controller(**values: str) -> ControllerConfig:
    required = {"node.id": "1", "cluster.id": "c", "metadata.log.dir": "d"}
    return ControllerConfig.parse({**required, **{key.replace("_", "."): value for key, value in values.items()}})


@pytest.mark.parametrize(
    "values",
    [
        {"listeners": "MESH://0.0.0.0:9093"},  # as in a container: a different host with the same port
        {"listeners": "MESH://127.0.0.1:0"},
        {"listeners": "MESH://127.0.0.1:19093", "advertised_listeners": "MESH://one:9093"},
        {"listeners": "MESH://127.0.0.1:9093", "controller_quorum_voters": " 1@one:9093 , 2@two:9093, "},
        {"listeners": "MESH://127.0.0.1:1", "controller_quorum_voters": "2@two:9093"},  # refused when the node starts
    ],
)
def test_controller_listeners_that_match_voters_are_accepted(values: dict[str, str]) -> None:
    assert controller(**{"controller_quorum_voters": "1@one:9093", **values}).voters


def test_controller_listener_that_differs_from_voters_is_refused() -> None:
    with pytest.raises(InvalidConfigError) as caught:
        controller(listeners="MESH://127.0.0.1:19093", controller_quorum_voters="1@one:9093,2@two:9093")
    (line,) = str(caught.value).splitlines()
    assert "'MESH://127.0.0.1:19093', but controller.quorum.voters has 1@one:9093" in line
    assert line.endswith("set advertised.listeners=MESH://one:9093")


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "node.properties"
    file.write_text(text)
    return file


def test_overrides_take_precedence_over_environment_and_file(tmp_path: Path) -> None:
    file = write(tmp_path, "log.segment.bytes=100\nlog.retention.ms=1\nbroker.rack=file\n")
    environment = {"KIPMESH_CONFIG_LOG_SEGMENT_BYTES": "200", "KIPMESH_CONFIG_LOG_RETENTION_MS": "2", "PATH": "/bin"}
    config = settings.load(
        BrokerConfig, file=file, environment=environment, overrides=[*REQUIRED, "log.segment.bytes=300"]
    )
    assert (config.log_segment_bytes, config.log_retention_ms, config.broker_rack) == (300, 2, "file")


def test_read_properties_parses_comments_separators_and_continuations(tmp_path: Path) -> None:
    text = "# a comment\n! another\n\n  a.b = one two \nc.d:127.0.0.1:1\ne.f=x,\\\n   y\ng.h=\na.b=last\nurl=k=v\n"
    assert settings.read_properties(write(tmp_path, text)) == {
        "a.b": "last",
        "c.d": "127.0.0.1:1",
        "e.f": "x,y",
        "g.h": "",
        "url": "k=v",
    }


def test_written_properties_are_read_back(tmp_path: Path) -> None:
    values = {"a": "1", "b.c": "MESH://127.0.0.1:9", "d": ""}
    assert settings.read_properties(write(tmp_path, settings.write_properties(values, title="t"))) == values


@pytest.mark.parametrize("value", ["a\nb", "a\\"])
def test_write_properties_refuses_line_breaks_and_backslashes(value: str) -> None:
    with pytest.raises(InvalidConfigError, match="a properties file cannot contain"):
        settings.write_properties({"a": value}, title="t")


@pytest.mark.parametrize("text", ["no separator", "=value"])
def test_read_properties_error_names_invalid_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidConfigError, match="line 2: expected key=value, got"):
        settings.read_properties(write(tmp_path, f"a=b\n{text}\n"))


def test_read_properties_refuses_missing_binary_and_large_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="No such file"):
        settings.read_properties(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"a=\xff")
    with pytest.raises(InvalidConfigError, match="must be UTF-8"):
        settings.read_properties(tmp_path / "binary")
    (tmp_path / "large").write_bytes(b"#" * (settings.FILE_BYTES_MAX + 1))
    with pytest.raises(InvalidConfigError, match="must have at most"):
        settings.read_properties(tmp_path / "large")


def test_unknown_key_is_refused_from_every_source(tmp_path: Path) -> None:
    file = write(tmp_path, "log.segmant.bytes=1\n")
    with pytest.raises(InvalidConfigError, match=r"key 'log\.segmant\.bytes' \(did you mean 'log\.segment"):
        settings.load(BrokerConfig, file=file, environment={}, overrides=REQUIRED)
    with pytest.raises(InvalidConfigError, match=r"unknown configuration key 'x\.y'"):
        settings.load(BrokerConfig, file=None, environment={}, overrides=["x.y=1"])
    with pytest.raises(InvalidConfigError, match=r"KIPMESH_CONFIG_NODE_IDD .*did you mean KIPMESH_CONFIG_NODE_ID"):
        settings.load(BrokerConfig, file=None, environment={"KIPMESH_CONFIG_NODE_IDD": "1"}, overrides=REQUIRED)


def test_invalid_value_error_names_key() -> None:
    with pytest.raises(InvalidConfigError, match=r"log\.segment\.bytes must be an integer, got 'many'"):
        settings.load(BrokerConfig, file=None, environment={}, overrides=[*REQUIRED, "log.segment.bytes=many"])


def test_invalid_value_error_names_file_or_environment_variable(tmp_path: Path) -> None:
    file = write(tmp_path, "log.segment.bytes=many\n")
    with pytest.raises(InvalidConfigError) as caught:
        settings.load(BrokerConfig, file=file, environment={}, overrides=REQUIRED)
    assert caught.value.message == f"configuration file {file}: log.segment.bytes must be an integer, got 'many'"
    environment = {"KIPMESH_CONFIG_LOG_SEGMENT_BYTES": "few"}
    with pytest.raises(InvalidConfigError) as caught:
        settings.load(BrokerConfig, file=file, environment=environment, overrides=REQUIRED)
    variable = "environment variable KIPMESH_CONFIG_LOG_SEGMENT_BYTES"
    assert caught.value.message == f"{variable}: log.segment.bytes must be an integer, got 'few'"


def test_environment_variables_without_config_prefix_are_ignored() -> None:
    environment = {"KIPMESH_LEADER_SERVICE_HOST": "10.0.0.1", "KIPMESH_BOOTSTRAP": "x"}
    assert settings.from_environment(environment, BrokerConfig.keys()) == {}


@pytest.mark.parametrize("text", ["node.id", "=1"])
def test_override_without_key_and_value_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="--config must be key=value, got"):
        settings.from_overrides([text])
