"""Settings in `tests/conftest.py` that make test runs reproducible and isolate tests from each other."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from kipmesh.cli import common
from kipmesh.cluster import ports


def test_hypothesis_examples_are_the_same_in_each_run(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--hypothesis-profile") is not None:
        pytest.skip("another profile was requested")
    current = settings()
    assert (current.derandomize, current.deadline, current.database) == (True, None, None)
    assert HealthCheck.too_slow in current.suppress_health_check
    # Constants of imported files must not affect examples. Adapt this to a Hypothesis without the attribute.
    assert len(providers.HypothesisProvider(None)._local_constants) == 0


def test_workers_choose_ports_from_separate_ranges() -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    chosen = ports.choose(200)
    span = (max(chosen) - min(chosen) + 1) * workers
    assert span <= ports.LAST_BY_DEFAULT + 1 - 10_240


@pytest.fixture(scope="module")
def before() -> dict[str, Any]:
    """Settings before the command. A cluster that tests of a directory share may have configured logging."""
    return settings_now()


def settings_now() -> dict[str, Any]:
    root = logging.getLogger()
    logs = {"level": root.level, "configured": structlog.is_configured(), "config": structlog.get_config()}
    return {**logs, "command": os.environ.get(common.COMMAND_CONFIG), "hangup": signal.getsignal(signal.SIGHUP)}


def test_command_configures_logging(before: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The next test checks that the settings are reverted."""
    monkeypatch.setenv("KIPMESH_LOG_LEVEL", "error")

    async def nothing() -> None: ...

    common.run(nothing)
    os.environ[common.COMMAND_CONFIG] = "gone"
    signal.signal(signal.SIGHUP, lambda *_: None)
    current = settings_now()
    assert logging.getLogger().level == logging.ERROR
    assert all(current[key] != before[key] for key in ("config", "command", "hangup"))


def test_settings_of_command_are_reverted_in_next_test(
    before: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("kipmesh.of.a.test").warning("is seen")
    assert caplog.messages == ["is seen"]
    assert settings_now() == before
