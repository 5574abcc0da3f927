"""A Spark job on Kubernetes: a driver's pod and executors' pods, over a mesh in the same namespace."""

from __future__ import annotations

import os

import pytest

from tests.kube.kube_of_tests import JOB_CHART, Release, command, image_values, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LIMIT = 5000
PROOFS = 6


def test_the_flights_pass_their_proofs_on_executors(release: Release) -> None:
    image = os.environ.get("KIPMESH_KUBE_IMAGE_SPARK")
    if image is None:
        pytest.skip("KIPMESH_KUBE_IMAGE_SPARK names no image of the Spark jobs")
    name, driver = "flights", "flights-spark"
    seen: set[str] = set()
    command(
        "helm", "install", name, str(JOB_CHART), "--namespace", release.namespace, *image_values(image),
        "--set", f"bootstrap={release.full}-brokers:19092,args={{--fill,--limit,{LIMIT}}}",
        "--set", "results.size=1Gi",
    )  # fmt: skip
    try:

        def is_over() -> bool:
            pods = release.json("get", "pods", "-l", f"app.kubernetes.io/instance={name}")["items"]
            for pod in pods:
                if pod["metadata"]["labels"].get("spark-role") == "executor" and pod["status"]["phase"] == "Running":
                    seen.add(pod["metadata"]["name"])
            status = release.json("get", "job", driver)["status"]
            return bool(status.get("succeeded") or status.get("failed"))

        wait_for("the job to end", is_over, timeout_s=1200)
        log = release.kubectl("logs", f"job/{driver}")
        assert release.json("get", "job", driver)["status"].get("succeeded") == 1, log
        assert len(seen) == 2
        assert log.count("  PASS  ") == PROOFS
        assert "FAIL" not in log
        left = release.json("get", "pods", "-l", "spark-role=executor")["items"]
        assert not [one for one in left if one["metadata"].get("deletionTimestamp") is None]
    finally:
        command("helm", "uninstall", name, "--namespace", release.namespace, "--wait")
        release.kubectl("delete", "pvc", f"{driver}-results", "--wait=false")
    release.kipmesh("topic", "delete", "flights")
