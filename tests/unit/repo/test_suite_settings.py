"""What `tests/conftest.py` takes away from chance, so that a failure says something of the code."""

from __future__ import annotations

import logging
import os
import signal

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


def test_a_command_sets_up_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next test does not notice."""
    monkeypatch.setenv("KIPMESH_LOG_LEVEL", "error")

    async def nothing() -> None: ...

    common.run(nothing)
    os.environ[common.COMMAND_CONFIG] = "gone"
    signal.signal(signal.SIGHUP, lambda *_: None)
    assert logging.getLogger().level == logging.ERROR
    assert structlog.is_configured()


def test_what_a_command_set_up_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("kipmesh.of.a.test").warning("is seen")
    assert caplog.messages == ["is seen"]
    assert not structlog.is_configured()
    assert common.COMMAND_CONFIG not in os.environ
    assert signal.getsignal(signal.SIGHUP) in (signal.SIG_DFL, signal.SIG_IGN)
