"""A client's view of the cluster: brokers, topics, leaders, and the one task that keeps it fresh.

One Metadata request is in flight at a time. It goes to a broker that metadata names, or to a bootstrap address when
none of those answers; while one is silent, as a stopped process is, the next one is asked as well. Which topics a
request asks for, and when, is a `RefreshPolicy`; the one here asks for all topics in use as soon as one of them needs
it (`metadata.refresh=all` of 526-11), and KIP-526's rules are another.

Invariants: a topic that is not tracked is never asked for; a request without topics asks for brokers only; within one
topic id the leader epoch of a partition never goes back.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kipmesh import messages as m
from kipmesh.client.calls import Backoff, call, raise_failure, task_failure
from kipmesh.client.types import ClusterDescription, Node, PartitionMetadata, TopicMetadata
from kipmesh.core.config import ClientConfig
from kipmesh.core.errors import ErrorCode, InvalidConfigError, KafkaError
from kipmesh.transport.grpc.client import ConnectionPool, Meter, TransportError

log = logging.getLogger(__name__)

_RETIRED_IDS_MAX = 16
SILENCE_S = 0.5
"""A broker that has not answered for so long may never: others are asked beside it."""

UNKNOWN_ANSWERS_MAX = 3
"""Answers in a row that do not know a topic, after which readers give up: metadata of a new topic may lag that long."""


def parse_bootstrap(bootstrap: str | Sequence[str]) -> tuple[str, ...]:
    """Addresses from `host:port,host:port`; raises InvalidConfigError."""
    parts = bootstrap.split(",") if isinstance(bootstrap, str) else bootstrap
    addresses = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    for address in addresses:
        host, colon, port = address.rpartition(":")
        if not (colon and host and port.isdigit() and 0 < int(port) <= 65535):
            raise InvalidConfigError(f"configuration key 'bootstrap.servers': {address!r} is not host:port")
    if not addresses:
        raise InvalidConfigError("configuration key 'bootstrap.servers': no address")
    return addresses


class TopicEntry:
    """What is known about one tracked topic. Times are seconds of the monotonic clock."""

    __slots__ = (
        "attempts",
        "error",
        "metadata",
        "name",
        "pinned",
        "refreshed_at",
        "retired_ids",
        "retry_at",
        "topic_id",
        "unknown_answers",
        "urgent",
        "waiters",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.metadata: TopicMetadata | None = None
        self.error = ErrorCode.NONE
        self.urgent = True
        self.refreshed_at = -1.0
        self.retry_at = 0.0
        self.attempts = 0
        self.unknown_answers = 0
        self.pinned = False
        self.waiters = 0
        self.topic_id = b""
        self.retired_ids: tuple[bytes, ...] = ()

    def known(self, *, is_patient: bool) -> TopicMetadata | None:
        """The topic's metadata, None if an answer may still bring it; raises KafkaError if it is to be given up."""
        if self.metadata is None and self.error is not ErrorCode.NONE and not self.error.retriable:
            raise KafkaError(self.error, f"topic {self.name!r}")
        if self.metadata is None and not is_patient and self.unknown_answers >= UNKNOWN_ANSWERS_MAX:
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {self.name!r} does not exist")
        return self.metadata


class Choice(NamedTuple):
    """What to ask for now (None: nothing), and otherwise in how many seconds to look again (None: when woken)."""

    topics: Sequence[str] | None
    wait_s: float | None = None


class RefreshPolicy(Protocol):
    """Decides which topics the next metadata request asks for."""

    def choose(self, now_s: float, entries: Mapping[str, TopicEntry]) -> Choice:
        """The next request, or when there may be one."""


class RefreshDue:
    """Asks for the topics that are urgent or `metadata.max.age.ms` old, and for no other."""

    def __init__(self, max_age_s: float, backoff_s: float) -> None:
        self._max_age_s = max_age_s
        self._backoff_s = backoff_s

    def choose(self, now_s: float, entries: Mapping[str, TopicEntry]) -> Choice:
        """See RefreshPolicy."""
        earliest: float | None = None
        due_now = []
        for topic, entry in entries.items():
            if entry.urgent:
                due = max(entry.retry_at, entry.refreshed_at + self._backoff_s if entry.refreshed_at >= 0 else 0.0)
            else:
                due = entry.refreshed_at + self._max_age_s
            if due <= now_s:
                due_now.append(topic)
            earliest = due if earliest is None else min(earliest, due)
        if due_now or earliest is None:
            return Choice(tuple(due_now) or None)
        return Choice(None, earliest - now_s)


class Metadata:
    """The cache and its task. Not shared between event loops."""

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
        self.cluster_id: str | None = None
        self.controller_id = -1
        self.listeners: list[Callable[[], None]] = []
        self.failure: KafkaError | None = None
        """Why the task has ended for good; listeners are told once."""
        self.last_failure: Exception | None = None
        """Why no broker answered the last request; None if one did, or no request was sent yet."""
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
            told = f"{self._client_id or 'a client of kipmesh'} was not closed: use `async with` or close()"
            warnings.warn(told, ResourceWarning, stacklevel=2, source=self)

    async def start(self, timeout_s: float) -> None:
        """Start the task and wait for a first answer; raises KafkaError naming the addresses when there is none."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="kipmesh-metadata")
            self._task.add_done_callback(self._ended)
        await self._wait(lambda: True if self.brokers else None, timeout_s, "the brokers of the cluster")

    async def close(self) -> None:
        """Stop the task; waiting callers are cancelled."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for waiter in self._waiters:
            waiter.cancel()
        self._waiters.clear()

    # -- reading

    def topic(self, name: str) -> TopicMetadata | None:
        """What is known about a topic, without asking."""
        entry = self._entries.get(name)
        return entry.metadata if entry is not None else None

    def error(self, name: str) -> ErrorCode:
        """The error of the topic in the last answer."""
        entry = self._entries.get(name)
        return entry.error if entry is not None else ErrorCode.NONE

    def take_error(self, name: str) -> KafkaError | None:
        """What a reader of the topic should be told: that it cannot be, or that several answers did not know it."""
        entry = self._entries.get(name)
        if entry is None or entry.error is ErrorCode.NONE:
            return None
        if not entry.error.retriable:
            return KafkaError(entry.error, f"topic {name!r}")
        if entry.unknown_answers < UNKNOWN_ANSWERS_MAX:
            return None
        entry.unknown_answers = 0
        return KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name!r} does not exist")

    def partition(self, topic: str, partition: int) -> PartitionMetadata | None:
        """What is known about a partition."""
        metadata = self.topic(topic)
        return metadata.partitions.get(partition) if metadata is not None else None

    def address(self, node_id: int) -> str | None:
        """The address of a broker."""
        node = self.brokers.get(node_id)
        return node.address if node is not None else None

    @property
    def unreachable_s(self) -> float:
        """For how long every request for metadata has failed; 0 when the last one did not."""
        return time.monotonic() - self._failing_since if self.last_failure is not None else 0.0

    def candidates(self) -> list[str]:
        """Addresses to ask what any broker can answer: known brokers in random order, then the bootstrap ones."""
        known = [node.address for node in self.brokers.values()]
        self._random.shuffle(known)
        first = list(self.bootstrap)
        self._random.shuffle(first)
        return list(dict.fromkeys(known + first))

    def describe(self) -> ClusterDescription:
        """The cluster as of the last answer."""
        return ClusterDescription(self.cluster_id, self.controller_id, tuple(self.brokers.values()))

    # -- asking

    def track(self, name: str) -> None:
        """Keep asking for this topic from now on, even while it does not exist."""
        self._entry(name).pinned = True

    def _entry(self, name: str) -> TopicEntry:
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = TopicEntry(name)
            self._wake.set()
        return entry

    def forget(self, name: str) -> None:
        """Keep this topic's metadata no longer."""
        self._entries.pop(name, None)

    def forget_unknown(self, name: str) -> None:
        """Do not ask again for a topic that does not exist and that nobody waits for or tracks."""
        entry = self._entries.get(name)
        if entry is not None and entry.metadata is None and not entry.waiters and not entry.pinned:
            del self._entries[name]

    def request_refresh(self, topics: Iterable[str] = ()) -> None:
        """Metadata may be old: ask soon for the brokers and for these topics if they are tracked."""
        self._brokers_stale = True
        for name in topics:
            entry = self._entries.get(name)
            if entry is not None:
                entry.urgent = True
        self._wake.set()

    async def wait_for_topic(self, name: str, timeout_s: float, *, patient: bool = False) -> TopicMetadata:
        """The topic's metadata; raises KafkaError when it is not to be had.

        A topic that nobody knows is given up after a few answers, or, for the `patient`, at the end of `timeout_s`.
        """
        entry = self._entry(name)
        entry.unknown_answers = 0
        entry.error = ErrorCode.NONE

        entry.waiters += 1
        try:
            result: TopicMetadata = await self._wait(
                lambda: entry.known(is_patient=patient), timeout_s, f"topic {name!r}", entry
            )
        finally:
            entry.waiters -= 1
            self.forget_unknown(name)
        return result

    async def wait_for_update(self, timeout_s: float) -> None:
        """Wait for the next answer, at most so long; raises KafkaError when there will be none."""
        raise_failure(self.failure)
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            if not waiter.done():
                self._waiters.remove(waiter)

    async def _wait(
        self, condition: Callable[[], Any], timeout_s: float, what: str, entry: TopicEntry | None = None
    ) -> Any:
        deadline = time.monotonic() + timeout_s
        while (result := condition()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._timeout(what, timeout_s, entry)
            await self.wait_for_update(left)
        return result

    def _timeout(self, what: str, timeout_s: float, entry: TopicEntry | None) -> KafkaError:
        if self.last_failure is not None or not self.brokers:
            where = ", ".join(self.bootstrap)
            reason = f" ({self.last_failure})" if self.last_failure is not None else ""
            return KafkaError(ErrorCode.NETWORK_EXCEPTION, f"no broker answers at {where}{reason}")
        code = entry.error if entry is not None and entry.error is not ErrorCode.NONE else ErrorCode.REQUEST_TIMED_OUT
        return KafkaError(code, f"{what} was not in the metadata within {timeout_s * 1000:.0f} ms")

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

    def _ended(self, task: asyncio.Future[None]) -> None:
        self.failure = task_failure(task, "the client's metadata task")
        if self.failure is None:
            return
        self._wake_waiters()
        for listener in self.listeners:
            try:
                listener()
            except Exception:
                log.exception("a listener to metadata failed")

    def _fail(self, error: Exception) -> None:
        if self.last_failure is None:
            self._failing_since = time.monotonic()
        self.last_failure = error
        if isinstance(error, TransportError | KafkaError):
            log.debug("metadata failed: %s", error)
        else:
            log.error("a metadata answer makes no sense", exc_info=error)

    async def _sleep(self, wait_s: float | None) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _request(self, topics: Sequence[str]) -> m.MetadataResponse:
        """The first response that names brokers; raises TransportError or KafkaError when there is none."""
        names = tuple([m.MetadataRequestTopic(name=name) for name in topics])
        request = m.MetadataRequest(topics=names, rack_id=self._rack_id)
        meter = self._meter() if topics else None
        failure: Exception = KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, "no address")
        left = self.candidates()
        asked: set[asyncio.Task[m.MetadataResponse | Exception]] = set()
        try:
            while left or asked:
                if left:
                    asked.add(asyncio.create_task(self._request_from(left.pop(0), request, meter)))
                wait_s = SILENCE_S if left else None
                done, asked = await asyncio.wait(asked, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    answer = task.result()
                    if not isinstance(answer, Exception):
                        return answer
                    failure = answer
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        raise failure

    async def _request_from(
        self, address: str, request: m.MetadataRequest, meter: Meter | None
    ) -> m.MetadataResponse | Exception:
        """The response of one broker, or why there is none."""
        try:
            response: m.MetadataResponse = await call(self._pool, address, request, self._connect_timeout_s, meter)
        except TransportError as error:
            return error
        except Exception as error:  # whatever an answer is made of, the next broker's may be better
            log.exception("metadata of %s cannot be read", address)
            return KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, f"metadata of {address} cannot be read: {error!r}")
        if response.brokers:
            return response
        return KafkaError(response.error_code or ErrorCode.BROKER_NOT_AVAILABLE, f"{address} knows no brokers yet")

    def _meter(self) -> Meter | None:
        """Counts the bytes of requests that name topics."""
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

    # -- answers

    def _apply(self, asked: Sequence[str], response: m.MetadataResponse) -> None:
        self._brokers_stale = False
        self.brokers = {each.node_id: Node(each.node_id, each.host, each.port, each.rack) for each in response.brokers}
        self.cluster_id = response.cluster_id
        self.controller_id = response.controller_id
        now = self._refreshed_at = time.monotonic()
        answers = {topic.name: topic for topic in response.topics}
        missing = m.MetadataResponseTopic(error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        for name in asked:
            entry = self._entries.get(name)
            if entry is not None:
                self._apply_topic(entry, answers.get(name, missing), now)

    def _apply_topic(self, entry: TopicEntry, answer: m.MetadataResponseTopic, now: float) -> None:
        entry.refreshed_at = now
        entry.error = KafkaError(answer.error_code).code
        if entry.error is ErrorCode.NONE and answer.topic_id not in entry.retired_ids:
            if answer.topic_id and entry.topic_id != answer.topic_id:
                # A broker that lags behind may still answer with the old topic: that is no news.
                entry.retired_ids = (*entry.retired_ids, entry.topic_id)[-_RETIRED_IDS_MAX:] if entry.topic_id else ()
                entry.topic_id = answer.topic_id
            entry.urgent = False
            entry.attempts = entry.unknown_answers = 0
            entry.metadata = _merge(entry.metadata, entry.name, answer)
            return
        entry.attempts += 1
        entry.retry_at = now + self._backoff.delay_s(entry.attempts)
        entry.urgent = True
        if entry.error in (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID):
            entry.unknown_answers += 1
            entry.metadata = None

    def apply_leaders(
        self, leaders: Iterable[tuple[str, int, m.LeaderIdAndEpoch]], endpoints: Iterable[m.NodeEndpoint]
    ) -> bool:
        """A broker said who leads topics' partitions now; true when that is news."""
        news: dict[str, dict[int, PartitionMetadata]] = {}
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
                changed = known._replace(leader_id=leader.leader_id, leader_epoch=leader.leader_epoch)
                news.setdefault(topic, {})[partition] = changed
        for topic, partitions in news.items():
            entry = self._entries[topic]
            if entry.metadata is not None:
                entry.metadata = entry.metadata._replace(partitions={**entry.metadata.partitions, **partitions})
        if news:
            # The rest of it, as who is in sync, is old as well (526-04); nobody waits for that.
            self.request_refresh(news)
            self._notify()
        return bool(news)


def topic_metadata(name: str, answer: m.MetadataResponseTopic) -> TopicMetadata:
    """The answer about one topic."""
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
        for each in sorted(answer.partitions, key=lambda each: each.partition_index)
    }
    return TopicMetadata(name, answer.topic_id, partitions, answer.is_internal)


def _merge(known: TopicMetadata | None, name: str, answer: m.MetadataResponseTopic) -> TopicMetadata:
    fresh = topic_metadata(name, answer)
    if known is None or known.topic_id != fresh.topic_id:
        return fresh
    partitions = dict(fresh.partitions)
    for index, old in known.partitions.items():
        new = partitions.get(index)
        if new is not None and new.leader_epoch < old.leader_epoch:
            partitions[index] = old
    return fresh._replace(partitions=partitions)
