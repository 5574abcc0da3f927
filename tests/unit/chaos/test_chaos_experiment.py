"""Experiment files: valid fields, defaults and errors."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from kipmesh_chaos.experiment import (
    ClockJump,
    Cut,
    Delay,
    Experiment,
    ExperimentError,
    FailedLogDir,
    Fault,
    FullDisk,
    load,
)

DEPLOY = Path(__file__).resolve().parents[3] / "deploy" / "chaos"
FILES = sorted(DEPLOY.glob("*.yaml"))
SMALL: dict[str, Any] = {"name": "small", "hypothesis": "It holds.", "duration_s": 5}


def write_experiment(directory: Path, **changes: Any) -> Path:
    file = directory / "experiment.yaml"
    file.write_text(yaml.safe_dump({**SMALL, **changes}))
    return file


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_bundled_experiments_are_valid_and_named_like_their_files(file: Path) -> None:
    experiment = load(file)
    assert experiment.name == file.stem
    assert experiment.all_faults
    assert all(fault.at_s + fault.for_s <= experiment.duration_s for fault in experiment.faults)


def test_bundled_experiments_cover_each_kind_of_fault() -> None:
    kinds = {fault.kind for file in FILES for fault in load(file).faults}
    assert kinds == {
        "kill", "pause", "restart", "cut", "delay", "full-disk", "failed-folder", "torn-tail", "bit-flip", "clock-jump"
    }  # fmt: skip
    directions = {fault.direction for file in FILES for fault in load(file).faults if isinstance(fault, Cut)}
    assert directions == {"both", "in", "out"}


def test_configuration_values_become_text_and_racks_have_defaults(tmp_path: Path) -> None:
    config = {"broker.session.timeout.ms": 1500, "unclean.leader.election.enable": True, "one": 1}
    experiment = load(write_experiment(tmp_path, cluster={"config": config}))
    assert experiment.cluster.config == {
        "broker.session.timeout.ms": "1500",
        "unclean.leader.election.enable": "true",
        "one": "1",
    }
    assert experiment.workload.racks == ("rack-a", "rack-b", "rack-c")
    assert not experiment.has(Fault)


def test_experiment_reports_its_kinds_of_faults(tmp_path: Path) -> None:
    faults = [{"kind": kind, "target": "leader:0"} for kind in ("cut", "full-disk", "clock-jump")]
    experiment = load(write_experiment(tmp_path, faults=faults))
    assert experiment.has(Cut)
    assert experiment.has(FullDisk)
    assert experiment.has(ClockJump)
    assert not experiment.has(FailedLogDir)
    experiment = load(write_experiment(tmp_path, faults=[{"kind": "failed-folder", "target": "leader:0"}]))
    assert experiment.has(FullDisk, FailedLogDir)
    experiment = load(write_experiment(tmp_path, random={"faults": [{"kind": "delay", "target": "broker:any"}]}))
    assert experiment.has(Cut, Delay)


def test_seed_determines_random_faults_and_their_times() -> None:
    by_chance = load(DEPLOY / "random.yaml").random
    assert by_chance is not None
    plan = list(islice(by_chance.plan(7), 200))
    assert list(islice(by_chance.plan(7), 200)) == plan
    assert list(islice(by_chance.plan(8), 200)) != plan
    assert {fault_plan.fault for fault_plan in plan} == set(by_chance.faults)
    for pause_s, _, for_s in plan:
        assert by_chance.pause_s[0] <= pause_s <= by_chance.pause_s[1]
        assert by_chance.for_s[0] <= for_s <= by_chance.for_s[1]


def test_shorter_duration_drops_later_faults(tmp_path: Path) -> None:
    faults = [{"kind": "kill", "target": "leader:0", "at_s": at_s} for at_s in (1, 4)]
    file = write_experiment(tmp_path, faults=faults)
    assert len(load(file, duration_s=3).faults) == 1
    assert load(file, duration_s=100).duration_s == 100
    assert len(load(file, duration_s=100).faults) == 2


def kill(**changes: Any) -> dict[str, Any]:
    return {"faults": [{"kind": "kill", "target": "leader:0", **changes}]}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"name": "Not A Name"}, "name must "),
        ({"hypothesis": ""}, "hypothesis must not be empty"),
        ({"duration_s": 0}, "duration_s must be more than 0, got 0"),
        ({"duration_s": float("nan")}, "duration_s must be a number, got nan"),
        ({"more": 1}, "more is not a known key"),
        (kill(kind="explode"), "faults.0.kind must be one of bit-flip, .*, got 'explode'"),
        (kill(target="zookeeper"), "faults.0.target: unknown target 'zookeeper', use leader:N"),
        (kill(target="leader:7"), "target leader:7: partition 7 does not exist"),
        (kill(target="coordinator"), "target coordinator needs workload.group"),
        ({"workload": {"group": {"members": 0}}}, "workload.group.members must be at least 1, got 0"),
        ({"workload": {"group": {"churn_s": 0}}}, "workload.group.churn_s must be "),
        (kill(at_s=5), r"faults.0: at_s must be less than duration_s, got 5"),
        (kill(at_s=-1), "faults.0.at_s must be at least 0, got -1"),
        (kill(delay_ms=5), "faults.0.delay_ms is not a known key"),
        (kill(kind="cut", direction="up"), "faults.0.direction must be .*, got 'up'"),
        (kill(kind="torn-tail", target="controller:active"), "torn-tail applies to brokers only"),
        (kill(kind="bit-flip", target="node:controller-1"), "bit-flip applies to brokers only"),
        (kill(kind="bit-flip", target="all:brokers"), "would lose acknowledged records"),
        ({"cluster": {"controllers": 2}}, "cluster.controllers must be "),
        ({"cluster": {"followers": 1}}, "replication_factor 3 exceeds 2 brokers"),
        ({"workload": {"producers": 1}}, "workload: 2 partitions need at least as many producers, got 1"),
        ({"random": {"faults": []}}, "random.faults must not be empty"),
        ({"random": kill(at_s=1)}, "random: faults.0: random faults take no at_s"),
        ({**kill(), "random": kill()}, "`faults` and `random` exclude each other"),
        (
            {"random": kill()["faults"]},
            r"random must be keys with values, got a list \(the list belongs under `random.faults`\)",
        ),
        ({"faults": kill()["faults"][0]}, "faults must be a list, got keys with values"),
        ({"faults": ["kill"]}, "faults.0 must be keys with values, got a string"),
        ({"faults": [{"target": "leader:0"}]}, "faults.0.kind is missing, use one of bit-flip, clock-jump, "),
        ({"cluster": 3}, "cluster must be keys with values, got a number"),
        ({"workload": None}, "workload must be keys with values, got nothing"),
        ({"workload": True}, "workload must be keys with values, got true or false"),
    ],
)
def test_errors_name_the_field_in_one_line(tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ExperimentError, match=error) as caught:
        load(write_experiment(tmp_path, **changes))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path))


@pytest.mark.parametrize(
    "text", ["", "[", "- 1", "\x00", "a: &a [*a]", "name: !!python/object:os.system x", "[" * 5000]
)
def test_invalid_document_is_rejected(tmp_path: Path, text: str) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(text)
    with pytest.raises(ExperimentError):
        load(file)


def test_oversized_file_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text("#" * (1 << 20) + "\n")
    with pytest.raises(ExperimentError, match="larger"):
        load(file)


def test_description_states_target_and_effect_of_fault() -> None:
    faults = [
        {"kind": "cut", "target": "leader:0", "direction": "in", "peers": "brokers"},
        {"kind": "delay", "target": "leader:0", "delay_ms": 20},
        {"kind": "clock-jump", "target": "leader:0", "jump_s": -60},
        {"kind": "kill", "target": "broker:any"},
    ]
    experiment = Experiment.model_validate({**SMALL, "faults": faults})
    assert [fault.describe() for fault in experiment.faults] == [
        "leader:0 cut off from brokers, direction in",
        "20 ms between leader:0 and nodes",
        "the clock of leader:0 jumps by -60 s",
        "kill broker:any",
    ]
