"""The way back to a nearby replica in the modes `metadata` and `consumer`: metadata alone says that it is there again.

Metadata that is refreshed every `metadata.max.age.ms` only would leave a consumer with the leader for so long after its
replica was back. So after a replica was left, metadata is asked for `retry.backoff.max.ms` later, and again, each time
after twice as long, until the partition is read from a replica again or the regular refresh is as good (392-14). In
mode `fetch` the leader says it in its next answer.
"""

from __future__ import annotations

from collections.abc import Callable

from kipmesh.client.types import TopicPartition


class ReplicaReturn:
    """Of one consumer. Times are seconds of the loop's clock."""

    def __init__(self, first_s: float, last_s: float) -> None:
        """The first wait, and the one that the regular refresh makes needless."""
        self._first_s = first_s
        self._last_s = last_s
        self._wait_s = 0.0
        self._away: dict[TopicPartition, None] = {}
        self.due_s: float | None = None
        """When metadata is asked for; None for never."""

    def left(self, where: TopicPartition, now_s: float) -> None:
        """The partition is read from the leader, since its replica failed."""
        if where not in self._away:
            self._away[where] = None
            self._wait_s = self._first_s
            self.due_s = now_s + self._first_s

    def topics(self, now_s: float, is_away: Callable[[TopicPartition], bool]) -> set[str]:
        """The topics whose metadata is asked for now; `is_away` says what is not read from a replica yet."""
        if self.due_s is None or now_s < self.due_s:
            return set()
        self._away = {where: None for where in self._away if is_away(where)}
        topics = {topic for topic, _ in self._away}
        self._wait_s *= 2
        if not topics or self._wait_s >= self._last_s:
            self._away = {}
            self.due_s = None
        else:
            self.due_s = now_s + self._wait_s
        return topics
