"""Fixtures for the tests of other projects; pytest finds them by itself where kipmesh is installed.

- `kipmesh_cluster`: one cluster for the whole session (each xdist worker has its own), within the test process;
- `kipmesh_bootstrap`: its brokers' addresses;
- `kipmesh_topic_prefix`: a prefix that no other test has, from the test's name;
- `kipmesh_topic`: a function that makes a topic under the prefix and returns its name.

Nothing heavy is imported before a test asks for a fixture.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kipmesh.cluster import LocalCluster

NAME_MAX = 180
"""Of a topic name's 249 characters; the rest is for the test's own part."""

_OPTION = "kipmesh_config"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The setting `kipmesh_config`: `key=value` lines for the nodes of the session's cluster."""
    parser.addini(_OPTION, "key=value lines for the nodes of the kipmesh_cluster fixture", type="linelist", default=[])


@pytest.fixture(scope="session")
def kipmesh_cluster(pytestconfig: pytest.Config) -> Iterator[LocalCluster]:
    """A cluster of one controller and three brokers in this process."""
    from kipmesh.cluster import LocalCluster

    pairs = (line.partition("=") for line in pytestconfig.getini(_OPTION))
    with LocalCluster(mode="single", config={key.strip(): value.strip() for key, _, value in pairs}) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kipmesh_bootstrap(kipmesh_cluster: LocalCluster) -> str:
    """`host:port` of the brokers, separated by commas."""
    return kipmesh_cluster.bootstrap


@pytest.fixture(scope="session")
def _kipmesh_test_numbers() -> Iterator[int]:
    return itertools.count(1)


@pytest.fixture
def kipmesh_topic_prefix(request: pytest.FixtureRequest, _kipmesh_test_numbers: Iterator[int]) -> str:
    """A prefix for topic names that no other test of the session has."""
    name = re.sub(r"[^a-zA-Z0-9_-]+", "-", request.node.name).strip("-")[:NAME_MAX]
    return f"{name}-{next(_kipmesh_test_numbers)}-"


@pytest.fixture
def kipmesh_topic(kipmesh_bootstrap: str, kipmesh_topic_prefix: str) -> Callable[..., str]:
    """`kipmesh_topic("orders", partitions=3)` makes a topic and returns its full name."""

    def make(name: str = "topic", *, partitions: int = 1, replication_factor: int = -1, **configs: str) -> str:
        from kipmesh.client.sync import AdminClient
        from kipmesh.client.types import NewTopic

        full_name = kipmesh_topic_prefix + name
        dotted = {key.replace("_", "."): value for key, value in configs.items()}
        with AdminClient(kipmesh_bootstrap) as admin:
            admin.create_topics([NewTopic(full_name, partitions, replication_factor, dotted)])
        return full_name

    return make
