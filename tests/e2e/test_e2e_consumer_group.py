"""Two consumer services of one group on a cluster of processes."""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.e2e.cli_of_tests import ClusterCli, wait_for

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
    """Reads a stream of a service on a thread until the stream ends or the service is killed."""

    def __init__(self, address: str) -> None:
        self.values: dict[int, list[str]] = {}
        self._client = httpx.Client(base_url=f"http://{address}", timeout=60)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with self._client.stream("GET", "/v1/topics/t/records") as response:
                for line in response.iter_lines():
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


def group(cluster: ClusterCli) -> list[dict[str, Any]]:
    """Return the partitions of the group."""
    done = cluster.run("group", "describe", "services", "--json", check=False)
    found: list[dict[str, Any]] = json.loads(done.stdout)["partitions"] if done.returncode == 0 else []
    return found


def shares(cluster: ClusterCli) -> list[int]:
    """Return the number of partitions of each member, sorted."""
    return sorted(Counter(partition["member"] for partition in group(cluster) if partition["member"]).values())


def produce(cluster: ClusterCli, first: int, count: int) -> set[str]:
    values = [str(number) for number in range(first, first + count)]
    cluster.run("produce", "t", "--key-separator", ":", stdin="".join(f"{value}:{value}\n" for value in values))
    return set(values)


def read_both(cluster: ClusterCli) -> tuple[Reader, Reader]:
    first, second = (Reader(cluster.node(f"consumer-{number}")["http"]) for number in (1, 2))
    wait_for(lambda: shares(cluster) == [2, 2], "two members with two partitions each", timeout_s=60, interval_s=0.3)
    return first, second


@pytest.mark.timeout(300)
def test_consumer_services_share_partitions_take_over_and_resume_from_commits(cluster: ClusterCli) -> None:
    config = [part for key, value in CONFIG.items() for part in ("--config", f"{key}={value}")]
    cluster.local("up", "--controllers", "1", "--followers", "1", "--consumers", "2", *config)
    cluster.run("topic", "create", "t", "--partitions", str(PARTITIONS), "--replication-factor", "2")
    first, second = read_both(cluster)
    wanted = produce(cluster, 0, 400)
    wait_for(lambda: set(first.all()) | set(second.all()) == wanted, "all records")
    assert len(first.values) == len(second.values) == 2
    assert len(first.all()) + len(second.all()) == 400
    cluster.local("kill", "consumer-2")
    second.join()
    wait_for(lambda: shares(cluster) == [4], "one member with all partitions", timeout_s=60, interval_s=0.3)
    more = produce(cluster, 400, 400)
    wait_for(lambda: more <= set(first.all()), "records of the partitions of the killed service")
    wait_for(
        lambda: [partition["lag"] for partition in group(cluster)] == [0] * PARTITIONS, "all committed", interval_s=0.3
    )
    cluster.local("kill", "consumer-1")
    first.join()
    cluster.local("start", "consumer-1")
    cluster.local("start", "consumer-2")
    first, second = read_both(cluster)
    wanted = produce(cluster, 800, 400)
    wait_for(lambda: set(first.all()) | set(second.all()) >= wanted, "all records after the restart")
    assert sorted(first.all() + second.all()) == sorted(wanted)  # no committed record is read again
    cluster.local("down", "--timeout", "0")
    first.join()
    second.join()
