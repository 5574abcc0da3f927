"""Metadata requests of many producers: the production tracker in simulated time (526-03 to 526-11).

`kipmesh_jobs.plan.producer_day` simulates each producer and checks the tracker's rules. Sizes are those of encoded
messages: a response has all brokers, and the partitions of each topic.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kipmesh import messages as m
from kipmesh.core.producer import RefreshMode
from kipmesh.messages.proto import encode
from kipmesh_jobs.plan.producer_day import WINDOW_MS, Day, DayConfig, DayResult
from kipmesh_jobs.plan.sizes import Sizes, Task

MODES: Sequence[RefreshMode] = ("paced", "literal", "all")
DURATION_S = 1_800
MEDIAN_TOPICS = 20
SPREAD = 1.3
TOPICS_MAX = 2_000
RECORDS_PER_TOPIC_S = 0.2


def topics_of(rng: Random) -> int:
    """Return a random number of topics of a producer, log-normal with median `MEDIAN_TOPICS`, from 1 to
    `TOPICS_MAX`.
    """
    return min(max(round(rng.lognormvariate(0, SPREAD) * MEDIAN_TOPICS), 1), TOPICS_MAX)


def simulate(topics: int, mode: RefreshMode, seed: int, duration_s: int = DURATION_S) -> DayResult:
    """Simulate a producer for `duration_s` seconds. It writes 0.2 records per second and topic, at least 1 per second
    in total, and more to popular topics (Zipf). Raises DayError.
    """
    rate = max(topics * RECORDS_PER_TOPIC_S, 1.0)
    config = DayConfig("zipf", mode, topics=topics, duration_s=duration_s, records_per_s=rate, seed=seed)
    return Day(config).run()


def simulate_start(topics: int, mode: RefreshMode) -> DayResult:
    """Simulate 60 s from a producer's start: one record to each topic within the first five seconds, then none. Raises
    DayError.
    """
    return Day(DayConfig("idle", mode, topics=topics, duration_s=60)).run()


def message_bytes(sizes: Sizes, topics: int) -> tuple[int, int]:
    """Return the encoded sizes, in bytes, of a Metadata request for `topics` topics and of its response."""
    names = [f"topic-{number:07}" for number in range(topics)]
    brokers = [
        m.MetadataResponseBroker(number, f"broker-{number}.example.org", 9092, f"rack-{number % 3}")
        for number in range(sizes.brokers)
    ]
    replicas = tuple(sizes.brokers - 1 - number for number in range(min(sizes.replication_factor, sizes.brokers)))
    partitions = [
        m.MetadataResponsePartition(0, number, replicas[0], 5, replicas, replicas)
        for number in range(sizes.topic_partitions)
    ]
    topic_responses = [m.MetadataResponseTopic(0, name, b"i" * 16, False, partitions) for name in names]
    request = m.MetadataRequest([m.MetadataRequestTopic(name=name) for name in names])
    response = m.MetadataResponse(0, brokers, "cluster", 1, topic_responses)
    return len(encode(request)), len(encode(response))


def sample(task: Task) -> dict[str, float]:
    """Simulate `sizes.producers_simulated` producers; return their metadata traffic scaled to all producers.

    Bytes are requests plus responses. `start_*` are rates in the first 10 s. `topics_of_producer`, `topics_per_request`
    and `bytes_per_record` are means and not scaled. Raises DayError.
    """
    sizes, rng = task.sizes, task.rng()
    mode = next(mode for mode in MODES if mode == task.case)
    empty, one = (sum(message_bytes(sizes, topics)) for topics in (0, 1))
    requests = requested_topics = start_requests = start_topics = topics = records = 0
    for _ in range(sizes.producers_simulated):
        many = topics_of(rng)
        found = simulate(many, mode, rng.getrandbits(32))
        topics += many
        records += found.records
        requests += sum(found.requests.values())
        requested_topics += sum(found.topics.values())
        start_requests += found.requests[0]
        start_topics += found.topics[0]
    share = sizes.producers / sizes.producers_simulated
    sent = requests * empty + requested_topics * (one - empty)
    return {
        "topics_of_producer": topics / sizes.producers_simulated,
        "requests_per_s": share * requests / DURATION_S,
        "topics_per_s": share * requested_topics / DURATION_S,
        "bytes_per_s": share * sent / DURATION_S,
        "bytes_per_record": sent / max(records, 1),
        "topics_per_request": requested_topics / max(requests, 1),
        "start_requests_per_s": share * start_requests / (WINDOW_MS / 1000),
        "start_topics_per_s": share * start_topics / (WINDOW_MS / 1000),
        "start_bytes_per_s": share * (start_requests * empty + start_topics * (one - empty)) / (WINDOW_MS / 1000),
    }
