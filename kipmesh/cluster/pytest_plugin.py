"""pytest fixtures for projects that use kipmesh. pytest loads this plugin wherever kipmesh is installed.

- `kipmesh_cluster`: a cluster in the test process, one per session (and per xdist worker)
- `kipmesh_bootstrap`: the bootstrap addresses of its brokers
- `kipmesh_topic_prefix`: a topic name prefix that is unique to the test
- `kipmesh_topic`: a function that creates a topic with that prefix and returns its name

The plugin imports clients and servers only when a test uses a fixture.
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
"""Maximum length of the test's name in the prefix. Topic names have at most 249 characters."""

_OPTION = "kipmesh_config"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the ini option `kipmesh_config`: `key=value` lines with settings of the cluster's nodes."""
    parser.addini(
        _OPTION, "key=value lines with settings of the kipmesh_cluster fixture's nodes", type="linelist", default=[]
    )


@pytest.fixture(scope="session")
def kipmesh_cluster(pytestconfig: pytest.Config) -> Iterator[LocalCluster]:
    """Run a cluster of one controller and three brokers in this process for the whole session.

    The settings are those of the ini option `kipmesh_config`.
    """
    from kipmesh.cluster import LocalCluster

    pairs = (line.partition("=") for line in pytestconfig.getini(_OPTION))
    with LocalCluster(mode="single", config={key.strip(): value.strip() for key, _, value in pairs}) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kipmesh_bootstrap(kipmesh_cluster: LocalCluster) -> str:
    """Return the bootstrap addresses of `kipmesh_cluster`: comma-separated host:port."""
    return kipmesh_cluster.bootstrap


@pytest.fixture(scope="session")
def _kipmesh_test_numbers() -> Iterator[int]:
    return itertools.count(1)


@pytest.fixture
def kipmesh_topic_prefix(request: pytest.FixtureRequest, _kipmesh_test_numbers: Iterator[int]) -> str:
    """Return a prefix for topic names that is unique in the session and contains the test's name."""
    name = re.sub(r"[^a-zA-Z0-9_-]+", "-", request.node.name).strip("-")[:NAME_MAX]
    return f"{name}-{next(_kipmesh_test_numbers)}-"


@pytest.fixture
def kipmesh_topic(kipmesh_bootstrap: str, kipmesh_topic_prefix: str) -> Callable[..., str]:
    """Return a function that creates a topic and returns its full name: `kipmesh_topic("orders", partitions=3)`.

    The full name starts with `kipmesh_topic_prefix`. The defaults are the name "topic", one partition and the brokers'
    replication factor. Other keyword arguments are topic settings with underscores for dots, for example
    `retention_ms="60000"`. The function raises KafkaError if the topic cannot be created, for example because it
    exists.
    """

    def make(name: str = "topic", *, partitions: int = 1, replication_factor: int = -1, **configs: str) -> str:
        from kipmesh.client.sync import AdminClient
        from kipmesh.client.types import NewTopic

        full_name = kipmesh_topic_prefix + name
        dotted = {key.replace("_", "."): value for key, value in configs.items()}
        with AdminClient(kipmesh_bootstrap) as admin:
            admin.create_topics([NewTopic(full_name, partitions, replication_factor, dotted)])
        return full_name

    return make
