"""The chart as `helm template` renders it, for tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "helm" / "kipmesh"
CI_VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
HELM = os.environ.get("HELM", "helm")
Manifest = dict[str, Any]

needs_helm = pytest.mark.skipif(shutil.which(HELM) is None, reason="helm is not installed (HELM names it)")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HELM, *arguments], check=False, capture_output=True, text=True, timeout=200)


def render(*arguments: str, release: str = "mesh", namespace: str = "ns") -> list[Manifest]:
    done = helm("template", release, str(CHART), "--namespace", namespace, *arguments)
    assert not done.returncode, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def refused(*arguments: str) -> str:
    """What helm says to values that it does not take."""
    done = helm("template", "mesh", str(CHART), *arguments)
    assert done.returncode, f"taken: {arguments}"
    return done.stderr


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    """By name."""
    return {one["metadata"]["name"]: one for one in manifests if one["kind"] == kind}


def pod_templates(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Metadata and spec of every pod, with its owner's name."""
    for one in manifests:
        if one["kind"] == "Pod":
            yield one["metadata"]["name"], one
        elif one["kind"] in ("StatefulSet", "Deployment"):
            yield one["metadata"]["name"], one["spec"]["template"]


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector, or a Service's plain one, takes these labels."""
    if "matchLabels" not in selector and "matchExpressions" not in selector:
        return all(labels.get(key) == value for key, value in selector.items())
    if not selects(selector.get("matchLabels") or {}, labels):
        return False
    for one in selector.get("matchExpressions") or []:
        found = labels.get(one["key"])
        wanted = {
            "In": lambda: found in one["values"],  # noqa: B023 - called within the loop
            "Exists": lambda: found is not None,  # noqa: B023
            "DoesNotExist": lambda: found is None,  # noqa: B023
        }
        if not wanted[one["operator"]]():
            return False
    return True
