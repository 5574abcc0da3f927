"""The parts of a broker that its handlers use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kipmesh.core.config import BrokerConfig
from kipmesh.core.metadata.image import MetadataImage
from kipmesh.node.broker.fetch import FetchHandler
from kipmesh.node.broker.forwarder import Forwarder
from kipmesh.node.broker.groups import GroupsHandler
from kipmesh.node.broker.log_dirs import LogDirsHandler
from kipmesh.node.broker.metadata import MetadataHandler
from kipmesh.node.broker.offsets import OffsetsHandler
from kipmesh.node.broker.partitions import Partitions
from kipmesh.node.broker.produce import ProduceHandler
from kipmesh.node.broker.producer_ids import ProducerIdsHandler

if TYPE_CHECKING:
    from kipmesh.transport.faults import Faults


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerParts:
    """Made once per broker, before it listens."""

    config: BrokerConfig
    image: Callable[[], MetadataImage]
    """The metadata that the broker acts on."""
    partitions: Partitions
    produce: ProduceHandler
    producer_ids: ProducerIdsHandler
    fetch: FetchHandler
    offsets: OffsetsHandler
    metadata: MetadataHandler
    log_dirs: LogDirsHandler
    groups: GroupsHandler
    forwarder: Forwarder
    faults: Faults | None
    """Faults for tests; None unless `fault.injection.enable`."""

    @property
    def responders(self) -> tuple[object, ...]:
        """The parts whose coroutines respond to the APIs of their names, unless `handlers` has one."""
        return self.groups, self.offsets, self.producer_ids, self.fetch
