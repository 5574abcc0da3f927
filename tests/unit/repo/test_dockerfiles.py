"""Dockerfiles of deploy/docker: each logical line is one instruction, and each service has an entry point."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.repo.repo_checks import ROOT

DOCKERFILES = sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))
SERVICES = ("metadata_controller", "leader", "follower", "consumer", "single")
_INSTRUCTIONS = {
    *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN", "SHELL"),
    *("STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}


def _instructions(path: Path) -> list[str]:
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return "\n".join(lines).replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_every_logical_line_is_an_instruction(path: Path) -> None:
    unknown = [line for line in _instructions(path) if line.split()[0] not in _INSTRUCTIONS]
    assert not unknown


def test_every_service_has_its_entry_point_command_and_health_check() -> None:
    stages = re.split(
        r"^FROM runtime AS ", "\n".join(_instructions(ROOT / "deploy/docker/service.Dockerfile")), flags=re.M
    )
    by_service = {stage.split()[0]: {line.split()[0] for line in stage.splitlines()[1:]} for stage in stages[1:]}
    assert set(by_service) >= set(SERVICES)
    for service in SERVICES[:-1]:
        assert by_service[service] >= {"HEALTHCHECK", "ENTRYPOINT", "CMD"}, service
