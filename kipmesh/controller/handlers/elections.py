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
    """Elect leaders of the named partitions.

    If the request names none, all partitions that need an election are decided, and the response omits those that
    turned out not to need one.
    """
    try:
        election_type = m.ElectionType(request.election_type)
    except ValueError:
        return m.ElectLeadersResponse(error_code=ErrorCode.INVALID_REQUEST)
    deadline = asyncio.get_running_loop().time() + context.respond_within(request.timeout_ms / 1000)
    if request.topic_partitions is None:
        wanted = await controller.do(OPERATION, lambda core: core.partitions_to_elect(election_type))
    else:
        wanted = [(each.topic, number) for each in request.topic_partitions for number in each.partitions]
    found: dict[TopicPartition, ElectionResult] = {}
    try:
        await _decide(controller, election_type, wanted, found)
        await _retry_pending(controller, election_type, found, deadline)
    finally:
        # Also after a failure: a pending election would later happen uncleanly although its request is over.
        left = [each for each in wanted if each not in found or found[each].is_pending]
        if left and election_type is m.ElectionType.UNCLEAN:
            # A cleanup is exempt from OPERATIONS_MAX: a full queue may have caused the failure.
            await controller.do(OPERATION, lambda core: core.withdraw_elections(left), is_cleanup=True)
    is_wanted = request.topic_partitions is not None
    results = [one for one in found.values() if is_wanted or one.code is not ErrorCode.ELECTION_NOT_NEEDED]
    return m.ElectLeadersResponse(replica_election_results=_by_topic(results))


async def _decide(
    controller: ControllerParts,
    election_type: m.ElectionType,
    wanted: Sequence[TopicPartition],
    found: dict[TopicPartition, ElectionResult],
) -> None:
    for first in range(0, len(wanted), DECIDED_MAX):
        some = wanted[first : first + DECIDED_MAX]
        decide = partial(MetadataController.elect_leaders, election_type=election_type, partitions=some)
        results: list[ElectionResult] = await controller.do(OPERATION, decide)
        found.update({(result.topic, result.partition): result for result in results})


async def _retry_pending(
    controller: ControllerParts,
    election_type: m.ElectionType,
    found: dict[TopicPartition, ElectionResult],
    deadline: float,
) -> None:
    """Repeat the decision for partitions that wait for log ends, until `deadline` (time of the event loop, s)."""
    loop = asyncio.get_running_loop()
    while (left := [each for each, result in found.items() if result.is_pending]) and loop.time() + RETRY_S < deadline:
        await asyncio.sleep(RETRY_S)
        await _decide(controller, election_type, left, found)
        for each in left:
            if found[each].code is ErrorCode.ELECTION_NOT_NEEDED:
                # The heartbeat with the last missing log end has already caused the election.
                found[each] = ElectionResult(*each)


def _by_topic(results: Iterable[ElectionResult]) -> list[m.ReplicaElectionResult]:
    topics: dict[str, list[m.PartitionResult]] = {}
    for result in results:
        topics.setdefault(result.topic, []).append(m.PartitionResult(result.partition, result.code, result.message))
    return [m.ReplicaElectionResult(topic, partitions) for topic, partitions in topics.items()]
