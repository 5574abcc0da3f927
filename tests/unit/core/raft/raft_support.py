"""An in-memory log and a driver that keeps the contract of `kipmesh.core.raft.machine`."""

from __future__ import annotations

from kipmesh.core import record_batch
from kipmesh.core.control_records import leader_change_batch
from kipmesh.core.errors import ErrorCode
from kipmesh.core.raft import ElectionState, Machine, RaftConfig, wire
from kipmesh.core.raft.types import (
    AppendAsFollower,
    AppendAsLeader,
    AppendLeaderChange,
    Committed,
    Effect,
    Event,
    FetchSnapshot,
    Flush,
    LogChanged,
    Persisted,
    PersistElection,
    RefuseAppend,
    Request,
    RequestReceived,
    Respond,
    Response,
    ResponseReceived,
    Send,
    StateChanged,
    TimerFired,
    TruncateLog,
)
from kipmesh.core.raft.wire import RequestPartition, ResponsePartition
from kipmesh.messages import (
    BeginQuorumEpochRequest,
    BeginQuorumEpochResponse,
    EndQuorumEpochRequest,
    EndQuorumEpochResponse,
    EpochEndOffset,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    PartitionData,
    QuorumEpochPartition,
    QuorumEpochPartitionResponse,
    SnapshotId,
    VotePartition,
    VotePartitionResponse,
    VoteRequest,
    VoteResponse,
)
from kipmesh.storage.log.epochs import LeaderEpochs

CLUSTER = "test"


def batch(value: bytes = b"x", records: int = 1) -> bytes:
    return record_batch.build([(None, value)] * records, base_offset=0, leader_epoch=0, timestamp_ms=0)


class MemoryLog:
    """A log of batches in a list."""

    def __init__(self, *epochs: int, start: int = 0) -> None:
        self.log_start_offset = self.log_end_offset = start
        self.batches: list[bytes] = []
        self.epochs = LeaderEpochs()
        for epoch in epochs:
            self.append(batch(), epoch)

    @property
    def latest_epoch(self) -> int:
        return self.epochs.latest_epoch

    def end_offset_for_epoch(self, epoch: int) -> EpochEndOffset:
        return self.epochs.end_offset_for(epoch, self.log_end_offset)

    def append(self, data: bytes, epoch: int) -> None:
        self.append_as_follower(record_batch.assign(data, self.log_end_offset, epoch))

    def append_as_follower(self, data: bytes) -> None:
        for position, header in record_batch.iterate(data):
            assert header.base_offset == self.log_end_offset
            self.epochs.assign(header.partition_leader_epoch, header.base_offset)
            self.batches.append(data[position : position + header.size_bytes])
            self.log_end_offset = header.next_offset

    def truncate_to(self, offset: int) -> None:
        while self.batches and record_batch.parse_header(self.batches[-1]).next_offset > offset:
            self.log_end_offset = record_batch.parse_header(self.batches.pop()).base_offset
        self.epochs.truncate_from_end(self.log_end_offset)

    def replace(self, snapshot: SnapshotId) -> None:
        self.batches.clear()
        self.epochs.clear()
        self.log_start_offset = self.log_end_offset = snapshot.end_offset

    def read(self, offset: int, max_offset: int) -> bytes:
        headers = [(data, record_batch.parse_header(data)) for data in self.batches]
        return b"".join(data for data, header in headers if offset <= header.base_offset < max_offset)

    def summary(self) -> str:
        entries = self.epochs.entries
        return f"{self.log_start_offset}..{self.log_end_offset} " + " ".join(f"{at}:e{epoch}" for epoch, at in entries)


class Node:
    """One machine with its log. If `flushes` is true, Flush completes immediately."""

    def __init__(
        self,
        node_id: int = 1,
        voters: tuple[int, ...] = (1, 2, 3),
        *,
        election: ElectionState | None = None,
        log: MemoryLog | None = None,
        snapshot: SnapshotId | None = None,
        jitter: float | None = None,
    ) -> None:
        self.config = RaftConfig(node_id, voters, CLUSTER)
        self.log = log or MemoryLog()
        self.disk = election or ElectionState()
        self.jitter = node_id / 10 if jitter is None else jitter
        self.flushes = True
        self.now_ms = 0
        self.effects: list[Effect] = []
        self.responses: dict[int, Response] = {}
        self.sent: list[Send] = []
        self._requests = 1000
        self.machine = Machine(
            self.config, self.disk, self.log, durable_end=self.log.log_end_offset, latest_snapshot=snapshot
        )
        self._do(self.machine.start(0, self.jitter))

    def step(self, event: Event) -> list[Effect]:
        """Process an event and its immediate consequences. Return all effects."""
        before = len(self.effects)
        self._do(self.machine.step(event, self.now_ms, self.jitter))
        return self.effects[before:]

    def _do(self, effects: list[Effect]) -> None:
        following: Event | None = None
        for effect in effects:
            self.effects.append(effect)
            match effect:
                case PersistElection(election):
                    self.disk = election
                case AppendLeaderChange(epoch, change):
                    self.log.append(leader_change_batch(change, epoch, self.now_ms), epoch)
                    following = LogChanged()
                case AppendAsLeader(_, data, epoch):
                    self.log.append(data, epoch)
                    following = LogChanged()
                case AppendAsFollower(records):
                    self.log.append_as_follower(records)
                    following = LogChanged()
                case TruncateLog(offset):
                    self.log.truncate_to(offset)
                    following = LogChanged()
                case Send():
                    self.sent.append(effect)
                case Respond(request_id, response, read):
                    if read is not None:
                        response = wire.with_records(response, self.log.read(read.offset, read.max_offset))
                    self.responses[request_id] = response
                case _:
                    pass
        if following is not None:
            self._do(self.machine.step(following, self.now_ms, self.jitter))
        elif self.flushes and Flush() in effects:
            self._do(self.machine.step(Persisted(self.log.log_end_offset), self.now_ms, self.jitter))

    def advance(self, ms: int) -> list[Effect]:
        self.now_ms += ms
        return self.step(TimerFired())

    def request(self, request: Request) -> Response | None:
        """Process a peer's request. Return the response, or None if it waits."""
        self._requests += 1
        self.step(RequestReceived(self._requests, request))
        return self.responses.get(self._requests)

    def respond_to_last(self, response: Response, *, to: int | None = None) -> list[Effect]:
        """Respond to the last request that was sent (to node `to`)."""
        sent = [send for send in self.sent if to in (None, send.node_id)][-1]
        return self.step(ResponseReceived(sent.request_id, response))

    def elect(self) -> Node:
        """Make the node leader of the next epoch, with another voter's vote if needed."""
        while not self.machine.leadership:
            self.advance(2500)
            if isinstance(self.sent[-1].request, VoteRequest) if self.sent else False:
                self.respond_to_last(voted(self.machine.epoch))
        return self


def peer(node_id: int, voters: tuple[int, ...] = (1, 2, 3)) -> RaftConfig:
    return RaftConfig(node_id, voters, CLUSTER)


def voted(epoch: int, *, granted: bool = True) -> VoteResponse:
    return wire.vote_response(ElectionState(epoch), ErrorCode.NONE, granted=granted)


def format_message(message: Request | Response | None) -> str:
    """Format a message as one line."""
    partition: RequestPartition | ResponsePartition | None = None
    match message:
        case VoteRequest() | BeginQuorumEpochRequest() | EndQuorumEpochRequest() | FetchRequest():
            partition = wire.only_partition(message)
        case VoteResponse() | BeginQuorumEpochResponse() | EndQuorumEpochResponse() | FetchResponse():
            partition = wire.only_response_partition(message)
        case None:
            return "waits"
    match partition:
        case VotePartition() as vote:
            return f"Vote epoch={vote.candidate_epoch} last={vote.last_offset}@{vote.last_offset_epoch}"
        case QuorumEpochPartition() as epoch:
            name = type(message).__name__.removesuffix("QuorumEpochRequest")
            successors = f" successors={list(epoch.preferred_successors)}" if epoch.preferred_successors else ""
            return f"{name} epoch={epoch.leader_epoch}{successors}"
        case FetchPartition() as part:
            return f"Fetch epoch={part.current_leader_epoch} at={part.fetch_offset}@{part.last_fetched_epoch}"
        case PartitionData() as data:
            return _format_fetch(data)
        case VotePartitionResponse() as granted:
            error = f" error={granted.error_code}" if granted.error_code else ""
            return f"vote {'granted' if granted.vote_granted else 'refused'} epoch={granted.leader_epoch}{error}"
        case QuorumEpochPartitionResponse() as known:
            return f"ok epoch={known.leader_epoch} error={known.error_code}"
    match message:
        case FetchResponse() | VoteResponse():
            return f"{'fetched' if isinstance(message, FetchResponse) else 'vote'} error={message.error_code}"
    return "?"


def _format_fetch(data: PartitionData) -> str:
    words = [f"fetched hw={data.high_watermark}"]
    if data.error_code:
        words.append(f"error={data.error_code}")
    if data.current_leader:
        words.append(f"leader={data.current_leader.leader_id}@{data.current_leader.leader_epoch}")
    if data.diverging_epoch:
        words.append(f"diverging={data.diverging_epoch.end_offset}@{data.diverging_epoch.epoch}")
    if data.snapshot_id:
        words.append(f"snapshot={data.snapshot_id.end_offset}@{data.snapshot_id.epoch}")
    if data.records:
        headers = [header for _, header in record_batch.iterate(data.records)]
        words.append(f"records={headers[0].base_offset}..{headers[-1].next_offset}")
    return " ".join(words)


def format_effect(effect: Effect) -> str | None:
    """Format an effect for scripts, or return None to omit it."""
    match effect:
        case PersistElection(election):
            return f"persist epoch={election.epoch} leader={election.leader_id} vote={election.voted_id}"
        case StateChanged(state, epoch, leader):
            return f"{state.value} epoch={epoch} leader={leader}"
        case Committed(offset):
            return f"committed {offset}"
        case TruncateLog(offset):
            return f"truncate {offset}"
        case FetchSnapshot(snapshot, leader):
            return f"fetch snapshot {snapshot.end_offset}@{snapshot.epoch} from {leader}"
        case RefuseAppend(_, error, leader):
            return f"refused {error.name} leader={leader}"
        case _:
            return None
