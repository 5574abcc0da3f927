"""Sizes of the planned cluster, tasks, samples, and their randomness."""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple

import numpy as np


class Sizes(NamedTuple):
    """Size of the planned cluster and of its simulation. All fields are positive. `batches_per_s` is for the whole
    cluster. `producers_simulated` producers are simulated per sample; their traffic is scaled to `producers`.
    """

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
        """Number of partitions of all topics, not counting replicas."""
        return self.topics * self.topic_partitions

    @property
    def partitions_of_broker(self) -> float:
        """Mean number of replicas of a broker."""
        return self.partitions * self.replication_factor / self.brokers


class Task(NamedTuple):
    """One simulation to run: part, case of the part, number of the run, random seed and sizes."""

    part: str
    case: str
    run: int
    seed: int
    sizes: Sizes

    def rng(self) -> Random:
        """Return a new generator for this seed, part and run. All cases of a run get the same draws, so they are
        comparable.
        """
        return Random(f"{self.seed}:{self.part}:{self.run}")


class Sample(NamedTuple):
    """The value of one metric of one task."""

    part: str
    case: str
    run: int
    metric: str
    value: float


def binomial(rng: Random, trials: int, share: float) -> int:
    """Return a random number of successes in `trials` attempts that each succeed with probability `share`."""
    return int(np.random.default_rng(rng.getrandbits(64)).binomial(trials, share))


def zipf_rate(rng: Random, sizes: Sizes) -> float:
    """Return the batches per second that a random partition receives. The rate of a topic is proportional to 1 / rank,
    and its partitions share it equally.
    """
    harmonic = math.log(sizes.topics) + 0.5772156649
    return sizes.batches_per_s / (rng.randint(1, sizes.topics) * harmonic * sizes.topic_partitions)
