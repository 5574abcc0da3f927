"""Brokers that leave for good: where their replicas go, and how they are unregistered.

A plan keeps the other replicas of each partition, in their order, and puts one broker in the place of the one that
leaves, by the rules of `placement`: first a rack with the fewest of the partition's replicas; in the place of a
preferred leader a leader service; then who has the fewest replicas of the topic, then of all. When only follower
services are left to take a preferred leader's place, the next replica that is a leader service moves to the front, or
else simply the next. Brokers that are fenced or shutting down take nothing.

A plan changes nothing: AlterPartitionReassignments does. It names PLANNED_MAX partitions at most, so that it is a short
step of the controller; whoever drains a broker asks again until all replicas are leaving.

UnregisterBroker is stricter than Kafka's, which forgets a broker that runs or that has replicas: those would stay
assigned to nobody, and a partition whose last in-sync replica that is would never come back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kipmesh.core.errors import ErrorCode
from kipmesh.core.messages import (
    PlanBrokerDrainRequest,
    PlanBrokerDrainResponse,
    ReassignablePartition,
    ReassignableTopic,
    UnregisterBrokerRequest,
    UnregisterBrokerResponse,
)
from kipmesh.core.metadata.decision import Decision
from kipmesh.core.metadata.image import BROKER_RESOURCE, MetadataImage
from kipmesh.core.metadata.reassignments import target_replicas
from kipmesh.core.metadata.records import ConfigRecord, UnregisterBrokerRecord
from kipmesh.core.metadata.states import BrokerState, TopicState

PLANNED_MAX = 200
"""Most partitions of one plan."""


def plan_drain(image: MetadataImage, request: PlanBrokerDrainRequest) -> PlanBrokerDrainResponse:
    """Where the replicas of a broker could go, some at a time; an error when one of them has nowhere to go."""
    broker_id = request.broker_id
    keys = sorted(image.partitions_of_broker(broker_id))
    if broker_id not in image.brokers and not keys:
        text = f"broker {broker_id} is not registered"
        return PlanBrokerDrainResponse(error_code=ErrorCode.BROKER_ID_NOT_REGISTERED, error_message=text)
    takers = [broker for broker in image.brokers.values() if broker.can_lead and broker.broker_id != broker_id]
    staying = []
    for key in keys:
        topic = image.topics[key[0]]
        target = target_replicas(topic.partitions[key[1]])
        if broker_id not in target:
            continue
        if all(taker.broker_id in target for taker in takers):
            return PlanBrokerDrainResponse(
                error_code=ErrorCode.INVALID_REPLICATION_FACTOR,
                error_message=f"partition {key[1]} of topic {topic.name!r} needs {len(target)} brokers, and without "
                f"broker {broker_id} there are {len(target) - 1} of its own and no other to take its place",
                replicas=len(keys),
            )
        staying.append((topic, key[1], target))
    plan = _Plan(image, takers, broker_id)
    topics: dict[str, list[ReassignablePartition]] = {}
    for topic, partition, target in staying[:PLANNED_MAX]:
        replicas = plan.moved(topic, target)
        topics.setdefault(topic.name, []).append(ReassignablePartition(partition, replicas))
    return PlanBrokerDrainResponse(
        topics=tuple([ReassignableTopic(name, tuple(partitions)) for name, partitions in topics.items()]),
        replicas=len(keys),
        leaving=len(keys) - len(staying),
    )


class _Plan:
    """The loads, as they grow while partitions are planned."""

    def __init__(self, image: MetadataImage, takers: Sequence[BrokerState], broker_id: int) -> None:
        self._brokers = image.brokers
        self._takers = takers
        self._broker_id = broker_id
        self._load = Counter({one.broker_id: len(image.partitions_of_broker(one.broker_id)) for one in takers})
        self._topic_load: dict[str, Counter[int]] = {}

    def moved(self, topic: TopicState, target: Sequence[int]) -> tuple[int, ...]:
        """The replicas of a partition with another broker in the place of the one that leaves."""
        place = target.index(self._broker_id)
        others = [replica for replica in target if replica != self._broker_id]
        of_topic = self._load_of(topic)
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

    def _load_of(self, topic: TopicState) -> Counter[int]:
        found = self._topic_load.get(topic.name)
        if found is None:
            found = Counter(replica for state in topic.partitions.values() for replica in target_replicas(state))
            self._topic_load[topic.name] = found
        return found

    def _rack(self, broker_id: int) -> str:
        broker = self._brokers.get(broker_id)
        return "" if broker is None else broker.rack or ""

    def _is_leader_role(self, broker_id: int) -> bool:
        broker = self._brokers.get(broker_id)
        return broker is not None and broker.is_leader_role


def unregister(
    image: MetadataImage, request: UnregisterBrokerRequest, *, is_running: bool
) -> Decision[UnregisterBrokerResponse]:
    """Forget a broker that is stopped and has no replica, and its dynamic configuration.

    `is_running` says whether it was heard of lately.
    """
    broker = image.brokers.get(request.broker_id)
    if broker is None:
        return _refused(ErrorCode.BROKER_ID_NOT_REGISTERED, f"broker {request.broker_id} is not registered")
    replicas = len(image.partitions_of_broker(broker.broker_id))
    if replicas:
        text = f"broker {broker.broker_id} still has {replicas} replicas: drain it first"
        return _refused(ErrorCode.POLICY_VIOLATION, text)
    if is_running or not broker.fenced:
        return _refused(ErrorCode.INVALID_REQUEST, f"broker {broker.broker_id} is running: stop it first")
    # Kafka leaves them, and a new broker with that id would inherit a throttle that nobody remembers.
    name = str(broker.broker_id)
    forgotten = [ConfigRecord(BROKER_RESOURCE, name, key, None) for key in image.broker_config(name)]
    records = (*forgotten, UnregisterBrokerRecord(broker.broker_id, broker.broker_epoch))
    return Decision(records, UnregisterBrokerResponse())


def _refused(code: ErrorCode, text: str) -> Decision[UnregisterBrokerResponse]:
    return Decision((), UnregisterBrokerResponse(error_code=code, error_message=text))
