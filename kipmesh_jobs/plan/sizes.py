"""What is planned, what a sample is, and where its randomness comes from."""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple

import numpy as np


class Sizes(NamedTuple):
    """A mesh. Every field is a number above 0; rates are a second, over the whole mesh."""

    brokers: int = 1_000
    topics: int = 1_000_000
    topic_partitions: int = 10
    replication_factor: int = 3
    producers: int = 100_000
    batches_per_s: float = 1_000_000.0
    batch_bytes: int = 1_000
    slots: int = 10_000
    """Of a broker's session cache (227-13)."""
    pairs: int = 20
    """Leader and follower, simulated in a sample."""
    simulated_s: int = 20
    """Of each pair."""
    producers_simulated: int = 10

    @property
    def partitions(self) -> int:
        """Of all topics."""
        return self.topics * self.topic_partitions

    @property
    def partitions_of_broker(self) -> float:
        """Replicas that a broker holds, on average."""
        return self.partitions * self.replication_factor / self.brokers


class Task(NamedTuple):
    """One sample: what, of which case, and the number of the run."""

    part: str
    case: str
    run: int
    seed: int
    sizes: Sizes

    def rng(self) -> Random:
        """The same for each case of a run: cases are compared on the same draw."""
        return Random(f"{self.seed}:{self.part}:{self.run}")


class Sample(NamedTuple):
    """A figure of a sample."""

    part: str
    case: str
    run: int
    metric: str
    value: float


def binomial(rng: Random, trials: int, share: float) -> int:
    """How many of many trials succeed."""
    return int(np.random.default_rng(rng.getrandbits(64)).binomial(trials, share))


def zipf_rate(rng: Random, sizes: Sizes) -> float:
    """Batches a second of a partition that is drawn: its topic's share falls with its rank, as 1 / rank."""
    harmonic = math.log(sizes.topics) + 0.5772156649
    return sizes.batches_per_s / (rng.randint(1, sizes.topics) * harmonic * sizes.topic_partitions)
