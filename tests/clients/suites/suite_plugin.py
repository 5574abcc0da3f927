"""Pytest plugin for runs of third-party test suites (`tools/client_suites.py`): records the outcome of each test.

Environment variables: `SUITE_RESULTS` is the output file (one JSON object per test), `SUITE_LIST` the file of excluded
tests. With `KAFKA_BOOTSTRAP`, aiokafka's fixtures return the running cluster instead of starting a container of Apache
Kafka, and tests without a broker are excluded.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BOOTSTRAP = os.environ.get("KAFKA_BOOTSTRAP", "")


def _server() -> SimpleNamespace:
    host, _, port = BOOTSTRAP.split(",")[0].rpartition(":")
    ports = {"port": int(port), "ssl_port": 1, "sasl_plain_port": 1, "sasl_ssl_port": 1}
    return SimpleNamespace(host=host, hosts=[f"{host}:{port}"], container=SimpleNamespace(), **ports)


_VALUES: dict[str, Callable[[], Any]] = {
    "docker": SimpleNamespace,
    "kafka_image": lambda: f"kafka:0_{os.environ['KAFKA_VERSION']}",
    "ssl_folder": lambda: Path("tests/ssl_cert"),
    "kafka_server": _server,
    "kerberos_utils": SimpleNamespace,
    "acl_manager": lambda: SimpleNamespace(cleanup=lambda: None),
    "kafka_config": SimpleNamespace,
}


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Any:
    if not BOOTSTRAP or fixturedef.argname not in _VALUES:
        return None
    value = _VALUES[fixturedef.argname]()
    fixturedef.cached_result = (value, fixturedef.cache_key(request), None)
    return value


def _is_listed(name: str, patterns: Any) -> bool:
    return any(name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])) for pattern in patterns)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    not_run = tomllib.loads(Path(os.environ["SUITE_LIST"]).read_text()).get("not-run", {})
    excluded = [item for item in items if _is_listed(item.nodeid, not_run)]
    if BOOTSTRAP:
        excluded += [item for item in items if "kafka_server" not in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=excluded)
    items[:] = [item for item in items if item not in excluded]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    reason = "" if report.outcome == "passed" else str(report.longrepr).strip()
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2])
    with open(os.environ["SUITE_RESULTS"], "a") as file:
        line = {"name": report.nodeid, "outcome": report.outcome, "why": reason[-3000:]}
        file.write(json.dumps(line) + "\n")
