"""A Spark job on Kubernetes with a driver pod and executor pods, over a cluster in the same namespace."""

from __future__ import annotations

import os

import pytest

from tests.kube.kube_of_tests import JOB_CHART, Release, command, image_values, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LIMIT = 5000
PROOFS = 6


def test_flights_job_passes_its_proofs_on_executor_pods(release: Release) -> None:
    image = os.environ.get("KIPMESH_KUBE_IMAGE_SPARK")
    if image is None:
        pytest.skip("KIPMESH_KUBE_IMAGE_SPARK is not set")
    name, driver = "flights", "flights-spark"
    seen: set[str] = set()
    command(
        "helm", "install", name, str(JOB_CHART), "--namespace", release.namespace, *image_values(image),
        "--set", f"bootstrap={release.full}-brokers:19092,args={{--fill,--limit,{LIMIT}}}",
        "--set", "results.size=1Gi",
    )  # fmt: skip
    try:

        def has_finished() -> bool:
            pods = release.json("get", "pods", "-l", f"app.kubernetes.io/instance={name}")["items"]
            for pod in pods:
                if pod["metadata"]["labels"].get("spark-role") == "executor" and pod["status"]["phase"] == "Running":
                    seen.add(pod["metadata"]["name"])
            status = release.json("get", "job", driver)["status"]
            return bool(status.get("succeeded") or status.get("failed"))

        wait_for("the end of the job", has_finished, timeout_s=1200)
        log = release.kubectl("logs", f"job/{driver}")
        assert release.json("get", "job", driver)["status"].get("succeeded") == 1, log
        assert len(seen) == 2
        assert log.count("  PASS  ") == PROOFS
        assert "FAIL" not in log
        left = release.json("get", "pods", "-l", "spark-role=executor")["items"]
        assert not [pod for pod in left if pod["metadata"].get("deletionTimestamp") is None]
    finally:
        command("helm", "uninstall", name, "--namespace", release.namespace, "--wait")
        release.kubectl("delete", "pvc", f"{driver}-results", "--wait=false")
    release.kipmesh("topic", "delete", "flights")
