"""Calls with retries to any broker or to partition leaders.

Retriable errors are retried with backoff and fresh metadata until the caller's timeout. The caller gets a result or one
KafkaError.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

from kipmesh.client.calls import Backoff, api_of, call, transport_failure
from kipmesh.client.metadata import Metadata, RefreshPolicy
from kipmesh.client.types import TopicPartition
from kipmesh.core.config import ClientConfig, Config
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.transport.grpc.client import ConnectionPool, TransportError

T = TypeVar("T")
ConfigT = TypeVar("ConfigT", bound=Config)
ByTopic = Mapping[str, Sequence[int]]
"""Partition numbers of a request by topic."""


def by_topic(partitions: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """Return the partition numbers by topic, in the given order."""
    topics: dict[str, list[int]] = {}
    for topic, partition in partitions:
        topics.setdefault(topic, []).append(partition)
    return topics


def parse_config(kind: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Parse a configuration from keyword arguments. Raises InvalidConfigError for unknown keys and invalid values.

    Keys have dots (`**{"linger.ms": 5}`) or underscores (`linger_ms=5`).
    """
    return kind.parse({key.replace("_", "."): value for key, value in values.items()})


class Client:
    """Base class of the asynchronous producer, consumer and admin client. Use `async with`."""

    _metadata: Metadata

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Connect to the cluster. Raises KafkaError if no bootstrap server responds in time."""
        raise NotImplementedError

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        raise NotImplementedError

    @property
    def last_failure(self) -> Exception | None:
        """The error of the last metadata request, or None if it succeeded or none was sent yet."""
        return self._metadata.last_failure


class PartitionResult(NamedTuple):
    """The result of one partition in a leader's response. `value` is valid only if `error_code` is 0."""

    topic: str
    partition: int
    error_code: int
    value: Any


class LeaderCall(NamedTuple):
    """How to build a request to partition leaders, and how to read its response."""

    build: Callable[[ByTopic], Any]
    """Build the request for the partitions of one leader."""
    parse: Callable[[Any], Iterable[PartitionResult]]
    """Read the results from a response."""


class Cluster:
    """Connections and metadata of one client, and calls to its brokers.

    Args: rack_id: rack sent in Metadata requests (392-15); policy: selects the topics to refresh.
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str],
        config: ClientConfig,
        default_client_id: str,
        *,
        rack_id: str = "",
        policy: RefreshPolicy | None = None,
    ) -> None:
        self.pool = ConnectionPool.of(config.client_id or default_client_id, config)
        self.metadata = Metadata(bootstrap, self.pool, config, policy=policy, rack_id=rack_id)
        self.backoff = Backoff(config.retry_backoff_ms, config.retry_backoff_max_ms)
        self.request_timeout_ms = config.request_timeout_ms
        self._request_timeout_s = config.request_timeout_ms / 1000

    async def start(self, timeout_s: float) -> None:
        """Connect. Raises KafkaError(NETWORK_EXCEPTION) if no bootstrap server responds within `timeout_s`."""
        try:
            await self.metadata.start(timeout_s)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        await self.metadata.close()
        await self.pool.close()

    async def retry(self, attempt: Callable[[float], Awaitable[T | KafkaError]], timeout_s: float) -> T:
        """Call `attempt` with the remaining seconds until it succeeds, and return its result.

        `attempt` returns a KafkaError if it fails. Retriable errors are retried with backoff. Raises the last error at
        the timeout, and any other error immediately.
        """
        deadline = time.monotonic() + timeout_s
        attempts = 0
        while True:
            result = await attempt(max(deadline - time.monotonic(), 0.001))
            if not isinstance(result, KafkaError):
                return result
            attempts += 1
            delay = self.backoff.delay_s(attempts)
            if not result.retriable or time.monotonic() + delay >= deadline:
                raise result
            await asyncio.sleep(delay)

    async def call_any(self, request: Any, timeout_s: float, retry: Callable[[Any], ErrorCode | None]) -> Any:
        """Send a request to any broker and return the response.

        `retry` returns the error code of a response that should be retried, or None to accept it. Raises KafkaError:
        immediately for a non-retriable error (UNSUPPORTED_VERSION if the broker does not implement the request),
        otherwise after retries for `timeout_s`.
        """
        api = api_of(request)
        name = f"{api.service.name if api.service else ''}.{api.rpc}"

        async def attempt(remaining_s: float) -> Any:
            failure = KafkaError(
                ErrorCode.REQUEST_TIMED_OUT, f"no broker responded to {api.rpc} within {timeout_s * 1000:.0f} ms"
            )
            deadline = time.monotonic() + remaining_s
            for address in self.metadata.candidates():
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    break
                try:
                    response = await call(self.pool, address, request, min(remaining_s, self._request_timeout_s))
                except TransportError as error:
                    if error.unimplemented:
                        return KafkaError(ErrorCode.UNSUPPORTED_VERSION, f"{address} does not implement {name}")
                    failure = transport_failure(error)
                    continue
                code = retry(response)
                return response if code is None else KafkaError(code, f"request {name} to broker {address} failed")
            return failure

        return await self.retry(attempt, timeout_s)

    async def call_leaders(
        self, partitions: Iterable[TopicPartition], leader_call: LeaderCall, timeout_s: float
    ) -> dict[TopicPartition, Any]:
        """Send a request to the leader of each partition and return the values by partition.

        Raises KafkaError for the first failed partition: immediately if the error is not retriable or the topic or
        partition does not exist (UNKNOWN_TOPIC_OR_PARTITION), otherwise after retries for `timeout_s`.
        """
        pending = set(partitions)
        results: dict[TopicPartition, Any] = {}
        deadline = time.monotonic() + timeout_s
        attempts = 0
        while pending:
            topics = {partition.topic for partition in pending}
            for topic in sorted(topics):
                await self.metadata.wait_for_topic(topic, max(deadline - time.monotonic(), 0.0))
            remaining_s = max(deadline - time.monotonic(), 0.001)
            values, failures = await self.call_leaders_once(pending, leader_call, remaining_s)
            results.update(values)
            pending.difference_update(values)
            if not pending:
                break
            attempts += 1
            delay = self.backoff.delay_s(attempts)
            is_last = time.monotonic() + delay >= deadline
            for partition, failure in failures.items():
                is_missing = (
                    attempts > 1
                    and failure.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                    and self.metadata.partition(*partition) is None
                )
                if is_last or not failure.retriable or is_missing:
                    raise failure
            self.metadata.request_refresh({partition.topic for partition in pending})
            await asyncio.sleep(delay)
        return results

    async def call_leaders_once(
        self, partitions: Iterable[TopicPartition], leader_call: LeaderCall, timeout_s: float
    ) -> tuple[dict[TopicPartition, Any], dict[TopicPartition, KafkaError]]:
        """Send one request to each leader, without retries, and return values and errors by partition.

        Every partition is in one of the two dicts.
        """
        results: dict[TopicPartition, Any] = {}
        groups: dict[int, list[TopicPartition]] = {}
        for topic_partition in sorted(partitions):
            known = self.metadata.partition(*topic_partition)
            name = f"{topic_partition.topic}-{topic_partition.partition}"
            if known is None:
                text = f"partition {name} is not in the metadata"
                results[topic_partition] = KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, text)
            elif known.leader_id not in self.metadata.brokers:
                results[topic_partition] = KafkaError(
                    ErrorCode.LEADER_NOT_AVAILABLE, f"partition {name} has no available leader"
                )
            else:
                groups.setdefault(known.leader_id, []).append(topic_partition)
        calls = [self._call_leader(leader_id, group, leader_call, timeout_s) for leader_id, group in groups.items()]
        for group_results in await asyncio.gather(*calls):
            results.update(group_results)
        failures = {each: result for each, result in results.items() if isinstance(result, KafkaError)}
        return {each: result for each, result in results.items() if each not in failures}, failures

    async def _call_leader(
        self, leader_id: int, group: Sequence[TopicPartition], leader_call: LeaderCall, timeout_s: float
    ) -> dict[TopicPartition, Any]:
        """Return the value or the KafkaError of each partition of the group."""
        address = self.metadata.address(leader_id)
        if address is None:
            failure = KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, f"leader {leader_id} is not in the metadata")
            return dict.fromkeys(group, failure)
        request = leader_call.build(by_topic(group))
        try:
            response = await call(self.pool, address, request, min(timeout_s, self._request_timeout_s))
        except TransportError as error:
            return dict.fromkeys(group, transport_failure(error))
        method = api_of(request).rpc
        results: dict[TopicPartition, Any] = {}
        for each in group:
            text = f"{method} response lacks partition {each.topic}-{each.partition}"
            results[each] = KafkaError(ErrorCode.NETWORK_EXCEPTION, text)
        for topic, partition, error_code, value in leader_call.parse(response):
            if error_code:
                value = KafkaError(error_code, f"{method} failed for {topic}-{partition}")
            if (topic_partition := TopicPartition(topic, partition)) in results:
                results[topic_partition] = value
        return results

    def topic_id(self, topic: str) -> bytes:
        """Return the topic's id, or empty bytes if it is unknown."""
        metadata = self.metadata.topic(topic)
        return metadata.topic_id if metadata is not None else b""

    def leader_epoch(self, topic: str, partition: int) -> int:
        """Return the leader epoch of a partition, or -1 if it is unknown."""
        known = self.metadata.partition(topic, partition)
        return known.leader_epoch if known is not None else -1
