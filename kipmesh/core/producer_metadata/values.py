"""What goes into and comes out of a `TopicTracker`. Times are milliseconds of any clock that never goes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

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
