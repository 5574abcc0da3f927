"""Brokers that leave for good: where their replicas go, and how they are unregistered.

A plan keeps the other replicas of each partition, in their order, and puts one broker in the place of the one that
leaves, by the rules of `placement`: first a rack with the fewest of the partition's replicas; in the place of a
preferred leader a leader service; then who has the fewest replicas of the topic, then of all. When only follower
services are left to take a preferred leader's place, the next replica that is a leader service moves to the front, or
else simply the next. Brokers that are fenced or shutting down take nothing.

A plan changes nothing: AlterPartitionReassignments does. It names at most PLANNED_MAX partitions and looks at about
LOOKED_MAX, so that it is a short step of the controller. Whoever drains a broker goes on behind the cursor of the last
plan until there is none, and begins again for what was refused or came meanwhile.

UnregisterBroker is stricter than Kafka's, which forgets a broker that runs or that has replicas: those would stay
assigned to nobody, and a partition whose last in-sync replica that is would never come back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import islice

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.decision import ControllerState, Decision
from kipmesh.core.metadata.image import BROKER_RESOURCE, MetadataImage
from kipmesh.core.metadata.reassignments import target_replicas
from kipmesh.core.metadata.records import ConfigRecord, UnregisterBrokerRecord
from kipmesh.core.metadata.states import PartitionKey, TopicState

PLANNED_MAX = 200
"""Most partitions of one plan."""
LOOKED_MAX = 1000
"""Most partitions that are looked at for one plan, those of topics whose loads are counted among them."""
WALKS_MAX = 32
"""Walks that are remembered; who goes on with one that is forgotten, or another controller's, begins again."""


class _Walk:
    """One walk over a broker's replicas, from plan to plan."""

    def __init__(self, walk_id: int, broker_id: int, keys: Collection[PartitionKey]) -> None:
        self.walk_id = walk_id
        self.broker_id = broker_id
        self.keys = list(keys)
        self.place = 0
        self.cursor: m.DrainCursor | None = None
        """Names the last partition before `place` that there was."""
        self.topic_loads: dict[bytes, Counter[int]] = {}


class Drains:
    """Answers PlanBrokerDrain from an image. It remembers where each walk stopped, so that all of a drain is O(n)."""

    def __init__(self, image: MetadataImage) -> None:
        self._image = image
        self._walks: dict[int, _Walk] = {}
        """By their ids, those that were used last at the end."""
        self._last_walk_id = 0

    def plan(self, request: m.PlanBrokerDrainRequest) -> m.PlanBrokerDrainResponse:
        """Where some of a broker's replicas could go; an error when one of them has nowhere to go."""
        image, broker_id = self._image, request.broker_id
        replicas = len(image.partitions_of_broker(broker_id))
        if broker_id not in image.brokers and not replicas:
            text = f"broker {broker_id} is not registered"
            return m.PlanBrokerDrainResponse(error_code=ErrorCode.BROKER_ID_NOT_REGISTERED, error_message=text)
        walk = self._walk(broker_id, request.cursor)
        plan = _Plan(image, broker_id, walk.topic_loads)
        topics: dict[str, list[m.ReassignablePartition]] = {}
        looked = planned = leaving = 0
        while walk.place < len(walk.keys) and looked < LOOKED_MAX and planned < PLANNED_MAX:
            topic_id, partition = walk.keys[walk.place]
            walk.place += 1
            looked += 1
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
                looked += plan.count_load(topic)
                asked = m.ReassignablePartition(partition, plan.moved(topic_id, target))
                topics.setdefault(topic.name, []).append(asked)
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
            walk = _Walk(self._last_walk_id, broker_id, self._image.partitions_of_broker(broker_id))
        self._walks[walk.walk_id] = walk
        if len(self._walks) > WALKS_MAX:
            del self._walks[next(iter(self._walks))]
        return walk


def _stuck(topic: TopicState, partition: int, broker_id: int, needed: int, replicas: int) -> m.PlanBrokerDrainResponse:
    return m.PlanBrokerDrainResponse(
        error_code=ErrorCode.INVALID_REPLICATION_FACTOR,
        error_message=f"partition {partition} of topic {topic.name!r} needs {needed} brokers, and without "
        f"broker {broker_id} there are {needed - 1} of its own and no other to take its place",
        replicas=replicas,
    )


class _Plan:
    """The loads, as they grow while partitions are planned."""

    def __init__(self, image: MetadataImage, broker_id: int, topic_loads: dict[bytes, Counter[int]]) -> None:
        """`topic_loads` have what the plans before this one of the same walk counted and gave."""
        self._brokers = image.brokers
        takers = [broker for broker in image.brokers.values() if broker.can_lead and broker.broker_id != broker_id]
        self._takers = takers
        self._broker_id = broker_id
        self._load = Counter({one.broker_id: len(image.partitions_of_broker(one.broker_id)) for one in takers})
        self._topic_loads = topic_loads

    def is_stuck(self, target: Collection[int]) -> bool:
        """Whether no broker can take the place of the one that leaves."""
        return len(self._takers) < len(target) and all(taker.broker_id in target for taker in self._takers)

    def moved(self, topic_id: bytes, target: Sequence[int]) -> tuple[int, ...]:
        """The replicas of a partition, whose topic's load was counted, with another in the place of the broker."""
        place = target.index(self._broker_id)
        others = [replica for replica in target if replica != self._broker_id]
        of_topic = self._topic_loads[topic_id]
        used = Counter(self._rack(replica) for replica in others)
        taker = min(
            (one for one in self._takers if one.broker_id not in others),
            key=lambda one: (
                used[one.rack or ""],
                place == 0 and not one.is_leader_role,
                of_topic[one.broker_id],
                self._load[one.broker_id],
                one.broker_id,
            ),
        )
        self._load[taker.broker_id] += 1
        of_topic[taker.broker_id] += 1
        if place or taker.is_leader_role or not others:
            return (*others[:place], taker.broker_id, *others[place:])
        first = next((replica for replica in others if self._is_leader_role(replica)), others[0])
        return (first, *[replica for replica in others if replica != first], taker.broker_id)

    def count_load(self, topic: TopicState) -> int:
        """Once in a walk: each broker's replicas of the topic. Of a huge topic every so manieth partition is counted.

        Returns how many were.
        """
        if topic.topic_id in self._topic_loads:
            return 0
        step = len(topic.partitions) // LOOKED_MAX + 1
        some = list(islice(topic.partitions.values(), 0, None, step))
        load = Counter(replica for state in some for replica in target_replicas(state))
        self._topic_loads[topic.topic_id] = Counter({broker: count * step for broker, count in load.items()})
        return len(some)

    def _rack(self, broker_id: int) -> str:
        broker = self._brokers.get(broker_id)
        return "" if broker is None else broker.rack or ""

    def _is_leader_role(self, broker_id: int) -> bool:
        broker = self._brokers.get(broker_id)
        return broker is not None and broker.is_leader_role


def unregister_broker(
    controller: ControllerState, request: m.UnregisterBrokerRequest
) -> Decision[m.UnregisterBrokerResponse]:
    """UnregisterBroker: forget a broker that is stopped and has no replica, and its dynamic configuration."""
    image = controller.image
    broker = image.brokers.get(request.broker_id)
    if broker is None:
        return _refused(ErrorCode.BROKER_ID_NOT_REGISTERED, f"broker {request.broker_id} is not registered")
    replicas = len(image.partitions_of_broker(broker.broker_id))
    if replicas:
        text = f"broker {broker.broker_id} still has {replicas} replicas: drain it first"
        return _refused(ErrorCode.POLICY_VIOLATION, text)
    if not broker.fenced or controller.sessions.has_heard(broker.broker_id):
        return _refused(ErrorCode.INVALID_REQUEST, f"broker {broker.broker_id} is running: stop it first")
    # Kafka leaves them, and a new broker with that id would inherit a throttle that nobody remembers.
    name = str(broker.broker_id)
    forgotten = [ConfigRecord(BROKER_RESOURCE, name, key, None) for key in image.broker_config(name)]
    records = (*forgotten, UnregisterBrokerRecord(broker.broker_id, broker.broker_epoch))
    return Decision(records, m.UnregisterBrokerResponse())


def _refused(code: ErrorCode, text: str) -> Decision[m.UnregisterBrokerResponse]:
    return Decision((), m.UnregisterBrokerResponse(error_code=code, error_message=text))
