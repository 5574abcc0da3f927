"""Sizes of the planned cluster, tasks, samples, and their randomness."""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple

import numpy as np


class Sizes(NamedTuple):
    """Size of a cluster. All fields are positive; rates are per second for the whole cluster."""

    brokers: int = 1_000
    topics: int = 1_000_000
    topic_partitions: int = 10
    replication_factor: int = 3
    producers: int = 100_000
    batches_per_s: float = 1_000_000.0
    batch_bytes: int = 1_000
    slots: int = 10_000
    """Slots of a broker's session cache (227-13)."""
    pairs: int = 20
    """Pairs of leader and follower that a sample simulates."""
    simulated_s: int = 20
    """Simulated seconds of each pair."""
    producers_simulated: int = 10

    @property
    def partitions(self) -> int:
        """Number of partitions of all topics."""
        return self.topics * self.topic_partitions

    @property
    def partitions_of_broker(self) -> float:
        """Mean number of replicas of a broker."""
        return self.partitions * self.replication_factor / self.brokers


class Task(NamedTuple):
    """One sample to simulate: part, case and run."""

    part: str
    case: str
    run: int
    seed: int
    sizes: Sizes

    def rng(self) -> Random:
        """Return the generator of a run. All cases of a run use the same draws, so they are comparable."""
        return Random(f"{self.seed}:{self.part}:{self.run}")


class Sample(NamedTuple):
    """One figure of a sample."""

    part: str
    case: str
    run: int
    metric: str
    value: float


def binomial(rng: Random, trials: int, share: float) -> int:
    """Return the number of successes in `trials` with probability `share`."""
    return int(np.random.default_rng(rng.getrandbits(64)).binomial(trials, share))


def zipf_rate(rng: Random, sizes: Sizes) -> float:
    """Return the batches per second of a random partition; a topic's share is proportional to 1 / rank."""
    harmonic = math.log(sizes.topics) + 0.5772156649
    return sizes.batches_per_s / (rng.randint(1, sizes.topics) * harmonic * sizes.topic_partitions)
