"""Dashboards match their code. Alerts match their tests and the monitoring page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.repo.repo_checks import HEADING, ROOT, slug

PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))
PAGE = ROOT / "docs" / "monitoring.md"
CASES = [
    case
    for path in sorted((PROMETHEUS / "tests").glob("*.yml"))
    for case in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]
]


def _rules(kind: str) -> list[dict[str, Any]]:
    files = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((PROMETHEUS / "rules").glob("*.yml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"] if kind in rule]


ALERTS, RECORDED = _rules("alert"), _rules("record")


def test_dashboards_match_their_code() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tools.gen_dashboards", "--check"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_stale_dashboards_are_found(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tools import gen_dashboards as g;"
        "files = g.render(); target = Path(sys.argv[1]);"
        "[(target / name).write_text(text) for name, text in files.items()];"
        "print(g.stale(files, target));"
        "(target / 'mesh.json').write_text('{}'); (target / 'kip_227.json').unlink();"
        "(target / 'of_before.json').write_text('{}'); print(g.stale(files, target))"
    )
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.splitlines() == ["[]", "['kip_227.json', 'mesh.json', 'of_before.json']"], result.stderr


def test_dashboards_cover_cluster_kafka_protocol_and_each_kip() -> None:
    assert {path.stem for path in DASHBOARDS} == {"mesh", "wire", "kip_227", "kip_392", "kip_526", "kip_630"}
    dashboards = [json.loads(path.read_text(encoding="utf-8")) for path in DASHBOARDS]
    assert len({dashboard["uid"] for dashboard in dashboards}) == len(dashboards)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_have_descriptions_and_do_not_overlap(path: Path) -> None:
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    occupied: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not occupied & cells, f"{panel['title']} overlaps another panel"
        occupied |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["datasource"]["uid"] == "$datasource"
            assert [target["refId"] for target in panel["targets"]] == [*"ABCDEFGH"][: len(panel["targets"])]
    ids = [panel["id"] for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(set(ids)) == len(ids)


def test_each_alert_fires_in_one_case_and_stays_quiet_in_another() -> None:
    fires: Counter[str] = Counter()
    quiet: Counter[str] = Counter()
    for case in CASES:
        for check in case.get("alert_rule_test", ()):
            (fires if check["exp_alerts"] else quiet)[check["alertname"]] += 1
    names = {rule["alert"] for rule in ALERTS}
    assert len(names) == len(ALERTS)
    assert set(fires) == set(quiet) == names


def test_each_recording_rule_is_tested() -> None:
    """Either a test evaluates the rule, or an alert uses it."""
    tested = " ".join(check["expr"] for case in CASES for check in case.get("promql_expr_test", ()))
    tested += " ".join(rule["expr"] for rule in ALERTS)
    assert [rule["record"] for rule in RECORDED if rule["record"] not in tested] == []


def test_names_of_recording_rules_have_three_parts() -> None:
    form = re.compile(r"[a-z_]+:(kafka|kipmesh)_\w+:[a-z0-9_]+")
    assert [rule["record"] for rule in RECORDED if not form.fullmatch(rule["record"])] == []


def test_each_alert_has_a_section_in_the_monitoring_page() -> None:
    headings = set(map(slug, HEADING.findall(PAGE.read_text(encoding="utf-8"))))
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["runbook"] == f"docs/monitoring.md#{rule['alert'].lower()}"
        assert rule["alert"].lower() in headings, f"{rule['alert']} has no section in docs/monitoring.md"
    known = {rule["alert"].lower() for rule in ALERTS}
    assert {heading for heading in headings if heading.startswith("kipmesh")} <= known


def test_dashboard_data_source_has_the_scrape_interval() -> None:
    interval = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))["global"]["scrape_interval"]
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text(encoding="utf-8"))
    assert [source["jsonData"]["timeInterval"] for source in sources["datasources"]] == [interval]
