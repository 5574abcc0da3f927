"""Consumers read from the replica in their rack, survive its failure, and return to it, in each selection mode.

Time limits suit a busy machine. `python -m bench.closest` measures the speed.
"""

from __future__ import annotations

import pytest

from bench import closest

pytestmark = pytest.mark.slow

BROKERS = {"broker.session.timeout.ms": "60000"}
CONSUMERS = {"fetch.max.wait.ms": "10000"}
"""No session or fetch times out: consumers notice a killed replica by its closed connections."""
GAP_S = 25.0


@pytest.mark.parametrize("mode", ["fetch", "metadata", "consumer"])
def test_consumer_reads_the_nearby_replica_and_returns_to_it_after_its_restart(mode: str) -> None:
    outcome = closest.run_mode(mode, closest.arguments(["--quick"]), brokers=BROKERS, consumers=CONSUMERS)
    assert outcome.clients.own > 0
    assert outcome.clients.share >= closest.SHARE_TARGET
    if mode == "fetch":  # fetches of the other modes do not carry the rack
        assert outcome.brokers.share >= closest.SHARE_TARGET
    assert outcome.gap_s < GAP_S


def test_all_bytes_cross_racks_without_a_replica_selector() -> None:
    outcome = closest.run_mode(closest.OFF, closest.arguments(["--quick"]), brokers=BROKERS, consumers=CONSUMERS)
    assert outcome.clients.own == outcome.brokers.own == 0
    assert outcome.clients.other > 0
    assert outcome.brokers.other > 0
