"""Runs docker commands for the tests of containers, and finds out whether docker is available."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASE_IMAGE = os.environ.get("BASE_IMAGE", "python:3.11-slim")
SERVICES = ("metadata_controller", "leader", "follower", "consumer", "single")
TAG = "tests"


def reason_to_skip() -> str:
    if shutil.which("docker") is None:
        return "docker is not installed"
    if succeeds("docker", "info"):
        if succeeds("docker", "image", "inspect", BASE_IMAGE) or succeeds("docker", "pull", "--quiet", BASE_IMAGE):
            return ""
        return f"the base image {BASE_IMAGE} is missing and cannot be pulled"
    return "the docker daemon does not respond"


def succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def docker(*arguments: str, check: bool = True, timeout_s: float = 120) -> str:
    """Run a docker command and return its standard output."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0 or not check, f"docker {arguments}: {done.stderr[-2000:]}"
    return done.stdout.strip()
