"""The controller fences a killed broker when its connection breaks, before its session ends.

Sessions here outlast any test, so that only the connection can cause a failover.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.continuous_load import Records
from bench.failover import create_topic, fail_leader, leader
from bench.quorum_cluster import QuorumCluster, wait_for

pytestmark = pytest.mark.slow

SESSION_S = 400
GAP_S = 25.0
"""Not a measurement (see bench.failover): long enough for a busy machine, shorter than a request timeout (30 s)."""
LOST = "broker lost"
DISCONNECTED = "broker disconnected"


@pytest.fixture
def quorum(tmp_path: Path) -> Iterator[QuorumCluster]:
    config = {
        "broker.session.timeout.ms": str(SESSION_S * 1000),
        "auto.leader.rebalance.enable": "false",  # leadership changes only by faults
    }
    with QuorumCluster(tmp_path, controllers=3, brokers=3, config=config) as cluster:
        create_topic(cluster)
        yield cluster


def count_in_logs(cluster: QuorumCluster, text: str) -> int:
    """Count occurrences of the text in the logs of controllers."""
    return sum(node.log.read_text().count(text) for node in cluster.controllers)


def test_controller_replaces_a_killed_leader_before_its_session_ends(quorum: QuorumCluster) -> None:
    for count in (1, 2):
        began = time.monotonic()
        found = fail_leader(quorum, "kill")
        assert found.gap_s < GAP_S
        assert found.after != found.before
        assert time.monotonic() - began < SESSION_S / 2, "the restarted broker waited for the end of its session"
        assert count_in_logs(quorum, LOST) == count


def test_controller_failover_fences_no_broker(quorum: QuorumCluster) -> None:
    before = leader(quorum)
    with Records(quorum) as records:
        records.more(50)
        for _ in range(2):
            active = quorum.active().name
            quorum.kill(active)
            assert quorum.active().name != active
            records.more(50)
            quorum.start(active)
            quorum.wait_caught_up()
        active = quorum.active().name
        quorum.pause(active)  # it observes the new leader after it is resumed
        assert quorum.active().name != active
        quorum.resume(active)
        quorum.wait_caught_up()
        records.more(50)
        time.sleep(1)  # several times the grace period of a broken connection
    assert leader(quorum) == before
    assert count_in_logs(quorum, LOST) == 0
    quorum.kill(before)
    wait_for(lambda: count_in_logs(quorum, LOST) == 1, "fenced broker")
    assert records.failed == 0


def test_controlled_shutdown_is_not_reported_as_a_lost_broker(quorum: QuorumCluster) -> None:
    found = fail_leader(quorum, "stop")
    assert found.gap_s < GAP_S
    assert count_in_logs(quorum, LOST) == 0
    assert count_in_logs(quorum, DISCONNECTED) == 0
