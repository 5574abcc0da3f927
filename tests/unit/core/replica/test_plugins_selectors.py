"""Selectors by name, by dotted path, and from a package that is installed beside kipmesh (392-11, 392-12)."""

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

# Run in a process of its own, where the package is installed: all that it is given is configuration.
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
again = [choose(f"c{client}", partition) for client in range(3) for partition in range(2)]
print(json.dumps({
    "names": selector_names(), "chosen": chosen, "again": again, "far": choose("c", 0, "us/x/1"),
    "failures": sum(guard.failures.values()),
}))
guard.close()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example's package, built from a copy so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("plugin")
    source, target = folder / "source", folder / "target"
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
def test_an_installed_plugin_needs_nothing_but_configuration(installed: Path, name: str) -> None:
    answer = run(installed, {"replica.selector.class": name, "metadata.max.age.ms": 60_000})
    assert answer["names"] == ["least-loaded"]
    assert sorted(answer["chosen"]) == [2, 2, 2, 3, 3, 3]  # evenly; 4 is out of sync
    assert answer["again"] == answer["chosen"]
    assert answer["far"] == 1
    assert answer["failures"] == 0


def test_another_selector_is_another_line_of_configuration(installed: Path) -> None:
    name = "org.apache.kafka.common.replica.RackAwareReplicaSelector"
    answer = run(installed, {"replica.selector.class": name})
    assert set(answer["chosen"]) == {1}  # no replica is in exactly that rack


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
def test_given_selectors(name: str | None, kind: type) -> None:
    assert type(load_selector(name, {})) is kind


class Wrong:
    """Has no `close`."""

    def configure(self, configs: Mapping[str, Any]) -> None: ...

    def select(self, *arguments: object) -> None: ...


class Picky(LeaderSelector):
    def configure(self, configs: Mapping[str, Any]) -> None:
        raise ValueError("no zone\nis given")


class Needy(LeaderSelector):
    def __init__(self, zone: str) -> None: ...


@pytest.fixture
def plugin() -> Iterator[str]:
    module = types.ModuleType("plugin_of_tests")
    vars(module).update(Wrong=Wrong, Picky=Picky, Needy=Needy, constant=3)
    sys.modules[module.__name__] = module
    yield module.__name__
    del sys.modules[module.__name__]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "nothing-like-that",
            "is neither a dotted path package.module.Class nor one of: LeaderSelector, RackAwareReplicaSelector",
        ),
        ("no_such_module.Selector", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("{}.Missing", "cannot be loaded: AttributeError"),
        ("{}.constant", "is not a class"),
        ("{}.Wrong", "has no method close"),
        ("{}.Needy", "failed in its constructor: TypeError"),
        ("{}.Picky", "failed in configure(): ValueError: no zone is given"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_one_line(plugin: str, name: str, why: str) -> None:
    with pytest.raises(InvalidConfigError) as raised:
        load_selector(name.format(plugin), {})
    assert why in str(raised.value)
    assert "'replica.selector.class'" in str(raised.value)
    assert "\n" not in str(raised.value)
