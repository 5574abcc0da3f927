"""What must never happen in a run, looked at after every step of a broker ("Log truth", 392-10).

- What is below the high watermark of a leader is committed: no later leader lacks it, no replica has anything else
  below its own high watermark, and every member of the ISR has it. The rules allow two losses: when no clean member of
  the ISR is left, the greatest log of the last ISR leads, and what none of those has is gone; and an unclean election,
  where the topic allows one.
- What was acknowledged with acks=all was committed then, on min.insync.replicas at least, and is there at the end.
- One leader an epoch; leader and partition epochs rise; leaders are elected out of the ISR.
- A replica's high watermarks never go back within one leadership.
- A log that is recovered has what was durable, after a killed process all that there was.
- A consumer gets each offset once, in order, and nothing that is not committed; it is reset, or told of a truncation,
  only for records that are gone indeed.
- After the last fault everything heals.
"""

from __future__ import annotations

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
from simulation.replicas.shadow import NOTHING_SURVIVES, Cut, Entry, Shadow, Truth, content

Where = tuple[int, int]
"""Broker and partition."""


class Seen(NamedTuple):
    """What a replica was when it was looked at last."""

    log_end: int
    generation: int
    high_watermark: int
    told: int
    leader_epoch: int
    is_leader: bool


class Reading(Protocol):
    """A consumer, as the checker sees it."""

    name: str
    partition: int
    reader: PartitionReader
    high_watermark: int
    """The highest that it was told."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """A broker's running process, as the checker sees it."""

    node_id: int
    manager: LogManager
    hosted_replicas: HostedReplicas
    lifecycle: BrokerLifecycle


class Checker:
    """See the module."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self.counts = engine.counts
        self.fail = engine.fail
        self.settings = settings
        self.image = MetadataImage()
        """Of the metadata that is committed."""
        self.brokers: dict[int, Hosted] = {}
        """Running processes."""
        self.truths = [Truth() for _ in range(settings.partitions)]
        self.shadows: dict[Where, Shadow] = {}
        self.ever: dict[Where, set[tuple[int, Entry]]] = {}
        """All that a broker ever had."""
        self.durable: dict[Where, int] = {}
        """What of a log must be there when it is loaded next."""
        self.seen: dict[Where, Seen] = {}
        self.committed_ms = 0.0
        """When anything was committed last."""

    def _shadow(self, where: Where) -> Shadow:
        shadow = self.shadows.get(where)
        if shadow is None:
            shadow = self.shadows[where] = Shadow()
        return shadow

    # -- metadata

    def state(self, partition: int) -> PartitionState | None:
        """What is committed about a partition."""
        return self.image.partition(self.settings.topic_id, partition)

    def commit_metadata(self, batch: bytes) -> None:
        """A batch of metadata is committed."""
        counts, delta = self.counts, MetadataDelta()
        topic = self.image.topics.get(self.settings.topic_id)
        before = dict(topic.partitions) if topic is not None else {}
        self.image.replay(batch, delta)
        for _, partition in sorted(delta.changed_partitions):
            state, old = self.state(partition), before.get(partition)
            if state is None or old is None:
                continue
            if state.partition_epoch <= old.partition_epoch or state.leader_epoch < old.leader_epoch:
                self.fail(f"the epochs of partition {partition} went back: {old} -> {state}")
            counts["ISR shrinks"] += len(state.isr) < len(old.isr)
            counts["ISR expansions"] += len(state.isr) > len(old.isr)
            if state.leader_epoch != old.leader_epoch and state.leader >= 0:
                self._elected(partition, old, state)
            if state.leader_epoch != old.leader_epoch and state.leader < 0:
                counts["partitions without leader"] += 1
            self._check_isr(partition)

    def _elected(self, partition: int, old: PartitionState, state: PartitionState) -> None:
        counts, truth = self.counts, self.truths[partition]
        counts["elections"] += 1
        # A loss that the rules allowed may come with this leader, when those before it never began.
        survivable = min([truth.end, *truth.allowed.values()])
        if state.leader_recovery_state == RECOVERING and old.leader < 0:
            counts["unclean elections"] += 1
            if not self.settings.is_unclean:
                self.fail(f"partition {partition}: unclean election {old} -> {state}")
            survivable = NOTHING_SURVIVES
        elif not old.isr:
            counts["elections by log end"] += 1
            if state.leader not in old.last_isr:
                self.fail(f"partition {partition}: elected from outside of the last ISR: {old} -> {state}")
            survivable = max(self._common(member, partition) for member in old.last_isr)
        elif state.leader not in old.isr:
            self.fail(f"partition {partition}: elected from outside of the ISR: {old} -> {state}")
        truth.survivable[state.leader_epoch] = survivable
        if survivable < truth.end:
            truth.allowed[state.leader_epoch] = survivable

    def _common(self, broker_id: int, partition: int) -> int:
        """How much of what is committed a broker has."""
        truth, shadow = self.truths[partition], self._shadow((broker_id, partition))
        return shadow.agrees(truth, min(shadow.end, truth.end))

    def _check_isr(self, partition: int) -> None:
        """Every member of the ISR has what the leader says is committed."""
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
                    f"partition {partition}: broker {member} is in the ISR {state.isr} and ends at "
                    f"{replica.log.log_end_offset}, the leader's high watermark is {end}"
                )

    def _replica(self, broker_id: int, partition: int) -> Replica | None:
        broker = self.brokers.get(broker_id)
        return broker.hosted_replicas.get(self.settings.topic_id, partition) if broker is not None else None

    # -- brokers' processes

    def started(self, broker: Hosted) -> None:
        """A process begins with what is on its disk."""
        self.brokers[broker.node_id] = broker
        for partition in range(self.settings.partitions):
            where = (broker.node_id, partition)
            self.seen.pop(where, None)
            floor, before = self.durable.pop(where, 0), self.shadows.pop(where, Shadow())
            log = broker.manager.get(TOPIC, partition)
            if log is not None and not log.topic_id:
                log = None  # a power cut took the file with the id: nobody can tell whose it is, and it is set aside
            now = self._shadow(where)
            now.generation = -1
            if log is not None:
                now.take(log)
            now.may_differ_from = before.may_differ_from
            for offset in range(max(before.base, now.base), min(floor, before.end)):
                if offset >= now.end or now.entries[offset - now.base] != before.entries[offset - before.base]:
                    self.fail(f"broker {broker.node_id} lost durable offset {offset} of {partition}: ends at {now.end}")

    def ended(self, node_id: int, *, power: bool) -> None:
        """A process ends, if there is one; without power only what is durable stays."""
        broker = self.brokers.pop(node_id, None)
        if broker is None:
            if power:
                self.forgot(node_id)
            return
        for (_, partition), log in broker.manager.logs.items():
            if log.failed is None and log.topic_id:  # without the id it is nobody's; see `started`
                if not log.durability.generation & 1:
                    self._shadow((node_id, partition)).take(log)
                self.durable[node_id, partition] = log.recovery_point if power else log.log_end_offset

    def forgot(self, node_id: int) -> None:
        """A disk was replaced, or lost its power between two processes."""
        for partition in range(self.settings.partitions):
            self.durable.pop((node_id, partition), None)

    def look(self, broker: Hosted) -> list[tuple[Seen, Seen]]:
        """Check the replicas of a broker; what has changed is returned as (before, now)."""
        changes = []
        for replica in broker.hosted_replicas:
            if not replica.log.durability.generation & 1:
                before, now = self._look(broker.node_id, replica)
                if before is not None and before != now:
                    changes.append((before, now))
        return changes

    def _look(self, node_id: int, replica: Replica) -> tuple[Seen | None, Seen]:
        log, where = replica.log, (node_id, replica.partition)
        now = Seen(
            log.log_end_offset,
            log.durability.generation,
            replica.high_watermark,
            replica.told_high_watermark,
            replica.leader_epoch,
            replica.leader is not None,
        )
        before = self.seen.get(where)
        if now != before:
            self.seen[where] = now
            truth, shadow = self.truths[replica.partition], self._shadow(where)
            if before is not None:
                self._check_replica(node_id, replica.partition, before, now)
            if log.failed is None:
                self.ever.setdefault(where, set()).update(shadow.take(log))
            if now.is_leader:
                self._check_leader(node_id, replica, shadow, truth)
            self._check_committed(node_id, replica, shadow, truth)
        return before, now

    def _check_replica(self, node_id: int, partition: int, before: Seen, now: Seen) -> None:
        truth = self.truths[partition]
        name = f"partition {partition} on broker {node_id}"
        if now.leader_epoch < before.leader_epoch:
            self.fail(f"{name}: the leader epoch went back from {before.leader_epoch} to {now.leader_epoch}")
        if now.generation != before.generation and now.log_end < before.log_end:
            self.counts["truncations"] += 1
            self.counts["records truncated"] += before.log_end - now.log_end
            if truth.cut_epoch < 0 and now.log_end < before.high_watermark:
                self.fail(f"{name}: cut to {now.log_end}, below its high watermark {before.high_watermark}")
        if truth.cut_epoch >= 0:
            return
        if now.high_watermark < before.high_watermark:
            self.fail(f"{name}: the high watermark went back from {before.high_watermark} to {now.high_watermark}")
        is_same = (now.leader_epoch, now.is_leader) == (before.leader_epoch, before.is_leader)
        if is_same and now.told < before.told:
            self.fail(f"{name}: the high watermark that is told went back from {before.told} to {now.told}")

    def _check_leader(self, node_id: int, replica: Replica, shadow: Shadow, truth: Truth) -> None:
        epoch, partition = replica.leader_epoch, replica.partition
        first = truth.leaders.setdefault(epoch, node_id)
        if first != node_id:
            self.fail(f"partition {partition}: brokers {first} and {node_id} lead in epoch {epoch}")
        if epoch in truth.survivable:
            self._leader_began(node_id, partition, epoch, shadow, truth)
        end = replica.high_watermark
        if end > truth.end and epoch >= truth.cut_epoch:
            self.committed_ms = self.engine.now_ms
            truth.entries += shadow.entries[truth.end - shadow.base : end - shadow.base]
            self._check_copies(partition, end - 1, truth)
        self._check_isr(partition)

    def _leader_began(self, node_id: int, partition: int, epoch: int, shadow: Shadow, truth: Truth) -> None:
        survivable = truth.survivable.pop(epoch)
        truth.allowed = {later: value for later, value in truth.allowed.items() if later > epoch}
        common = shadow.agrees(truth, min(shadow.end, truth.end))
        if common < survivable and epoch >= truth.cut_epoch:
            self.fail(
                f"partition {partition}: broker {node_id} leads in epoch {epoch} with {shadow.end} records, of "
                f"{truth.end} committed it has {common}; {survivable} had to survive"
            )
        # Behind an unclean leader's back one of an older epoch may go on for a while: that is lost, too, when it comes.
        if survivable == NOTHING_SURVIVES or (common < truth.end and epoch >= truth.cut_epoch):
            self._lose(partition, common, epoch, truth)
            shadow.may_differ_from = None if epoch == truth.cut_epoch else common

    def _lose(self, partition: int, common: int, epoch: int, truth: Truth) -> None:
        """An unclean leader has nothing from `common` on; of an epoch that is over, only that."""
        truth.floor = min(truth.floor, common)
        for (_, other), each in self.shadows.items():
            if other == partition:
                each.verified = min(each.verified, common)
                known = each.may_differ_from
                each.may_differ_from = common if known is None else min(known, common)
        if epoch >= truth.cut_epoch:
            self.counts["records lost as the rules allow"] += truth.end - common
            self.counts["losses as the rules allow"] += truth.end > common
            truth.cuts.append(Cut(common, epoch))
            del truth.entries[common:]

    def _check_copies(self, partition: int, offset: int, truth: Truth) -> None:
        """What is committed is, or was, on as many replicas as `min.insync.replicas` says."""
        state = self.state(partition)
        wanted = min(self.settings.min_isr, len(state.replicas) if state is not None else 0)
        entry = (offset, truth.entries[offset])
        have = sum(entry in found for (_, other), found in self.ever.items() if other == partition)
        if have < wanted:
            self.fail(f"partition {partition}: offset {offset} is committed on {have} replicas, {wanted} are needed")

    def _check_committed(self, node_id: int, replica: Replica, shadow: Shadow, truth: Truth) -> None:
        """Below its own high watermark a replica has what is committed, and nothing else.

        What is below its log start was deleted: a follower may have had something else there that nobody can tell.
        """
        shadow.verified = max(shadow.verified, min(replica.log.log_start_offset, truth.end, shadow.end))
        end = min(replica.high_watermark, shadow.end)
        lost_from = shadow.may_differ_from
        if lost_from is not None:
            agreed = shadow.agrees(truth, min(end, truth.end))
            if agreed > max(lost_from, shadow.base, replica.log.log_start_offset):
                # Something of what came after the loss, or only of what an unclean leader brought back?
                is_new = truth.entries[agreed - 1][0] >= truth.cut_epoch
                shadow.may_differ_from = None if is_new else agreed
        if shadow.may_differ_from is not None:
            end = min(end, shadow.may_differ_from)
        elif truth.cuts and replica.leader_epoch < truth.cut_epoch:
            end = min(end, truth.floor)
        if end <= shadow.verified:
            return
        name = f"partition {replica.partition} on broker {node_id}"
        if end > truth.end:
            self.fail(f"{name}: high watermark {replica.high_watermark}, but {truth.end} are committed")
        same = shadow.agrees(truth, end)
        if same < end:
            mine, other = shadow.entries[same - shadow.base], truth.entries[same]
            self.fail(f"{name}: offset {same} below the high watermark is {mine}, committed is {other}")
        shadow.verified = end

    # -- producers

    def produced(self, node_id: int, request: ProduceRequest, response: ProduceResponse) -> None:
        """A broker is about to answer a produce request with acks=all."""
        for topic, answers in zip(request.topic_data, response.responses, strict=True):
            for data, answer in zip(topic.partition_data, answers.partition_responses, strict=True):
                if not answer.error_code:
                    self._acknowledging(node_id, data.index, answer.base_offset, data.records)

    def _acknowledging(self, node_id: int, partition: int, base: int, batch: bytes) -> None:
        truth, header = self.truths[partition], record_batch.parse_header(batch)
        replica = self._replica(node_id, partition)
        if truth.cuts and (replica is None or replica.leader_epoch <= truth.cut_epoch or base >= truth.floor):
            return
        self.counts["acknowledged with acks=all"] += header.record_count
        for delta in range(header.record_count):
            offset = base + delta
            entry = truth.entries[offset] if offset < truth.end else None
            if entry is None or entry[1:] != (header.crc, delta):
                self.fail(f"partition {partition}: offset {offset} is acknowledged and not committed ({entry})")
            truth.acknowledged[offset] = (entry, len(truth.cuts))

    def acknowledged(self, partition: int, base: int, batch: bytes) -> None:
        """A producer was told that its batch is committed."""
        self.counts["batches acknowledged"] += 1
        truth, header = self.truths[partition], record_batch.parse_header(batch)
        known = truth.acknowledged.get(base)
        if (known is None or known[0][1:] != (header.crc, 0)) and not truth.cuts:
            self.fail(f"partition {partition}: a producer was told of offset {base}, a broker was not")

    # -- consumers

    def consumed(self, consumer: Reading, offset: int, position: int, entry: Entry) -> None:
        """A consumer got a record at `offset`; it waited for the one at `position`."""
        truth = self.truths[consumer.partition]
        name = f"{consumer.name} of partition {consumer.partition}"
        self.counts["records consumed"] += 1
        if offset != position:
            self.fail(f"{name} got offset {offset}, the next was {position}")
        if offset >= truth.floor and consumer.reader.leader_epoch <= truth.cut_epoch:
            return
        if offset >= truth.end:
            self.fail(f"{name} got offset {offset}, and {truth.end} are committed")
        if truth.entries[offset] != entry and offset < truth.floor:
            self.fail(f"{name} got {entry} at offset {offset}, committed is {truth.entries[offset]}")

    def consumer_told(self, consumer: Reading, effect: OffsetReset | TruncationFound | RaiseError) -> None:
        """A consumer is reset, told of a truncation, or of an error."""
        truth = self.truths[consumer.partition]
        self.counts[f"consumer {type(effect).__name__}"] += 1
        if truth.cuts:
            return
        if isinstance(effect, OffsetReset) and effect.offset < truth.log_start:
            return
        self.fail(f"{consumer.name} of partition {consumer.partition}: {effect}, but nothing was lost")

    def consumer_high_watermark(self, consumer: Reading) -> None:
        """392-10."""
        now, before = consumer.reader.high_watermark, consumer.high_watermark
        consumer.high_watermark = now
        if now < before and not self.truths[consumer.partition].cuts:
            self.fail(f"{consumer.name}: the high watermark went back from {before} to {now}")

    # -- at the end

    def converged(self) -> set[int]:
        """Long after the last fault: led, in sync, equal, and what was acknowledged is there.

        Returns the partitions that wait for a lost replica.
        """
        waiting: set[int] = set()
        for partition, truth in enumerate(self.truths):
            state = self.state(partition)
            if state is not None and state.leader < 0 and any(is_lost(state, member) for member in state.last_isr):
                self.counts["partitions that wait for a lost replica"] += 1  # for good, or till somebody decides
                waiting.add(partition)
                continue
            if state is None or state.leader < 0:
                self.fail(f"partition {partition} has no leader at the end: {state}")
            if set(state.isr) != set(state.replicas):
                self.fail(f"partition {partition}: the ISR is {state.isr} of {state.replicas} at the end")
            self._check_equal(partition, state, truth)
            for offset, (entry, cuts) in truth.acknowledged.items():
                was_cut = any(cut.offset <= offset for cut in truth.cuts[cuts:])
                if not was_cut and (offset >= truth.end or truth.entries[offset] != entry):
                    self.fail(f"partition {partition}: offset {offset} was acknowledged and is gone")
        return waiting

    def _check_equal(self, partition: int, state: PartitionState, truth: Truth) -> None:
        logs = {}
        for broker_id in state.replicas:
            replica = self._replica(broker_id, partition)
            if replica is None or replica.log.log_end_offset != truth.end or replica.high_watermark != truth.end:
                ends = (replica.log.log_end_offset, replica.high_watermark) if replica is not None else None
                self.fail(f"partition {partition}: broker {broker_id} has {ends} at the end, committed are {truth.end}")
            logs[broker_id] = replica.log
        start = max(log.log_start_offset for log in logs.values())
        if len({content(log, start) for log in logs.values()}) != 1:
            self.fail(f"partition {partition}: the logs from {start} to {truth.end} are not the same bytes")
