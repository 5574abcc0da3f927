"""Checks the rules of replication safety (REP, 392-10) after every step of a broker.

- Records below a leader's high watermark are committed: later leaders and all ISR members have them, and replicas have
  nothing else below their high watermark. Two losses are permitted: when no clean ISR member is left, the longest log
  of the last ISR is elected; and unclean elections of topics that enable them.
- Records acknowledged with acks=all are committed on at least min.insync.replicas, and exist at the end.
- A leader epoch has one leader, elected from the ISR. Leader and partition epochs rise. High watermarks of a replica
  never decrease within a leader epoch. A recovered log has all durable records, after a kill all records.
- A consumer receives committed records once and in order. Resets and truncations are reported only for lost records.
- After the last fault, all partitions recover.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kipmesh.broker.membership.lifecycle import BrokerLifecycle
from kipmesh.broker.replication.hosted_replicas import HostedReplicas
from kipmesh.broker.replication.replica import Replica
from kipmesh.client.consumer.rules.reader import PartitionReader
from kipmesh.client.consumer.rules.values import OffsetReset, RaiseError, TruncationFound
from kipmesh.core import record_batch
from kipmesh.core.metadata.elections import RECOVERING
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage, PartitionState
from kipmesh.core.metadata.states import is_lost
from kipmesh.messages import ProduceRequest, ProduceResponse
from kipmesh.storage.log_manager import LogManager
from simulation.engine import Engine
from simulation.replicas.settings import TOPIC, Settings
from simulation.replicas.shadow import NOTHING_SURVIVES, CommittedLog, Entry, Loss, Shadow, content

ReplicaKey = tuple[int, int]
"""Broker id and partition."""


class ReplicaState(NamedTuple):
    """State of a replica at one check."""

    log_end: int
    generation: int
    high_watermark: int
    leader_high_watermark: int
    leader_epoch: int
    is_leader: bool


class Reading(Protocol):
    """The parts of a consumer that the checker needs."""

    name: str
    partition: int
    reader: PartitionReader
    high_watermark: int
    """The highest received high watermark."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """The parts of a running broker process that the checker needs."""

    node_id: int
    manager: LogManager
    hosted_replicas: HostedReplicas
    lifecycle: BrokerLifecycle


class Checker:
    """Checks the rules in the module docstring. `check_` methods raise InvariantError."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self.counts = engine.counts
        self.fail = engine.fail
        self.settings = settings
        self.image = MetadataImage()
        """Image of the committed metadata."""
        self.brokers: dict[int, Hosted] = {}
        """Running processes by broker id."""
        self.committed = [CommittedLog() for _ in range(settings.partitions)]
        self.shadows: defaultdict[ReplicaKey, Shadow] = defaultdict(Shadow)
        self.stored: defaultdict[ReplicaKey, set[tuple[int, Entry]]] = defaultdict(set)
        """All records that a broker ever stored."""
        self.durable: dict[ReplicaKey, int] = {}
        """End offsets that the next loaded log must reach."""
        self.last_states: dict[ReplicaKey, ReplicaState] = {}
        self.committed_ms = 0.0
        """Time of the last commit."""

    # -- metadata

    def state(self, partition: int) -> PartitionState | None:
        """Return the committed metadata of a partition, or None if it does not exist."""
        return self.image.partition(self.settings.topic_id, partition)

    def commit_metadata(self, batch: bytes) -> None:
        """Apply a committed metadata batch to the checker's image, and check the changed partitions.

        Raises InvariantError.
        """
        counts, delta = self.counts, MetadataDelta()
        topic = self.image.topics.get(self.settings.topic_id)
        before = dict(topic.partitions) if topic is not None else {}
        self.image.replay(batch, delta)
        for _, partition in sorted(delta.changed_partitions):
            state, old = self.state(partition), before.get(partition)
            if state is None or old is None:
                continue
            if state.partition_epoch <= old.partition_epoch or state.leader_epoch < old.leader_epoch:
                self.fail(f"partition {partition}: an epoch decreased: {old} -> {state}")
            counts["ISR shrinks"] += len(state.isr) < len(old.isr)
            counts["ISR expansions"] += len(state.isr) > len(old.isr)
            if state.leader_epoch != old.leader_epoch and state.leader >= 0:
                self._elected(partition, old, state)
            if state.leader_epoch != old.leader_epoch and state.leader < 0:
                counts["partitions without leader"] += 1
            self._check_isr(partition)

    def _elected(self, partition: int, old: PartitionState, state: PartitionState) -> None:
        counts, committed = self.counts, self.committed[partition]
        counts["elections"] += 1
        # A loss permitted for an earlier leader that never started may happen with this one.
        survivable = min([committed.end, *committed.allowed.values()])
        if state.leader_recovery_state == RECOVERING and old.leader < 0:
            counts["unclean elections"] += 1
            if not self.settings.is_unclean:
                self.fail(f"partition {partition}: unclean election {old} -> {state}")
            survivable = NOTHING_SURVIVES
        elif not old.isr:
            counts["elections by log end"] += 1
            if state.leader not in old.last_isr:
                self.fail(f"partition {partition}: the leader is not from the last ISR: {old} -> {state}")
            survivable = max(self._common(member, partition) for member in old.last_isr)
        elif state.leader not in old.isr:
            self.fail(f"partition {partition}: the leader is not from the ISR: {old} -> {state}")
        committed.survivable[state.leader_epoch] = survivable
        if survivable < committed.end:
            committed.allowed[state.leader_epoch] = survivable

    def _common(self, broker_id: int, partition: int) -> int:
        """Return the offset up to which a broker's log matches the committed records."""
        committed, shadow = self.committed[partition], self.shadows[broker_id, partition]
        return shadow.matching_end(committed, min(shadow.end, committed.end))

    def _check_isr(self, partition: int) -> None:
        """Check that every ISR member has all records below the leader's high watermark."""
        state = self.state(partition)
        if state is None or state.leader < 0:
            return
        leader = self._replica(state.leader, partition)
        if leader is None or leader.leader is None or leader.leader_epoch != state.leader_epoch:
            return
        end = leader.high_watermark
        for member in state.isr:
            replica, broker = self._replica(member, partition), self.image.brokers.get(member)
            if replica is None or broker is None:
                continue
            is_current = self.brokers[member].lifecycle.broker_epoch == broker.broker_epoch
            if is_current and replica.log.log_end_offset < end:
                self.fail(
                    f"partition {partition}: log end {replica.log.log_end_offset} of broker {member} in the ISR "
                    f"{state.isr} is below the leader's high watermark {end}"
                )

    def _replica(self, broker_id: int, partition: int) -> Replica | None:
        broker = self.brokers.get(broker_id)
        return broker.hosted_replicas.get(self.settings.topic_id, partition) if broker is not None else None

    # -- brokers' processes

    def check_start(self, broker: Hosted) -> None:
        """Check that the logs of a started process have all records that `process_ended` expects."""
        self.brokers[broker.node_id] = broker
        for partition in range(self.settings.partitions):
            key = (broker.node_id, partition)
            self.last_states.pop(key, None)
            floor, before = self.durable.pop(key, 0), self.shadows.pop(key, Shadow())
            log = broker.manager.get(TOPIC, partition)
            if log is not None and not log.topic_id:
                log = None  # a power failure destroyed the topic id, so that the log is set aside
            now = self.shadows[key]
            now.generation = -1
            if log is not None:
                now.follow(log)
            now.may_differ_from = before.may_differ_from
            for offset in range(max(before.base, now.base), min(floor, before.end)):
                if offset >= now.end or now.entries[offset - now.base] != before.entries[offset - before.base]:
                    self.fail(f"broker {broker.node_id} lost durable offset {offset} of {partition} with end {now.end}")

    def process_ended(self, node_id: int, *, power: bool) -> None:
        """Record which records of a broker must survive the end of its process.

        After a power failure these are the durable records, otherwise all records. If no process ran, a power failure
        drops all expectations.
        """
        broker = self.brokers.pop(node_id, None)
        if broker is None:
            if power:
                self.disk_lost(node_id)
            return
        for (_, partition), log in broker.manager.logs.items():
            if log.failed is None and log.topic_id:  # logs without id are set aside, see `check_start`
                if not log.durability.generation & 1:
                    self.shadows[node_id, partition].follow(log)
                self.durable[node_id, partition] = log.recovery_point if power else log.log_end_offset

    def disk_lost(self, node_id: int) -> None:
        """Expect no records of this broker: its disk was replaced, or lost power while no process ran."""
        for partition in range(self.settings.partitions):
            self.durable.pop((node_id, partition), None)

    def check_replicas(self, broker: Hosted) -> list[tuple[ReplicaState, ReplicaState]]:
        """Check the replicas of a broker. Return pairs (state before, state now) of those that changed."""
        changes = []
        for replica in broker.hosted_replicas:
            if not replica.log.durability.generation & 1:
                before, now = self._check_changes(broker.node_id, replica)
                if before is not None and before != now:
                    changes.append((before, now))
        return changes

    def _check_changes(self, node_id: int, replica: Replica) -> tuple[ReplicaState | None, ReplicaState]:
        log, key = replica.log, (node_id, replica.partition)
        now = ReplicaState(
            log.log_end_offset,
            log.durability.generation,
            replica.high_watermark,
            replica.leader_high_watermark,
            replica.leader_epoch,
            replica.leader is not None,
        )
        before = self.last_states.get(key)
        if now != before:
            self.last_states[key] = now
            committed, shadow = self.committed[replica.partition], self.shadows[key]
            if before is not None:
                self._check_replica(node_id, replica.partition, before, now)
            if log.failed is None:
                self.stored[key].update(shadow.follow(log))
            if now.is_leader:
                self._check_leader(node_id, replica, shadow, committed)
            self._check_committed(node_id, replica, shadow, committed)
        return before, now

    def _check_replica(self, node_id: int, partition: int, before: ReplicaState, now: ReplicaState) -> None:
        committed = self.committed[partition]
        name = f"partition {partition} on broker {node_id}"
        if now.leader_epoch < before.leader_epoch:
            self.fail(f"{name}: leader epoch decreased from {before.leader_epoch} to {now.leader_epoch}")
        if now.generation != before.generation and now.log_end < before.log_end:
            self.counts["truncations"] += 1
            self.counts["records truncated"] += before.log_end - now.log_end
            if committed.loss_epoch < 0 and now.log_end < before.high_watermark:
                self.fail(f"{name}: truncated to {now.log_end}, below its high watermark {before.high_watermark}")
        if committed.loss_epoch >= 0:
            return
        if now.high_watermark < before.high_watermark:
            self.fail(f"{name}: high watermark decreased from {before.high_watermark} to {now.high_watermark}")
        is_same = (now.leader_epoch, now.is_leader) == (before.leader_epoch, before.is_leader)
        if is_same and now.leader_high_watermark < before.leader_high_watermark:
            self.fail(
                f"{name}: leader's high watermark decreased from {before.leader_high_watermark} "
                f"to {now.leader_high_watermark}"
            )

    def _check_leader(self, node_id: int, replica: Replica, shadow: Shadow, committed: CommittedLog) -> None:
        epoch, partition = replica.leader_epoch, replica.partition
        first = committed.leaders.setdefault(epoch, node_id)
        if first != node_id:
            self.fail(f"partition {partition}: leader epoch {epoch} has the leaders {first} and {node_id}")
        if epoch in committed.survivable:
            self._check_new_leader(node_id, partition, epoch, shadow, committed)
        end = replica.high_watermark
        if end > committed.end and epoch >= committed.loss_epoch:
            self.committed_ms = self.engine.now_ms
            committed.entries += shadow.entries[committed.end - shadow.base : end - shadow.base]
            self._check_copies(partition, end - 1, committed)
        self._check_isr(partition)

    def _check_new_leader(
        self, node_id: int, partition: int, epoch: int, shadow: Shadow, committed: CommittedLog
    ) -> None:
        survivable = committed.survivable.pop(epoch)
        committed.allowed = {later: value for later, value in committed.allowed.items() if later > epoch}
        common = shadow.matching_end(committed, min(shadow.end, committed.end))
        if common < survivable and epoch >= committed.loss_epoch:
            self.fail(
                f"partition {partition}: leader {node_id} of epoch {epoch} with log end {shadow.end} has the committed "
                f"records up to {common} of {committed.end}, but those up to {survivable} must survive"
            )
        # After an unclean election a leader of an older epoch may continue to commit. These records are lost as well.
        if survivable == NOTHING_SURVIVES or (common < committed.end and epoch >= committed.loss_epoch):
            self._lose(partition, common, epoch, committed)
            shadow.may_differ_from = None if epoch == committed.loss_epoch else common

    def _lose(self, partition: int, common: int, epoch: int, committed: CommittedLog) -> None:
        """Record a permitted loss of the committed records from offset `common`, by the leader of `epoch`.

        If `epoch` is older than that of the last loss, the committed records stay.
        """
        committed.first_lost = min(committed.first_lost, common)
        for (_, other), each in self.shadows.items():
            if other == partition:
                each.verified = min(each.verified, common)
                known = each.may_differ_from
                each.may_differ_from = common if known is None else min(known, common)
        if epoch >= committed.loss_epoch:
            self.counts["allowed lost records"] += committed.end - common
            self.counts["allowed losses"] += committed.end > common
            committed.losses.append(Loss(common, epoch))
            del committed.entries[common:]

    def _check_copies(self, partition: int, offset: int, committed: CommittedLog) -> None:
        """Check that a committed record is or was on at least `min.insync.replicas` replicas."""
        state = self.state(partition)
        needed = min(self.settings.min_isr, len(state.replicas) if state is not None else 0)
        entry = (offset, committed.entries[offset])
        copies = sum(entry in stored for (_, other), stored in self.stored.items() if other == partition)
        if copies < needed:
            self.fail(f"partition {partition}: committed offset {offset} has {copies} copies, needs {needed}")

    def _check_committed(self, node_id: int, replica: Replica, shadow: Shadow, committed: CommittedLog) -> None:
        """Check that a replica has exactly the committed records below its high watermark.

        Records below its log start are deleted; a follower may have stored others there.
        """
        shadow.verified = max(shadow.verified, min(replica.log.log_start_offset, committed.end, shadow.end))
        end = min(replica.high_watermark, shadow.end)
        lost_from = shadow.may_differ_from
        if lost_from is not None:
            agreed = shadow.matching_end(committed, min(end, committed.end))
            if agreed > max(lost_from, shadow.base, replica.log.log_start_offset):
                # Records after the loss, or only lost records that an unclean leader restored?
                is_new = committed.entries[agreed - 1][0] >= committed.loss_epoch
                shadow.may_differ_from = None if is_new else agreed
        if shadow.may_differ_from is not None:
            end = min(end, shadow.may_differ_from)
        elif committed.losses and replica.leader_epoch < committed.loss_epoch:
            end = min(end, committed.first_lost)
        if end <= shadow.verified:
            return
        name = f"partition {replica.partition} on broker {node_id}"
        if end > committed.end:
            self.fail(f"{name}: high watermark {replica.high_watermark} exceeds the committed end {committed.end}")
        same = shadow.matching_end(committed, end)
        if same < end:
            stored, expected = shadow.entries[same - shadow.base], committed.entries[same]
            self.fail(f"{name}: offset {same} below the high watermark is {stored}, but {expected} is committed")
        shadow.verified = end

    # -- producers

    def check_produced(self, node_id: int, request: ProduceRequest, response: ProduceResponse) -> None:
        """Check, before a Produce response with acks=all is sent, that the acknowledged batches are committed."""
        for topic, results in zip(request.topic_data, response.responses, strict=True):
            for data, result in zip(topic.partition_data, results.partition_responses, strict=True):
                if not result.error_code:
                    self._check_committed_batch(node_id, data.index, result.base_offset, data.records)

    def _check_committed_batch(self, node_id: int, partition: int, base: int, batch: bytes) -> None:
        committed, header = self.committed[partition], record_batch.parse_header(batch)
        replica = self._replica(node_id, partition)
        if committed.losses and (
            replica is None or replica.leader_epoch <= committed.loss_epoch or base >= committed.first_lost
        ):
            return
        self.counts["acknowledged with acks=all"] += header.record_count
        for delta in range(header.record_count):
            offset = base + delta
            entry = committed.entries[offset] if offset < committed.end else None
            if entry is None or entry[1:] != (header.crc, delta):
                self.fail(f"partition {partition}: acknowledged offset {offset} is not committed ({entry})")
            committed.acknowledged[offset] = (entry, len(committed.losses))

    def check_acknowledged(self, partition: int, base: int, batch: bytes) -> None:
        """Check an acknowledgement that a producer received: a broker acknowledged this batch at offset `base`."""
        self.counts["batches acknowledged"] += 1
        committed, header = self.committed[partition], record_batch.parse_header(batch)
        known = committed.acknowledged.get(base)
        if (known is None or known[0][1:] != (header.crc, 0)) and not committed.losses:
            self.fail(f"partition {partition}: no broker acknowledged offset {base} that a producer received")

    # -- consumers

    def check_consumed(self, consumer: Reading, offset: int, position: int, entry: Entry) -> None:
        """Check a record that a consumer received at `offset`. `position` is the offset that the consumer expects."""
        committed = self.committed[consumer.partition]
        name = f"{consumer.name} of partition {consumer.partition}"
        self.counts["records consumed"] += 1
        if offset != position:
            self.fail(f"{name} received offset {offset}, expected {position}")
        if offset >= committed.first_lost and consumer.reader.leader_epoch <= committed.loss_epoch:
            return
        if offset >= committed.end:
            self.fail(f"{name} received offset {offset}, beyond the committed end {committed.end}")
        if committed.entries[offset] != entry and offset < committed.first_lost:
            self.fail(f"{name} received {entry} at offset {offset}, but {committed.entries[offset]} is committed")

    def check_consumer_effect(self, consumer: Reading, effect: OffsetReset | TruncationFound | RaiseError) -> None:
        """Check that a reset, truncation or error of a consumer follows a permitted loss or deletion."""
        committed = self.committed[consumer.partition]
        self.counts[f"consumer {type(effect).__name__}"] += 1
        if committed.losses:
            return
        if isinstance(effect, OffsetReset) and effect.offset < committed.log_start:
            return
        self.fail(f"{consumer.name} of partition {consumer.partition}: {effect} without a loss")

    def check_consumer_high_watermark(self, consumer: Reading) -> None:
        """Check that a consumer's high watermark does not decrease (392-10), and store it in the consumer."""
        now, before = consumer.reader.high_watermark, consumer.high_watermark
        consumer.high_watermark = now
        if now < before and not self.committed[consumer.partition].losses:
            self.fail(f"{consumer.name}: high watermark decreased from {before} to {now}")

    # -- at the end

    def check_converged(self) -> set[int]:
        """Check the final state of a run: leaders, complete ISRs, equal logs, and no lost acknowledged record.

        Returns the partitions that have no leader because they wait for a lost replica of the last ISR. They are not
        checked.
        """
        blocked: set[int] = set()
        for partition, committed in enumerate(self.committed):
            state = self.state(partition)
            if state is not None and state.leader < 0 and any(is_lost(state, member) for member in state.last_isr):
                self.counts["partitions waiting for a lost replica"] += 1  # until an operator decides
                blocked.add(partition)
                continue
            if state is None or state.leader < 0:
                self.fail(f"partition {partition} has no leader at the end: {state}")
            if set(state.isr) != set(state.replicas):
                self.fail(f"partition {partition}: ISR {state.isr} at the end lacks some of {state.replicas}")
            self._check_equal(partition, state, committed)
            for offset, (entry, losses) in committed.acknowledged.items():
                was_lost = any(loss.offset <= offset for loss in committed.losses[losses:])
                if not was_lost and (offset >= committed.end or committed.entries[offset] != entry):
                    self.fail(f"partition {partition}: acknowledged offset {offset} is lost")
        return blocked

    def _check_equal(self, partition: int, state: PartitionState, committed: CommittedLog) -> None:
        logs = {}
        for broker_id in state.replicas:
            replica = self._replica(broker_id, partition)
            if (
                replica is None
                or replica.log.log_end_offset != committed.end
                or replica.high_watermark != committed.end
            ):
                ends = (replica.log.log_end_offset, replica.high_watermark) if replica is not None else None
                self.fail(
                    f"partition {partition}: broker {broker_id} has (log end, high watermark) {ends}, "
                    f"expected {committed.end}"
                )
            logs[broker_id] = replica.log
        start = max(log.log_start_offset for log in logs.values())
        if len({content(log, start) for log in logs.values()}) != 1:
            self.fail(f"partition {partition}: the logs differ between offsets {start} and {committed.end}")
