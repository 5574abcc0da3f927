"""Metadata cache of a client: brokers, topics and leaders, refreshed by one background task.

One refresh is in flight at a time. It goes to a known broker, then to the bootstrap servers; while a broker does not
respond, the next one is tried as well (526-09). A `RefreshPolicy` selects the topics. `RefreshDue` is the policy of
consumers and admin clients; producers use KIP-526 (`ProducerMetadata`).

Invariants: only tracked topics are requested; a request without topics requests brokers only; within one topic id the
leader epoch of a partition never decreases.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kipmesh import messages as m
from kipmesh.client.calls import Backoff, call, raise_failure, task_failure
from kipmesh.client.types import Node, PartitionMetadata, TopicMetadata
from kipmesh.core.config import ClientConfig
from kipmesh.core.errors import ErrorCode, InvalidConfigError, KafkaError
from kipmesh.transport.grpc.client import ConnectionPool, Meter, TransportError

log = logging.getLogger(__name__)

_RETIRED_IDS_MAX = 16
SILENCE_S = 0.5
"""Time without a response after which another broker is tried in parallel."""

UNKNOWN_RESPONSES_MAX = 3
"""Consecutive responses without a topic after which it counts as missing. Brokers may lag behind for a new topic."""


def parse_bootstrap(bootstrap: str | Sequence[str]) -> tuple[str, ...]:
    """Parse `host:port,host:port`, or a sequence of `host:port`. Raises TypeError and InvalidConfigError."""
    if isinstance(bootstrap, Mapping):  # may contain passwords
        raise TypeError(
            "bootstrap must be 'host:port' or a list of these, got a dict of settings; pass them as keyword arguments"
        )
    if isinstance(bootstrap, bytes) or not isinstance(bootstrap, Iterable):
        raise TypeError(f"bootstrap must be 'host:port' or a list of these, got {bootstrap!r}")
    parts = bootstrap.split(",") if isinstance(bootstrap, str) else list(bootstrap)
    for part in parts:
        if not isinstance(part, str):
            raise TypeError(f"bootstrap must be 'host:port' or a list of these, got the element {part!r}")
    addresses = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    for address in addresses:
        host, colon, port = address.rpartition(":")
        if not (colon and host and port.isdigit() and 0 < int(port) <= 65535):
            raise InvalidConfigError(f"bootstrap.servers must be a list of host:port, got {address!r}")
    if not addresses:
        raise InvalidConfigError("bootstrap.servers must contain at least one host:port")
    return addresses


@dataclass(slots=True, eq=False)
class TopicEntry:
    """The cached metadata of one tracked topic. Times are seconds of the monotonic clock."""

    name: str
    metadata: TopicMetadata | None = None
    error: ErrorCode = ErrorCode.NONE
    """The topic's error in the last response."""
    urgent: bool = True
    """Whether to refresh as soon as the backoff allows, instead of at `metadata.max.age.ms`."""
    refreshed_at: float = -1.0
    retry_at: float = 0.0
    attempts: int = 0
    """Consecutive responses without usable metadata of the topic."""
    unknown_responses: int = 0
    """Consecutive responses that report the topic as unknown."""
    pinned: bool = False
    """Whether to keep requesting the topic while it does not exist."""
    waiters: int = 0
    topic_id: bytes = b""
    retired_ids: tuple[bytes, ...] = ()
    """Ids of deleted topics with this name. Brokers that lag behind may still return them."""

    def require(self, *, is_patient: bool) -> TopicMetadata | None:
        """Return the topic's metadata, or None while a later response may contain it.

        Raises KafkaError for a non-retriable error of the topic. After `UNKNOWN_RESPONSES_MAX` responses without the
        topic, raises UNKNOWN_TOPIC_OR_PARTITION unless `is_patient`.
        """
        if self.metadata is None and self.error is not ErrorCode.NONE and not self.error.retriable:
            raise _topic_failure(self)
        if self.metadata is None and not is_patient and self.unknown_responses >= UNKNOWN_RESPONSES_MAX:
            raise _missing_topic(self)
        return self.metadata


def _topic_failure(entry: TopicEntry) -> KafkaError:
    return KafkaError(entry.error, f"metadata of topic {entry.name!r} is not available")


def _missing_topic(entry: TopicEntry) -> KafkaError:
    return KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {entry.name!r} does not exist")


class Choice(NamedTuple):
    """The decision of a RefreshPolicy: the topics to request now, or None and the seconds until the next decision.

    If `wait_s` is None, the policy decides again only after a change.
    """

    topics: Sequence[str] | None
    wait_s: float | None = None


class RefreshPolicy(Protocol):
    """Selects the topics of the next metadata request."""

    def choose(self, now_s: float, entries: Mapping[str, TopicEntry]) -> Choice:
        """Return the topics to request now, or the seconds until the next decision. `now_s` is a monotonic time."""


@dataclass(frozen=True, slots=True)
class RefreshDue:
    """Requests every topic that is urgent or older than `max_age_s`, and no other topic."""

    max_age_s: float
    backoff_s: float

    def choose(self, now_s: float, entries: Mapping[str, TopicEntry]) -> Choice:
        """Return the topics that are due now, or the seconds until the first one is due."""
        earliest: float | None = None
        due_now = []
        for topic, entry in entries.items():
            if entry.urgent:
                due = max(entry.retry_at, entry.refreshed_at + self.backoff_s if entry.refreshed_at >= 0 else 0.0)
            else:
                due = entry.refreshed_at + self.max_age_s
            if due <= now_s:
                due_now.append(topic)
            earliest = due if earliest is None else min(earliest, due)
        if due_now or earliest is None:
            return Choice(tuple(due_now) or None)
        return Choice(None, earliest - now_s)


class Metadata:
    """The metadata cache and its refresh task. Belongs to one event loop.

    `brokers` maps ids to brokers. `listeners` are called after each refresh, failed or not.
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str],
        pool: ConnectionPool,
        config: ClientConfig,
        *,
        policy: RefreshPolicy | None = None,
        rack_id: str = "",
    ) -> None:
        self.bootstrap = parse_bootstrap(bootstrap)
        self.brokers: dict[int, Node] = {}
        self.listeners: list[Callable[[], None]] = []
        self.failure: KafkaError | None = None
        """The error that ended the refresh task. Listeners are called once when it is set."""
        self.last_failure: Exception | None = None
        """The error of the last request, or None if it succeeded or no request was sent yet."""
        self._entries: dict[str, TopicEntry] = {}
        self._pool = pool
        self._rack_id = rack_id
        self._client_id = config.client_id
        self._backoff = Backoff(config.retry_backoff_ms, config.retry_backoff_max_ms)
        self._policy = policy or RefreshDue(config.metadata_max_age_ms / 1000, config.retry_backoff_ms / 1000)
        self._request_timeout_s = config.request_timeout_ms / 1000
        self._connect_timeout_s = min(config.socket_connection_setup_timeout_ms / 1000, self._request_timeout_s)
        self._failing_since = 0.0
        self._brokers_stale = True
        self._refreshed_at = 0.0
        self._wake = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._random = random.Random()

    def __del__(self) -> None:
        if getattr(self, "_task", None) is not None:
            text = f"{self._client_id or 'a kipmesh client'} was not closed: use `async with` or close()"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)

    async def start(self, timeout_s: float) -> None:
        """Start the refresh task and wait for the first response with brokers.

        Raises KafkaError(NETWORK_EXCEPTION), which names the bootstrap servers, if none responds within `timeout_s`.
        The task then continues until `close`.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="kipmesh-metadata")
            self._task.add_done_callback(self._on_task_done)
        await self._wait(lambda: True if self.brokers else None, timeout_s, "the brokers of the cluster")

    async def close(self) -> None:
        """Stop the refresh task. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for waiter in self._waiters:
            waiter.cancel()
        self._waiters.clear()

    # -- cached values

    def topic(self, name: str) -> TopicMetadata | None:
        """Return the cached metadata of a topic, or None. Sends no request."""
        entry = self._entries.get(name)
        return entry.metadata if entry is not None else None

    def take_error(self, name: str) -> KafkaError | None:
        """Return the topic's error if it should be reported to the application, otherwise None.

        This applies to non-retriable errors, and to UNKNOWN_TOPIC_OR_PARTITION once per `UNKNOWN_RESPONSES_MAX`
        responses without the topic.
        """
        entry = self._entries.get(name)
        if entry is None or entry.error is ErrorCode.NONE:
            return None
        if not entry.error.retriable:
            return _topic_failure(entry)
        if entry.unknown_responses < UNKNOWN_RESPONSES_MAX:
            return None
        entry.unknown_responses = 0
        return _missing_topic(entry)

    def partition(self, topic: str, partition: int) -> PartitionMetadata | None:
        """Return the cached metadata of a partition, or None. Sends no request."""
        metadata = self.topic(topic)
        return metadata.partitions.get(partition) if metadata is not None else None

    def address(self, node_id: int) -> str | None:
        """Return the `host:port` of a broker, or None if it is unknown."""
        node = self.brokers.get(node_id)
        return node.address if node is not None else None

    @property
    def unreachable_s(self) -> float:
        """Seconds for which all metadata requests have failed; 0 if the last one succeeded."""
        return time.monotonic() - self._failing_since if self.last_failure is not None else 0.0

    def candidates(self) -> list[str]:
        """Return addresses for a request that any broker can serve: known brokers, then bootstrap servers, shuffled."""
        known = [node.address for node in self.brokers.values()]
        self._random.shuffle(known)
        first = list(self.bootstrap)
        self._random.shuffle(first)
        return list(dict.fromkeys(known + first))

    # -- requests

    def track(self, name: str) -> None:
        """Request this topic's metadata, and keep it fresh until `forget`, even while the topic does not exist."""
        self._entry(name).pinned = True

    def _entry(self, name: str) -> TopicEntry:
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = TopicEntry(name)
            self._wake.set()
        return entry

    def forget(self, name: str) -> None:
        """Remove this topic's metadata and stop refreshing it. Does nothing for an unknown topic."""
        self._entries.pop(name, None)

    def forget_unknown(self, name: str) -> None:
        """Stop requesting a topic without metadata, unless it is tracked or a caller waits for it."""
        entry = self._entries.get(name)
        if entry is not None and entry.metadata is None and not entry.waiters and not entry.pinned:
            del self._entries[name]

    def request_refresh(self, topics: Iterable[str] = ()) -> None:
        """Refresh the brokers and the tracked ones among these topics as soon as the backoff allows."""
        self._brokers_stale = True
        for name in topics:
            entry = self._entries.get(name)
            if entry is not None:
                entry.urgent = True
        self._wake.set()

    async def wait_for_topic(self, name: str, timeout_s: float, *, patient: bool = False) -> TopicMetadata:
        """Return the topic's metadata, requesting it if it is not cached.

        Raises KafkaError: UNKNOWN_TOPIC_OR_PARTITION after several responses without the topic, or only after
        `timeout_s` if `patient`; the topic's error; REQUEST_TIMED_OUT; NETWORK_EXCEPTION if no broker responds.
        """
        entry = self._entry(name)
        entry.unknown_responses = 0
        entry.error = ErrorCode.NONE
        entry.waiters += 1
        try:
            result: TopicMetadata = await self._wait(
                lambda: entry.require(is_patient=patient), timeout_s, f"topic {name!r}", entry
            )
        finally:
            entry.waiters -= 1
            self.forget_unknown(name)
        return result

    async def wait_for_update(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the next refresh to succeed or fail. Returns normally in each case.

        Raises KafkaError if the refresh task has already ended with an error.
        """
        raise_failure(self.failure)
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            if not waiter.done():
                self._waiters.remove(waiter)

    async def _wait(
        self, condition: Callable[[], Any], timeout_s: float, name: str, entry: TopicEntry | None = None
    ) -> Any:
        deadline = time.monotonic() + timeout_s
        while (result := condition()) is None:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise self._timeout(name, timeout_s, entry)
            await self.wait_for_update(remaining_s)
        return result

    def _timeout(self, name: str, timeout_s: float, entry: TopicEntry | None) -> KafkaError:
        if self.last_failure is not None or not self.brokers:
            addresses = ", ".join(self.bootstrap)
            reason = f" ({self.last_failure})" if self.last_failure is not None else ""
            return KafkaError(ErrorCode.NETWORK_EXCEPTION, f"no broker responds at {addresses}{reason}")
        code = entry.error if entry is not None and entry.error is not ErrorCode.NONE else ErrorCode.REQUEST_TIMED_OUT
        return KafkaError(code, f"no metadata for {name} within {timeout_s * 1000:.0f} ms")

    # -- the task

    async def _run(self) -> None:
        failures = 0
        while True:
            self._wake.clear()
            choice = self._policy.choose(time.monotonic(), self._entries)
            topics, wait_s = choice
            if topics is None and self._brokers_stale:
                due_s = self._refreshed_at + self._backoff.base_ms / 1000 - time.monotonic()
                topics, wait_s = ((), 0) if due_s <= 0 else (None, due_s if wait_s is None else min(due_s, wait_s))
            if topics is None:
                await self._sleep(wait_s)
                continue
            try:
                response = await self._request(topics)
            except (TransportError, KafkaError) as error:
                failures += 1
                self._fail(error)
                self._notify()
                await asyncio.sleep(self._backoff.delay_s(failures))
                continue
            failures = 0
            self.last_failure = None
            try:
                self._apply(topics, response)
            except Exception as error:
                self._fail(error)
                await asyncio.sleep(self._backoff.max_ms / 1000)
            self._notify()

    def _on_task_done(self, task: asyncio.Future[None]) -> None:
        self.failure = task_failure(task, "the client's metadata task")
        if self.failure is None:
            return
        self._wake_waiters()
        for listener in self.listeners:
            try:
                listener()
            except Exception:
                log.exception("metadata listener failed")

    def _fail(self, error: Exception) -> None:
        if self.last_failure is None:
            self._failing_since = time.monotonic()
        self.last_failure = error
        if isinstance(error, TransportError | KafkaError):
            log.debug("metadata request failed error=%s", error)
        else:
            log.error("invalid metadata response", exc_info=error)

    async def _sleep(self, wait_s: float | None) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _request(self, topics: Sequence[str]) -> m.MetadataResponse:
        """Return the first response that lists brokers. Raises the last TransportError or KafkaError if there is none.

        The next broker is tried after a failure, and in parallel after `SILENCE_S` without a response.
        """
        names = tuple([m.MetadataRequestTopic(name=name) for name in topics])
        request = m.MetadataRequest(topics=names, rack_id=self._rack_id)
        meter = self._meter() if topics else None
        failure: Exception = KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, "no broker address is known")
        addresses = self.candidates()
        pending: set[asyncio.Task[m.MetadataResponse | Exception]] = set()
        try:
            while addresses or pending:
                if addresses:
                    pending.add(asyncio.create_task(self._request_from(addresses.pop(0), request, meter)))
                wait_s = SILENCE_S if addresses else None
                done, pending = await asyncio.wait(pending, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    response = task.result()
                    if not isinstance(response, Exception):
                        return response
                    failure = response
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        raise failure

    async def _request_from(
        self, address: str, request: m.MetadataRequest, meter: Meter | None
    ) -> m.MetadataResponse | Exception:
        """Return one broker's response, or the TransportError or KafkaError on failure."""
        try:
            response: m.MetadataResponse = await call(self._pool, address, request, self._connect_timeout_s, meter)
        except TransportError as error:
            return error
        except Exception as error:  # an invalid response must not end the task: another broker may send a valid one
            log.exception("metadata response cannot be decoded broker=%s", address)
            text = f"metadata response of {address} cannot be decoded: {error!r}"
            return KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, text)
        if response.brokers:
            return response
        return KafkaError(response.error_code or ErrorCode.BROKER_NOT_AVAILABLE, f"{address} returned no brokers")

    def _meter(self) -> Meter | None:
        """Return the counter for the bytes of requests that name topics, or None if they are not counted."""
        return None

    def _notify(self) -> None:
        self._wake_waiters()
        for listener in self.listeners:
            listener()

    def _wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- responses

    def _apply(self, requested: Sequence[str], response: m.MetadataResponse) -> None:
        self._brokers_stale = False
        self.brokers = {each.node_id: Node(each.node_id, each.host, each.port, each.rack) for each in response.brokers}
        now = self._refreshed_at = time.monotonic()
        topics = {topic.name: topic for topic in response.topics}
        missing = m.MetadataResponseTopic(error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        for name in requested:
            entry = self._entries.get(name)
            if entry is not None:
                self._apply_topic(entry, topics.get(name, missing), now)

    def _apply_topic(self, entry: TopicEntry, topic: m.MetadataResponseTopic, now: float) -> None:
        entry.refreshed_at = now
        entry.error = KafkaError(topic.error_code).code
        if entry.error is ErrorCode.NONE and topic.topic_id not in entry.retired_ids:
            if topic.topic_id and entry.topic_id != topic.topic_id:
                entry.retired_ids = (*entry.retired_ids, entry.topic_id)[-_RETIRED_IDS_MAX:] if entry.topic_id else ()
                entry.topic_id = topic.topic_id
            entry.urgent = False
            entry.attempts = entry.unknown_responses = 0
            entry.metadata = _merge(entry.metadata, entry.name, topic)
            return
        entry.attempts += 1
        entry.retry_at = now + self._backoff.delay_s(entry.attempts)
        entry.urgent = True
        if entry.error in (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID):
            entry.unknown_responses += 1
            entry.metadata = None

    def apply_leaders(
        self, leaders: Iterable[tuple[str, int, m.LeaderIdAndEpoch]], endpoints: Iterable[m.NodeEndpoint]
    ) -> bool:
        """Apply the current leaders from an error response (KIP-951). Return whether any leader changed.

        Leaders with a newer leader epoch are accepted for tracked topics, whose metadata is then refreshed.
        """
        changed: dict[str, dict[int, PartitionMetadata]] = {}
        brokers = {each.node_id: Node(each.node_id, each.host, each.port, each.rack) for each in endpoints}
        for topic, partition, leader in leaders:
            entry = self._entries.get(topic)
            if entry is None or entry.metadata is None or leader.leader_id < 0:
                continue
            known = entry.metadata.partitions.get(partition)
            if known is None or leader.leader_epoch <= known.leader_epoch:
                continue
            self.brokers.update(brokers)
            if leader.leader_id in self.brokers:
                updated = known._replace(leader_id=leader.leader_id, leader_epoch=leader.leader_epoch)
                changed.setdefault(topic, {})[partition] = updated
        for topic, partitions in changed.items():
            entry = self._entries[topic]
            if entry.metadata is not None:
                entry.metadata = entry.metadata._replace(partitions={**entry.metadata.partitions, **partitions})
        if changed:
            # The ISR and the replicas are stale as well (526-04), but no caller waits for them.
            self.request_refresh(changed)
            self._notify()
        return bool(changed)


def topic_metadata(name: str, topic: m.MetadataResponseTopic) -> TopicMetadata:
    """Convert a topic from a Metadata response, sorting its partitions in ascending order."""
    partitions = {
        each.partition_index: PartitionMetadata(
            each.partition_index,
            each.leader_id,
            each.leader_epoch,
            each.replica_nodes,
            each.isr_nodes,
            each.offline_replicas,
            each.error_code,
            each.preferred_read_replica,
            each.last_known_elr,
        )
        for each in sorted(topic.partitions, key=lambda each: each.partition_index)
    }
    return TopicMetadata(name, topic.topic_id, partitions, topic.is_internal)


def _merge(known: TopicMetadata | None, name: str, topic: m.MetadataResponseTopic) -> TopicMetadata:
    fresh = topic_metadata(name, topic)
    if known is None or known.topic_id != fresh.topic_id:
        return fresh
    partitions = dict(fresh.partitions)
    for index, old in known.partitions.items():
        new = partitions.get(index)
        if new is not None and new.leader_epoch < old.leader_epoch:
            partitions[index] = old
    return fresh._replace(partitions=partitions)
