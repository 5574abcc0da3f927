"""Selectors by name, by dotted path, and from an installed plugin package (392-11, 392-12)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kipmesh.core.errors import InvalidConfigError
from kipmesh.core.replica.selection import LeaderSelector, RackAwareReplicaSelector
from kipmesh.core.replica.selector_loader import load_selector

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "least_loaded_selector"

# Runs in a separate process with the installed package. Its only input is configuration.
PROGRAM = """
import json, sys
from kipmesh.messages import NodeEndpoint
from kipmesh.core.replica.selection import ClientMetadata, GuardedSelector, PartitionView, ReplicaView, TopicPartition
from kipmesh.core.replica.selector_loader import load_selector, selector_names

configs = json.loads(sys.argv[1])
guard = GuardedSelector(load_selector(configs["replica.selector.class"], configs))
racks = {1: "eu/a/1", 2: "eu/b/1", 3: "eu/b/2", 4: "eu/b/3"}
replicas = [ReplicaView(NodeEndpoint(node, "h", 1, rack), node != 4, 0, 100, 0) for node, rack in racks.items()]
view = PartitionView(replicas, replicas[0], 50)

def choose(client, partition, rack="eu/b/9"):
    return guard.select(TopicPartition("t", partition), ClientMetadata(rack, client), view).node_id

chosen = [choose(f"c{client}", partition) for client in range(3) for partition in range(2)]
repeated = [choose(f"c{client}", partition) for client in range(3) for partition in range(2)]
print(json.dumps({
    "names": selector_names(), "chosen": chosen, "repeated": repeated, "far": choose("c", 0, "us/x/1"),
    "failures": sum(guard.failures.values()),
}))
guard.close()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the example package, built from a copy to keep the checkout clean."""
    directory = tmp_path_factory.mktemp("plugin")
    source, target = directory / "source", directory / "target"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    options = ["--disable-pip-version-check", "--no-cache-dir", "--no-compile", "--target", str(target), str(source)]
    done = subprocess.run([*command, *options], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def run(target: Path, configs: Mapping[str, Any]) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(configs)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=target)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["least-loaded", "kipmesh_least_loaded.LeastLoadedZoneSelector"])
def test_installed_selector_plugin_is_loaded_by_name(installed: Path, name: str) -> None:
    output = run(installed, {"replica.selector.class": name, "metadata.max.age.ms": 60_000})
    assert output["names"] == ["least-loaded"]
    assert sorted(output["chosen"]) == [2, 2, 2, 3, 3, 3]  # balanced; replica 4 is out of sync
    assert output["repeated"] == output["chosen"]
    assert output["far"] == 1
    assert output["failures"] == 0


def test_replica_selector_class_selects_implementation(installed: Path) -> None:
    name = "org.apache.kafka.common.replica.RackAwareReplicaSelector"
    output = run(installed, {"replica.selector.class": name})
    assert set(output["chosen"]) == {1}  # no replica has exactly this rack


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (None, LeaderSelector),
        ("", LeaderSelector),
        ("LeaderSelector", LeaderSelector),
        ("org.apache.kafka.common.replica.LeaderSelector", LeaderSelector),
        (" RackAwareReplicaSelector ", RackAwareReplicaSelector),
        ("org.apache.kafka.common.replica.RackAwareReplicaSelector", RackAwareReplicaSelector),
        ("kipmesh.core.replica.selection.RackAwareReplicaSelector", RackAwareReplicaSelector),
        ("kipmesh.core.replica.selection:RackAwareReplicaSelector", RackAwareReplicaSelector),
    ],
)
def test_built_in_selectors_are_loaded_by_short_and_full_names(name: str | None, kind: type) -> None:
    assert type(load_selector(name, {})) is kind


class WithoutClose:
    def configure(self, configs: Mapping[str, Any]) -> None: ...

    def select(self, *arguments: object) -> None: ...


class FailingConfigure(LeaderSelector):
    def configure(self, configs: Mapping[str, Any]) -> None:
        raise ValueError("no zone\nis given")


class RequiredArgument(LeaderSelector):
    def __init__(self, zone: str) -> None: ...


@pytest.fixture
def plugin() -> Iterator[str]:
    module = types.ModuleType("plugin_of_tests")
    vars(module).update(
        WithoutClose=WithoutClose, FailingConfigure=FailingConfigure, RequiredArgument=RequiredArgument, constant=3
    )
    sys.modules[module.__name__] = module
    yield module.__name__
    del sys.modules[module.__name__]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "nothing-like-that",
            "is neither a dotted path package.module.Class nor one of: LeaderSelector, RackAwareReplicaSelector",
        ),
        ("no_such_module.Selector", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("{}.Missing", "cannot be loaded: AttributeError"),
        ("{}.constant", "is not a class"),
        ("{}.WithoutClose", "has no method close"),
        ("{}.RequiredArgument", "failed in its constructor: TypeError"),
        ("{}.FailingConfigure", "failed in configure(): ValueError: no zone is given"),
    ],
)
def test_invalid_selector_raises_one_line_config_error(plugin: str, name: str, reason: str) -> None:
    with pytest.raises(InvalidConfigError) as raised:
        load_selector(name.format(plugin), {})
    assert reason in str(raised.value)
    assert "'replica.selector.class'" in str(raised.value)
    assert "\n" not in str(raised.value)
