"""Fixtures of client tests: one cluster of each kind per worker, and drivers of clients."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.kafka import KafkaMissingError
from tests.clients import clusters_of_tests as clusters
from tests.clients import drivers_of_tests as drivers

Open = Callable[..., drivers.Driver]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "client" in metafunc.fixturenames:
        metafunc.parametrize("client", list(drivers.wanted()), scope="session", indirect=True)


@pytest.fixture(scope="session", params=clusters.wanted())
def cluster(request: pytest.FixtureRequest) -> Iterator[clusters.Cluster]:
    try:
        running = clusters.make(request.param)
    except (clusters.UnsupportedError, KafkaMissingError) as error:
        pytest.skip(str(error))
    yield running
    running.down()


@pytest.fixture(scope="session")
def client(request: pytest.FixtureRequest) -> drivers.Client:
    found = drivers.CLIENTS[request.param]
    try:
        found.command()
    except drivers.MissingError as error:
        pytest.skip(str(error))
    return found


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """Unique topic name."""
    name = request.node.originalname.removeprefix("test_")[:40]
    return f"{name}-{secrets.token_hex(3)}"


@pytest.fixture
def open_driver(cluster: clusters.Cluster, tmp_path: Path) -> Iterator[Open]:
    """`open_driver(client, rack=...)` starts another process of a client, which is closed after the test."""
    opened: list[drivers.Driver] = []

    def start(client: drivers.Client, **options: Any) -> drivers.Driver:
        log = tmp_path / f"{client.name}-{len(opened)}.log"
        opened.append(drivers.Driver(client, cluster.bootstrap, log, options))
        return opened[-1]

    yield start
    for driver in opened:
        driver.close()


@pytest.fixture(scope="session")
def shared_drivers() -> Iterator[dict[tuple[str, str], drivers.Driver]]:
    found: dict[tuple[str, str], drivers.Driver] = {}
    yield found
    for driver in found.values():
        driver.close()


@pytest.fixture
def driver(
    cluster: clusters.Cluster,
    client: drivers.Client,
    shared_drivers: dict[tuple[str, str], drivers.Driver],
    tmp_path_factory: pytest.TempPathFactory,
) -> drivers.Driver:
    """Process of the client that most tests share."""
    key = cluster.name, client.name
    if key not in shared_drivers:
        log = tmp_path_factory.mktemp(client.name) / "driver.log"
        shared_drivers[key] = drivers.Driver(client, cluster.bootstrap, log, {})
    return shared_drivers[key]


@pytest.fixture
def breakable(
    cluster: clusters.Cluster, shared_drivers: dict[tuple[str, str], drivers.Driver]
) -> Iterator[clusters.Cluster]:
    """The cluster for a test that kills brokers. Closes shared drivers after the test: their metadata may be stale."""
    yield cluster
    for driver in shared_drivers.values():
        driver.close()
    shared_drivers.clear()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    """Skip the test if the client or the cluster lacks a feature."""
    outcome = yield
    error = outcome.excinfo[1] if outcome.excinfo else None
    if isinstance(error, drivers.NoVerbError | clusters.UnsupportedError):
        outcome.force_exception(pytest.skip.Exception(str(error), _use_item_location=True))
