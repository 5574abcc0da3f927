"""ListOffsets, OffsetsForLeaderEpoch and DeleteRecords, asked of the leaders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kipmesh import messages as m
from kipmesh.client.cluster import ByTopic, Cluster, LeaderCall, PartitionAnswer
from kipmesh.client.types import OffsetAndTimestamp, TopicPartition


def _topics(
    cluster: Cluster, asked: ByTopic, values: Mapping[TopicPartition, int], topic_type: Any, partition_type: Any
) -> list[Any]:
    """The topics of a request whose partitions have an index, the current leader epoch and a value."""
    return [
        topic_type(
            topic,
            cluster.topic_id(topic),
            [
                partition_type(index, cluster.leader_epoch(topic, index), values[TopicPartition(topic, index)])
                for index in partitions
            ],
        )
        for topic, partitions in asked.items()
    ]


def list_offsets_call(cluster: Cluster, timestamps: Mapping[TopicPartition, int]) -> LeaderCall:
    """ListOffsets; the values are OffsetAndTimestamp, with offset -1 for none."""

    def request(asked: ByTopic) -> m.ListOffsetsRequest:
        topics = _topics(cluster, asked, timestamps, m.ListOffsetsTopic, m.ListOffsetsPartition)
        return m.ListOffsetsRequest(topics=topics, timeout_ms=cluster.request_timeout_ms)

    def answers(response: m.ListOffsetsResponse) -> Iterable[PartitionAnswer]:
        for topic in response.topics:
            for each in topic.partitions:
                place = OffsetAndTimestamp(each.offset, each.timestamp, each.leader_epoch)
                yield PartitionAnswer(topic.name, each.partition_index, each.error_code, place)

    return LeaderCall(request, answers)


async def list_offsets(
    cluster: Cluster, timestamps: Mapping[TopicPartition, int], timeout_s: float
) -> dict[TopicPartition, OffsetAndTimestamp | None]:
    """For each partition the first record at or after a timestamp (or TIMESTAMP_...); None when there is none."""
    found = await cluster.call_leaders(timestamps, list_offsets_call(cluster, timestamps), timeout_s)
    return {where: place if place.offset >= 0 else None for where, place in found.items()}


def end_of_epochs_call(cluster: Cluster, epochs: Mapping[TopicPartition, int]) -> LeaderCall:
    """Where the leader's log has the end of an epoch, at most the high watermark (392-09): EpochEndOffset."""

    def request(asked: ByTopic) -> m.OffsetsForLeaderEpochRequest:
        topics = _topics(cluster, asked, epochs, m.OffsetForLeaderTopic, m.OffsetForLeaderPartition)
        return m.OffsetsForLeaderEpochRequest(topics=topics)

    def answers(response: m.OffsetsForLeaderEpochResponse) -> Iterable[PartitionAnswer]:
        for topic in response.topics:
            for each in topic.partitions:
                end = m.EpochEndOffset(each.leader_epoch, each.end_offset)
                yield PartitionAnswer(topic.topic, each.partition, each.error_code, end)

    return LeaderCall(request, answers)


async def delete_records(
    cluster: Cluster, offsets: Mapping[TopicPartition, int], timeout_s: float
) -> dict[TopicPartition, int]:
    """Raise the log starts (-1: to the high watermark); the new log start by partition."""

    def request(asked: ByTopic) -> m.DeleteRecordsRequest:
        topics = [
            m.DeleteRecordsTopic(
                topic,
                [m.DeleteRecordsPartition(index, offsets[TopicPartition(topic, index)]) for index in partitions],
            )
            for topic, partitions in asked.items()
        ]
        return m.DeleteRecordsRequest(topics=topics, timeout_ms=cluster.request_timeout_ms)

    def answers(response: m.DeleteRecordsResponse) -> Iterable[PartitionAnswer]:
        for topic in response.topics:
            for each in topic.partitions:
                yield PartitionAnswer(topic.name, each.partition_index, each.error_code, each.low_watermark)

    return await cluster.call_leaders(offsets, LeaderCall(request, answers), timeout_s)
