"""The chart of a Spark job, by `helm template`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.kube.chart_of_tests import ROOT, helm, needs_helm

pytestmark = needs_helm

CHART = ROOT / "helm" / "kipmesh-job"
GIVEN = ("--set", "bootstrap=mesh-kipmesh-brokers:19092")


def arguments(*more: str) -> list[str]:
    """Of the driver."""
    done = helm("template", "flights", str(CHART), "--namespace", "ns", *GIVEN, *more)
    assert not done.returncode, done.stderr
    (job,) = (one for one in yaml.safe_load_all(done.stdout) if one and one["kind"] == "Job")
    found: list[str] = job["spec"]["template"]["spec"]["containers"][0]["args"]
    return found


def test_numbers_of_a_values_file_are_written_out(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "args": ["--rows", 1000000, "--share", 0.5, "--name", "1e6"],
        "sparkConf": {"spark.network.timeout": 12000000, "spark.ui.enabled": False},
        "executors": {"instances": 3, "overheadFactor": 1.5},
    }
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values))
    found = arguments("--values", str(file))
    assert found[:6] == ["--rows", "1000000", "--share", "0.5", "--name", "1e6"]
    conf = dict(one.removeprefix("--spark-conf=").split("=", 1) for one in found if one.startswith("--spark-conf="))
    assert conf["spark.network.timeout"] == "12000000"
    assert conf["spark.ui.enabled"] == "false"
    assert conf["spark.executor.instances"] == "3"
    assert conf["spark.kubernetes.memoryOverheadFactor"] == "1.5"


def test_settings_of_values_win() -> None:
    assert "--spark-conf=spark.executor.memory=3g" in arguments("--set", r"sparkConf.spark\.executor\.memory=3g")
    assert "--spark-conf=spark.executor.memory=1g" in arguments()


@pytest.mark.parametrize("release", ["1flights", "my.flights"])
def test_a_release_name_that_makes_no_service_is_refused(release: str) -> None:
    done = helm("template", release, str(CHART), *GIVEN)
    assert done.returncode
    assert f"{release}-spark is not a valid Service name" in done.stderr
