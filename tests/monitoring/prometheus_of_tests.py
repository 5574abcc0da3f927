"""A real Prometheus on a free port of this machine, with the committed configuration pointed at a local cluster."""

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
MISSING = "no Prometheus here (on Debian: apt-get install prometheus)"
INTERVAL_S = 1
HTTP_TIMEOUT_S = 30.0
START_TIMEOUT_S = 60.0


class PrometheusError(Exception):
    """It did not start, or refused a question."""


class Series(NamedTuple):
    """Labels, and (time, value) pairs; what is no number is left out."""

    labels: Mapping[str, str]
    samples: list[tuple[float, float]]


def configuration(nodes: Iterable[NodeInfo]) -> dict[str, Any]:
    """deploy/prometheus/prometheus.yml, often, and with each of its names leading to a node of a local cluster."""
    loaded: dict[str, Any] = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    often = f"{INTERVAL_S}s"
    loaded["global"] |= {"scrape_interval": often, "scrape_timeout": often, "evaluation_interval": often}
    ways = [
        {"source_labels": ["instance"], "regex": node.name, "target_label": "__address__", "replacement": node.http}
        for node in nodes
    ]
    for job in loaded["scrape_configs"]:
        job["relabel_configs"] = [*job["relabel_configs"], *ways]
        for discovery in job.get("file_sd_configs", ()):
            discovery["refresh_interval"] = often
    return loaded


class Prometheus:
    """`with Prometheus(folder, nodes, producers)`: running until the end; nothing of it is left."""

    def __init__(self, folder: Path, nodes: Iterable[NodeInfo], producers: str) -> None:
        """`producers` is the address of what exports this process's producers."""
        (folder / "rules").mkdir(parents=True)
        (folder / "producers").mkdir()
        for path in RULES:
            (folder / "rules" / path.name).write_text(yaml.safe_dump(short_rules(path)))
        (folder / "producers" / "tests.json").write_text(json.dumps([{"targets": [producers]}]))
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration(nodes)))
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = ports.PortReservation()  # it takes its time to listen
        self._url = ""

    def __enter__(self) -> Self:
        assert BINARY is not None
        (port,) = self._ports.choose(1)
        self._url = f"http://127.0.0.1:{port}"
        command = [BINARY, f"--config.file={self._folder}/prometheus.yml", f"--web.listen-address=127.0.0.1:{port}"]
        command += [f"--storage.tsdb.path={self._folder}/data", "--log.level=warn"]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise PrometheusError(f"Prometheus did not start: {(self._folder / 'log').read_text()}")
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process; idempotent."""
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
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=HTTP_TIMEOUT_S) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _ask(self, path: str, **parameters: object) -> Any:
        body = urllib.parse.urlencode(parameters).encode()
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}", body, timeout=HTTP_TIMEOUT_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise PrometheusError(f"{parameters}: {error.read().decode()}") from None

    def now(self, expr: str) -> list[Series]:
        """The value of each series now."""
        result = self._ask("query", query=expr)["result"]
        return [Series(each["metric"], _numbers([each["value"]])) for each in result]

    def value(self, expr: str) -> float:
        """The one value of an expression; nan without any."""
        found = [value for series in self.now(expr) for _, value in series.samples]
        assert len(found) <= 1, f"{expr}: {found}"
        return found[0] if found else math.nan

    def over(self, expr: str, begin: float, end: float, step_s: float = INTERVAL_S) -> list[Series]:
        """All values of each series in that time (of `time.time`); series without a number are left out."""
        result = self._ask("query_range", query=expr, start=begin, end=end, step=step_s)["result"]
        found = [Series(each["metric"], _numbers(each["values"])) for each in result]
        return [series for series in found if series.samples]

    def rules(self) -> list[Mapping[str, Any]]:
        """The rules as they are loaded, with what went wrong."""
        return [rule for group in self._ask_get("rules")["groups"] for rule in group["rules"]]

    def targets(self) -> list[Mapping[str, Any]]:
        """What is scraped."""
        found: list[Mapping[str, Any]] = self._ask_get("targets")["activeTargets"]
        return found

    def _ask_get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}", timeout=HTTP_TIMEOUT_S) as answer:
            return json.load(answer)["data"]

    def wait(self, expr: str, is_right: Callable[[float], bool], timeout_s: float = 120.0) -> float:
        """The expression's value, as soon as it is right or that time is over; blocks."""
        deadline = time.monotonic() + timeout_s
        while not is_right(value := self.value(expr)) and time.monotonic() < deadline:
            time.sleep(INTERVAL_S / 4)
        return value


def _numbers(samples: Iterable[tuple[float, str]]) -> list[tuple[float, float]]:
    return [(at, float(text)) for at, text in samples if not math.isnan(float(text))]
