"""Consumers read in their own rack, go on when the replica there dies, and come back to it, in each of the modes.

How fast is measured by `python -m bench.closest`; here time limits are such that a busy machine keeps them.
"""

from __future__ import annotations

import pytest

from bench import closest

pytestmark = pytest.mark.slow

BROKERS = {"broker.session.timeout.ms": "60000"}
CONSUMERS = {"fetch.max.wait.ms": "10000"}
"""Nobody is taken for silent: a killed replica is noticed by its connections."""
GAP_S = 25.0


@pytest.mark.parametrize("mode", ["fetch", "metadata", "consumer"])
def test_the_replica_nearby_is_read_and_read_again(mode: str) -> None:
    outcome = closest.run_mode(mode, closest.arguments(["--quick"]), brokers=BROKERS, consumers=CONSUMERS)
    assert outcome.clients.own > 0
    assert outcome.clients.share >= closest.SHARE_TARGET
    if mode == "fetch":  # in the others fetches do not name the rack
        assert outcome.brokers.share >= closest.SHARE_TARGET
    assert outcome.gap_s < GAP_S


def test_without_a_selector_all_bytes_cross_racks() -> None:
    outcome = closest.run_mode(closest.OFF, closest.arguments(["--quick"]), brokers=BROKERS, consumers=CONSUMERS)
    assert outcome.clients.own == outcome.brokers.own == 0
    assert outcome.clients.other > 0
    assert outcome.brokers.other > 0
