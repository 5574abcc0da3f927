"""The topics of one producer: which are urgent (T), which are not (U), what to ask for, and what to forget.

Rules 526-01 to 526-11. A topic with metadata is in exactly one place, and one without is in one of the last three:

    FRESH    its metadata is younger than half of `metadata.max.age.ms`
    AGED     older than that: the set U (526-05)
    URGENT   the set T (526-04), to be asked for now
    WAITING  the set T, once its own back-off is over (526-09); or without records: to be forgotten then
    ASKED    in the request that is under way

The driver calls `hold` when a record (or a batch of records) of a topic starts to wait or be under way and `release`
when that ends, `changed` when something says that metadata is out of date, and `poll` after each of these and when the
time it named has come. Each call costs what is due and not what is known: the places are linked lists in the order of
the last refresh, the back-offs are a heap. Only a request of mode `all` walks through all topics.

Invariants: one request is under way at most; FRESH and AGED are in the order of refresh, and no topic in FRESH was
refreshed before one in AGED; `_idle` has, in the order of their last use, the topics with metadata that nobody holds.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import Literal, NamedTuple

_BUCKETS = 64
"""Of `metadata.max.age.ms`. A topic counts as old as the oldest of its bucket may be."""
_MARGIN_SHARE = 32
"""Requests are planned to go `metadata.max.age.ms` / 32 before the oldest topic is urgent: room for round trips."""

RefreshMode = Literal["paced", "literal", "all"]
"""`paced`: non-urgent requests are spread (526-11); `literal`: as the seed says; `all`: each request asks for all."""

TARGET_MIN_TOPICS = 20


@dataclass(frozen=True, slots=True)
class TrackerConfig:
    """The thresholds. `backoff_ms` says how long a topic waits that so many answers in a row did not resolve."""

    max_age_ms: int
    evict_ms: int
    retry_backoff_ms: int
    backoff_ms: Callable[[int], float]
    mode: RefreshMode = "paced"

    def target_topics(self, cached_topics: int) -> int:
        """526-03: topics of a request that is not urgent; what is asked every ten seconds if all are asked in turn."""
        return max(-(-10_000 * cached_topics // self.max_age_ms), TARGET_MIN_TOPICS)


class RefreshRequest(NamedTuple):
    """A metadata request to send now: the urgent topics first, then `len(topics) - urgent_topics` that are not."""

    topics: tuple[str, ...]
    urgent_topics: int

    @property
    def is_urgent(self) -> bool:
        """Whether it was made for urgent topics (526-06); otherwise 526-07 made it."""
        return self.urgent_topics > 0


class Step(NamedTuple):
    """What to do now, and until when nothing has to be done unless something happens (None: nothing ever).

    `forgotten` topics are those that are known no more since the last step: evicted, or never resolved and given up.
    """

    request: RefreshRequest | None
    forgotten: tuple[str, ...]
    wait_until_ms: float | None


@dataclass(slots=True)
class TrackerMetrics:
    """526-10. A request and its bytes are urgent when one of its topics is; topics are counted one by one."""

    urgent_requests: int = 0
    non_urgent_requests: int = 0
    failed_requests: int = 0
    urgent_topics: int = 0
    non_urgent_topics: int = 0
    urgent_bytes: int = 0
    non_urgent_bytes: int = 0
    cached_topics: int = 0
    evictions: int = 0


class Pace:
    """When the next request goes that is not urgent (526-11).

    Topics that started together become half aged together, and 526-07 taken literally requests them back to back. Here
    the requests are spread: the next one goes as late as the slowest even pace allows at which every topic is requested
    before it is `metadata.max.age.ms` old. The pace is found from a histogram of the times of refresh, so it costs the
    same for any number of topics.

    Invariant: the buckets count exactly the topics that `entered` and did not leave; there are at most `_BUCKETS` + 2
    with topics in use, because older topics are urgent and leave.
    """

    def __init__(self, max_age_ms: int) -> None:
        self._max_age_ms = max_age_ms
        self._width_ms = max_age_ms / _BUCKETS
        self._margin_ms = max_age_ms / _MARGIN_SHARE
        self._counts: dict[int, int] = {}  # in order: times of refresh never go back, but for a topic that comes back
        self._in_order = True
        self._last_ms = float("-inf")

    def entered(self, refreshed_ms: float) -> None:
        """A topic waits for its next refresh."""
        bucket = int(refreshed_ms // self._width_ms)
        if bucket not in self._counts:
            self._in_order = self._in_order and (not self._counts or bucket > next(reversed(self._counts)))
            self._counts[bucket] = 0
        self._counts[bucket] += 1

    def left(self, refreshed_ms: float) -> None:
        """It does not any more: it is asked for, is urgent or is gone."""
        bucket = int(refreshed_ms // self._width_ms)
        self._counts[bucket] -= 1
        if not self._counts[bucket]:
            del self._counts[bucket]

    def asked(self, now_ms: float) -> None:
        """A request goes that is not urgent."""
        self._last_ms = now_ms

    def next_ms(self, target_topics: int, oldest_refreshed_ms: float) -> float:
        """When the next request of at most `target_topics` goes; in the past if it is late.

        With a request every d ms from the last one on (or from when the oldest topic is half aged), the one that asks
        for the last topic of each bucket has to go before that bucket's time is over: the largest such d is the pace.
        """
        if not self._in_order:
            self._counts = dict(sorted(self._counts.items()))
            self._in_order = True
        half_aged_ms = oldest_refreshed_ms + self._max_age_ms / 2
        begin_ms = max(self._last_ms, half_aged_ms)
        interval_ms = float("inf")
        topics = 0
        for bucket, count in self._counts.items():
            topics += count
            latest_ms = bucket * self._width_ms + self._max_age_ms - self._margin_ms
            interval_ms = min(interval_ms, (latest_ms - begin_ms) / -(-topics // target_topics))
        return max(begin_ms + interval_ms, half_aged_ms)


class Place(Enum):
    """See the module."""

    FRESH = "fresh"
    AGED = "aged"
    URGENT = "urgent"
    WAITING = "waiting"
    ASKED = "asked"


class _Topic:
    """What is known about one topic."""

    __slots__ = ("asked_from", "attempts", "holds", "name", "place", "refreshed_ms", "retry_ms", "told", "used_ms")

    def __init__(self, name: str, now_ms: float) -> None:
        self.name = name
        self.place = Place.URGENT
        self.asked_from = Place.URGENT  # of a topic in ASKED
        self.holds = 0
        self.used_ms = now_ms
        self.refreshed_ms: float | None = None  # of its metadata; None without any
        self.told = False  # that its metadata changed, since it was asked for
        self.attempts = 0  # answers in a row that did not resolve it
        self.retry_ms = 0.0  # not asked for before


_Places = OrderedDict[str, _Topic]


class TopicTracker:
    """See the module."""

    def __init__(self, config: TrackerConfig) -> None:
        self._config = config
        self._metrics = TrackerMetrics()
        self._topics: dict[str, _Topic] = {}
        self._fresh: _Places = OrderedDict()
        self._aged: _Places = OrderedDict()
        self._urgent: _Places = OrderedDict()
        self._places = {Place.FRESH: self._fresh, Place.AGED: self._aged, Place.URGENT: self._urgent}
        self._retries: list[tuple[float, int, _Topic]] = []
        self._retry_number = 0
        self._idle: _Places = OrderedDict()
        self._pace = Pace(config.max_age_ms)
        self._request: RefreshRequest | None = None
        self._asked: list[_Topic] = []
        self._not_before_ms = float("-inf")
        self._cached = 0
        self._forgotten: list[str] = []

    def metrics(self) -> TrackerMetrics:
        """A copy of the counters, and how many topics have metadata now."""
        return replace(self._metrics, cached_topics=self._cached)

    def target_topics(self) -> int:
        """526-03, now."""
        return self._config.target_topics(self._cached)

    def place(self, name: str) -> Place | None:
        """Where a topic is; None if it is not known. What is due is moved by `poll` only."""
        topic = self._topics.get(name)
        return topic.place if topic is not None else None

    def attempts(self, name: str) -> int:
        """Answers in a row that did not resolve the topic."""
        topic = self._topics.get(name)
        return topic.attempts if topic is not None else 0

    # -- what happens at the producer

    def hold(self, name: str, now_ms: float) -> None:
        """Something of this topic waits or is under way: without metadata it is urgent; it is not forgotten."""
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = _Topic(name, now_ms)
            self._put(topic, Place.URGENT)
        topic.holds += 1
        topic.used_ms = now_ms
        self._idle.pop(name, None)

    def release(self, name: str, now_ms: float) -> None:
        """One `hold` ends. The topic counts as used until now."""
        topic = self._topics[name]
        topic.holds -= 1
        topic.used_ms = now_ms
        if topic.holds:
            return
        if topic.refreshed_ms is not None:
            self._idle[name] = topic
        elif topic.place is Place.URGENT:
            # Nobody waits for it any more: it is not in T (526-08).
            self._drop(topic)

    def changed(self, name: str, now_ms: float) -> None:
        """Something says that the topic's metadata is out of date, or a record needs a partition that is not in it.

        If that comes within `retry.backoff.ms` of an answer, then that answer did not resolve it: it waits for so long.
        """
        topic = self._topics.get(name)
        if topic is None or topic.refreshed_ms is None or topic.told:
            return
        topic.told = True
        if topic.place in (Place.FRESH, Place.AGED):
            self._take(topic)
            self._make_urgent(topic, now_ms)

    # -- requests

    def poll(self, now_ms: float) -> Step:
        """What to do now. A request that is returned is under way: `answered` or `failed` has to follow."""
        self._evict(now_ms)
        self._ripen(now_ms)
        request = self._choose(now_ms) if self._request is None and now_ms >= self._not_before_ms else None
        if request is not None:
            self._count(request)
            self._request = request
        forgotten, self._forgotten = self._forgotten, []
        gone = tuple(name for name in forgotten if name not in self._topics)
        return Step(request, gone, self._wait_until_ms(now_ms))

    def answered(self, now_ms: float, resolved: Set[str], lost: Set[str] = frozenset()) -> None:
        """The request's answer. Topics that it asked for and that are not `resolved` wait, each by itself (526-09).

        `lost` ones have no metadata any more; the others keep what they have.
        """
        assert self._request is not None
        names, self._request, self._asked = self._request.topics, None, []
        for name in names:
            topic = self._topics.get(name)
            if topic is None:
                continue  # evicted meanwhile
            self._take(topic)
            if name in resolved:
                self._resolve(topic, now_ms)
            else:
                self._leave_unresolved(topic, now_ms, name in lost)

    def failed(self, now_ms: float) -> None:
        """No answer: nothing is asked for `retry.backoff.ms` (526-09), and then what is urgent or due by then."""
        assert self._request is not None
        self._metrics.failed_requests += 1
        self._request = None
        self._not_before_ms = now_ms + self._config.retry_backoff_ms
        asked, self._asked = self._asked, []
        # Backwards to the front: nothing that is older can have come there meanwhile.
        for topic in reversed(asked):
            if self._topics.get(topic.name) is not topic:
                continue  # evicted meanwhile
            if topic.refreshed_ms is None and not topic.holds:
                self._drop(topic)
            elif topic.told or topic.asked_from not in (Place.FRESH, Place.AGED):
                self._make_urgent(topic, now_ms)
            else:
                self._put(topic, topic.asked_from, first=True)

    def transferred(self, sent_bytes: int, received_bytes: int) -> None:
        """Bytes of the request that is under way."""
        assert self._request is not None
        if self._request.is_urgent:
            self._metrics.urgent_bytes += sent_bytes + received_bytes
        else:
            self._metrics.non_urgent_bytes += sent_bytes + received_bytes

    # -- places

    def _put(self, topic: _Topic, place: Place, *, first: bool = False) -> None:
        topic.place = place
        places = self._places.get(place)
        if places is None:
            return
        places[topic.name] = topic
        if first:
            places.move_to_end(topic.name, last=False)
        if place is not Place.URGENT:
            assert topic.refreshed_ms is not None
            self._pace.entered(topic.refreshed_ms)

    def _take(self, topic: _Topic) -> None:
        places = self._places.get(topic.place)
        if places is None:
            return
        del places[topic.name]
        if topic.place is not Place.URGENT:
            assert topic.refreshed_ms is not None
            self._pace.left(topic.refreshed_ms)

    def _drop(self, topic: _Topic) -> None:
        self._take(topic)
        del self._topics[topic.name]
        self._forgotten.append(topic.name)
        self._idle.pop(topic.name, None)
        self._cached -= topic.refreshed_ms is not None

    def _make_urgent(self, topic: _Topic, now_ms: float) -> None:
        """From no list: to T, now or after the back-off of an answer that was of no use."""
        if topic.refreshed_ms is not None and topic.told:
            topic.retry_ms = max(topic.retry_ms, topic.refreshed_ms + self._config.retry_backoff_ms)
        if topic.retry_ms > now_ms:
            self._wait(topic)
        else:
            self._put(topic, Place.URGENT)

    def _wait(self, topic: _Topic) -> None:
        topic.place = Place.WAITING
        self._retry_number += 1
        heapq.heappush(self._retries, (topic.retry_ms, self._retry_number, topic))

    # -- answers

    def _resolve(self, topic: _Topic, now_ms: float) -> None:
        told = topic.told and topic.place is Place.ASKED  # after it was asked for: the answer may be from before
        self._cached += topic.refreshed_ms is None
        topic.refreshed_ms = now_ms
        topic.attempts, topic.retry_ms, topic.told = 0, 0.0, told
        if not topic.holds and topic.name not in self._idle:
            self._idle[topic.name] = topic
            topic.used_ms = now_ms
        if told:
            self._make_urgent(topic, now_ms)
        else:
            self._put(topic, Place.FRESH)

    def _leave_unresolved(self, topic: _Topic, now_ms: float, is_lost: bool) -> None:
        if is_lost and topic.refreshed_ms is not None:
            self._cached -= 1
            topic.refreshed_ms = None
            self._idle.pop(topic.name, None)
        topic.told = topic.refreshed_ms is not None
        topic.attempts += 1
        topic.retry_ms = now_ms + self._config.backoff_ms(topic.attempts)
        self._wait(topic)

    # -- time

    def _evict(self, now_ms: float) -> None:
        """526-01: topics with metadata that nobody used for `metadata.evict.ms`."""
        while self._idle:
            topic = next(iter(self._idle.values()))
            if topic.used_ms + self._config.evict_ms > now_ms:
                break
            self._drop(topic)
            self._metrics.evictions += 1

    def _ripen(self, now_ms: float) -> None:
        """Move what time moves: FRESH to AGED, AGED to URGENT, and WAITING on."""
        max_age_ms = self._config.max_age_ms
        for place, age_ms in ((self._fresh, max_age_ms / 2), (self._aged, max_age_ms)):
            while place:
                topic = next(iter(place.values()))
                assert topic.refreshed_ms is not None
                if topic.refreshed_ms + age_ms > now_ms:
                    break
                self._take(topic)
                self._put(topic, Place.AGED if place is self._fresh else Place.URGENT)
        while self._retries and self._retries[0][0] <= now_ms:
            retry_ms, _, topic = heapq.heappop(self._retries)
            if self._is_stale(retry_ms, topic):
                continue
            if topic.refreshed_ms is not None or topic.holds:
                self._put(topic, Place.URGENT)
            else:
                self._drop(topic)

    def _is_stale(self, retry_ms: float, topic: _Topic) -> bool:
        known = self._topics.get(topic.name) is topic
        return not known or topic.place is not Place.WAITING or topic.retry_ms != retry_ms

    def _choose(self, now_ms: float) -> RefreshRequest | None:
        target = self.target_topics()
        if self._config.mode == "all":
            if not self._urgent:
                return None
            wanted = (topic for topic in self._topics.values() if topic.refreshed_ms is not None or topic.holds)
            others = [topic for topic in wanted if topic.place is not Place.URGENT]
            # In the order of refresh, which `failed` needs.
            others.sort(key=lambda topic: -1.0 if topic.refreshed_ms is None else topic.refreshed_ms)
            return self._ask(list(self._urgent.values()), others)
        if self._urgent:
            # 526-06: all of T, however many, and as many of U as the target leaves room for.
            room = max(target - len(self._urgent), 0)
            return self._ask(list(self._urgent.values()), list(islice(self._aged.values(), room)))
        if self._is_time_for_aged(now_ms, target):
            self._pace.asked(now_ms)
            return self._ask([], list(islice(self._aged.values(), target)))
        return None

    def _is_time_for_aged(self, now_ms: float, target: int) -> bool:
        """526-07, or by its pace 526-11."""
        if self._config.mode == "literal":
            return len(self._aged) >= target
        return bool(self._aged) and now_ms >= self._next_aged_ms()

    def _next_aged_ms(self) -> float:
        """When mode `paced` asks next for topics that are not urgent, if there are any."""
        oldest = next(iter((self._aged or self._fresh).values()))
        assert oldest.refreshed_ms is not None
        return self._pace.next_ms(self.target_topics(), oldest.refreshed_ms)

    def _ask(self, urgent: list[_Topic], others: list[_Topic]) -> RefreshRequest:
        self._asked = [*urgent, *others]
        for topic in self._asked:
            self._take(topic)
            topic.asked_from, topic.place = topic.place, Place.ASKED
            topic.told = False
        return RefreshRequest(tuple(topic.name for topic in self._asked), len(urgent))

    def _count(self, request: RefreshRequest) -> None:
        self._metrics.urgent_requests += request.is_urgent
        self._metrics.non_urgent_requests += not request.is_urgent
        self._metrics.urgent_topics += request.urgent_topics
        self._metrics.non_urgent_topics += len(request.topics) - request.urgent_topics

    def _wait_until_ms(self, now_ms: float) -> float | None:
        due = []
        if self._idle:
            due.append(next(iter(self._idle.values())).used_ms + self._config.evict_ms)
        if self._request is None:
            request_ms = self._next_request_ms(now_ms)
            if request_ms is not None:
                due.append(max(request_ms, self._not_before_ms))
        return min(due, default=None)

    def _next_request_ms(self, now_ms: float) -> float | None:
        """When a request may be due, if none is under way and nothing happens."""
        if self._urgent:
            return now_ms
        while self._retries and self._is_stale(self._retries[0][0], self._retries[0][2]):
            heapq.heappop(self._retries)
        due = [self._retries[0][0]] if self._retries else []
        if self._aged or self._fresh:
            oldest = next(iter((self._aged or self._fresh).values()))
            assert oldest.refreshed_ms is not None
            due.append(oldest.refreshed_ms + self._config.max_age_ms)
            if self._config.mode == "paced":
                due.append(self._next_aged_ms())
            elif self._config.mode == "literal":
                due.append(self._target_reached_ms(now_ms))
        return min(due, default=None)

    def _target_reached_ms(self, now_ms: float) -> float:
        """The next time when U may reach the target (526-07)."""
        target = self.target_topics()
        if len(self._aged) >= target:
            return now_ms
        if len(self._aged) + len(self._fresh) < target:
            return float("inf")
        next_aged = next(iter(self._fresh.values()))
        assert next_aged.refreshed_ms is not None
        return next_aged.refreshed_ms + self._config.max_age_ms / 2
