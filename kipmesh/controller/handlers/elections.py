"""ElectLeaders (43) on the active controller.

Partitions are decided in batches, so that other requests are not delayed. An unclean election waits for the log ends
that brokers report in heartbeats. It is withdrawn after the request's timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial

from kipmesh import messages as m
from kipmesh.controller.decision_queue import ControllerParts
from kipmesh.core.context import RequestContext
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.controller import MetadataController
from kipmesh.core.metadata.elections import ElectionResult, TopicPartition

OPERATION = "ElectLeaders"
DECIDED_MAX = 1000
"""Maximum number of partitions in one decision."""
RETRY_S = 0.1
"""Time between two decisions about the same partition."""


async def elect_leaders(
    controller: ControllerParts, request: m.ElectLeadersRequest, context: RequestContext
) -> m.ElectLeadersResponse:
    """Elect leaders for the named partitions, with the results in the table in `core.metadata.elections`.

    If the request names no partitions, leaders are elected for all that need one, and the response omits those that
    turned out not to need one. An unclean election waits for missing log ends until the request's timeout. An unknown
    election type gets INVALID_REQUEST. Raises KafkaError as `QuorumController.do` does.
    """
    try:
        election_type = m.ElectionType(request.election_type)
    except ValueError:
        return m.ElectLeadersResponse(error_code=ErrorCode.INVALID_REQUEST)
    deadline = asyncio.get_running_loop().time() + context.respond_within(request.timeout_ms / 1000)
    if request.topic_partitions is None:
        partitions = await controller.do(OPERATION, lambda core: core.partitions_to_elect(election_type))
    else:
        partitions = [(each.topic, number) for each in request.topic_partitions for number in each.partitions]
    results: dict[TopicPartition, ElectionResult] = {}
    try:
        await _decide(controller, election_type, partitions, results)
        await _retry_pending(controller, election_type, results, deadline)
    finally:
        # Also after a failure: a pending election would later happen uncleanly although its request is over.
        pending = [each for each in partitions if each not in results or results[each].is_pending]
        if pending and election_type is m.ElectionType.UNCLEAN:
            # A cleanup is exempt from OPERATIONS_MAX: a full queue may have caused the failure.
            await controller.do(OPERATION, lambda core: core.withdraw_elections(pending), is_cleanup=True)
    is_named = request.topic_partitions is not None
    reported = [each for each in results.values() if is_named or each.code is not ErrorCode.ELECTION_NOT_NEEDED]
    return m.ElectLeadersResponse(replica_election_results=_by_topic(reported))


async def _decide(
    controller: ControllerParts,
    election_type: m.ElectionType,
    partitions: Sequence[TopicPartition],
    results: dict[TopicPartition, ElectionResult],
) -> None:
    for first in range(0, len(partitions), DECIDED_MAX):
        batch = partitions[first : first + DECIDED_MAX]
        decide = partial(MetadataController.elect_leaders, election_type=election_type, partitions=batch)
        decided: list[ElectionResult] = await controller.do(OPERATION, decide)
        results.update({(result.topic, result.partition): result for result in decided})


async def _retry_pending(
    controller: ControllerParts,
    election_type: m.ElectionType,
    results: dict[TopicPartition, ElectionResult],
    deadline: float,
) -> None:
    """Repeat the decision for partitions that wait for log ends, until `deadline` (event loop time in s)."""
    loop = asyncio.get_running_loop()
    while loop.time() + RETRY_S < deadline and (pending := [key for key, each in results.items() if each.is_pending]):
        await asyncio.sleep(RETRY_S)
        await _decide(controller, election_type, pending, results)
        for each in pending:
            if results[each].code is ErrorCode.ELECTION_NOT_NEEDED:
                # The heartbeat with the last missing log end has already caused the election.
                results[each] = ElectionResult(*each)


def _by_topic(results: Iterable[ElectionResult]) -> list[m.ReplicaElectionResult]:
    topics: dict[str, list[m.PartitionResult]] = {}
    for result in results:
        topics.setdefault(result.topic, []).append(m.PartitionResult(result.partition, result.code, result.message))
    return [m.ReplicaElectionResult(topic, partitions) for topic, partitions in topics.items()]
