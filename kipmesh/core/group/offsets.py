"""OffsetCommit, OffsetFetch, OffsetDelete and DeleteGroups, and the expiry of offsets, as in Kafka.

Members commit in their generation; other clients only while the group is empty ("simple" consumers, generation -1). An
offset expires `offsets.retention.minutes` after the group became empty. In a group that never had members the time
counts from the commit, and in a stable group from the commit for topics without a subscriber.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.group import records as r
from kipmesh.core.group.classic import ClassicGroup, GroupState
from kipmesh.core.group.coordinator_state import CoordinatorState
from kipmesh.core.group.membership import is_too_long
from kipmesh.core.group.rebalances import Rebalances
from kipmesh.core.group.table import TopicPartition
from kipmesh.core.group.types import Instant

TOMBSTONES_PER_WRITE = 1000
"""Maximum tombstones in one write. Expiry continues at the next check."""


class Offsets:
    """Commit, fetch, deletion and expiry of offsets for the groups in `state`."""

    def __init__(self, state: CoordinatorState, rebalances: Rebalances) -> None:
        self._state = state
        self._rebalances = rebalances

    # --- OffsetCommit ----------------------------------------------------------------------------------------------

    def commit(self, request: m.OffsetCommitRequest, request_id: int, now: Instant) -> None:
        """Handle OffsetCommit (API key 8). The response follows when the offsets are committed.

        Error codes per partition: NOT_COORDINATOR, INVALID_GROUP_ID, GROUP_ID_NOT_FOUND, UNKNOWN_MEMBER_ID,
        FENCED_INSTANCE_ID, ILLEGAL_GENERATION, REBALANCE_IN_PROGRESS, INVALID_TOPIC_EXCEPTION and
        OFFSET_METADATA_TOO_LARGE (that partition only), those of `write_error`.
        """
        state, group_id = self._state, request.group_id
        if group_id in state.deleting:
            state.when_idle(group_id, partial(self.commit, request, request_id), now)
            return
        group = state.group(group_id)
        code = self._error(group, request)
        if code:
            state.respond(request_id, commit_response(request, code))
            return
        if group is not None and group.state in (GroupState.STABLE, GroupState.PREPARING_REBALANCE):
            self._rebalances.reset_session(group, request.member_id, now)
        records: list[r.Record] = []
        topics = []
        for topic in request.topics:
            results = []
            for partition in topic.partitions:
                code = self._partition_error(topic.name, partition)
                results.append(m.OffsetCommitResponsePartition(partition.partition_index, code))
                if not code:
                    key = r.OffsetCommitKey(group_id, topic.name, partition.partition_index)
                    text = partition.committed_metadata or ""
                    offset, epoch = partition.committed_offset, partition.committed_leader_epoch
                    records.append(r.OffsetRecord(key, r.OffsetCommitValue(offset, epoch, text, now.wall_ms)))
            topics.append(m.OffsetCommitResponseTopic(topic.name, results))
        response = m.OffsetCommitResponse(topics=topics)
        if records:
            state.write(
                group_id,
                records,
                lambda code, _now: state.respond(request_id, commit_response(request, code) if code else response),
            )
        else:
            state.respond(request_id, response)

    def _error(self, group: ClassicGroup | None, request: m.OffsetCommitRequest) -> ErrorCode:
        if self._state.is_closed:
            return ErrorCode.NOT_COORDINATOR
        if is_too_long(request.group_id):
            return ErrorCode.INVALID_GROUP_ID
        generation_id = request.generation_id_or_member_epoch
        if group is None:
            return ErrorCode.NONE if generation_id < 0 else ErrorCode.GROUP_ID_NOT_FOUND
        return group.check_commit(request.member_id, request.group_instance_id, generation_id)

    def _partition_error(self, topic: str, partition: m.OffsetCommitRequestPartition) -> ErrorCode:
        if is_too_long(topic):
            return ErrorCode.INVALID_TOPIC_EXCEPTION
        size = len((partition.committed_metadata or "").encode())
        is_large = size > self._state.settings.offset_metadata_max_bytes
        return ErrorCode.OFFSET_METADATA_TOO_LARGE if is_large else ErrorCode.NONE

    # --- OffsetFetch -----------------------------------------------------------------------------------------------

    def fetch(self, request: m.OffsetFetchRequestGroup, request_id: int) -> None:
        """Handle one group of an OffsetFetch (API key 9). A request without topics gets all committed offsets.
        Partitions without a committed offset, including those of an unknown group, get -1 and no error. Error code:
        NOT_COORDINATOR."""
        if self._state.is_closed:
            self._state.respond(request_id, m.OffsetFetchResponseGroup(request.group_id, (), ErrorCode.NOT_COORDINATOR))
            return
        offsets = self._state.table.offsets(request.group_id)
        wanted: dict[str, Sequence[int]] = {}
        if request.topics is None:
            for topic, partition in offsets:
                wanted[topic] = [*wanted.get(topic, ()), partition]
        else:
            wanted = {topic.name: topic.partition_indexes for topic in request.topics}
        topics = [
            m.OffsetFetchResponseTopics(name, [_fetched(offsets.get((name, index)), index) for index in indexes])
            for name, indexes in wanted.items()
        ]
        self._state.respond(request_id, m.OffsetFetchResponseGroup(request.group_id, topics))

    # --- OffsetDelete ----------------------------------------------------------------------------------------------

    def delete(self, request: m.OffsetDeleteRequest, request_id: int, now: Instant) -> None:
        """Handle OffsetDelete (API key 47): delete offsets of topics without a subscribed member. Partitions without an
        offset get no error.

        Error codes: NOT_COORDINATOR, GROUP_ID_NOT_FOUND, NON_EMPTY_GROUP (not Empty and not of the consumer protocol),
        those of `write_error`; per partition GROUP_SUBSCRIBED_TO_TOPIC.
        """
        state, group_id = self._state, request.group_id
        if state.is_busy(group_id) and not state.is_closed:
            state.when_idle(group_id, partial(self.delete, request, request_id), now)
            return
        group = state.group(group_id)
        code = self._delete_error(group)
        if code or group is None:
            state.respond(request_id, m.OffsetDeleteResponse(code))
            return
        offsets = state.table.offsets(group_id)
        deleted: list[TopicPartition] = []
        topics = []
        for topic in request.topics:
            code = ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC if group.is_subscribed(topic.name) else ErrorCode.NONE
            results = [m.OffsetDeleteResponsePartition(one.partition_index, code) for one in topic.partitions]
            topics.append(m.OffsetDeleteResponseTopic(topic.name, results))
            places = [(topic.name, one.partition_index) for one in topic.partitions]
            deleted.extend(place for place in places if not code and place in offsets)
        response = m.OffsetDeleteResponse(topics=topics)
        if deleted:
            outcome = partial(self._deleted, group_id, response, request_id)
            state.write(group_id, tombstones(group_id, deleted), outcome)
        else:
            state.respond(request_id, response)

    def _delete_error(self, group: ClassicGroup | None) -> ErrorCode:
        if self._state.is_closed:
            return ErrorCode.NOT_COORDINATOR
        if group is None:
            return ErrorCode.GROUP_ID_NOT_FOUND
        is_other_protocol = group.state is not GroupState.EMPTY and not group.is_consumer
        return ErrorCode.NON_EMPTY_GROUP if is_other_protocol else ErrorCode.NONE

    def _deleted(
        self, group_id: str, response: m.OffsetDeleteResponse, request_id: int, code: ErrorCode, now: Instant
    ) -> None:
        self._state.respond(request_id, m.OffsetDeleteResponse(code) if code else response)
        self._state.forget_if_unused(group_id)

    # --- expiry ----------------------------------------------------------------------------------------------------

    def expire(self, now: Instant) -> None:
        """Delete expired offsets, up to TOMBSTONES_PER_WRITE per group, and empty groups without offsets. Groups with
        pending writes wait for the next call."""
        for group_id in self._state.table.group_ids():
            if not self._state.is_busy(group_id) and group_id not in self._state.deleting:
                self._expire_group(group_id, now)

    def _expire_group(self, group_id: str, now: Instant) -> None:
        group = self._state.group(group_id)
        assert group is not None  # the table has it
        offsets = self._state.table.offsets(group_id)
        expired = [place for place, value in offsets.items() if self._is_expired(group, place, value, now)]
        records: list[r.Record] = tombstones(group_id, expired[:TOMBSTONES_PER_WRITE])
        if len(records) == len(offsets) and group.is_empty:
            self._end_group(group_id, records)
        elif records:
            self._state.write(group_id, records)

    def _is_expired(self, group: ClassicGroup, place: TopicPartition, value: r.OffsetCommitValue, now: Instant) -> bool:
        if group.is_subscribed(place[0]):
            return False
        since = value.commit_timestamp
        if group.protocol_type is not None:
            if group.state is GroupState.EMPTY:
                since = since if group.current_state_timestamp < 0 else group.current_state_timestamp
            elif not (group.is_consumer and group.subscribed_topics is not None and group.state is GroupState.STABLE):
                return False
        if value.expire_timestamp >= 0:
            return now.wall_ms >= value.expire_timestamp
        return now.wall_ms - since >= self._state.settings.offsets_retention_ms

    def topics_deleted(self, names: Collection[str], now: Instant) -> None:
        """Delete the offsets of deleted topics in all groups, so that a recreated topic starts without offsets. Groups
        with pending writes follow later."""
        deleted = frozenset(names)
        for group_id in self._state.table.group_ids():
            if any(topic in deleted for topic, _ in self._state.table.offsets(group_id)):
                self._state.when_idle(group_id, partial(self._delete_topics, group_id, deleted), now)

    def _delete_topics(self, group_id: str, names: Collection[str], now: Instant) -> None:
        if self._state.is_closed:
            return
        deleted = [place for place in self._state.table.offsets(group_id) if place[0] in names]
        for start in range(0, len(deleted), TOMBSTONES_PER_WRITE):
            records = tombstones(group_id, deleted[start : start + TOMBSTONES_PER_WRITE])
            self._state.write(group_id, records, lambda _code, _now: self._state.forget_if_unused(group_id))

    # --- DeleteGroups ----------------------------------------------------------------------------------------------

    def delete_group(self, group_id: str, request_id: int, now: Instant) -> None:
        """Handle one group of DeleteGroups (API key 42): delete the group and its offsets. The response is a
        DeletableGroupResult.

        Error codes: NOT_COORDINATOR, GROUP_ID_NOT_FOUND, NON_EMPTY_GROUP, those of `write_error`.
        """
        state = self._state
        if state.is_busy(group_id) and not state.is_closed:
            state.when_idle(group_id, partial(self.delete_group, group_id, request_id), now)
            return
        group = state.group(group_id)
        code = ErrorCode.NONE
        if state.is_closed:
            code = ErrorCode.NOT_COORDINATOR
        elif group is None:
            code = ErrorCode.GROUP_ID_NOT_FOUND
        elif not group.is_empty:
            code = ErrorCode.NON_EMPTY_GROUP
        if code:
            state.respond(request_id, m.DeletableGroupResult(group_id, code))
        else:
            self._end_group(group_id, tombstones(group_id, list(state.table.offsets(group_id))), request_id)

    def _end_group(self, group_id: str, records: list[r.Record], request_id: int | None = None) -> None:
        """Write these tombstones and the group's tombstone. JoinGroup and OffsetCommit requests wait meanwhile."""
        self._state.deleting.add(group_id)
        records.append(r.GroupRecord(r.GroupMetadataKey(group_id), None))
        self._state.write(group_id, records, partial(self._group_ended, group_id, request_id))

    def _group_ended(self, group_id: str, request_id: int | None, code: ErrorCode, now: Instant) -> None:
        self._state.deleting.discard(group_id)
        if not code:
            self._state.live.pop(group_id, None)
        if request_id is not None:
            self._state.respond(request_id, m.DeletableGroupResult(group_id, code))


def tombstones(group_id: str, places: Collection[TopicPartition]) -> list[r.Record]:
    """Return the records that delete the group's offsets for these partitions."""
    return [r.OffsetRecord(r.OffsetCommitKey(group_id, *place), None) for place in places]


def commit_response(request: m.OffsetCommitRequest, code: ErrorCode) -> m.OffsetCommitResponse:
    """Return an OffsetCommit response with the same error code for every partition of the request."""
    return m.OffsetCommitResponse(
        topics=[
            m.OffsetCommitResponseTopic(
                topic.name, [m.OffsetCommitResponsePartition(one.partition_index, code) for one in topic.partitions]
            )
            for topic in request.topics
        ]
    )


def _fetched(value: r.OffsetCommitValue | None, index: int) -> m.OffsetFetchResponsePartitions:
    if value is None:
        return m.OffsetFetchResponsePartitions(index, metadata="")
    return m.OffsetFetchResponsePartitions(index, value.offset, value.leader_epoch, value.metadata)
