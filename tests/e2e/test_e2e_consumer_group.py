"""Two consumer services of one group on a mesh of processes: they share, one takes over, and offsets outlive them."""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.e2e.mesh_of_tests import Mesh, wait_for

pytestmark = pytest.mark.slow

PARTITIONS = 4
CONFIG = {
    "group.id": "services",
    "auto.offset.reset": "earliest",
    "auto.commit.interval.ms": "200",
    "heartbeat.interval.ms": "200",
    "session.timeout.ms": "6000",
    "stream.heartbeat.interval.ms": "200",
}


class Reader:
    """Reads a stream of a service in a thread until the service ends it, or dies."""

    def __init__(self, address: str) -> None:
        self.values: dict[int, list[str]] = {}
        self._client = httpx.Client(base_url=f"http://{address}", timeout=60)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with self._client.stream("GET", "/v1/topics/t/records") as answer:
                for line in answer.iter_lines():
                    record = json.loads(line)
                    self.values.setdefault(record["partition"], []).append(record["value"])
        except httpx.TransportError:
            pass  # the service was killed

    def all(self) -> list[str]:
        return [value for values in list(self.values.values()) for value in values]

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._client.close()


def group(mesh: Mesh) -> list[dict[str, Any]]:
    """The group's partitions."""
    done = mesh.run("group", "describe", "services", "--json", check=False)
    found: list[dict[str, Any]] = json.loads(done.stdout)["partitions"] if done.returncode == 0 else []
    return found


def shares(mesh: Mesh) -> list[int]:
    """How many partitions each member has."""
    return sorted(Counter(one["member"] for one in group(mesh) if one["member"]).values())


def produce(mesh: Mesh, first: int, count: int) -> set[str]:
    values = [str(number) for number in range(first, first + count)]
    mesh.run("produce", "t", "--key-separator", ":", stdin="".join(f"{value}:{value}\n" for value in values))
    return set(values)


def read_both(mesh: Mesh) -> tuple[Reader, Reader]:
    one, two = (Reader(mesh.node(f"consumer-{number}")["http"]) for number in (1, 2))
    wait_for(lambda: shares(mesh) == [2, 2], "two members with two partitions each", timeout_s=60, interval_s=0.3)
    return one, two


@pytest.mark.timeout(300)
def test_services_share_take_over_and_go_on(mesh: Mesh) -> None:
    config = [part for key, value in CONFIG.items() for part in ("--config", f"{key}={value}")]
    mesh.local("up", "--controllers", "1", "--followers", "1", "--consumers", "2", *config)
    mesh.run("topic", "create", "t", "--partitions", str(PARTITIONS), "--replication-factor", "2")
    one, two = read_both(mesh)
    wanted = produce(mesh, 0, 400)
    wait_for(lambda: set(one.all()) | set(two.all()) == wanted, "all records")
    assert len(one.values) == len(two.values) == 2
    assert len(one.all()) + len(two.all()) == 400
    mesh.local("kill", "consumer-2")
    two.join()
    wait_for(lambda: shares(mesh) == [4], "one member with all partitions", timeout_s=60, interval_s=0.3)
    more = produce(mesh, 400, 400)
    wait_for(lambda: more <= set(one.all()), "the records of the dead one's partitions")
    wait_for(lambda: [one["lag"] for one in group(mesh)] == [0] * PARTITIONS, "all committed", interval_s=0.3)
    mesh.local("kill", "consumer-1")
    one.join()
    mesh.local("start", "consumer-1")
    mesh.local("start", "consumer-2")
    one, two = read_both(mesh)
    wanted = produce(mesh, 800, 400)
    wait_for(lambda: set(one.all()) | set(two.all()) >= wanted, "all records of the second life")
    assert sorted(one.all() + two.all()) == sorted(wanted)  # nothing again that was committed
    mesh.local("down", "--timeout", "0")
    one.join()
    two.join()
