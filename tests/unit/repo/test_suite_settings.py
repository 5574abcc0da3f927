"""What `tests/conftest.py` takes away from chance, so that a failure says something of the code."""

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


def test_properties_have_the_same_examples_in_every_run(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--hypothesis-profile") is not None:
        pytest.skip("another profile is asked for")
    now = settings()
    assert (now.derandomize, now.deadline, now.database) == (True, None, None)
    assert HealthCheck.too_slow in now.suppress_health_check
    # What other files imported decides nothing: a Hypothesis without this name needs another way.
    assert len(providers.HypothesisProvider(None)._local_constants) == 0


def test_workers_take_ports_apart_from_each_other() -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    chosen = ports.choose(200)
    span = (max(chosen) - min(chosen) + 1) * workers
    assert span <= ports.LAST_BY_DEFAULT + 1 - 10_240


@pytest.fixture(scope="module")
def before() -> dict[str, Any]:
    """Not always what a new process has: a cluster that all tests of a folder share has set up logs for its time."""
    return settings_now()


def settings_now() -> dict[str, Any]:
    root = logging.getLogger()
    logs = {"level": root.level, "configured": structlog.is_configured(), "config": structlog.get_config()}
    return {**logs, "command": os.environ.get(common.COMMAND_CONFIG), "hangup": signal.getsignal(signal.SIGHUP)}


def test_a_command_sets_up_logs(before: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next test does not notice."""
    monkeypatch.setenv("KIPMESH_LOG_LEVEL", "error")

    async def nothing() -> None: ...

    common.run(nothing)
    os.environ[common.COMMAND_CONFIG] = "gone"
    signal.signal(signal.SIGHUP, lambda *_: None)
    now = settings_now()
    assert logging.getLogger().level == logging.ERROR
    assert all(now[key] != before[key] for key in ("config", "command", "hangup"))


def test_what_a_command_set_up_is_gone(before: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("kipmesh.of.a.test").warning("is seen")
    assert caplog.messages == ["is seen"]
    assert settings_now() == before
