"""`complete_variables` where Spark's inner classes are out of reach."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark", exc_type=ImportError)

from kipmesh.spark.source import RUNNER_VARIABLES, complete_variables


def session(exists: bool, variables: dict[str, str]) -> Any:
    """What of Spark's session is used."""
    source = SimpleNamespace(dataSourceCls=lambda: SimpleNamespace(envVars=lambda: variables))
    manager = SimpleNamespace(dataSourceExists=lambda _name: exists, lookupDataSource=lambda _name: source)
    return SimpleNamespace(
        _jsparkSession=SimpleNamespace(sessionState=lambda: SimpleNamespace(dataSourceManager=lambda: manager))
    )


def test_what_is_missing_is_added_and_what_is_there_stays() -> None:
    variables = {"SPARK_BUFFER_SIZE": "65536", "PYTHONPATH": "/somewhere"}
    complete_variables(session(True, variables), "kipmesh")
    assert variables == {**RUNNER_VARIABLES, "SPARK_BUFFER_SIZE": "65536", "PYTHONPATH": "/somewhere"}


def test_a_source_that_is_not_there_is_left_out() -> None:
    variables: dict[str, str] = {}
    complete_variables(session(False, variables), "kipmesh")
    assert variables == {}


def test_other_inner_classes_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    broken: Any = SimpleNamespace(_jsparkSession=SimpleNamespace())
    with caplog.at_level(logging.WARNING):
        complete_variables(broken, "kipmesh")
    assert "must not start concurrently" in caplog.text


def test_spark_connect_has_no_inner_classes_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    remote: Any = SimpleNamespace()
    with caplog.at_level(logging.WARNING):
        complete_variables(remote, "kipmesh")
    assert caplog.text == ""
