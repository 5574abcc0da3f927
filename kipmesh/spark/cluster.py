"""The cluster as the source uses it: questions for planning, and the records of a range.

Planning asks through an admin client, so that each micro-batch sees partitions and offsets as they are now; reading
goes through a consumer, which fetches ahead in its own thread while the caller decodes. Both are opened when they are
first needed and closed with the `ClusterConnection`.

Invariant: `fetch` gives whole batches in offset order that cover the range, or raises, or (when failOnDataLoss is
false) has reported what is missing. What waits undelivered is at most two fetches of a partition, and about
`fetch.max.bytes` of all.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

from kipmesh.client.sync import AdminClient, Consumer
from kipmesh.client.types import TIMESTAMP_EARLIEST, TIMESTAMP_LATEST, OffsetAndTimestamp, TopicMetadata
from kipmesh.core.config import AdminConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.spark import consumers
from kipmesh.spark.offsets import InvalidOptionError, OffsetRange, Offsets, TopicPartition
from kipmesh.spark.options import SourceOptions
from kipmesh.spark.planning import DataLoss

_POLL_MS: Final = 500
RACK_VARIABLE: Final = "KIPMESH_CLIENT_RACK"
"""The environment variable of an executor that says in which rack it is."""


class ClusterConnection:
    """A connection to the cluster that the options name."""

    def __init__(self, options: SourceOptions, *, keeps_consumer: bool = False) -> None:
        """`keeps_consumer`: leave the consumer to the next task of this process where nothing went wrong."""
        self._options = options
        self._keeps_consumer = keeps_consumer
        self._admin: AdminClient | None = None
        self._consumer: Consumer | None = None
        self._key: consumers.Key | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._key is not None and self._consumer is not None:
                consumer, self._consumer = self._consumer, None
                consumers.give_back(self._key, consumer)
        finally:
            self.close()

    def close(self) -> None:
        """Close what was opened; may be called again."""
        admin, consumer = self._admin, self._consumer
        self._admin = self._consumer = None
        try:
            if consumer is not None:
                consumer.close()
        finally:
            if admin is not None:
                admin.close()

    # -- planning (`kipmesh.spark.planning.Cluster`)

    def partitions(self) -> list[TopicPartition]:
        """The partitions that the options name, in order; `InvalidOptionError` when one does not exist."""
        options = self._options
        if options.assignment:
            there = set(self._partitions_of("assign", sorted({each.topic for each in options.assignment})))
            missing = [each for each in options.assignment if each not in there]
            if missing:
                raise InvalidOptionError(
                    "assign", f"names {missing[0].topic}-{missing[0].partition}, which is not there"
                )
            return list(options.assignment)
        if options.pattern:
            pattern = re.compile(options.pattern)
            listed = self._open_admin().list_topics()
            return _all_partitions(each for each in listed if pattern.fullmatch(each.name) and not each.is_internal)
        return self._partitions_of("subscribe", sorted(options.topics))

    def earliest_offsets(self, partitions: Collection[TopicPartition]) -> Offsets:
        """The first offset of each partition."""
        return self._list_offsets(dict.fromkeys(partitions, TIMESTAMP_EARLIEST))

    def latest_offsets(self, partitions: Collection[TopicPartition]) -> Offsets:
        """The offset after the last readable record of each partition."""
        return self._list_offsets(dict.fromkeys(partitions, TIMESTAMP_LATEST))

    def offsets_for_times(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """The first offset whose time is at least the one given; None where all records are older."""
        found = self._list(times)
        return {where: None if place is None else place.offset for where, place in found.items()}

    def _list_offsets(self, wanted: Mapping[TopicPartition, int]) -> Offsets:
        return {where: 0 if place is None else place.offset for where, place in self._list(wanted).items()}

    def _list(self, wanted: Mapping[TopicPartition, int]) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        if not wanted:
            return {}
        asked = {(topic, partition): timestamp for (topic, partition), timestamp in wanted.items()}
        options = self._options
        option = "assign" if options.assignment else "subscribePattern" if options.pattern else "subscribe"
        with _there(option):  # they were a moment ago
            found = self._open_admin().list_offsets(asked)
        return {TopicPartition(*where): place for where, place in found.items()}

    def _partitions_of(self, option: str, topics: list[str]) -> list[TopicPartition]:
        with _there(option):
            return _all_partitions(self._open_admin().describe_topics(topics))

    def leaders(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Who leads each partition now; -1 where nobody does."""
        topics = self._open_admin().describe_topics(sorted({each.topic for each in partitions}))
        known = {
            TopicPartition(topic.name, number): found.leader_id
            for topic in topics
            for number, found in topic.partitions.items()
        }
        return {each: known.get(each, -1) for each in partitions}

    # -- reading

    def fetch(self, ranges: Sequence[OffsetRange], loss: DataLoss) -> Iterator[tuple[OffsetRange, int, bytes]]:
        """Whole batches that hold the records of a range, and the offset from which on they count.

        The first batch of a range may begin before that offset: those records were read already, or deleted. Ranges
        are of several partitions, each named once, and come in turns, by one fetch session a broker.
        """
        consumer = self._open_consumer()
        open_ranges = {each.topic_partition: each for each in ranges}
        positions = {each.topic_partition: each.start for each in ranges}
        consumer.assign(open_ranges)
        for where, start in positions.items():
            consumer.seek(where, start)
        quiet_since = time.monotonic()
        while open_ranges:
            try:
                batches = consumer.fetch_batches(timeout_ms=_POLL_MS)
            except KafkaError as error:
                if error.code != ErrorCode.OFFSET_OUT_OF_RANGE:
                    raise
                positions.update(self._all_next_there(open_ranges, positions, loss))
                for where in open_ranges:  # the error names one; what the others have fetched comes again
                    consumer.seek(where, positions[where])
                self._drop_read(consumer, open_ranges, positions)
                continue
            if batches:
                quiet_since = time.monotonic()
            else:
                self._check_not_stalled(open_ranges, positions, quiet_since)
                positions.update(self._all_next_there(open_ranges, positions, loss))
            for each in batches:
                where = TopicPartition(each.topic, each.partition)
                wanted = open_ranges.get(where)
                if wanted is not None:
                    yield wanted, positions[where], each.records
                    positions[where] = each.next_position
            self._drop_read(consumer, open_ranges, positions)

    @staticmethod
    def _drop_read(consumer: Consumer, open_ranges: dict[TopicPartition, OffsetRange], positions: Offsets) -> None:
        read = [where for where, wanted in open_ranges.items() if positions[where] >= wanted.end]
        for where in read:
            del open_ranges[where]
        if read and open_ranges:  # what was lost may end beyond the log: nobody is to fetch there
            consumer.assign(open_ranges)

    def _check_not_stalled(
        self, open_ranges: Mapping[TopicPartition, OffsetRange], positions: Offsets, quiet_since: float
    ) -> None:
        stall_seconds = self._options.poll_timeout_ms / 1000
        if time.monotonic() - quiet_since > stall_seconds:
            where = next(iter(open_ranges))
            text = (
                f"no records of {where.topic}-{where.partition} from offset {positions[where]} for {stall_seconds:g} s"
                " (kafkaConsumer.pollTimeoutMs)"
            )
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, text)

    def _all_next_there(
        self, open_ranges: Mapping[TopicPartition, OffsetRange], positions: Offsets, loss: DataLoss
    ) -> Offsets:
        """Where to go on when nothing came: where each was, or after what was lost."""
        earliest = self.earliest_offsets(open_ranges)
        late = [where for where in open_ranges if positions[where] >= earliest[where]]
        latest = self.latest_offsets(late)
        return {
            where: _next_there(wanted, positions[where], earliest[where], latest.get(where), loss)
            for where, wanted in open_ranges.items()
        }

    # -- clients

    def _open_admin(self) -> AdminClient:
        if self._admin is None:
            known = AdminConfig.keys()
            config = {key: value for key, value in self._options.client_config.items() if key in known}
            self._admin = AdminClient(self._options.bootstrap, **config)
            self._admin.start()
        return self._admin

    def _open_consumer(self) -> Consumer:
        if self._consumer is None:
            config = in_rack_of_this_process(self._options.client_config, os.environ)
            if self._keeps_consumer:
                self._key = consumers.key_of(self._options.bootstrap, config)
                self._consumer = consumers.borrow(self._key)
                if self._consumer is not None:
                    return self._consumer
            self._consumer = Consumer(self._options.bootstrap, **config)
            self._consumer.start()
        return self._consumer


def in_rack_of_this_process(config: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """A consumer's settings, with the rack of the process that reads unless they name one (392-17).

    Options travel from the driver to the executors, and each executor may be in another rack: so the rack is not among
    them, but in the executor's own environment.
    """
    rack = environment.get(RACK_VARIABLE, "").strip()
    if not rack or "client.rack" in config or "rack.id" in config:
        return dict(config)
    return {**config, "client.rack": rack}


def _next_there(wanted: OffsetRange, position: int, earliest: int, latest: int | None, loss: DataLoss) -> int:
    """Where to go on when nothing came at `position`: there, or after what was lost."""
    where = wanted.topic_partition
    name = f"{where.topic}-{where.partition}"
    if position < earliest:
        following = min(earliest, wanted.end)
        loss.report(f"{name} begins at offset {earliest} now and {position} was to be read", following - position)
        return following
    if latest is not None and position >= latest:
        loss.report(f"{name} ends at offset {latest} now and {position} was to be read", wanted.end - position)
        return wanted.end
    return position


@contextmanager
def _there(option: str) -> Iterator[None]:
    """A topic that is unknown becomes the `InvalidOptionError` of the option that names it."""
    try:
        yield
    except KafkaError as error:
        if error.code in (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INVALID_TOPIC_EXCEPTION):
            raise InvalidOptionError(option, f"names a topic that is not there: {error}") from None
        raise


def _all_partitions(topics: Iterable[TopicMetadata]) -> list[TopicPartition]:
    return sorted(TopicPartition(topic.name, partition) for topic in topics for partition in topic.partitions)
