"""promtool checks of deploy/prometheus: syntax, and unit tests of rules and alerts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.monitoring.prometheus_of_tests import MISSING, PROMTOOL
from tests.monitoring.promql_of_tests import PROMETHEUS

pytestmark = [pytest.mark.skipif(PROMTOOL is None, reason=MISSING), pytest.mark.timeout(400)]

LIMIT_S = 300


def _promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_configuration_is_valid() -> None:
    assert "is valid prometheus config file syntax" in _promtool("check", "config", "prometheus.yml")


def test_tls_configuration_differs_only_in_tls_settings() -> None:
    assert "is valid prometheus config file syntax" in _promtool(
        "check", "config", "--syntax-only", "prometheus-tls.yml"
    )
    plain, tls = (yaml.safe_load((PROMETHEUS / name).read_text()) for name in ("prometheus.yml", "prometheus-tls.yml"))
    files = {"ca_file": "ca.crt", "cert_file": "tls.crt", "key_file": "tls.key"}
    for job in plain["scrape_configs"]:
        if job["job_name"] != "kipmesh-producer":  # producers are parts of applications, which configure TLS themselves
            job["scheme"] = "https"
            job["tls_config"] = {key: f"/etc/kipmesh-tls/{name}" for key, name in files.items()}
    assert tls == plain


@pytest.mark.parametrize("path", sorted((PROMETHEUS / "tests").glob("*.yml")), ids=lambda path: path.stem)
def test_rules_pass_their_promtool_tests(path: Path) -> None:
    assert "SUCCESS" in _promtool("test", "rules", f"tests/{path.name}")


def test_promtool_detects_a_wrong_threshold(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    (tmp_path / "rules").mkdir()
    (tmp_path / "tests").mkdir()
    for path in (PROMETHEUS / "rules").glob("*.yml"):
        (tmp_path / "rules" / path.name).write_text(path.read_text())
    alerts = tmp_path / "rules" / "alerts.yml"
    changed = alerts.read_text().replace("snapshotlag > 1000000", "snapshotlag > 10000000")
    assert changed != alerts.read_text()
    alerts.write_text(changed)
    cases = yaml.safe_load((PROMETHEUS / "tests" / "kip_alerts_test.yml").read_text())
    cases["tests"] = [case for case in cases["tests"] if case["name"] == "KipmeshSnapshotLag fires"]
    assert len(cases["tests"]) == 1
    (tmp_path / "tests" / "one.yml").write_text(yaml.safe_dump(cases))
    command = [PROMTOOL, "test", "rules", "tests/one.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode != 0
    assert "KipmeshSnapshotLag" in done.stdout + done.stderr
