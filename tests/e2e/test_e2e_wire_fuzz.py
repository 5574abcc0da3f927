"""Mutated frames and half-open connections at the Kafka listener; `make fuzz-wire` sends more of them."""

from __future__ import annotations

import random
import struct

import pytest

from tools import fuzz_wire


@pytest.mark.slow
def test_listener_survives_mutated_frames() -> None:
    summary = fuzz_wire.run(frames=1_000, seed=2)
    checked_frames = int(summary.split()[2].replace(",", ""))
    assert checked_frames >= 1_000, summary


def test_mutations_are_reproducible_from_their_seed() -> None:
    corpus = fuzz_wire.corpus()
    assert len(corpus) > 1000
    first, second = ([fuzz_wire.mutate(random.Random(seed), corpus[3], corpus) for seed in range(50)] for _ in range(2))
    assert first == second
    assert len(set(first)) > 40


def test_valid_request_is_a_metadata_request() -> None:
    key, version, correlation_id = struct.unpack_from(">hhi", fuzz_wire.HONEST)
    assert (key, version, correlation_id) == (3, 4, 77)
