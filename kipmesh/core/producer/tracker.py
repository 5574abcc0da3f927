"""Metadata refresh of one producer: which topics to request, when, and which to forget. Rules 526-01 to 526-11.

A topic with metadata is in exactly one place. A topic without metadata is in one of the last three:

    FRESH      its metadata is younger than half of `metadata.max.age.ms`
    AGED       its metadata is older: the set U (526-05)
    URGENT     the set T (526-04), to be requested now
    WAITING    part of T after its own back-off (526-09); forgotten then if no record needs it
    IN_FLIGHT  in the current request

The driver calls `hold` when a record (or batch) of a topic starts to wait, `release` when that ends, `changed` when
metadata is out of date, and `poll` after each of these and at the time that `poll` returned. The cost of a call depends
on the topics that are due, not on all topics; only requests of mode `all` visit all topics.

Invariants: at most one request is in flight; FRESH and AGED are in refresh order, and no topic in FRESH was refreshed
before one in AGED; `_idle` has the topics with metadata and without holds, in the order of last use.
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
"""Buckets per `metadata.max.age.ms`. A topic counts as old as the oldest possible topic of its bucket."""
_MARGIN_SHARE = 32
"""Requests are planned `metadata.max.age.ms` / 32 before the oldest topic becomes urgent, to leave time for round
trips."""

RefreshMode = Literal["paced", "literal", "all"]
"""`paced`: spread non-urgent requests over time (526-11); `literal`: send one once enough topics are AGED (526-07);
`all`: every request names all topics."""

TARGET_MIN_TOPICS = 20


@dataclass(frozen=True, slots=True)
class TrackerConfig:
    """Thresholds of the tracker, in ms. `backoff_ms(n)` returns a topic's back-off in ms after `n` consecutive
    responses that did not resolve it."""

    max_age_ms: int
    evict_ms: int
    retry_backoff_ms: int
    backoff_ms: Callable[[int], float]
    mode: RefreshMode = "paced"

    def target_topics(self, cached_topics: int) -> int:
        """Return the maximum number of topics in a non-urgent request (526-03), at least TARGET_MIN_TOPICS. One such
        request every 10 s refreshes all `cached_topics` within `max_age_ms`."""
        return max(-(-10_000 * cached_topics // self.max_age_ms), TARGET_MIN_TOPICS)


class RefreshRequest(NamedTuple):
    """A metadata request to send now. The first `urgent_topics` entries of `topics` are urgent."""

    topics: tuple[str, ...]
    urgent_topics: int

    @property
    def is_urgent(self) -> bool:
        """Whether the request has urgent topics (526-06)."""
        return self.urgent_topics > 0


class Step(NamedTuple):
    """Result of `poll`: a request to send or None, and the time in ms of the next `poll` (None: not needed without new
    events).

    `forgotten`: topics dropped since the last step, because they were evicted or never resolved.
    """

    request: RefreshRequest | None
    forgotten: tuple[str, ...]
    wait_until_ms: float | None


@dataclass(slots=True)
class TrackerMetrics:
    """Counters of rule 526-10. All bytes of a request with an urgent topic count as urgent; topics are counted
    individually."""

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
    """Time of the next non-urgent request (526-11).

    Topics that started together reach half their maximum age together, and rule 526-07 alone would request them back to
    back. Pacing instead spaces requests evenly, at the slowest pace at which every topic is requested before
    `metadata.max.age.ms`. The pace is computed from a histogram of refresh times, so its cost does not depend on the
    number of topics.

    Invariant: the buckets count exactly the topics in FRESH and AGED. At most `_BUCKETS` + 2 buckets are in use,
    because older topics are urgent.
    """

    def __init__(self, max_age_ms: int) -> None:
        self._max_age_ms = max_age_ms
        self._width_ms = max_age_ms / _BUCKETS
        self._margin_ms = max_age_ms / _MARGIN_SHARE
        self._counts: dict[int, int] = {}  # in bucket order, unless a topic returns after a failed request
        self._in_order = True
        self._last_ms = float("-inf")

    def add(self, refreshed_ms: float) -> None:
        """Count a topic in FRESH or AGED whose metadata was refreshed at `refreshed_ms`."""
        bucket = int(refreshed_ms // self._width_ms)
        if bucket not in self._counts:
            self._in_order = self._in_order and (not self._counts or bucket > next(reversed(self._counts)))
            self._counts[bucket] = 0
        self._counts[bucket] += 1

    def remove(self, refreshed_ms: float) -> None:
        """Stop counting a topic that leaves FRESH or AGED. `refreshed_ms` is as in `add`."""
        bucket = int(refreshed_ms // self._width_ms)
        self._counts[bucket] -= 1
        if not self._counts[bucket]:
            del self._counts[bucket]

    def request_sent(self, now_ms: float) -> None:
        """Record that a non-urgent request is sent."""
        self._last_ms = now_ms

    def next_ms(self, target_topics: int, oldest_refreshed_ms: float) -> float:
        """Return the time in ms of the next non-urgent request, which has at most `target_topics` topics. The time is
        in the past if the request is late.

        With a request every d ms from the last one on (or from when the oldest topic is half aged), the request for the
        last topic of each bucket must precede the bucket's deadline. The largest such d is the pace.
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
    """The list that a topic is in. The module docstring defines the lists."""

    FRESH = "fresh"
    AGED = "aged"
    URGENT = "urgent"
    WAITING = "waiting"
    IN_FLIGHT = "in flight"


@dataclass(slots=True, eq=False)
class _Topic:
    """State of one topic."""

    name: str
    used_ms: float
    place: Place = Place.URGENT
    requested_from: Place = Place.URGENT  # for a topic in IN_FLIGHT
    holds: int = 0
    refreshed_ms: float | None = None  # None without metadata
    is_changed: bool = False  # `changed` was called since the last request for it
    attempts: int = 0  # responses in a row that did not resolve it
    retry_ms: float = 0.0  # earliest next request


_Places = OrderedDict[str, _Topic]


def _oldest_refresh_ms(topics: _Places) -> float:
    """Return the refresh time in ms of the first of these topics, which must have metadata."""
    refreshed_ms = next(iter(topics.values())).refreshed_ms
    assert refreshed_ms is not None
    return refreshed_ms


class TopicTracker:
    """Decides which topics of one producer to request, and when. Times are in ms, all from the same monotonic clock."""

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
        self._requested: list[_Topic] = []
        self._not_before_ms = float("-inf")
        self._cached = 0
        self._forgotten: list[str] = []

    def metrics(self) -> TrackerMetrics:
        """Return a copy of the counters, with the current number of topics with metadata."""
        return replace(self._metrics, cached_topics=self._cached)

    def target_topics(self) -> int:
        """Return the current maximum number of topics in a non-urgent request (526-03)."""
        return self._config.target_topics(self._cached)

    def place(self, name: str) -> Place | None:
        """Return the topic's place, or None if the tracker does not know it. Only `poll` moves topics that are due."""
        topic = self._topics.get(name)
        return topic.place if topic is not None else None

    def attempts(self, name: str) -> int:
        """Return the number of consecutive responses that did not resolve the topic, or 0 for an unknown topic."""
        topic = self._topics.get(name)
        return topic.attempts if topic is not None else 0

    # --- producer events

    def hold(self, name: str, now_ms: float) -> None:
        """Record that a record or batch of the topic waits or is in flight. The topic is kept until `release`. An
        unknown topic becomes urgent."""
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = _Topic(name, now_ms)
            self._put(topic, Place.URGENT)
        topic.holds += 1
        topic.used_ms = now_ms
        self._idle.pop(name, None)

    def release(self, name: str, now_ms: float) -> None:
        """End one `hold`. The topic counts as used until now. Raises KeyError for an unknown topic."""
        topic = self._topics[name]
        topic.holds -= 1
        topic.used_ms = now_ms
        if topic.holds:
            return
        if topic.refreshed_ms is not None:
            self._idle[name] = topic
        elif topic.place is Place.URGENT:
            # No record needs it, so it is not in T (526-08).
            self._drop(topic)

    def changed(self, name: str, now_ms: float) -> None:
        """Record that the topic's metadata is out of date or lacks a partition that a record needs, which makes it
        urgent. Ignored for a topic without metadata.

        If this happens within `retry.backoff.ms` of a response, that response counts as not resolving the topic, which
        then waits for the back-off.
        """
        topic = self._topics.get(name)
        if topic is None or topic.refreshed_ms is None or topic.is_changed:
            return
        topic.is_changed = True
        if topic.place in (Place.FRESH, Place.AGED):
            self._take(topic)
            self._make_urgent(topic, now_ms)

    # --- requests

    def poll(self, now_ms: float) -> Step:
        """Return the next step, and move topics that are due. If the step has a request, `completed` or `failed` must
        be called for it."""
        self._evict(now_ms)
        self._move_due(now_ms)
        request = self._choose(now_ms) if self._request is None and now_ms >= self._not_before_ms else None
        if request is not None:
            self._count(request)
            self._request = request
        forgotten, self._forgotten = self._forgotten, []
        gone = tuple(name for name in forgotten if name not in self._topics)
        return Step(request, gone, self._wait_until_ms(now_ms))

    def completed(self, now_ms: float, resolved: Set[str], lost: Set[str] = frozenset()) -> None:
        """Record the response of the current request. `resolved` topics are fresh; the others back off independently
        (526-09).

        Unresolved topics in `lost` lose their metadata; the others keep it.
        """
        assert self._request is not None
        names, self._request, self._requested = self._request.topics, None, []
        for name in names:
            topic = self._topics.get(name)
            if topic is None:
                continue  # evicted meanwhile
            self._take(topic)
            if name in resolved:
                self._resolve(topic, now_ms)
            else:
                self._back_off(topic, now_ms, name in lost)

    def failed(self, now_ms: float) -> None:
        """Record that the current request failed. The next request waits for `retry.backoff.ms` (526-09)."""
        assert self._request is not None
        self._metrics.failed_requests += 1
        self._request = None
        self._not_before_ms = now_ms + self._config.retry_backoff_ms
        requested, self._requested = self._requested, []
        # In reverse to the front keeps refresh order: no older topic can have been added meanwhile.
        for topic in reversed(requested):
            if self._topics.get(topic.name) is not topic:
                continue  # evicted meanwhile
            if topic.refreshed_ms is None and not topic.holds:
                self._drop(topic)
            elif topic.is_changed or topic.requested_from not in (Place.FRESH, Place.AGED):
                self._make_urgent(topic, now_ms)
            else:
                self._put(topic, topic.requested_from, first=True)

    def transferred(self, sent_bytes: int, received_bytes: int) -> None:
        """Count the bytes of the current request and its response. Call it before `completed` or `failed`."""
        assert self._request is not None
        if self._request.is_urgent:
            self._metrics.urgent_bytes += sent_bytes + received_bytes
        else:
            self._metrics.non_urgent_bytes += sent_bytes + received_bytes

    # --- places

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
            self._pace.add(topic.refreshed_ms)

    def _take(self, topic: _Topic) -> None:
        places = self._places.get(topic.place)
        if places is None:
            return
        del places[topic.name]
        if topic.place is not Place.URGENT:
            assert topic.refreshed_ms is not None
            self._pace.remove(topic.refreshed_ms)

    def _drop(self, topic: _Topic) -> None:
        self._take(topic)
        del self._topics[topic.name]
        self._forgotten.append(topic.name)
        self._idle.pop(topic.name, None)
        self._cached -= topic.refreshed_ms is not None

    def _make_urgent(self, topic: _Topic, now_ms: float) -> None:
        """Move a topic that is in no list to URGENT, or to WAITING if its last response did not resolve it and the
        back-off is running."""
        if topic.refreshed_ms is not None and topic.is_changed:
            topic.retry_ms = max(topic.retry_ms, topic.refreshed_ms + self._config.retry_backoff_ms)
        if topic.retry_ms > now_ms:
            self._wait(topic)
        else:
            self._put(topic, Place.URGENT)

    def _wait(self, topic: _Topic) -> None:
        topic.place = Place.WAITING
        self._retry_number += 1
        heapq.heappush(self._retries, (topic.retry_ms, self._retry_number, topic))

    # --- responses

    def _resolve(self, topic: _Topic, now_ms: float) -> None:
        is_changed = topic.is_changed and topic.place is Place.IN_FLIGHT  # the response may be older than the change
        self._cached += topic.refreshed_ms is None
        topic.refreshed_ms = now_ms
        topic.attempts, topic.retry_ms, topic.is_changed = 0, 0.0, is_changed
        if not topic.holds and topic.name not in self._idle:
            self._idle[topic.name] = topic
            topic.used_ms = now_ms
        if is_changed:
            self._make_urgent(topic, now_ms)
        else:
            self._put(topic, Place.FRESH)

    def _back_off(self, topic: _Topic, now_ms: float, is_lost: bool) -> None:
        if is_lost and topic.refreshed_ms is not None:
            self._cached -= 1
            topic.refreshed_ms = None
            self._idle.pop(topic.name, None)
        topic.is_changed = topic.refreshed_ms is not None
        topic.attempts += 1
        topic.retry_ms = now_ms + self._config.backoff_ms(topic.attempts)
        self._wait(topic)

    # --- time

    def _evict(self, now_ms: float) -> None:
        """Drop topics with metadata that have been unused for `metadata.evict.ms` (526-01)."""
        while self._idle and (topic := next(iter(self._idle.values()))).used_ms + self._config.evict_ms <= now_ms:
            self._drop(topic)
            self._metrics.evictions += 1

    def _move_due(self, now_ms: float) -> None:
        """Move topics that are due: FRESH to AGED, AGED to URGENT, WAITING to URGENT or dropped."""
        max_age_ms = self._config.max_age_ms
        for place, age_ms in ((self._fresh, max_age_ms / 2), (self._aged, max_age_ms)):
            while place and _oldest_refresh_ms(place) + age_ms <= now_ms:
                topic = next(iter(place.values()))
                self._take(topic)
                self._put(topic, Place.AGED if place is self._fresh else Place.URGENT)
        while self._retries and self._retries[0][0] <= now_ms:
            retry_ms, _, topic = heapq.heappop(self._retries)
            if self._is_outdated(retry_ms, topic):
                continue
            if topic.refreshed_ms is not None or topic.holds:
                self._put(topic, Place.URGENT)
            else:
                self._drop(topic)

    def _is_outdated(self, retry_ms: float, topic: _Topic) -> bool:
        known = self._topics.get(topic.name) is topic
        return not known or topic.place is not Place.WAITING or topic.retry_ms != retry_ms

    def _choose(self, now_ms: float) -> RefreshRequest | None:
        target = self.target_topics()
        if self._config.mode == "all":
            if not self._urgent:
                return None
            candidates = (topic for topic in self._topics.values() if topic.refreshed_ms is not None or topic.holds)
            others = [topic for topic in candidates if topic.place is not Place.URGENT]
            # In refresh order, which `failed` relies on.
            others.sort(key=lambda topic: -1.0 if topic.refreshed_ms is None else topic.refreshed_ms)
            return self._start_request(list(self._urgent.values()), others)
        if self._urgent:
            # 526-06: all of T, however many, and as many of U as the target leaves room for.
            room = max(target - len(self._urgent), 0)
            return self._start_request(list(self._urgent.values()), list(islice(self._aged.values(), room)))
        if self._is_time_for_aged(now_ms, target):
            self._pace.request_sent(now_ms)
            return self._start_request([], list(islice(self._aged.values(), target)))
        return None

    def _is_time_for_aged(self, now_ms: float, target: int) -> bool:
        """Return whether a non-urgent request is due: in mode `literal` by 526-07, else by the pace of 526-11."""
        if self._config.mode == "literal":
            return len(self._aged) >= target
        return bool(self._aged) and now_ms >= self._next_aged_ms()

    def _next_aged_ms(self) -> float:
        """Return the time in ms of the next non-urgent request in mode `paced`. Requires a topic in FRESH or AGED."""
        return self._pace.next_ms(self.target_topics(), _oldest_refresh_ms(self._aged or self._fresh))

    def _start_request(self, urgent: list[_Topic], others: list[_Topic]) -> RefreshRequest:
        self._requested = [*urgent, *others]
        for topic in self._requested:
            self._take(topic)
            topic.requested_from, topic.place = topic.place, Place.IN_FLIGHT
            topic.is_changed = False
        return RefreshRequest(tuple(topic.name for topic in self._requested), len(urgent))

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
        """Return the time in ms when the next request may be due without new events, or None. Requires that no request
        is in flight."""
        if self._urgent:
            return now_ms
        while self._retries and self._is_outdated(self._retries[0][0], self._retries[0][2]):
            heapq.heappop(self._retries)
        due = [self._retries[0][0]] if self._retries else []
        if self._aged or self._fresh:
            due.append(_oldest_refresh_ms(self._aged or self._fresh) + self._config.max_age_ms)
            if self._config.mode == "paced":
                due.append(self._next_aged_ms())
            elif self._config.mode == "literal":
                due.append(self._target_reached_ms(now_ms))
        return min(due, default=None)

    def _target_reached_ms(self, now_ms: float) -> float:
        """Return the next time in ms when enough topics may be AGED for a request (526-07), or infinity."""
        target = self.target_topics()
        if len(self._aged) >= target:
            return now_ms
        if len(self._aged) + len(self._fresh) < target:
            return float("inf")
        return _oldest_refresh_ms(self._fresh) + self._config.max_age_ms / 2
