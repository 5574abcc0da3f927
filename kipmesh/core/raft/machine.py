"""The metadata quorum of one replica: a state machine that only decides ("The metadata quorum", 630-08, 630-13).

Theory of operation. A step takes one event and returns effects, in the order in which they must be done. The machine
reads the log (`LogView`) but never writes it, knows no clock, no randomness, no network: `now_ms` and `jitter`, a
random number in [0, 1), come with each step. After every event the machine polls its state, as Kafka's client does:
what is due is done, what may be sent is sent. So no event is needed for anything to happen but the passing of time,
and the driver calls `step(TimerFired())` at `next_deadline_ms()`.

The contract with the driver (etcd's Ready, as effects):

1. Effects are done in order, all of them, before the next event. What fails for good (disk) ends the node.
2. `PersistElection` is durable before anything after it is done: no response and no request names an epoch or a vote
   that a crash could forget. The machine puts it before the first effect that could tell.
3. An effect of `CHANGES_LOG` is the last of its kind in a step, and the next event is `LogChanged` when it was done, or
   `AppendRejected` when the log is as it was. Anything else raises `DriverError`.
4. `Flush` may be done on a thread while events go on; `Persisted` reports `Log.recovery_point`. A voter sends no Fetch
   before everything that it has is durable, and a leader counts itself only with what is.
5. `Respond.read` is read from the log when the effect is done, so before any later change of the log.
6. `Send` may get a response, a failure or nothing; the machine gives up by itself. Late responses are ignored.
7. `QuorumError` and `IllegalTransitionError` mean that safety is gone: the node stops and writes nothing more.

Invariants: epoch, and while it runs the high watermark, never go back; one vote an epoch; the leader appends its
LeaderChange before anything else; nothing below the high watermark is ever cut; a leader never fetches a snapshot.
"""

from __future__ import annotations

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC
from kipmesh.core.raft import elections, replication, snapshots, types, wire
from kipmesh.core.raft.context import RaftContext
from kipmesh.core.raft.types import State


class Machine(RaftContext):
    """The context of a replica with its steps, which dispatch to elections, replication and snapshots."""

    def start(self, now_ms: int, jitter: float) -> list[types.Effect]:
        """Take the first step."""
        self.now_ms, self.jitter = now_ms, jitter
        elections.enter_state(self)
        if self.state is State.RESIGNED:
            self.unacknowledged = set(self.successors)
        replication.flush_if_needed(self)
        self._poll()
        return self.take_effects()

    def step(self, event: types.Event, now_ms: int, jitter: float) -> list[types.Effect]:
        """Handle one event; return what to do, in order."""
        if self.awaits_log != isinstance(event, types.LogChanged | types.AppendRejected):
            raise types.DriverError(
                f"{type(event).__name__} while {'' if self.awaits_log else 'not '}waiting for the log"
            )
        self.now_ms, self.jitter = max(now_ms, self.now_ms), jitter
        self.awaits_log = False
        self._handle(event)
        self._poll()
        return self.take_effects()

    def next_deadline_ms(self) -> int | None:
        """When `TimerFired` is due at the latest; None for never."""
        return min(self.deadlines(), default=None)

    def _handle(self, event: types.Event) -> None:
        match event:
            case types.TimerFired():
                pass
            case types.RequestReceived(request_id, request):
                self._on_request(request_id, request)
            case types.ResponseReceived(request_id, response):
                self._on_response(request_id, response)
            case types.RequestFailed(request_id):
                node_id = self.end_request(request_id)
                if node_id is not None:
                    self.retry_later(node_id)
            case types.AppendRequested(token, batch, epoch):
                replication.on_append(self, token, batch, epoch)
            case types.LogChanged():
                replication.on_log_changed(self)
            case types.AppendRejected():
                replication.on_append_rejected(self)
            case types.Persisted(end_offset):
                replication.on_persisted(self, end_offset)
            case types.SnapshotChanged(latest, earliest):
                snapshots.on_snapshot_changed(self, latest, earliest or latest)
            case types.SnapshotFetchProgress() | types.SnapshotFetchFailed():
                snapshots.on_fetch_progress(self, failed=isinstance(event, types.SnapshotFetchFailed))
            case types.SnapshotServed(replica_id):
                if self.leadership is not None:
                    self.leadership.is_alive(replica_id, self.now_ms)
            case types.ResignRequested():
                elections.resign(self)

    def _on_request(self, request_id: int, request: types.Request) -> None:
        self.heard_voter |= isinstance(request, m.VoteRequest)
        if request.cluster_id not in (None, self.config.cluster_id):
            self.emit(types.Respond(request_id, wire.error_response(request, ErrorCode.INCONSISTENT_CLUSTER_ID)))
            return
        match request, wire.only_partition(request):
            case m.FetchRequest(), m.FetchPartition() as asked:
                replication.on_fetch(self, request_id, request, asked)
            case m.VoteRequest(), m.VotePartition() as asked:
                elections.on_vote(self, request_id, asked)
            case _, m.QuorumEpochPartition() as asked:
                elections.on_quorum_epoch(self, request_id, asked, ends=isinstance(request, m.EndQuorumEpochRequest))
            case _:
                self.emit(types.Respond(request_id, wire.error_response(request, ErrorCode.INVALID_REQUEST)))

    def _on_response(self, request_id: int, response: types.Response) -> None:
        node_id = self.end_request(request_id)
        if node_id is None:
            return
        self.heard_voter |= isinstance(response, m.VoteResponse)
        if isinstance(response, m.DescribeQuorumResponse):
            raise types.DriverError("DescribeQuorum is not asked by a replica")
        match None if response.error_code else wire.only_response_partition(response):
            case m.PartitionData() as data:
                replication.on_fetch_response(self, node_id, data)
            case m.VotePartitionResponse() as vote:
                elections.on_vote_response(self, node_id, vote)
            case m.QuorumEpochPartitionResponse() as told:
                elections.on_quorum_epoch_response(self, node_id, told)
            case _:
                self.retry_later(node_id)

    def _poll(self) -> None:
        """Do what is due in this state, and in the one that follows from it."""
        self.expire_requests()
        while not self.awaits_log:
            before = (self.state, self.epoch)
            if self.leadership is not None:
                replication.poll_leader(self, self.leadership)
            elif self.state.follows:
                replication.poll_follower(self)
            elif self.state is State.OBSERVER_UNATTACHED:
                replication.poll_unattached_observer(self)
            else:
                elections.poll_voter(self)
            if before == (self.state, self.epoch):
                break

    # -- DescribeQuorum

    def describe(self, request: m.DescribeQuorumRequest, now_ms: int, wall_ms: int) -> m.DescribeQuorumResponse:
        """Describe the quorum as of now; only the leader can. `wall_ms` is the wall clock's now.

        Without topics it describes the metadata partition. Replicas that do not lead respond NOT_LEADER_OR_FOLLOWER
        with the leader that they know.
        """
        asked = [(topic.topic_name, topic.partition_indexes) for topic in request.topics]
        topics = []
        for name, partitions in asked or [(CLUSTER_METADATA_TOPIC, (0,))]:
            described = [
                self._describe_metadata(now_ms, wall_ms)
                if name == CLUSTER_METADATA_TOPIC and partition == 0
                else m.DescribeQuorumPartition(partition, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
                for partition in partitions
            ]
            topics.append(m.DescribeQuorumTopicResponse(name, tuple(described)))
        return m.DescribeQuorumResponse(topics=tuple(topics))

    def _describe_metadata(self, now_ms: int, wall_ms: int) -> m.DescribeQuorumPartition:
        election = self.told_election
        found = m.DescribeQuorumPartition(0, leader_id=election.leader_id, leader_epoch=election.epoch)
        if self.leadership is None:
            return found._replace(error_code=ErrorCode.NOT_LEADER_OR_FOLLOWER)
        voters, observers = self.leadership.described(self.log.log_end_offset, now_ms, wall_ms)
        return found._replace(
            high_watermark=self.high_watermark, current_voters=tuple(voters), observers=tuple(observers)
        )
