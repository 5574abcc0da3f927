"""Calls to a cluster with retries: to any broker, or per partition to its leader.

Everything that can be asked again is: until `default.api.timeout.ms` is over, with backoff and fresh metadata. What a
caller gets is a result or one `KafkaError`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kipmesh.client.backoff import Backoff
from kipmesh.client.metadata import Metadata, RefreshPolicy
from kipmesh.client.types import TopicPartition
from kipmesh.core.config import ClientConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.rpc.client import ConnectionPool, TransportError

ByTopic = Mapping[str, Sequence[int]]
"""Topic -> its partitions in a request."""


class PartitionAnswer(NamedTuple):
    """One partition's part of an answer."""

    topic: str
    partition: int
    error_code: int
    value: Any


class LeaderCall(NamedTuple):
    """A method of `Broker` that leaders answer: how to ask, and how to read the answer."""

    method: str
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

    async def call_any(
        self, service: str, method: str, request: Any, timeout_s: float, retry: Callable[[Any], ErrorCode | None]
    ) -> Any:
        """Ask any broker. `retry` says which error of an answer makes asking again worthwhile (None: take it)."""
        deadline = time.monotonic() + timeout_s
        attempts = 0
        while True:
            failure: KafkaError | None = None
            for address in self.metadata.candidates():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                try:
                    response = await self.pool.get(address).call(
                        service, method, request, min(left, self._request_timeout_s)
                    )
                except TransportError as error:
                    if error.code.name == "UNIMPLEMENTED":
                        text = f"{address} does not answer {service}.{method}"
                        raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, text) from None
                    failure = KafkaError(_transport_code(error), str(error))
                    continue
                code = retry(response)
                if code is None:
                    return response
                failure = KafkaError(code, f"{service}.{method} at {address}")
                break
            attempts += 1
            delay = self.backoff.delay_s(attempts)
            if time.monotonic() + delay >= deadline:
                raise failure or KafkaError(ErrorCode.REQUEST_TIMED_OUT, f"{method} within {timeout_s * 1000:.0f} ms")
            await asyncio.sleep(delay)

    async def call_leaders(
        self, partitions: Iterable[TopicPartition], call: LeaderCall, timeout_s: float
    ) -> dict[TopicPartition, Any]:
        """Ask each partition's leader; the values by partition. Raises the first error that cannot be retried."""
        pending = set(partitions)
        results: dict[TopicPartition, Any] = {}
        deadline = time.monotonic() + timeout_s
        attempts = 0
        while pending:
            for topic in sorted({where.topic for where in pending}):
                await self.metadata.wait_for_topic(topic, max(deadline - time.monotonic(), 0.0))
            found, failures = await self.ask_leaders(pending, call, max(deadline - time.monotonic(), 0.001))
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
        self, partitions: Iterable[TopicPartition], call: LeaderCall, timeout_s: float
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
        calls = [self._ask(leader_id, group, call, timeout_s) for leader_id, group in groups.items()]
        for group, answers in zip(groups.values(), await asyncio.gather(*calls), strict=True):
            if isinstance(answers, KafkaError):
                failures.update(dict.fromkeys(group, answers))
                continue
            for where in group:
                answer = answers.get(where)
                what = f"{call.method} of {where.topic}-{where.partition}"
                if answer is None:
                    failures[where] = KafkaError(ErrorCode.NETWORK_EXCEPTION, f"{what}: not in the answer")
                elif answer.error_code:
                    failures[where] = KafkaError(answer.error_code, what)
                else:
                    values[where] = answer.value
        return values, failures

    async def _ask(
        self, leader_id: int, group: Sequence[TopicPartition], call: LeaderCall, timeout_s: float
    ) -> dict[TopicPartition, PartitionAnswer] | KafkaError:
        address = self.metadata.address(leader_id)
        if address is None:
            return KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, f"broker {leader_id} is gone")
        by_topic: dict[str, list[int]] = {}
        for topic, partition in group:
            by_topic.setdefault(topic, []).append(partition)
        timeout_s = min(timeout_s, self._request_timeout_s)
        try:
            response = await self.pool.get(address).call("Broker", call.method, call.request(by_topic), timeout_s)
        except TransportError as error:
            return KafkaError(_transport_code(error), str(error))
        return {TopicPartition(each.topic, each.partition): each for each in call.answers(response)}

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


def _transport_code(error: TransportError) -> ErrorCode:
    return ErrorCode.REQUEST_TIMED_OUT if error.timed_out else ErrorCode.NETWORK_EXCEPTION
