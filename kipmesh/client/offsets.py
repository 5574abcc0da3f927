"""ListOffsets, OffsetsForLeaderEpoch and DeleteRecords requests to partition leaders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kipmesh import messages as m
from kipmesh.client.cluster import ByTopic, Cluster, LeaderCall, PartitionResult
from kipmesh.client.types import OffsetAndTimestamp, TopicPartition


def _topics(
    cluster: Cluster, partitions: ByTopic, values: Mapping[TopicPartition, int], topic_type: Any, partition_type: Any
) -> list[Any]:
    """Build the topics of a request whose partitions have an index, the current leader epoch and a value."""
    return [
        topic_type(
            topic,
            cluster.topic_id(topic),
            [
                partition_type(index, cluster.leader_epoch(topic, index), values[TopicPartition(topic, index)])
                for index in indexes
            ],
        )
        for topic, indexes in partitions.items()
    ]


def list_offsets_call(cluster: Cluster, timestamps: Mapping[TopicPartition, int]) -> LeaderCall:
    """Return the ListOffsets call for these timestamps (ms or TIMESTAMP_...).

    Its values are OffsetAndTimestamp, with offset -1 if there is no such record.
    """

    def build(partitions: ByTopic) -> m.ListOffsetsRequest:
        topics = _topics(cluster, partitions, timestamps, m.ListOffsetsTopic, m.ListOffsetsPartition)
        return m.ListOffsetsRequest(topics=topics, timeout_ms=cluster.request_timeout_ms)

    def parse(response: m.ListOffsetsResponse) -> Iterable[PartitionResult]:
        for topic in response.topics:
            for each in topic.partitions:
                found = OffsetAndTimestamp(each.offset, each.timestamp, each.leader_epoch)
                yield PartitionResult(topic.name, each.partition_index, each.error_code, found)

    return LeaderCall(build, parse)


async def list_offsets(
    cluster: Cluster, timestamps: Mapping[TopicPartition, int], timeout_s: float
) -> dict[TopicPartition, OffsetAndTimestamp | None]:
    """Return each partition's first record at or after its timestamp (ms or TIMESTAMP_...), or None if there is none.

    Raises KafkaError: retriable errors after retries for `timeout_s`, others immediately.
    """
    results = await cluster.call_leaders(timestamps, list_offsets_call(cluster, timestamps), timeout_s)
    return {partition: found if found.offset >= 0 else None for partition, found in results.items()}


def offsets_for_leader_epoch_call(cluster: Cluster, epochs: Mapping[TopicPartition, int]) -> LeaderCall:
    """Return the OffsetsForLeaderEpoch call for these epochs by partition (392-09). Its values are EpochEndOffset."""

    def build(partitions: ByTopic) -> m.OffsetsForLeaderEpochRequest:
        topics = _topics(cluster, partitions, epochs, m.OffsetForLeaderTopic, m.OffsetForLeaderPartition)
        return m.OffsetsForLeaderEpochRequest(topics=topics)

    def parse(response: m.OffsetsForLeaderEpochResponse) -> Iterable[PartitionResult]:
        for topic in response.topics:
            for each in topic.partitions:
                end = m.EpochEndOffset(each.leader_epoch, each.end_offset)
                yield PartitionResult(topic.topic, each.partition, each.error_code, end)

    return LeaderCall(build, parse)


async def delete_records(
    cluster: Cluster, offsets: Mapping[TopicPartition, int], timeout_s: float
) -> dict[TopicPartition, int]:
    """Delete the records below these offsets (-1: the high watermark) and return the new log start offsets.

    Raises KafkaError: retriable errors after retries for `timeout_s`, others immediately, such as OFFSET_OUT_OF_RANGE
    above the high watermark. Records of other partitions may be deleted nevertheless.
    """

    def build(partitions: ByTopic) -> m.DeleteRecordsRequest:
        topics = [
            m.DeleteRecordsTopic(
                topic, [m.DeleteRecordsPartition(index, offsets[TopicPartition(topic, index)]) for index in indexes]
            )
            for topic, indexes in partitions.items()
        ]
        return m.DeleteRecordsRequest(topics=topics, timeout_ms=cluster.request_timeout_ms)

    def parse(response: m.DeleteRecordsResponse) -> Iterable[PartitionResult]:
        for topic in response.topics:
            for each in topic.partitions:
                yield PartitionResult(topic.name, each.partition_index, each.error_code, each.low_watermark)

    return await cluster.call_leaders(offsets, LeaderCall(build, parse), timeout_s)
