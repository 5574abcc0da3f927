"""Shared parts of the controller's decisions: inputs, results, and limits on values from requests.

A decision is a function of the controller and a request. It returns the records to append as one batch and the response
to send once they are durable. It changes nothing itself: the image changes only by applying the records.

Invariants: a value that passes the checks can be encoded; an error names the field and quotes only the start of a large
value.
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
"""Returns whether a broker may be elected: `MetadataImage.can_lead`, or with exceptions."""
UNCLEAN_LEADER_ELECTION = "unclean.leader.election.enable"
_TRUE = frozenset({"true", "1", "on", "t", "y", "yes"})  # the strings that TopicConfig parses as true

NAME_LENGTH_MAX = 255
"""Maximum characters of names of listeners, hosts, features, racks and users."""
NAME_RULE = f"at most {NAME_LENGTH_MAX} characters and no NUL"
ERROR_LENGTH_MAX = 500
"""Maximum characters of an error message in a response, without the `...` that marks a truncated one."""


class Decision(NamedTuple, Generic[Response]):
    """Records to append as one batch, and the response to send once they are durable."""

    records: Sequence[Record]
    response: Response


class ControllerState:
    """Inputs of decisions: configuration, image and broker sessions. `new_topic_id` returns a random topic id (16
    bytes)."""

    def __init__(self, config: ControllerConfig, image: MetadataImage, new_topic_id: Callable[[], bytes]) -> None:
        self.config = config
        self.image = image
        self.new_topic_id = new_topic_id
        self.sessions = BrokerSessions(config.broker_session_timeout_ms, config.broker_connection_loss_timeout_ms)

    def unclean_allowed(self, topic_name: str) -> bool:
        """Return the topic's `unclean.leader.election.enable`, or the controller's own value if the topic does not set
        it."""
        value = self.image.topic_config(topic_name).get(UNCLEAN_LEADER_ELECTION)
        return self.config.unclean_leader_election_enable if value is None else value.lower() in _TRUE


def find_topic(image: MetadataImage, name: str) -> TopicState:
    """Return the topic with this name. Raises KafkaError(UNKNOWN_TOPIC_OR_PARTITION) if it does not exist."""
    topic = image.topic_by_name(name)
    if topic is None:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name!r} does not exist")
    return topic


def find_partition(image: MetadataImage, topic_name: str, partition: int) -> tuple[PartitionKey, PartitionState]:
    """Return (key, state) of a partition by topic name. Raises KafkaError(UNKNOWN_TOPIC_OR_PARTITION) if the topic or
    partition does not exist."""
    topic = find_topic(image, topic_name)
    state = topic.partitions.get(partition)
    if state is None:
        text = f"partition {partition} of topic {topic_name!r} does not exist"
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, text)
    return (topic.topic_id, partition), state


def check_replicas(image: MetadataImage, replicas: Sequence[int]) -> None:
    """Raise KafkaError(INVALID_REPLICA_ASSIGNMENT) unless there is at least one replica and all are distinct,
    registered brokers.

    Fenced brokers are allowed, because they may return.
    """
    if not replicas:
        raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, "a partition needs at least one replica")
    if len(set(replicas)) != len(replicas):
        raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"replicas {list(replicas)} name a broker twice")
    for broker_id in replicas:
        if broker_id not in image.brokers:
            raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"broker {broker_id} is not registered")


def is_registered(image: MetadataImage, broker_id: int, broker_epoch: int) -> bool:
    """Return whether the broker is registered with this broker epoch; if not, callers return STALE_BROKER_EPOCH."""
    broker = image.brokers.get(broker_id)
    return broker is not None and broker.broker_epoch == broker_epoch


def error_text(message: str) -> str:
    """Return the error message, or its first ERROR_LENGTH_MAX characters and `...` if it is longer."""
    return message if len(message) <= ERROR_LENGTH_MAX else message[:ERROR_LENGTH_MAX] + "..."


def is_name(text: str) -> bool:
    """Return whether the text can be written as a name: at most NAME_LENGTH_MAX characters and no NUL."""
    return len(text) <= NAME_LENGTH_MAX and "\0" not in text
