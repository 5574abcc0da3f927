"""ElectLeaders (API key 43) on the active controller: many small decisions, and the wait for brokers' log ends.

The partitions are decided some at a time, so that nobody else waits long. An unclean election needs to know where the
logs end, which heartbeats tell: the request waits for that within its own time, and what is not elected by then is not
wished for any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.controller import MetadataController
from kipmesh.core.metadata.preferred import ElectionResult, TopicPartition
from kipmesh.node.controller.owner import DoOrCleanUp
from kipmesh.node.controller.parts import ControllerParts
from kipmesh.rpc.server import RequestContext

OPERATION = "ElectLeaders"
DECIDED_MAX = 1000
"""Partitions of one decision."""
LOOK_S = 0.1
"""Time between two looks whether the log ends are there."""


class LeaderElections:
    """Answers ElectLeaders."""

    def __init__(self, do: DoOrCleanUp) -> None:
        self._do = do

    async def elect_leaders(self, request: m.ElectLeadersRequest, context: RequestContext) -> m.ElectLeadersResponse:
        """ElectLeaders. Of all partitions, those that need no election are not in the answer."""
        try:
            election_type = m.ElectionType(request.election_type)
        except ValueError:
            return m.ElectLeadersResponse(error_code=ErrorCode.INVALID_REQUEST)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + context.answer_within(request.timeout_ms / 1000)
        results = await self._elect(election_type, request, deadline)
        if request.topic_partitions is None:
            results = [result for result in results if result.code is not ErrorCode.ELECTION_NOT_NEEDED]
        return m.ElectLeadersResponse(replica_election_results=_by_topic(results))

    async def _elect(
        self, election_type: m.ElectionType, request: m.ElectLeadersRequest, deadline: float
    ) -> list[ElectionResult]:
        if request.topic_partitions is None:
            wanted = await self._do(OPERATION, lambda controller: controller.electable(election_type))
        else:
            wanted = [(each.topic, number) for each in request.topic_partitions for number in each.partitions]
        found: dict[TopicPartition, ElectionResult] = {}
        try:
            await self._decide(election_type, wanted, found)
            await self._settle(election_type, found, deadline)
        finally:
            # Without an answer, too: a wish that was left behind would be an unclean election that nobody waits for.
            left = [each for each in wanted if each not in found or found[each].is_pending]
            if left and election_type is m.ElectionType.UNCLEAN:
                # Nor is it one operation too many: what is full may be why there is no answer.
                await self._do(OPERATION, lambda controller: controller.withdraw_elections(left), is_cleanup=True)
        return list(found.values())

    async def _decide(
        self,
        election_type: m.ElectionType,
        wanted: Sequence[TopicPartition],
        found: dict[TopicPartition, ElectionResult],
    ) -> None:
        for first in range(0, len(wanted), DECIDED_MAX):
            some = wanted[first : first + DECIDED_MAX]
            decide = partial(MetadataController.elect_leaders, election_type=election_type, partitions=some)
            results: list[ElectionResult] = await self._do(OPERATION, decide)
            found.update({(result.topic, result.partition): result for result in results})

    async def _settle(
        self, election_type: m.ElectionType, found: dict[TopicPartition, ElectionResult], deadline: float
    ) -> None:
        """Ask again for what waits for log ends, until the time is over."""
        loop = asyncio.get_running_loop()
        while (left := _pending(found)) and loop.time() + LOOK_S < deadline:
            await asyncio.sleep(LOOK_S)
            await self._decide(election_type, left, found)
            for each in left:
                if found[each].code is ErrorCode.ELECTION_NOT_NEEDED:
                    # A heartbeat that told the last log end has elected meanwhile.
                    found[each] = ElectionResult(*each)


def _pending(found: dict[TopicPartition, ElectionResult]) -> list[TopicPartition]:
    return [each for each, result in found.items() if result.is_pending]


def _by_topic(results: Iterable[ElectionResult]) -> list[m.ReplicaElectionResult]:
    topics: dict[str, list[m.PartitionResult]] = {}
    for result in results:
        topics.setdefault(result.topic, []).append(m.PartitionResult(result.partition, result.code, result.message))
    return [m.ReplicaElectionResult(topic, partitions) for topic, partitions in topics.items()]


async def elect_leaders(
    controller: ControllerParts, request: m.ElectLeadersRequest, context: RequestContext
) -> m.ElectLeadersResponse:
    """Elect leaders of the named partitions, or of all that need it."""
    return await LeaderElections(controller.do).elect_leaders(request, context)
