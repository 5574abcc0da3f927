"""Manifests of the chart of Spark jobs, rendered by `helm template`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.kube.chart_of_tests import ROOT, helm, needs_helm

pytestmark = needs_helm

CHART = ROOT / "helm" / "kipmesh-job"
REQUIRED_VALUES = ("--set", "bootstrap=mesh-kipmesh-brokers:19092")


def arguments(*options: str) -> list[str]:
    """Return the arguments of the driver."""
    result = helm("template", "flights", str(CHART), "--namespace", "ns", *REQUIRED_VALUES, *options)
    assert not result.returncode, result.stderr
    (job,) = (manifest for manifest in yaml.safe_load_all(result.stdout) if manifest and manifest["kind"] == "Job")
    driver_arguments: list[str] = job["spec"]["template"]["spec"]["containers"][0]["args"]
    return driver_arguments


def test_numbers_in_values_of_job_render_without_exponent(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "args": ["--rows", 1000000, "--share", 0.5, "--name", "1e6"],
        "sparkConf": {"spark.network.timeout": 12000000, "spark.ui.enabled": False},
        "executors": {"instances": 3, "overheadFactor": 1.5},
    }
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values))
    driver_arguments = arguments("--values", str(file))
    assert driver_arguments[:6] == ["--rows", "1000000", "--share", "0.5", "--name", "1e6"]
    conf = dict(
        argument.removeprefix("--spark-conf=").split("=", 1)
        for argument in driver_arguments
        if argument.startswith("--spark-conf=")
    )
    assert conf["spark.network.timeout"] == "12000000"
    assert conf["spark.ui.enabled"] == "false"
    assert conf["spark.executor.instances"] == "3"
    assert conf["spark.kubernetes.memoryOverheadFactor"] == "1.5"


def test_spark_conf_of_values_overrides_defaults() -> None:
    assert "--spark-conf=spark.executor.memory=3g" in arguments("--set", r"sparkConf.spark\.executor\.memory=3g")
    assert "--spark-conf=spark.executor.memory=1g" in arguments()


@pytest.mark.parametrize("release", ["1flights", "my.flights"])
def test_job_release_name_invalid_for_service_is_rejected(release: str) -> None:
    result = helm("template", release, str(CHART), *REQUIRED_VALUES)
    assert result.returncode
    assert f"{release}-spark is not a valid Service name" in result.stderr
