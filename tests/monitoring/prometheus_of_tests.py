"""Runs a real Prometheus with the committed configuration against a local cluster."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import yaml

from kipmesh.cluster import ports
from kipmesh.cluster.layout import NodeInfo
from tests.monitoring.promql_of_tests import PROMETHEUS, RULES, short_rules

BINARY = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
MISSING = "Prometheus is not installed (on Debian: apt-get install prometheus)"
INTERVAL_S = 1
HTTP_TIMEOUT_S = 30.0
START_TIMEOUT_S = 60.0


class PrometheusError(Exception):
    """Prometheus did not start or refused a query."""


class Series(NamedTuple):
    """Labels and (time, value) pairs without NaN."""

    labels: Mapping[str, str]
    samples: list[tuple[float, float]]


def configuration(nodes: Iterable[NodeInfo]) -> dict[str, Any]:
    """Return deploy/prometheus/prometheus.yml with short intervals and the addresses of a local cluster's nodes."""
    loaded: dict[str, Any] = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    interval = f"{INTERVAL_S}s"
    loaded["global"] |= {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
    addresses = [
        {"source_labels": ["instance"], "regex": node.name, "target_label": "__address__", "replacement": node.http}
        for node in nodes
    ]
    for job in loaded["scrape_configs"]:
        job["relabel_configs"] = [*job["relabel_configs"], *addresses]
        for discovery in job.get("file_sd_configs", ()):
            discovery["refresh_interval"] = interval
    return loaded


class Prometheus:
    """`with Prometheus(directory, nodes, producers)` runs a process until the end of the block."""

    def __init__(self, directory: Path, nodes: Iterable[NodeInfo], producers: str) -> None:
        """`producers` is the address of the exporter of this process's producers."""
        (directory / "rules").mkdir(parents=True)
        (directory / "producers").mkdir()
        for path in RULES:
            (directory / "rules" / path.name).write_text(yaml.safe_dump(short_rules(path)))
        (directory / "producers" / "tests.json").write_text(json.dumps([{"targets": [producers]}]))
        (directory / "prometheus.yml").write_text(yaml.safe_dump(configuration(nodes)))
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = ports.PortReservation()  # held until Prometheus listens
        self._url = ""

    def __enter__(self) -> Self:
        assert BINARY is not None
        (port,) = self._ports.choose(1)
        self._url = f"http://127.0.0.1:{port}"
        command = [BINARY, f"--config.file={self._directory}/prometheus.yml", f"--web.listen-address=127.0.0.1:{port}"]
        command += [f"--storage.tsdb.path={self._directory}/data", "--log.level=warn"]
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise PrometheusError(f"Prometheus did not start: {(self._directory / 'log').read_text()}")
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the process; idempotent."""
        self._ports.close()
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=HTTP_TIMEOUT_S) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _query(self, path: str, **parameters: object) -> Any:
        body = urllib.parse.urlencode(parameters).encode()
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}", body, timeout=HTTP_TIMEOUT_S) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise PrometheusError(f"{parameters}: {error.read().decode()}") from None

    def now(self, expr: str) -> list[Series]:
        """Return the current value of each series."""
        result = self._query("query", query=expr)["result"]
        return [Series(each["metric"], _numbers([each["value"]])) for each in result]

    def value(self, expr: str) -> float:
        """Return the only value of an expression, or NaN without a value."""
        found = [value for series in self.now(expr) for _, value in series.samples]
        assert len(found) <= 1, f"{expr}: {found}"
        return found[0] if found else math.nan

    def over(self, expr: str, begin: float, end: float, step_s: float = INTERVAL_S) -> list[Series]:
        """Return the values of each series between two times (`time.time`). Series without a number are omitted."""
        result = self._query("query_range", query=expr, start=begin, end=end, step=step_s)["result"]
        found = [Series(each["metric"], _numbers(each["values"])) for each in result]
        return [series for series in found if series.samples]

    def rules(self) -> list[Mapping[str, Any]]:
        """Return the loaded rules with their errors."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def targets(self) -> list[Mapping[str, Any]]:
        """Return the active scrape targets."""
        found: list[Mapping[str, Any]] = self._get("targets")["activeTargets"]
        return found

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}", timeout=HTTP_TIMEOUT_S) as response:
            return json.load(response)["data"]

    def wait(self, expr: str, is_expected: Callable[[float], bool], timeout_s: float = 120.0) -> float:
        """Wait until the value is expected or the timeout is over, and return the value."""
        deadline = time.monotonic() + timeout_s
        while not is_expected(value := self.value(expr)) and time.monotonic() < deadline:
            time.sleep(INTERVAL_S / 4)
        return value


def _numbers(samples: Iterable[tuple[float, str]]) -> list[tuple[float, float]]:
    return [(at, float(text)) for at, text in samples if not math.isnan(float(text))]
