"""Decommissioning of brokers: plans that move their replicas (PlanBrokerDrain), and UnregisterBroker.

A plan keeps the other replicas of each partition in order and replaces the drained broker by the rules of `placement`:
a rack with the fewest replicas of the partition, a leader service for a preferred leader, the fewest replicas of the
topic, the fewest of all. If only a follower service can replace a preferred leader, the next replica that is a leader
service moves to the front, or else the next replica. Fenced and stopping brokers receive nothing.

A plan changes nothing; the caller applies it by AlterPartitionReassignments. It names at most PLANNED_MAX partitions
and checks about CHECKED_MAX, which keeps the controller's step short. The caller continues from the last plan's cursor
until there is none, and starts again for partitions that were refused or created meanwhile.

UnregisterBroker is stricter than Kafka's, which removes running brokers and brokers with replicas. A partition whose
last in-sync replica is on a removed broker would never recover.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.decision import ControllerState, Decision
from kipmesh.core.metadata.image import MetadataImage
from kipmesh.core.metadata.reassignments import target_replicas
from kipmesh.core.metadata.records import ConfigRecord, UnregisterBrokerRecord
from kipmesh.core.metadata.states import BROKER_RESOURCE, PartitionKey, TopicState

PLANNED_MAX = 200
"""Maximum partitions in one plan."""
CHECKED_MAX = 1000
"""Maximum partitions checked for one plan, including those counted for topic loads."""
WALKS_MAX = 32
"""Maximum remembered walks. A caller whose walk was dropped, or belongs to another controller, starts again."""


@dataclass(slots=True, eq=False)
class _Walk:
    """Progress of one drain over the broker's replicas, from one `plan` call to the next."""

    walk_id: int
    broker_id: int
    keys: Sequence[PartitionKey]
    place: int = 0
    cursor: m.DrainCursor | None = None
    """Position of the last existing partition before `place`."""
    topic_loads: dict[bytes, Counter[int]] = field(default_factory=dict)


class Drains:
    """Plans drains of brokers. Remembers the position of each walk, so that a whole drain costs O(replicas)."""

    def __init__(self, image: MetadataImage) -> None:
        self._image = image
        self._walks: dict[int, _Walk] = {}
        """Walk id -> walk, least recently used first."""
        self._last_walk_id = 0

    def plan(self, request: m.PlanBrokerDrainRequest) -> m.PlanBrokerDrainResponse:
        """Return moves for some of the broker's replicas and the cursor of the next plan, which is None after the last
        replica.

        With `is_check`, no moves are returned. `leaving` counts the replicas of this step that a running reassignment
        already removes. Error codes: BROKER_ID_NOT_REGISTERED if the broker is not registered and has no replicas;
        INVALID_REPLICATION_FACTOR if no broker can replace the drained one for a partition.
        """
        image, broker_id = self._image, request.broker_id
        replicas = len(image.partitions_of_broker(broker_id))
        if broker_id not in image.brokers and not replicas:
            text = f"broker {broker_id} is not registered"
            return m.PlanBrokerDrainResponse(error_code=ErrorCode.BROKER_ID_NOT_REGISTERED, error_message=text)
        walk = self._walk(broker_id, request.cursor)
        plan = _Plan(image, broker_id, walk.topic_loads)
        topics: dict[str, list[m.ReassignablePartition]] = {}
        checked = planned = leaving = 0
        while walk.place < len(walk.keys) and checked < CHECKED_MAX and planned < PLANNED_MAX:
            topic_id, partition = walk.keys[walk.place]
            walk.place += 1
            checked += 1
            topic, state = image.topics.get(topic_id), image.partition(topic_id, partition)
            if topic is None or state is None:
                continue  # deleted since the walk began
            walk.cursor = m.DrainCursor(walk.walk_id, topic.name, partition)
            target = target_replicas(state)
            if broker_id not in target:
                leaving += broker_id in state.replicas
                continue
            if plan.is_stuck(target):
                del self._walks[walk.walk_id]
                return _stuck(topic, partition, broker_id, len(target), replicas)
            if not request.is_check:
                checked += plan.count_load(topic)
                moved = m.ReassignablePartition(partition, plan.replace_broker(topic_id, target))
                topics.setdefault(topic.name, []).append(moved)
                planned += 1
        is_over = walk.place >= len(walk.keys)
        if is_over:
            del self._walks[walk.walk_id]
        return m.PlanBrokerDrainResponse(
            topics=tuple([m.ReassignableTopic(name, tuple(partitions)) for name, partitions in topics.items()]),
            replicas=replicas,
            leaving=leaving,
            next_cursor=None if is_over else walk.cursor,
        )

    def _walk(self, broker_id: int, cursor: m.DrainCursor | None) -> _Walk:
        walk = None if cursor is None else self._walks.pop(cursor.walk_id, None)
        if walk is None or walk.cursor != cursor or walk.broker_id != broker_id:
            self._last_walk_id += 1
            walk = _Walk(self._last_walk_id, broker_id, list(self._image.partitions_of_broker(broker_id)))
        self._walks[walk.walk_id] = walk
        if len(self._walks) > WALKS_MAX:
            del self._walks[next(iter(self._walks))]
        return walk


def _stuck(topic: TopicState, partition: int, broker_id: int, needed: int, replicas: int) -> m.PlanBrokerDrainResponse:
    return m.PlanBrokerDrainResponse(
        error_code=ErrorCode.INVALID_REPLICATION_FACTOR,
        error_message=f"partition {partition} of topic {topic.name!r} needs {needed} brokers, but no other broker "
        f"can replace broker {broker_id}; add a broker or unfence one",
        replicas=replicas,
    )


class _Plan:
    """One plan: chooses replacements by the brokers' loads, which it updates as partitions are planned."""

    def __init__(self, image: MetadataImage, broker_id: int, topic_loads: dict[bytes, Counter[int]]) -> None:
        """Args: topic_loads: replica counts per topic and broker, as counted and planned by earlier plans of the same
        walk."""
        brokers = image.brokers
        self._racks = {each: broker.rack or "" for each, broker in brokers.items()}
        self._leader_services = {each for each, broker in brokers.items() if broker.is_leader_role}
        self._candidates = {each for each, broker in brokers.items() if broker.can_lead and each != broker_id}
        self._broker_id = broker_id
        self._load = Counter({each: len(image.partitions_of_broker(each)) for each in self._candidates})
        self._topic_loads = topic_loads

    def is_stuck(self, target: Collection[int]) -> bool:
        """Return whether no broker can replace the drained one in a partition with these target replicas."""
        return self._candidates <= set(target)

    def replace_broker(self, topic_id: bytes, target: Sequence[int]) -> tuple[int, ...]:
        """Return the target replicas with the drained broker replaced. `count_load` must have counted the topic. A
        leader service may move to the front (see the module)."""
        place = target.index(self._broker_id)
        others = [replica for replica in target if replica != self._broker_id]
        of_topic = self._topic_loads[topic_id]
        used = Counter(self._racks.get(replica, "") for replica in others)
        best = min(
            self._candidates.difference(others),
            key=lambda each: (
                used[self._racks[each]],
                place == 0 and each not in self._leader_services,
                of_topic[each],
                self._load[each],
                each,
            ),
        )
        self._load[best] += 1
        of_topic[best] += 1
        if place or best in self._leader_services or not others:
            return (*others[:place], best, *others[place:])
        first = next((replica for replica in others if replica in self._leader_services), others[0])
        return (first, *[replica for replica in others if replica != first], best)

    def count_load(self, topic: TopicState) -> int:
        """Count each broker's replicas of the topic once per walk; large topics are sampled. Return the number of
        partitions examined, or 0 if the topic was counted before."""
        if topic.topic_id in self._topic_loads:
            return 0
        step = len(topic.partitions) // CHECKED_MAX + 1
        some = list(islice(topic.partitions.values(), 0, None, step))
        load = Counter(replica for state in some for replica in target_replicas(state))
        self._topic_loads[topic.topic_id] = Counter({broker: count * step for broker, count in load.items()})
        return len(some)


def unregister_broker(
    controller: ControllerState, request: m.UnregisterBrokerRequest
) -> Decision[m.UnregisterBrokerResponse]:
    """Decide UnregisterBroker: remove a stopped broker without replicas, and its dynamic configuration.

    Error codes: BROKER_ID_NOT_REGISTERED, POLICY_VIOLATION (the broker has replicas), INVALID_REQUEST (it is running).
    """
    image = controller.image
    broker = image.brokers.get(request.broker_id)
    if broker is None:
        return _error(ErrorCode.BROKER_ID_NOT_REGISTERED, f"broker {request.broker_id} is not registered")
    replicas = len(image.partitions_of_broker(broker.broker_id))
    if replicas:
        text = f"broker {broker.broker_id} still has {replicas} replicas: drain it first"
        return _error(ErrorCode.POLICY_VIOLATION, text)
    if not broker.fenced or controller.sessions.is_confirmed(broker.broker_id):
        return _error(ErrorCode.INVALID_REQUEST, f"broker {broker.broker_id} is running: stop it first")
    # Kafka keeps them, so a new broker with that id would inherit an old throttle.
    name = str(broker.broker_id)
    forgotten = [ConfigRecord(BROKER_RESOURCE, name, key, None) for key in image.broker_config(name)]
    records = (*forgotten, UnregisterBrokerRecord(broker.broker_id, broker.broker_epoch))
    return Decision(records, m.UnregisterBrokerResponse())


def _error(code: ErrorCode, text: str) -> Decision[m.UnregisterBrokerResponse]:
    return Decision((), m.UnregisterBrokerResponse(error_code=code, error_message=text))
