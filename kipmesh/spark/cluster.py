"""Cluster access of the source: metadata and offsets for planning, and the records of ranges.

Planning uses an admin client, so that each micro-batch sees current partitions and offsets. Reading uses a consumer,
which prefetches in a thread while the caller decodes. Both open on first use and close with the `ClusterConnection`.

Invariant: `fetch` returns whole batches in offset order that cover the range, or raises, or (failOnDataLoss=false) has
reported the missing offsets. At most two fetches per partition and about `fetch.max.bytes` in total are buffered.
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
from kipmesh.client.types import TIMESTAMP_EARLIEST, TIMESTAMP_LATEST, TopicMetadata
from kipmesh.core.config import AdminConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.spark import consumers
from kipmesh.spark.offsets import InvalidOptionError, OffsetRange, Offsets, TopicPartition
from kipmesh.spark.options import SourceOptions
from kipmesh.spark.planning import DataLoss

_POLL_MS: Final = 500
RACK_VARIABLE: Final = "KIPMESH_CLIENT_RACK"
"""Environment variable with the rack of an executor."""


class ClusterConnection:
    """An admin client and a consumer for the options of a read, each opened on first use. A context manager.

    `keeps_consumer`: reuse an idle consumer of this process if there is one, and keep it for the next task when the
    context ends without an error. Otherwise the consumer is closed.
    """

    def __init__(self, options: SourceOptions, *, keeps_consumer: bool = False) -> None:
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
        """Close the clients. Idempotent. Calling another method afterwards opens new clients."""
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
        """Return the partitions that the options select, sorted.

        A pattern selects no internal topics and may select none at all. Raises InvalidOptionError if a topic or
        partition of `subscribe` or `assign` does not exist, or KafkaError.
        """
        options = self._options
        if options.assignment:
            there = set(self._partitions_of("assign", sorted({each.topic for each in options.assignment})))
            missing = [each for each in options.assignment if each not in there]
            if missing:
                raise InvalidOptionError(
                    "assign", f"names {missing[0].topic}-{missing[0].partition}, which does not exist"
                )
            return list(options.assignment)
        if options.pattern:
            pattern = re.compile(options.pattern)
            listed = self._open_admin().list_topics()
            return _all_partitions(each for each in listed if pattern.fullmatch(each.name) and not each.is_internal)
        return self._partitions_of("subscribe", sorted(options.topics))

    def earliest_offsets(self, partitions: Collection[TopicPartition]) -> Offsets:
        """Return the log start offset of each partition. Raises InvalidOptionError for a deleted topic, KafkaError."""
        return self._boundary_offsets(partitions, TIMESTAMP_EARLIEST)

    def latest_offsets(self, partitions: Collection[TopicPartition]) -> Offsets:
        """Return the high watermark of each partition. Raises InvalidOptionError for a deleted topic, KafkaError."""
        return self._boundary_offsets(partitions, TIMESTAMP_LATEST)

    def offsets_for_times(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """Return, by partition, the first offset with at least the given timestamp (ms); None if there is none.

        Raises InvalidOptionError for a deleted topic, KafkaError.
        """
        if not times:
            return {}
        options = self._options
        option = "assign" if options.assignment else "subscribePattern" if options.pattern else "subscribe"
        with _existing_topics(option):  # a topic may have been deleted since planning began
            found = self._open_admin().list_offsets(
                {(topic, partition): time_ms for (topic, partition), time_ms in times.items()}
            )
        return {TopicPartition(*where): None if place is None else place.offset for where, place in found.items()}

    def _boundary_offsets(self, partitions: Collection[TopicPartition], timestamp: int) -> Offsets:
        found = self.offsets_for_times(dict.fromkeys(partitions, timestamp))
        return {where: offset or 0 for where, offset in found.items()}

    def _partitions_of(self, option: str, topics: list[str]) -> list[TopicPartition]:
        with _existing_topics(option):
            return _all_partitions(self._open_admin().describe_topics(topics))

    def leaders(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the broker id of each partition's leader, or -1 without a leader or partition. Raises KafkaError."""
        topics = self._open_admin().describe_topics(sorted({each.topic for each in partitions}))
        known = {
            TopicPartition(topic.name, number): found.leader_id
            for topic in topics
            for number, found in topic.partitions.items()
        }
        return {each: known.get(each, -1) for each in partitions}

    # -- reading

    def fetch(self, ranges: Sequence[OffsetRange], loss: DataLoss) -> Iterator[tuple[OffsetRange, int, bytes]]:
        """Yield (range, first wanted offset, bytes of whole batches) until all ranges are read.

        The bytes may also contain records before the first wanted offset and after the range. Each range must belong
        to a different partition. Results of different ranges are interleaved. Raises KafkaError (REQUEST_TIMED_OUT if
        no partition has records for `kafkaConsumer.pollTimeoutMs`), DataLossError if `loss` is set to fail and offsets
        of a range are missing, InvalidOptionError if a topic was deleted.
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
                positions.update(self._resume_positions(open_ranges, positions, loss))
                for where in open_ranges:  # the error discards prefetched records of all partitions
                    consumer.seek(where, positions[where])
                self._drop_read(consumer, open_ranges, positions)
                continue
            if batches:
                quiet_since = time.monotonic()
            else:
                self._check_not_stalled(open_ranges, positions, quiet_since)
                positions.update(self._resume_positions(open_ranges, positions, loss))
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
        if read and open_ranges:  # do not fetch beyond the end of a truncated log
            consumer.assign(open_ranges)

    def _check_not_stalled(
        self, open_ranges: Mapping[TopicPartition, OffsetRange], positions: Offsets, quiet_since: float
    ) -> None:
        stall_seconds = self._options.poll_timeout_ms / 1000
        if time.monotonic() - quiet_since > stall_seconds:
            where = next(iter(open_ranges))
            text = (
                f"no records of {where.topic}-{where.partition} from offset {positions[where]} within"
                f" {stall_seconds:g} s (kafkaConsumer.pollTimeoutMs)"
            )
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, text)

    def _resume_positions(
        self, open_ranges: Mapping[TopicPartition, OffsetRange], positions: Offsets, loss: DataLoss
    ) -> Offsets:
        """Return the offset to resume at in each partition: its position, or the end of a gap reported to `loss`."""
        earliest = self.earliest_offsets(open_ranges)
        late = [where for where in open_ranges if positions[where] >= earliest[where]]
        latest = self.latest_offsets(late)
        return {
            where: _resume_position(wanted, positions[where], earliest[where], latest.get(where), loss)
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
            config = with_rack_of_process(self._options.client_config, os.environ)
            if self._keeps_consumer:
                self._key = consumers.key_of(self._options.bootstrap, config)
                self._consumer = consumers.borrow(self._key)
                if self._consumer is not None:
                    return self._consumer
            self._consumer = Consumer(self._options.bootstrap, **config)
            self._consumer.start()
        return self._consumer


def with_rack_of_process(config: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return a consumer's configuration, with `client.rack` set to the rack of this process if no rack is configured.

    Options travel from the driver to executors in other racks, so the rack comes from the environment of the executor
    (`KIPMESH_CLIENT_RACK`). Rule 392-17.
    """
    rack = environment.get(RACK_VARIABLE, "").strip()
    if not rack or "client.rack" in config or "rack.id" in config:
        return dict(config)
    return {**config, "client.rack": rack}


def _resume_position(wanted: OffsetRange, position: int, earliest: int, latest: int | None, loss: DataLoss) -> int:
    """Return the offset to resume at, and report skipped offsets to `loss`.

    The result is `position`, or the log start if that is later, or the end of the range if the log ends at or before
    `position`.
    """
    where = wanted.topic_partition
    name = f"{where.topic}-{where.partition}"
    if position < earliest:
        following = min(earliest, wanted.end)
        loss.report(f"{name} now begins at offset {earliest}, requested offset {position}", following - position)
        return following
    if latest is not None and position >= latest:
        loss.report(f"{name} now ends at offset {latest}, requested offset {position}", wanted.end - position)
        return wanted.end
    return position


@contextmanager
def _existing_topics(option: str) -> Iterator[None]:
    """Convert KafkaError UNKNOWN_TOPIC_OR_PARTITION and INVALID_TOPIC_EXCEPTION to InvalidOptionError for `option`."""
    try:
        yield
    except KafkaError as error:
        if error.code in (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INVALID_TOPIC_EXCEPTION):
            raise InvalidOptionError(option, f"names a topic that does not exist: {error}") from None
        raise


def _all_partitions(topics: Iterable[TopicMetadata]) -> list[TopicPartition]:
    return sorted(TopicPartition(topic.name, partition) for topic in topics for partition in topic.partitions)
