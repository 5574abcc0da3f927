"""Calls to a cluster with retries: to any broker, or per partition to its leader.

Everything that can be asked again is: until `default.api.timeout.ms` is over, with backoff and fresh metadata. What a
caller gets is a result or one `KafkaError`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from kipmesh.client.calls import Backoff, api_of, call, no_answer
from kipmesh.client.metadata import Metadata, RefreshPolicy
from kipmesh.client.types import TopicPartition
from kipmesh.core.config import ClientConfig, Config
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.transport.grpc.client import ConnectionPool, TransportError

T = TypeVar("T")
ConfigT = TypeVar("ConfigT", bound=Config)
ByTopic = Mapping[str, Sequence[int]]
"""Topic -> its partitions in a request."""


def by_topic(partitions: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """The partitions of each topic."""
    topics: dict[str, list[int]] = {}
    for topic, partition in partitions:
        topics.setdefault(topic, []).append(partition)
    return topics


def parse_config(kind: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """The configuration from keyword arguments; raises InvalidConfigError.

    Keys have dots (`**{"linger.ms": 5}`) or underscores (`linger_ms=5`).
    """
    return kind.parse({key.replace("_", "."): value for key, value in values.items()})


class Client:
    """The part that the asynchronous producer, consumer and admin client share. Use `async with`."""

    _metadata: Metadata

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Connect; raises KafkaError when no bootstrap address answers."""
        raise NotImplementedError

    async def close(self) -> None:
        """Disconnect; may be called again."""
        raise NotImplementedError

    @property
    def last_failure(self) -> Exception | None:
        """Why no broker answered the last request for metadata; None when one did."""
        return self._metadata.last_failure


class PartitionAnswer(NamedTuple):
    """One partition's part of an answer."""

    topic: str
    partition: int
    error_code: int
    value: Any


class LeaderCall(NamedTuple):
    """A request that leaders answer: how to ask, and how to read the answer."""

    request: Callable[[ByTopic], Any]
    answers: Callable[[Any], Iterable[PartitionAnswer]]


class Cluster:
    """Connections and metadata of one client."""

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
        """Connect; raises KafkaError when no bootstrap address answers."""
        try:
            await self.metadata.start(timeout_s)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Disconnect; may be called again."""
        await self.metadata.close()
        await self.pool.close()

    async def retry(self, attempt: Callable[[float], Awaitable[T | KafkaError]], timeout_s: float) -> T:
        """The result of the first attempt that succeeds; raises an attempt's error that retries do not cure.

        `attempt` gets the seconds that are left. Its last error is raised when the time is over.
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
        """Ask any broker. `retry` says which error of an answer makes asking again worthwhile (None: take it)."""
        api = api_of(request)
        name = f"{api.service.name if api.service else ''}.{api.rpc}"

        async def attempt(left_s: float) -> Any:
            failure = KafkaError(ErrorCode.REQUEST_TIMED_OUT, f"{api.rpc} within {timeout_s * 1000:.0f} ms")
            deadline = time.monotonic() + left_s
            for address in self.metadata.candidates():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                try:
                    response = await call(self.pool, address, request, min(left, self._request_timeout_s))
                except TransportError as error:
                    if error.unimplemented:
                        text = f"{address} does not answer {name}"
                        return KafkaError(ErrorCode.UNSUPPORTED_VERSION, text)
                    failure = no_answer(error)
                    continue
                code = retry(response)
                return response if code is None else KafkaError(code, f"{name} at {address}")
            return failure

        return await self.retry(attempt, timeout_s)

    async def call_leaders(
        self, partitions: Iterable[TopicPartition], asked: LeaderCall, timeout_s: float
    ) -> dict[TopicPartition, Any]:
        """Ask each partition's leader; the values by partition. Raises the first error that cannot be retried."""
        pending = set(partitions)
        results: dict[TopicPartition, Any] = {}
        deadline = time.monotonic() + timeout_s
        attempts = 0
        while pending:
            for topic in sorted({where.topic for where in pending}):
                await self.metadata.wait_for_topic(topic, max(deadline - time.monotonic(), 0.0))
            found, failures = await self.ask_leaders(pending, asked, max(deadline - time.monotonic(), 0.001))
            results.update(found)
            pending.difference_update(found)
            if not pending:
                break
            attempts += 1
            delay = self.backoff.delay_s(attempts)
            late = time.monotonic() + delay >= deadline
            for where, failure in failures.items():
                hopeless = attempts > 1 and failure.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                if late or not failure.retriable or (hopeless and not self.knows(where)):
                    raise failure
            self.metadata.request_refresh({where.topic for where in pending})
            await asyncio.sleep(delay)
        return results

    async def ask_leaders(
        self, partitions: Iterable[TopicPartition], asked: LeaderCall, timeout_s: float
    ) -> tuple[dict[TopicPartition, Any], dict[TopicPartition, KafkaError]]:
        """Ask each partition's leader once: values and errors by partition, together all of them."""
        values: dict[TopicPartition, Any] = {}
        failures: dict[TopicPartition, KafkaError] = {}
        groups: dict[int, list[TopicPartition]] = {}
        for where in sorted(partitions):
            known = self.metadata.partition(*where)
            if known is None:
                failures[where] = KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{where.topic}-{where.partition}")
            elif known.leader_id not in self.metadata.brokers:
                failures[where] = KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, f"{where.topic}-{where.partition}")
            else:
                groups.setdefault(known.leader_id, []).append(where)
        calls = [self._ask(leader_id, group, asked, timeout_s) for leader_id, group in groups.items()]
        for answers in await asyncio.gather(*calls):
            for where, answer in answers.items():
                if isinstance(answer, KafkaError):
                    failures[where] = answer
                else:
                    values[where] = answer
        return values, failures

    async def _ask(
        self, leader_id: int, group: Sequence[TopicPartition], asked: LeaderCall, timeout_s: float
    ) -> dict[TopicPartition, Any]:
        """The value or the KafkaError of each partition of the group."""
        address = self.metadata.address(leader_id)
        if address is None:
            return dict.fromkeys(group, KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, f"broker {leader_id} is gone"))
        request = asked.request(by_topic(group))
        try:
            response = await call(self.pool, address, request, min(timeout_s, self._request_timeout_s))
        except TransportError as error:
            return dict.fromkeys(group, no_answer(error))
        method = api_of(request).rpc
        found: dict[TopicPartition, Any] = {}
        for topic, partition, error_code, value in asked.answers(response):
            failure = KafkaError(error_code, f"{method} of {topic}-{partition}") if error_code else None
            found[TopicPartition(topic, partition)] = failure or value
        for topic, partition in set(group) - found.keys():
            text = f"{method} of {topic}-{partition}: not in the answer"
            found[TopicPartition(topic, partition)] = KafkaError(ErrorCode.NETWORK_EXCEPTION, text)
        return {where: found[where] for where in group}

    def knows(self, where: TopicPartition) -> bool:
        """Whether the partition is in the metadata."""
        return self.metadata.partition(*where) is not None

    def topic_id(self, topic: str) -> bytes:
        """The topic's id, if it is known."""
        metadata = self.metadata.topic(topic)
        return metadata.topic_id if metadata is not None else b""

    def leader_epoch(self, topic: str, partition: int) -> int:
        """The leader epoch of a partition, -1 if it is not known."""
        known = self.metadata.partition(topic, partition)
        return known.leader_epoch if known is not None else -1
