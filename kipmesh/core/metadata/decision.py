"""What the controller's decisions share: what they read, what they return, and limits on what requests may write.

A decision is a function of the controller and a request. It returns the records to append (one batch) and the response
that may be sent when they are durable. It changes nothing: the image follows from the records alone.

Everything in a record comes from the image, the controller or a request; the limits are for the last. Invariant: a
value that passes can be encoded; an error names the field and quotes little of a large value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from kipmesh.core.config import ControllerConfig
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.metadata.image import MetadataImage, PartitionKey, PartitionState, TopicState
from kipmesh.core.metadata.records import Record
from kipmesh.core.metadata.sessions import BrokerSessions

Response = TypeVar("Response")

CanLead = Callable[[int], bool]
"""Whether a broker may be elected, as `MetadataImage.can_lead` or with exceptions."""
UNCLEAN_LEADER_ELECTION = "unclean.leader.election.enable"
_TRUE = frozenset({"true", "1", "on", "t", "y", "yes"})  # what TopicConfig reads as true

NAME_LENGTH_MAX = 255
"""Characters of names of listeners, hosts, features, racks and users."""
REFUSAL_LENGTH_MAX = 500
"""Characters of an error's text in a response."""


class Decision(NamedTuple, Generic[Response]):
    """Records that hold together (one batch), and the response that may be sent when they are durable."""

    records: Sequence[Record]
    response: Response


class ControllerState:
    """What decisions read."""

    def __init__(self, config: ControllerConfig, image: MetadataImage, new_topic_id: Callable[[], bytes]) -> None:
        self.config = config
        self.image = image
        self.new_topic_id = new_topic_id
        self.sessions = BrokerSessions(config.broker_session_timeout_ms, config.broker_connection_loss_timeout_ms)

    def unclean_allowed(self, topic_name: str) -> bool:
        """The topic's `unclean.leader.election.enable`, by default the controller's own."""
        value = self.image.topic_config(topic_name).get(UNCLEAN_LEADER_ELECTION)
        return self.config.unclean_leader_election_enable if value is None else value.lower() in _TRUE


def find_topic(image: MetadataImage, name: str) -> TopicState:
    """The topic of that name; raises KafkaError(UNKNOWN_TOPIC_OR_PARTITION)."""
    topic = image.topic_by_name(name)
    if topic is None:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"no topic {name!r}")
    return topic


def find_partition(image: MetadataImage, topic_name: str, partition: int) -> tuple[PartitionKey, PartitionState]:
    """The partition of the topic of that name; raises KafkaError(UNKNOWN_TOPIC_OR_PARTITION)."""
    topic = image.topic_by_name(topic_name)
    state = None if topic is None else topic.partitions.get(partition)
    if topic is None or state is None:
        what = f"topic {topic_name!r}" if topic is None else f"partition {partition} of topic {topic_name!r}"
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no {what}")
    return (topic.topic_id, partition), state


def check_replicas(image: MetadataImage, replicas: Sequence[int]) -> None:
    """Kafka's rules: not empty, each broker once and registered. Fenced ones may be named: they may come back."""
    if not replicas:
        raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, "a partition has at least one replica")
    if len(set(replicas)) != len(replicas):
        raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"{list(replicas)} has a broker twice")
    for broker_id in replicas:
        if broker_id not in image.brokers:
            raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"broker {broker_id} is not registered")


def is_registered(image: MetadataImage, broker_id: int, broker_epoch: int) -> bool:
    """Whether this is the broker's current registration; otherwise the error is STALE_BROKER_EPOCH."""
    broker = image.brokers.get(broker_id)
    return broker is not None and broker.broker_epoch == broker_epoch


def refusal(message: str) -> str:
    """The text of an error in a response: it may quote the request, but not all of a large one."""
    return message if len(message) <= REFUSAL_LENGTH_MAX else message[:REFUSAL_LENGTH_MAX] + "..."


def is_name(text: str) -> bool:
    """Whether a record has room for the name."""
    return len(text) <= NAME_LENGTH_MAX and "\0" not in text
