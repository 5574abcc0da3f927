"""A simulated partition on three brokers, and a consumer that reads it through `PartitionReader`.

Logs are lists of (epoch, value). Responses come from `kipmesh.core.replica.serving` and `selection`. There is no
background work: each rule of a test makes one change. `Reading.check` is the oracle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any

from kipmesh.client.consumer.rules import values as c
from kipmesh.client.consumer.rules.reader import PartitionReader
from kipmesh.client.consumer.rules.states import State
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.core.replica import serving
from kipmesh.core.replica.follower import FollowerWatermarks, follower_high_watermark, has_diverged, truncation_offset
from kipmesh.core.replica.selection import SELECTORS, ClientMetadata, GuardedSelector, TopicPartition
from kipmesh.core.replica.selection_views import ReplicaProgress, preferred_read_replica, view_of
from kipmesh.messages import EpochEndOffset, NodeEndpoint, PartitionData
from kipmesh.storage.log.epochs import LeaderEpochs

PARTITION = TopicPartition("t", 0)
RACKS = {1: "a", 2: "b", 3: "b"}
RECORDS_MAX = 3
MAX_AGE_MS = 60_000


@dataclass
class Broker:
    """A replica: log from `start` on, own and leader high watermark, and whether it runs."""

    broker_id: int
    start: int = 0
    log: list[tuple[int, int]] = field(default_factory=list)
    marks: FollowerWatermarks = field(default_factory=lambda: FollowerWatermarks.start(-1, 0))
    epoch: int = -1
    verified: bool = False
    """Whether the replica has compared its log with the leader's in this epoch."""
    is_up: bool = True
    epochs: LeaderEpochs = field(default_factory=LeaderEpochs)
    known_start: int = 0
    """Log start as known by the leader."""
    known_end: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.log)

    def epoch_at(self, offset: int) -> int:
        return self.log[offset - self.start][0] if self.start <= offset < self.end else -1

    def end_of(self, epoch: int) -> EpochEndOffset:
        return self.epochs.end_offset_for(epoch, self.end)

    def append(self, records: list[tuple[int, int]]) -> None:
        for epoch, value in records:
            self.epochs.assign(epoch, self.end)
            self.log.append((epoch, value))

    def truncate(self, offset: int) -> None:
        del self.log[max(offset - self.start, 0) :]
        self.epochs.truncate_from_end(self.end)
        self.marks = self.marks.truncated(self.end)


class World:
    """The partition. Unclean elections may lose committed records."""

    def __init__(self, *, names_rack: bool = True) -> None:
        self.brokers = {broker_id: Broker(broker_id) for broker_id in RACKS}
        self.isr = set(RACKS)
        self.fenced: set[int] = set()
        self.leader_id = -1
        self.epoch = 0
        self.epoch_start = 0
        self.values = count()
        self.names_rack = names_rack
        self.selector = GuardedSelector(SELECTORS["RackAwareReplicaSelector"]())
        self.elect(1)

    @property
    def leader(self) -> Broker:
        return self.brokers[self.leader_id]

    @property
    def high_watermark(self) -> int:
        return self.leader.marks.own

    @property
    def high_watermark_is_known(self) -> bool:
        return self.high_watermark >= self.epoch_start

    def online(self) -> set[int]:
        return set(RACKS) - self.fenced

    def view(self, preferred: int = -1) -> c.PartitionView:
        return c.PartitionView(
            self.leader_id, self.epoch, tuple(RACKS), tuple(sorted(self.isr)), tuple(sorted(self.fenced)), preferred
        )

    # --- replication

    def elect(self, broker_id: int, *, unclean: bool = False) -> None:
        self.leader_id = broker_id
        self.epoch += 1
        leader = self.leader
        self.fenced.discard(broker_id)
        if unclean:
            self.isr = {broker_id}
        self.isr = self.isr - self.fenced | {broker_id}
        for broker in self.brokers.values():
            broker.epoch, broker.verified = self.epoch, broker is leader
            broker.known_end = broker.known_start = -1
            broker.marks = FollowerWatermarks.start(self.epoch, broker.marks.own)
        leader.epochs.assign(self.epoch, leader.end)
        self.epoch_start = leader.end
        self.advance()

    def produce(self) -> None:
        self.leader.append([(self.epoch, next(self.values))])
        self.advance()

    def advance(self) -> None:
        ends = [self.leader.end if member == self.leader_id else self.brokers[member].known_end for member in self.isr]
        own = max(self.high_watermark, min(ends))
        self.leader.marks = FollowerWatermarks(self.epoch, own, own)

    def replicate(self, broker_id: int, limit: int = 1) -> None:
        """Make one fetch of a follower: the leader counts its position, and the follower applies the response."""
        leader, broker = self.leader, self.brokers[broker_id]
        if broker is leader or broker_id in self.fenced or not broker.is_up:
            return
        last = broker.epoch_at(broker.end - 1) if broker.log else -1
        if last >= 0:
            at_leader = leader.end_of(last)
            if at_leader.end_offset < 0 or has_diverged(broker.end, last, at_leader):
                broker.truncate(truncation_offset(at_leader, broker.end_of(at_leader.epoch), broker.end))
                return
        if not leader.start <= broker.end <= leader.end:
            broker.log, broker.epochs, broker.start = [], LeaderEpochs(), leader.start
            broker.marks = broker.marks.restarted(leader.start)
            return
        broker.verified = True
        broker.known_end, broker.known_start = broker.end, broker.start
        if broker.end >= max(self.high_watermark, self.epoch_start):
            self.isr.add(broker_id)
        self.advance()
        first = broker.end - leader.start
        broker.append(leader.log[first : first + limit])
        before = broker.marks
        broker.marks = broker.marks.observe_leader(self.high_watermark, broker.end)
        assert broker.marks.own == follower_high_watermark(broker.marks.leader, broker.end, before.own)

    def retain(self, broker_id: int, records: int) -> None:
        broker = self.brokers[broker_id]
        gone = min(records, max(broker.marks.own - broker.start, 0))
        del broker.log[:gone]
        broker.start += gone
        broker.epochs.truncate_from_start(broker.start)

    def fence(self, broker_id: int) -> None:
        if broker_id != self.leader_id:
            self.fenced.add(broker_id)
            self.isr.discard(broker_id)
            self.advance()

    # --- responses

    def fetch(self, request: c.FetchFrom, client_rack: str) -> PartitionData:
        broker = self.brokers[request.node_id]
        if not broker.is_up:
            return PartitionData(error_code=ErrorCode.NETWORK_EXCEPTION)
        is_leader = request.node_id == self.leader_id
        data = PartitionData(0, 0, broker.marks.leader, broker.marks.leader, broker.start)
        if request.current_leader_epoch != broker.epoch:
            older = request.current_leader_epoch < broker.epoch
            return data._replace(error_code=ErrorCode.FENCED_LEADER_EPOCH if older else ErrorCode.UNKNOWN_LEADER_EPOCH)
        refused = serving.check_fetch(is_leader=is_leader, replica_id=request.replica_id, names_rack=self.names_rack)
        if refused:
            return data._replace(error_code=refused)
        offset, last = request.fetch_offset, request.last_fetched_epoch
        if serving.compares_epochs(
            offset, last, is_leader=is_leader, log_start_offset=broker.start, log_end_offset=broker.end
        ):
            found = broker.end_of(last)
            if found.end_offset < 0:
                return data._replace(error_code=ErrorCode.OFFSET_OUT_OF_RANGE)
            if has_diverged(offset, last, found):
                return data._replace(diverging_epoch=found)
        may_choose = (
            self.names_rack and client_rack and request.offers_rack and request.replica_id == serving.CONSUMER_ID
        )
        if is_leader and may_choose:
            chosen = self.select(client_rack, offset)
            if chosen >= 0:
                return data._replace(preferred_read_replica=chosen)
        case = serving.offset_case(
            offset,
            log_start_offset=broker.start,
            log_end_offset=broker.end,
            high_watermark=broker.marks.own,
            leader_high_watermark=broker.marks.leader,
        )
        if case is not serving.OffsetCase.READABLE:
            return data._replace(error_code=case.error_code)
        end = min(offset + RECORDS_MAX, broker.marks.own)
        records = [(at, *broker.log[at - broker.start]) for at in range(offset, end)]
        return data._replace(records=repr(records).encode())

    def select(self, client_rack: str, fetch_offset: int | None) -> int:
        """Return the leader selector's replica, or without an offset the replica chosen from metadata alone."""
        progress = {}
        if fetch_offset is not None:
            progress = {
                broker.broker_id: ReplicaProgress(broker.known_start, broker.known_end)
                for broker in self.brokers.values()
            }
            progress[self.leader_id] = ReplicaProgress(self.leader.start, self.leader.end, 0)
        view = view_of(
            leader_id=self.leader_id,
            replicas=list(RACKS),
            isr=self.isr,
            endpoints={node: NodeEndpoint(node, "h", 1, RACKS[node]) for node in self.online()},
            progress=progress,
            fetch_offset=fetch_offset,
        )
        return preferred_read_replica(self.selector, PARTITION, ClientMetadata(client_rack, "client"), view)

    def list_offsets(self, request: c.ListOffsetsAtLeader) -> int | ErrorCode:
        code = self._lookup_error(request.node_id, request.current_leader_epoch)
        if code:
            return code
        if request.timestamp == -2:
            return self.leader.start
        return self.high_watermark if self.high_watermark_is_known else ErrorCode.OFFSET_NOT_AVAILABLE

    def end_of_epoch(self, request: c.EndOfEpochAtLeader) -> EpochEndOffset | ErrorCode:
        code = self._lookup_error(request.node_id, request.current_leader_epoch)
        if code:
            return code
        try:
            return serving.epoch_end_for(
                -1,
                request.epoch,
                self.leader.end_of(request.epoch),
                leader_epoch=self.epoch,
                high_watermark=self.high_watermark,
                high_watermark_is_known=self.high_watermark_is_known,
            )
        except KafkaError as error:
            return error.code

    def _lookup_error(self, node_id: int, epoch: int) -> ErrorCode:
        if not self.brokers[node_id].is_up:
            return ErrorCode.NETWORK_EXCEPTION
        if epoch != self.brokers[node_id].epoch:
            return ErrorCode.FENCED_LEADER_EPOCH
        return ErrorCode.NONE if node_id == self.leader_id else ErrorCode.NOT_LEADER_OR_FOLLOWER


Read = tuple[int, int, int]
"""(offset, epoch, value)"""


class Reading:
    """Drives one `PartitionReader` and keeps the records that its application has received."""

    def __init__(self, world: World, rack: str = "b", policy: int | None = -2, **config: Any) -> None:
        self.world = world
        self.rack = rack
        self.config = c.ReaderConfig(
            policy,
            has_rack=bool(rack),
            metadata_max_age_ms=MAX_AGE_MS,
            **config,
        )
        self.reader = PartitionReader(self.config, lambda attempts: min(100 << attempts, 1000))
        self.now_ms = 1000
        self.buffer: list[Read] = []
        self.seen: list[Read] = []
        """Records since the last reset, without those reported as truncated."""
        self.sent: tuple[int, c.Action] | None = None
        self.wants_metadata = True
        self.reports: list[c.TruncationFound] = []
        self.resets: list[c.OffsetReset] = []
        self.left: list[c.LeftFollower] = []
        self.served_by: list[int] = []
        self.moves = 0
        self.marks: list[int] = []

    def refresh(self) -> None:
        self.wants_metadata = False
        preferred = -1
        if self.config.mode is not c.SelectionMode.FETCH:
            preferred = self.world.select(self.rack, None)
        self.do(self.reader.metadata(self.world.view(preferred), self.now_ms))

    def send(self) -> c.Action:
        """Send the reader's next request. `respond` delivers the response."""
        wanted = self.reader.next(self.now_ms)
        if isinstance(wanted, c.FetchFrom | c.ListOffsetsAtLeader | c.EndOfEpochAtLeader):
            node_before = self.reader.node_id
            self.sent = (self.reader.sent(wanted, self.now_ms), wanted)
            self.moves += node_before not in (-1, self.reader.node_id)
        elif isinstance(wanted, c.AwaitMetadata):
            self.wants_metadata = True
        return wanted

    def respond(self) -> None:
        """Deliver the response to the request in flight."""
        if self.sent is None:
            return
        (number, request), self.sent = self.sent, None
        reader, world = self.reader, self.world
        offset, drained, resets = reader.fetch_offset or 0, reader.state is State.DRAINING, len(self.resets)
        self.respond_to(number, request)
        if len(self.resets) > resets or (reader.state is State.DRAINING and not drained):
            confirmed = not isinstance(request, c.FetchFrom) or request.node_id == world.leader_id
            assert confirmed, "a reset without confirmation of the leader"
            assert offset < world.leader.start or offset > world.high_watermark

    def respond_to(self, number: int, request: c.Action) -> None:
        reader, world = self.reader, self.world
        match request:
            case c.FetchFrom():
                data = world.fetch(request, self.rack)
                records: list[Read] = eval(data.records or b"[]")
                spans = [
                    c.EpochSpan(part[0][0], part[-1][0] + 1, epoch)
                    for epoch, part in ((epoch, list(group)) for epoch, group in groupby(records, lambda read: read[1]))
                ]
                effects = reader.fetched(number, data, spans, self.now_ms)
                if records and any(isinstance(effect, c.TakeRecords) for effect in effects):
                    self.served_by.append(request.node_id)
                self.do(effects, records)
            case c.ListOffsetsAtLeader():
                found = world.list_offsets(request)
                failed = isinstance(found, ErrorCode)
                self.do(
                    reader.failed(number, ErrorCode(found), self.now_ms) if failed else reader.listed(number, found)
                )
            case c.EndOfEpochAtLeader():
                end = world.end_of_epoch(request)
                if isinstance(end, ErrorCode):
                    self.do(reader.failed(number, end, self.now_ms))
                else:
                    self.do(reader.epoch_ended(number, end))

    def do(self, effects: c.Effects, records: list[Read] | None = None) -> None:
        for effect in effects:
            match effect:
                case c.TakeRecords():
                    self.buffer += records or []
                case c.RefreshMetadata():
                    self.wants_metadata = True
                case c.MoveTo():
                    self.buffer.clear()
                case c.Abandon():
                    if self.sent is not None and self.sent[0] == effect.request_id:
                        self.sent = None
                case c.OffsetReset():
                    self.resets.append(effect)
                    self.seen.clear()
                case c.TruncationFound():
                    self.reported(effect)
                case c.LeftFollower():
                    self.left.append(effect)
                case _:
                    pass
        self.marks.append(self.reader.high_watermark)

    def reported(self, effect: c.TruncationFound) -> None:
        self.reports.append(effect)
        log = self.world.leader
        end = effect.end_offset if effect.end_offset is not None else 0
        truncated = [read for read in self.seen if read[0] >= end]
        kept = [read for read in self.seen if read[0] < end]
        assert effect.position > end
        if self.seen:  # empty just after a seek
            assert truncated, "the reported truncation concerns no record"
        for offset, epoch, value in truncated:
            assert not log.start <= offset < log.end or log.log[offset - log.start] != (epoch, value)
        # Kept records may also be truncated, hidden by the leader's retention. The next response reports them.
        self.seen = [] if effect.end_offset is None else kept
        self.marks.clear()

    def take(self, limit: int = 1) -> None:
        """Deliver buffered records to the application."""
        taken, self.buffer = self.buffer[:limit], self.buffer[limit:]
        for read in taken:
            if self.seen:
                assert read[0] == self.seen[-1][0] + 1, "skipped or duplicated record"
            self.seen.append(read)
        if taken:
            self.do(self.reader.delivered(taken[-1][0] + 1))

    def step(self, ms: int = 0) -> c.Action:
        """Advance the clock, refresh metadata if requested, exchange one request, and read all records."""
        self.now_ms += ms
        self.do(self.reader.tick(self.now_ms))
        if self.wants_metadata:
            self.refresh()
        wanted = self.send()
        self.respond()
        self.take(1000)
        return wanted

    def check(self) -> None:
        """Check the invariants that hold after every step."""
        assert all(a <= b for a, b in zip(self.marks, self.marks[1:], strict=False)), "the high watermark decreased"
        if self.seen and self.reader.position is not None and self.reader.state is not State.HALTED:
            assert self.reader.position == self.seen[-1][0] + 1
        if self.reader.fetch_offset is not None and self.reader.position is not None:
            assert self.reader.position <= self.reader.fetch_offset

    def check_complete(self) -> None:
        """Check that the application has exactly the records of the leader's log."""
        log = self.world.leader
        assert self.reader.position == self.world.high_watermark == log.end
        for offset, epoch, value in self.seen:
            assert offset < log.start or log.log[offset - log.start] == (epoch, value), (
                "an unreported record that is not in the log"
            )
