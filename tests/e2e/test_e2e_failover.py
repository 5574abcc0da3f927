"""A leader's process dies: the controller sees its connection break, and does not wait for its session to end.

The sessions here are longer than any test, so whatever goes on does so because of the connection.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import leader_failover
from bench.leader_failover import Records, leader, suffer
from bench.quorum_cluster import QuorumCluster, wait_for

pytestmark = pytest.mark.slow

SESSION_S = 400
GAP_S = 25.0
"""Not a measurement (that is bench.failover): a machine that does much else must pass, one that waits for a
time-out (of a request: 30 s) must not."""
GONE = "broker lost"
BROKE = "broker disconnected"


@pytest.fixture
def quorum(tmp_path: Path) -> Iterator[QuorumCluster]:
    config = {
        "broker.session.timeout.ms": str(SESSION_S * 1000),
        "auto.leader.rebalance.enable": "false",  # who leads after a fault leads until the next one
    }
    with QuorumCluster(tmp_path, controllers=3, brokers=3, config=config) as mesh:
        leader_failover.prepare(mesh)
        yield mesh


def told(mesh: QuorumCluster, text: str) -> int:
    """How often controllers said that."""
    return sum(node.log.read_text().count(text) for node in mesh.controllers)


def test_a_killed_leader_is_followed_by_another_and_comes_back_at_once(quorum: QuorumCluster) -> None:
    for count in (1, 2):
        began = time.monotonic()
        found = suffer(quorum, "kill")
        assert found.gap_s < GAP_S
        assert found.after != found.before
        assert time.monotonic() - began < SESSION_S / 2, "the broker that came back had to wait"
        assert told(quorum, GONE) == count


def test_a_change_of_the_active_controller_fences_nobody(quorum: QuorumCluster) -> None:
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
        quorum.pause(active)  # it stands still, and hears of its deposition later
        assert quorum.active().name != active
        quorum.resume(active)
        quorum.wait_caught_up()
        records.more(50)
        time.sleep(1)  # several times what a connection may be gone
    assert leader(quorum) == before
    assert told(quorum, GONE) == 0
    quorum.kill(before)  # this one is seen by whichever controller is active now
    wait_for(lambda: told(quorum, GONE) == 1, "broker that is fenced")
    assert records.failed == 0


def test_a_clean_stop_is_not_taken_for_a_death(quorum: QuorumCluster) -> None:
    found = suffer(quorum, "stop")
    assert found.gap_s < GAP_S
    assert told(quorum, GONE) == 0
    assert told(quorum, BROKE) == 0
