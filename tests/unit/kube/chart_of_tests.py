"""Helpers for tests of the chart: `helm template`, manifests by kind, and label selectors."""

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
    result = helm("template", release, str(CHART), "--namespace", namespace, *arguments)
    assert not result.returncode, result.stderr
    return [manifest for manifest in yaml.safe_load_all(result.stdout) if manifest]


def error_of(*arguments: str) -> str:
    """Return the error of helm for invalid values."""
    result = helm("template", "mesh", str(CHART), *arguments)
    assert result.returncode, f"accepted: {arguments}"
    return result.stderr


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    """Return the manifests of a kind by name."""
    return {manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == kind}


def pod_templates(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield each pod template with the name of its owner."""
    for manifest in manifests:
        if manifest["kind"] == "Pod":
            yield manifest["metadata"]["name"], manifest
        elif manifest["kind"] in ("StatefulSet", "Deployment"):
            yield manifest["metadata"]["name"], manifest["spec"]["template"]


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector, or the plain selector of a Service, matches the labels."""
    if "matchLabels" not in selector and "matchExpressions" not in selector:
        return all(labels.get(key) == value for key, value in selector.items())
    if not selects(selector.get("matchLabels") or {}, labels):
        return False
    for expression in selector.get("matchExpressions") or []:
        value = labels.get(expression["key"])
        is_match = {
            "In": lambda: value in expression["values"],  # noqa: B023 - called within the loop
            "Exists": lambda: value is not None,  # noqa: B023
            "DoesNotExist": lambda: value is None,  # noqa: B023
        }
        if not is_match[expression["operator"]]():
            return False
    return True
