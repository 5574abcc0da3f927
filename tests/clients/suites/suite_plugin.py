"""A plugin of pytest in the runs of others' test suites (`tools/client_suites.py`): says how each test ended.

`SUITE_RESULTS` is the file that gets a JSON object a test, `SUITE_LIST` the list of what is not run. aiokafka's
fixtures start a container of Apache Kafka; with `KAFKA_BOOTSTRAP` they get the cluster that runs there instead, and
only the tests that talk with it are run.
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
    return any(name == each or (each.endswith("*") and name.startswith(each[:-1])) for each in patterns)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    not_run = tomllib.loads(Path(os.environ["SUITE_LIST"]).read_text()).get("not-run", {})
    left_out = [item for item in items if _is_listed(item.nodeid, not_run)]
    if BOOTSTRAP:
        left_out += [item for item in items if "kafka_server" not in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    why = "" if report.outcome == "passed" else str(report.longrepr).strip()
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        why = str(report.longrepr[2])
    with open(os.environ["SUITE_RESULTS"], "a") as file:
        line = {"name": report.nodeid, "outcome": report.outcome, "why": why[-3000:]}
        file.write(json.dumps(line) + "\n")
