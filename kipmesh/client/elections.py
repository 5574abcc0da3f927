"""ElectLeaders by any broker, which forwards it to the active controller."""

from __future__ import annotations

from collections.abc import Iterable

from kipmesh import messages as m
from kipmesh.client.cluster import Cluster
from kipmesh.client.types import TopicPartition
from kipmesh.core.errors import ErrorCode, KafkaError

_ANSWER_SHARE = 0.8
"""Of the caller's time: for log ends to be told; the rest is for the answer, and for another broker."""


async def elect_leaders(
    cluster: Cluster, election_type: m.ElectionType, partitions: Iterable[TopicPartition] | None, timeout_s: float
) -> dict[TopicPartition, KafkaError | None]:
    """What became of each partition's election: None where there was one.

    Of all partitions (None) only those that needed one are in it. Raises KafkaError when nobody was active in time.
    """
    topics: dict[str, list[int]] = {}
    for topic, partition in partitions or ():
        topics.setdefault(topic, []).append(partition)
    request_s = min(timeout_s, cluster.request_timeout_ms / 1000)
    request = m.ElectLeadersRequest(
        election_type,
        None if partitions is None else [m.TopicPartitions(topic, numbers) for topic, numbers in topics.items()],
        int(request_s * _ANSWER_SHARE * 1000),
    )

    def retry(response: m.ElectLeadersResponse) -> ErrorCode | None:
        code = ErrorCode.of(response.error_code)
        return code if code.retriable else None

    response: m.ElectLeadersResponse = await cluster.call_any("Admin", "ElectLeaders", request, timeout_s, retry)
    if response.error_code:
        raise KafkaError(response.error_code, "the election of leaders")
    return {
        TopicPartition(result.topic, each.partition_id): (
            KafkaError(each.error_code, each.error_message or "") if each.error_code else None
        )
        for result in response.replica_election_results
        for each in result.partition_result
    }
