"""`complete_variables` with fakes of the internal classes of Spark."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark", exc_type=ImportError)

from kipmesh.spark.source import RUNNER_VARIABLES, complete_variables


def fake_session(exists: bool, variables: dict[str, str]) -> Any:
    """Return the parts of a Spark session that `complete_variables` uses."""
    source = SimpleNamespace(dataSourceCls=lambda: SimpleNamespace(envVars=lambda: variables))
    manager = SimpleNamespace(dataSourceExists=lambda _name: exists, lookupDataSource=lambda _name: source)
    return SimpleNamespace(
        _jsparkSession=SimpleNamespace(sessionState=lambda: SimpleNamespace(dataSourceManager=lambda: manager))
    )


def test_missing_runner_variables_are_added_and_others_stay() -> None:
    variables = {"SPARK_BUFFER_SIZE": "65536", "PYTHONPATH": "/somewhere"}
    complete_variables(fake_session(True, variables), "kipmesh")
    assert variables == {**RUNNER_VARIABLES, "SPARK_BUFFER_SIZE": "65536", "PYTHONPATH": "/somewhere"}


def test_unknown_data_source_gets_no_variables() -> None:
    variables: dict[str, str] = {}
    complete_variables(fake_session(False, variables), "kipmesh")
    assert variables == {}


def test_unknown_spark_classes_log_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    session_without_classes: Any = SimpleNamespace(_jsparkSession=SimpleNamespace())
    with caplog.at_level(logging.WARNING):
        complete_variables(session_without_classes, "kipmesh")
    assert "must not start concurrently" in caplog.text


def test_spark_connect_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    connect_session: Any = SimpleNamespace()
    with caplog.at_level(logging.WARNING):
        complete_variables(connect_session, "kipmesh")
    assert caplog.text == ""
