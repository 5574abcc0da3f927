"""A broker failure: decisions of the active controller and their cost, by event and by record (630-16, 630-18).

Controller and metadata image are the production ones. Fencing depends only on partitions of the failing brokers, so the
image has these and all brokers; the decision equals that of the whole cluster. Network traffic is computed: a batch per
replica, a Fetch response per observer.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kipmesh import messages as m
from kipmesh.core import record_batch
from kipmesh.core.config import ControllerConfig
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.controller import MetadataController
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, MetadataDelta, MetadataImage
from kipmesh.messages.proto import encode
from kipmesh_jobs.plan.sizes import Task, binomial

WAYS = ("event", "record")
FAILURES = (1, 3)
_EPOCH = 1
_CONTROLLER = 1_000_000
_CONFIG = {
    "node.id": _CONTROLLER,
    "cluster.id": "plan",
    "controller.quorum.voters": f"{_CONTROLLER}@127.0.0.1:19093",
    "metadata.log.dir": "unused",
}


def make_image(brokers: int, failing: int, held: int, replication_factor: int, rng: Random) -> MetadataImage:
    """Return a metadata image with all brokers and `failing * held` topics of one partition. Each of the first
    `failing` brokers has a replica of `held` of these partitions; all replicas are in sync.
    """
    image, delta = MetadataImage(), MetadataDelta()
    directories = [rng.randbytes(16) for _ in range(brokers)]
    image.apply(r.FeatureLevelRecord(r.METADATA_VERSION, r.METADATA_VERSION_LEVEL), delta)
    for broker in range(brokers):
        end_points = (r.BrokerEndpoint("MESH", f"broker-{broker}", 9092),)
        image.apply(r.RegisterBrokerRecord(broker, False, rng.randbytes(16), broker, end_points, fenced=False), delta)
    for number in range(failing * held):
        topic_id = rng.randbytes(16)
        image.apply(r.TopicRecord(f"topic-{number}", topic_id), delta)
        replicas = _replicas(number // held, brokers, replication_factor, number % replication_factor, rng)
        placed = tuple(directories[replica] for replica in replicas)
        image.apply(r.PartitionRecord(0, topic_id, replicas, replicas, (), (), replicas[0], 0, 0, 0, placed), delta)
    image.offset, image.epoch = image.partition_count + failing * held + brokers, _EPOCH
    return image


def _replicas(holder: int, brokers: int, count: int, place: int, rng: Random) -> tuple[int, ...]:
    """Return `count` distinct brokers. `holder` is at index `place`; the others are random. The broker at index 0 is
    the leader.
    """
    others: list[int] = []
    while len(others) < count - 1:
        other = rng.randrange(brokers)
        if other != holder and other not in others:
            others.append(other)
    others.insert(place, holder)
    return tuple(others)


class Ledger:
    """Counts the records and bytes of decisions, and applies them to a metadata image as a replica does.

    `values_bytes` are the encoded records, `batch_bytes` the record batches, `response_bytes` one Fetch response per
    batch.
    """

    def __init__(self, image: MetadataImage) -> None:
        self._image = image
        self.records = self.values_bytes = self.batch_bytes = self.response_bytes = 0

    def take(self, records: Sequence[r.Record]) -> None:
        """Count these records as one batch and apply it to the image."""
        image = self._image
        values = [r.encode_record(record) for record in records]
        batch = record_batch.build(
            [(None, value) for value in values], base_offset=image.offset + 1, leader_epoch=_EPOCH, timestamp_ms=1
        )
        end = image.offset + 1
        partition = m.PartitionData(0, 0, end, end, 0, records=batch)
        topic = m.FetchableTopicResponse(CLUSTER_METADATA_TOPIC, CLUSTER_METADATA_TOPIC_ID, [partition])
        self.records += len(records)
        self.values_bytes += sum(map(len, values))
        self.batch_bytes += len(batch)
        self.response_bytes += len(encode(m.FetchResponse(responses=[topic])))
        for _ in image.replay_steps(batch, MetadataDelta()):
            pass


def fail(way: str, brokers: int, failing: int, held: int, replication_factor: int, rng: Random) -> dict[str, float]:
    """Simulate a simultaneous failure of the first `failing` brokers; return its figures by name.

    The controller fences the brokers (`way` is `event` or `record`), then handles one heartbeat of every other broker.
    `partitions` counts those with a failed replica, `sent_*` are bytes to all other brokers together, `proof_*` are
    records and bytes that the heartbeats cause. Other figures are records, or bytes at one replica.
    """
    image = make_image(brokers, failing, held, replication_factor, rng)
    controller = MetadataController(ControllerConfig.parse(_CONFIG), image, lambda: b"")
    if way == "event":
        Ledger(image).take(controller.activate(0))
    fallen = list(range(failing))
    touched = {key for broker in fallen for key in image.partitions_of_broker(broker)}
    ledger, proofs = Ledger(image), Ledger(image)
    for number in range(failing):
        ledger.take(controller.brokers.fence(fallen[number:]))
    for broker_id, broker in image.brokers.items():
        if broker_id >= failing:
            heartbeat = m.BrokerHeartbeatRequest(broker_id, broker.broker_epoch, image.offset)
            decisions = controller.heartbeat(heartbeat, 1, image.offset + 1).records
            if decisions:
                proofs.take(decisions)
    observers = brokers - failing
    return {
        "partitions": len(touched),
        "records": ledger.records,
        "record_bytes": ledger.values_bytes / max(ledger.records, 1),
        "replica_bytes": ledger.values_bytes,
        "batch_bytes": ledger.batch_bytes,
        "sent_bytes": ledger.values_bytes * observers,
        "sent_as_responses_bytes": ledger.response_bytes * observers,
        "proof_records": proofs.records,
        "proof_sent_bytes": proofs.response_bytes * observers,
    }


def case_of(way: str, failing: int) -> str:
    """Return the name of a case, `WAY:FAILING`, such as `event:3`."""
    return f"{way}:{failing}"


def sample(task: Task) -> dict[str, float]:
    """Simulate a failure in the planned cluster. Each broker has a random number of replicas. Returns the figures of
    `fail`.
    """
    way, failing = task.case.split(":")
    sizes, rng = task.sizes, task.rng()
    held = max(binomial(rng, sizes.partitions, sizes.replication_factor / sizes.brokers), 1)
    return fail(way, sizes.brokers, int(failing), held, sizes.replication_factor, rng)


def sample_seed(task: Task) -> dict[str, float]:
    """Simulate the failure of one broker in the proposal's cluster: 100,000 topics of ten partitions, three replicas,
    100 brokers with 30,000 replicas each. Returns the figures of `fail`.
    """
    return fail(task.case, 100, 1, 100_000 * 10 * 3 // 100, 3, task.rng())
