"""Cost of a fetch with and without a session: the leader's handler, the follower's handler, and the encoded messages.

A `Leader` has the state of a broker that leads partitions: `Replica`s with real logs, a metadata image, the session
cache and `FetchHandler`. A `Follower` has a `FetchSessionHandler`, with positions as from `ReplicaFetcher`. Requests
and responses are encoded as protobuf. Not included: gRPC, the network, and the follower's logs, whose cost does not
depend on sessions.

A fetch without changes subscribes, waits for `WAIT_MS`, and returns an empty response.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from kipmesh.broker.observability.metrics import BrokerMetrics
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.replica import DirtyReplicas, Replica
from kipmesh.broker.requests.fetch import FetchHandler
from kipmesh.broker.requests.fetch_sessions import make_session_cache
from kipmesh.core.config import BrokerConfig, TopicConfig
from kipmesh.core.fetch_session import FetchSessionHandler, SessionRequest
from kipmesh.core.metadata.image import BrokerState, MetadataImage, PartitionState, TopicState
from kipmesh.core.record_batch import build
from kipmesh.messages import FetchPartition, FetchRequest, FetchResponse
from kipmesh.messages.proto import decode, encode
from kipmesh.node import monotonic_ms
from kipmesh.storage.fs import RealFileSystem
from kipmesh.storage.log_manager import LogManager
from kipmesh.transport.grpc.server import RequestContext

LEADER_ID, FOLLOWER_ID, EPOCH = 1, 2, 7
TOPIC_PARTITIONS = 100
CHANGED_TOPICS = 10
"""Changed partitions are spread over so many topics at every size, because the size of requests depends on it."""
VALUE_BYTES = 100
WAIT_MS = 1
MAX_BYTES = 10 << 20

_LONG_ID = 1 << 28  # larger ids take five bytes on the wire, as nearly all random ids do

Place = tuple[int, int]
"""Number of the topic, and partition."""


class Cost(NamedTuple):
    """Cost of one fetch. CPU is that of the thread, in microseconds."""

    request_bytes: int
    response_bytes: int
    server_us: float
    client_us: float


def topic_id(topic: int) -> bytes:
    """Return a topic id of the usual length."""
    return (topic + 1).to_bytes(16, "big")


def places(partitions: int, changed: int) -> list[Place]:
    """Return `changed` partitions of a session: equally many of each of ten topics, which are far apart."""
    topics = partitions // TOPIC_PARTITIONS
    return [
        (number * topics // CHANGED_TOPICS, partition)
        for number in range(CHANGED_TOPICS)
        for partition in range(changed // CHANGED_TOPICS)
    ]


class Leader:
    """A broker that leads `partitions` partitions with one follower each. Their logs are in a new directory."""

    def __init__(self, directory: Path, partitions: int) -> None:
        self.partitions = partitions
        config = BrokerConfig.parse(
            {
                "node.id": LEADER_ID,
                "cluster.id": "bench",
                "controller.quorum.voters": "9@localhost:1",
                "log.dirs": str(directory),
            }
        )
        directory.mkdir()
        self._logs = LogManager(
            RealFileSystem(), (str(directory),), cluster_id="bench", node_id=LEADER_ID, defaults=TopicConfig()
        )
        self._logs.load(0)
        image = MetadataImage(offset=0)
        for broker in (LEADER_ID, FOLLOWER_ID):
            image.brokers[broker] = BrokerState(broker, EPOCH, b"x" * 16, {}, None, False, False, False)
        self._hosted, self._dirty_replicas = HostedReplicas(image), DirtyReplicas()
        self.replicas: dict[Place, Replica] = {}
        for topic in range(partitions // TOPIC_PARTITIONS):
            self._add(topic, image)
        self.handler = FetchHandler(
            config,
            self._hosted,
            make_session_cache(config, self._dirty_replicas.subscriptions, self._hosted),
            BrokerMetrics(CollectorRegistry()),
            lambda replica, isr: None,
            monotonic_ms,
        )
        self._batch = build([(None, b"v" * VALUE_BYTES)], base_offset=0, leader_epoch=-1, timestamp_ms=1)

    def _add(self, topic: int, image: MetadataImage) -> None:
        name = f"topic-{topic:06}"
        states = {}
        for number in range(TOPIC_PARTITIONS):
            state = PartitionState((LEADER_ID, FOLLOWER_ID), (LEADER_ID, FOLLOWER_ID), LEADER_ID, 0, 0)
            log = self._logs.create(name, number, topic_id(topic), TopicConfig(), 0)
            replica = Replica(LEADER_ID, log, 0, monotonic_ms, self._dirty_replicas)
            replica.become_leader(
                state, min_insync_replicas=1, lag_max_ms=30_000, eligible_epoch=self._hosted.eligible_epoch
            )
            self._hosted.add(replica)
            self.replicas[topic, number] = replica
            states[number] = state
        image.topics[topic_id(topic)] = TopicState(name, topic_id(topic), states)

    def append(self, changed: list[Place]) -> None:
        """Append a record of `VALUE_BYTES` to each partition."""
        for place in changed:
            self.replicas[place].append(self._batch, 1, 1)

    async def end_session(self, session_id: int) -> None:
        """Close the follower's session."""
        request = FetchRequest(replica_id=FOLLOWER_ID, replica_epoch=EPOCH, session_id=session_id)
        await self.handler.fetch(request, RequestContext("broker-2", "peer"))

    def close(self) -> None:
        """Close the logs. The caller deletes their directory."""
        self._logs.close(-1)


class Follower:
    """A follower that fetches some partitions of a leader, with or without sessions."""

    def __init__(self, leader: Leader, partitions: list[Place], *, enabled: bool) -> None:
        self._leader = leader
        self._session = FetchSessionHandler(enabled=enabled)
        self._moved = list(partitions)  # partitions with new positions, as `ReplicaFetcher._moved`

    @property
    def session_id(self) -> int:
        """Id of the session, or 0."""
        return self._session.session_id

    def _next_request(self) -> tuple[SessionRequest, bytes]:
        for topic, number in self._moved:
            replica = self._leader.replicas[topic, number]
            log = replica.log  # equals the follower's log after all records are read
            position = FetchPartition(number, 0, log.log_end_offset, log.latest_epoch, log.log_start_offset, 1 << 20)
            self._session.want(replica.topic, replica.topic_id, position)
        self._moved = []
        request = self._session.next_request()
        filled = request.fill(
            FetchRequest(
                cluster_id="bench",
                replica_id=FOLLOWER_ID,
                replica_epoch=EPOCH,
                max_wait_ms=WAIT_MS,
                min_bytes=1,
                max_bytes=MAX_BYTES,
            )
        )
        return request, encode(filled)

    async def fetch(self, changed: list[Place]) -> Cost:
        """Append a record to each changed partition, fetch them and return the cost; AssertionError if any is lost."""
        clock = time.thread_time_ns
        begin = clock()
        request, sent = self._next_request()
        client_ns = clock() - begin
        self._leader.append(changed)
        begin = clock()
        context = RequestContext("broker-2", "peer")
        response = await self._leader.handler.fetch(decode(FetchRequest, sent), context)
        received = encode(response)
        server_ns = clock() - begin
        begin = clock()
        result = self._session.handle_response(request, decode(FetchResponse, received))
        client_ns += clock() - begin
        records = [one for one in result.partitions if one.data.records]
        if not result.is_accepted or len(records) != len(changed):
            raise AssertionError(f"{len(records)} of {len(changed)} records fetched, error {result.error.name}")
        self._moved = changed
        return Cost(len(sent), len(received), server_ns / 1e3, client_ns / 1e3)

    async def open(self) -> None:
        """Open a session by a full fetch. Repeats that until the session id has the usual length."""
        while True:
            await self.fetch([])
            if self.session_id >= _LONG_ID:
                return
            await self.close()

    async def close(self) -> None:
        """Close the session, if there is one."""
        request = self._session.close()
        if request is not None:
            await self._leader.end_session(request.session_id)


async def memory_bytes(leader: Leader) -> tuple[float, float]:
    """Return the bytes per partition of an open, idle session in the leader and in the follower, by tracemalloc."""
    warm_up = Follower(leader, list(leader.replicas), enabled=True)
    await warm_up.open()  # compiles the codecs
    await warm_up.close()
    del warm_up
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        follower = Follower(leader, list(leader.replicas), enabled=True)
        await follower.open()
        session_id = follower.session_id
        gc.collect()
        both = tracemalloc.get_traced_memory()[0]
        del follower
        gc.collect()
        server = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    await leader.end_session(session_id)
    return (server - before) / leader.partitions, (both - server) / leader.partitions
