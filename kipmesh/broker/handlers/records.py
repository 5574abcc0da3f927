"""Requests to the replicas of a broker: Produce, Fetch, offsets, log directories and producers.

- Produce (0): batches are appended as received, as slices of the request's frame. acks=0 has no response; an error in
  any partition closes the connection. zstd needs version 7.
- Fetch (1): sessions from version 7 on, racks and preferred replicas from 11, topic ids from 13. zstd needs version 10.
  Replicas fetch by gRPC only: a broker's replica id on a Kafka listener returns CLUSTER_AUTHORIZATION_FAILED.
- DescribeProducers (61): from any hosted replica, leader or follower, as in Apache Kafka.
"""

from __future__ import annotations

import shutil
from functools import partial

from kipmesh import messages as m
from kipmesh.broker.parts import BrokerParts
from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.decision import error_text
from kipmesh.core.metadata.topics import check_topic_name
from kipmesh.messages.apis import describe_producers as producers_api
from kipmesh.messages.table import PRODUCE
from kipmesh.storage.data_directory import DataDirectory
from kipmesh.transport.pipeline import NO_RESPONSE, CloseConnection

RACK_SINCE = 11
_ZSTD = 4
_ATTRIBUTES_AT = 22
_PRODUCE_ZSTD_SINCE, _FETCH_ZSTD_SINCE = 7, 10
_REPLICA_STATE_SINCE = 15


def _is_zstd(records: bytes) -> bool:
    return len(records) > _ATTRIBUTES_AT and records[_ATTRIBUTES_AT] & 7 == _ZSTD


async def produce(broker: BrokerParts, request: m.ProduceRequest, context: RequestContext) -> m.ProduceResponse | None:
    """Append batches and respond when `acks` is satisfied. Errors are per partition.

    On Kafka listeners, acks=0 returns NO_RESPONSE, or raises CloseConnection after an error. Before version 7 a request
    with zstd batches gets UNSUPPORTED_COMPRESSION_TYPE for all partitions.
    """
    if context.is_before(_PRODUCE_ZSTD_SINCE) and any(
        _is_zstd(data.records) for topic in request.topic_data for data in topic.partition_data
    ):
        code = ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
        response: m.ProduceResponse = PRODUCE.error_response(request, code, None, context.version)  # type: ignore[assignment]
    else:
        try:
            response = await broker.produce.produce(request, context)
        except KafkaError as error:
            if request.acks or context.version is None:
                raise
            raise CloseConnection("acks-0", str(error)) from None  # the client expects no response
    if request.acks or context.version is None:
        return response
    for topic in response.responses:
        for partition in topic.partition_responses:
            if partition.error_code:
                name = f"{topic.name or topic.topic_id.hex()}-{partition.index}"
                raise CloseConnection("acks-0", f"{name}: {ErrorCode.of(partition.error_code).name}")
    return NO_RESPONSE


async def fetch(broker: BrokerParts, request: m.FetchRequest, context: RequestContext) -> m.FetchResponse:
    """Read records for a consumer or, over gRPC only, for a follower, within its fetch session.

    A broker's replica id on a Kafka listener returns CLUSTER_AUTHORIZATION_FAILED.
    """
    if context.version is None:
        return await broker.fetch.fetch(request, context)
    if not context.is_before(_REPLICA_STATE_SINCE):
        request = request._replace(replica_id=request.replica_state.replica_id)
    if request.replica_id >= 0:
        return m.FetchResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    if request.max_bytes > context.response_bytes_max:
        # At least 1: a fetch without room completes immediately, and the consumer would repeat it in a loop.
        request = request._replace(max_bytes=max(1, context.response_bytes_max))
    names_rack = not context.is_before(RACK_SINCE)
    response = await broker.fetch.fetch(request, context, names_rack=names_rack)
    return _without_zstd(response) if context.is_before(_FETCH_ZSTD_SINCE) else response


def _without_zstd(response: m.FetchResponse) -> m.FetchResponse:
    """Replace records that begin with a zstd batch with the partition error UNSUPPORTED_COMPRESSION_TYPE."""
    topics = []
    for topic in response.responses:
        partitions = [
            data._replace(error_code=ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, records=b"")
            if _is_zstd(data.records)
            else data
            for data in topic.partitions
        ]
        topics.append(topic._replace(partitions=partitions))
    return response._replace(responses=topics)


async def list_offsets(
    broker: BrokerParts, request: m.ListOffsetsRequest, context: RequestContext
) -> m.ListOffsetsResponse:
    """Return offsets by timestamp. On Kafka listeners, any replica id that is not negative counts as a consumer."""
    if context.version is not None:
        # Apache Kafka accepts any replica id of a client; kafka-python 3.1 sends 0.
        request = request._replace(replica_id=min(request.replica_id, -1))
    return await broker.offsets.list_offsets(request, context)


async def offsets_for_leader_epoch(
    broker: BrokerParts, request: m.OffsetsForLeaderEpochRequest, context: RequestContext
) -> m.OffsetsForLeaderEpochResponse:
    """Return the end offset of a leader epoch, for consumers and, over gRPC, for followers.

    A broker's replica id on a Kafka listener returns CLUSTER_AUTHORIZATION_FAILED.
    """
    if context.version is None or request.replica_id < 0:
        return await broker.offsets.offsets_for_leader_epoch(request, context)
    code = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    topics = [
        m.OffsetForLeaderTopicResult(
            topic.topic, partitions=[m.OffsetForLeaderPartitionResult(code, one.partition) for one in topic.partitions]
        )
        for topic in request.topics
    ]
    return m.OffsetsForLeaderEpochResponse(topics=topics)


async def describe_log_dirs(
    broker: BrokerParts, request: m.DescribeLogDirsRequest, context: RequestContext
) -> m.DescribeLogDirsResponse:
    """Describe each log directory: the size and lag of its replicas, and the total and free bytes of its disk.

    An offline directory has KAFKA_STORAGE_ERROR and the reason. Null topics mean all, as does an empty list over gRPC.
    """
    wanted = {topic.topic: frozenset(topic.partitions) for topic in request.topics or ()}
    logs: dict[str, dict[str, list[m.DescribeLogDirsPartition]]] = {}
    is_all = request.topics is None or (context.version is None and not request.topics)
    for replica in broker.hosted_replicas:
        numbers = wanted.get(replica.topic)
        if not is_all and (numbers is None or (numbers and replica.partition not in numbers)):
            continue
        lag = max(0, replica.high_watermark - replica.log.log_end_offset)
        topics = logs.setdefault(replica.log.dir.rpartition("/")[0], {})
        topics.setdefault(replica.topic, []).append(
            m.DescribeLogDirsPartition(replica.partition, replica.log.size_bytes, lag)
        )
    results = [
        await _describe_log_dir(broker, directory, logs.get(directory.path, {}))
        for directory in broker.log_manager.directories
    ]
    return m.DescribeLogDirsResponse(results=results)


async def _describe_log_dir(
    broker: BrokerParts, directory: DataDirectory, topics: dict[str, list[m.DescribeLogDirsPartition]]
) -> m.DescribeLogDirsResult:
    if directory.error is not None:
        code = ErrorCode.KAFKA_STORAGE_ERROR
        return m.DescribeLogDirsResult(code, directory.path, error_message=directory.error.message)
    total, usable = await broker.disk.run(partial(_disk_space, directory.path))
    return m.DescribeLogDirsResult(
        ErrorCode.NONE,
        directory.path,
        [m.DescribeLogDirsTopic(name, sorted(partitions)) for name, partitions in sorted(topics.items())],
        total,
        usable,
    )


def _disk_space(path: str) -> tuple[int, int]:
    """Return total and free bytes of the directory's disk, or (-1, -1) if the directory cannot be read. Blocks."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return -1, -1
    return usage.total, usage.free


async def describe_producers(
    broker: BrokerParts, request: producers_api.DescribeProducersRequest, context: RequestContext
) -> producers_api.DescribeProducersResponse:
    """Describe the active producers of partitions.

    Errors per partition: NOT_LEADER_OR_FOLLOWER if the replica has no role yet or no longer, INVALID_TOPIC_EXCEPTION
    for an invalid name, and those of `HostedReplicas.require`.
    """
    wanted: dict[str, dict[int, None]] = {}  # a repeated partition is described once
    for one in request.topics:
        wanted.setdefault(one.name, {}).update(dict.fromkeys(one.partition_indexes))
    topics = [(name, [_producers(broker, name, index) for index in indexes]) for name, indexes in wanted.items()]
    return producers_api.DescribeProducersResponse(
        topics=[producers_api.DescribeProducersTopicResponse(*topic) for topic in topics]
    )


def _producers(broker: BrokerParts, name: str, index: int) -> producers_api.DescribeProducersPartitionResponse:
    try:
        check_topic_name(name)
        replica = broker.hosted_replicas.require(b"", name, index)
        if not replica.has_role:
            raise KafkaError(
                ErrorCode.NOT_LEADER_OR_FOLLOWER, f"partition {index} of topic {name!r} is starting or stopping"
            )
    except KafkaError as error:
        return producers_api.DescribeProducersPartitionResponse(index, error.code, error_text(error.message))
    entries = replica.log.producers.states.entries()
    active = [
        producers_api.ActiveProducer(producer_id, epoch, sequence, timestamp, coordinator_epoch, txn_offset)
        for producer_id, epoch, sequence, _, _, timestamp, coordinator_epoch, txn_offset in entries
    ]
    return producers_api.DescribeProducersPartitionResponse(index, active_producers=active)
