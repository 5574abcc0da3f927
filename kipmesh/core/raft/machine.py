"""State machine of one replica of the metadata quorum, sans-IO ("The metadata quorum", 630-08, 630-13).

A step takes one event and returns effects in the order in which they must be performed. The machine reads the log
(`LogView`) but never writes it, and has no clock, randomness or network: each step receives `now_ms` and `jitter`, a
random number in [0, 1). After each event the machine polls its state like Kafka's Raft client: it performs what is due.
The driver calls `step(TimerFired())` at `next_deadline_ms()`.

Contract with the driver (similar to etcd's Ready):

1. Perform all effects in order before the next event. A permanent failure (disk) stops the node.
2. `PersistElection` is durable before any later effect is performed, so that a crash cannot forget a disclosed epoch or
   vote.
3. A step has at most one effect of `CHANGES_LOG`. The next event is then `LogChanged`, or `AppendRejected` if the log
   is unchanged. Any other event raises `DriverError`.
4. `Flush` may run on a thread while events continue. `Persisted` reports `Log.recovery_point`. A voter sends Fetch only
   when its log is durable, and a leader counts only its durable records.
5. `Respond.read` is read from the log when the effect is performed, before any later change of the log.
6. `Send` may get a response, a failure or nothing: requests expire in the machine. Late responses are ignored.
7. `QuorumError` and `IllegalTransitionError` mean that safety is lost: the node stops and writes nothing more.

Invariants: the epoch never decreases, nor does the high watermark within a run; one vote per epoch; a leader first
appends its LeaderChange; no record below the high watermark is truncated; a leader never fetches a snapshot.
"""

from __future__ import annotations

from kipmesh import messages as m
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC
from kipmesh.core.raft import elections, replication, snapshots, types, wire
from kipmesh.core.raft.context import RaftContext
from kipmesh.core.raft.types import State


class Machine(RaftContext):
    """The state machine of one replica: a `RaftContext` with steps that call elections, replication and snapshots."""

    def start(self, now_ms: int, jitter: float) -> list[types.Effect]:
        """Return the effects of the first step. Must be called once, before `step`."""
        self.now_ms, self.jitter = now_ms, jitter
        elections.enter_state(self)
        if self.state is State.RESIGNED:
            self.unacknowledged = set(self.successors)
        replication.flush_if_needed(self)
        self._poll()
        return self.take_effects()

    def step(self, event: types.Event, now_ms: int, jitter: float) -> list[types.Effect]:
        """Handle one event and return the effects in order.

        Raises DriverError for a DescribeQuorum response, for any other event while `LogChanged` or `AppendRejected` is
        due, and for one of these two while neither is due. Raises QuorumError or IllegalTransitionError if consensus is
        broken.
        """
        if self.awaits_log != isinstance(event, types.LogChanged | types.AppendRejected):
            expected = "LogChanged or AppendRejected" if self.awaits_log else "no log event"
            raise types.DriverError(f"unexpected event {type(event).__name__}, expected {expected}")
        self.now_ms, self.jitter = max(now_ms, self.now_ms), jitter
        self.awaits_log = False
        self._handle(event)
        self._poll()
        return self.take_effects()

    def next_deadline_ms(self) -> int | None:
        """Return the latest time (monotonic ms) at which `TimerFired` is due, or None if no timer is needed."""
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
                    self.leadership.mark_alive(replica_id, self.now_ms)
            case types.ResignRequested():
                elections.resign(self)

    def _on_request(self, request_id: int, request: types.Request) -> None:
        self.has_voter_activity |= isinstance(request, m.VoteRequest)
        if request.cluster_id not in (None, self.config.cluster_id):
            self.emit(types.Respond(request_id, wire.error_response(request, ErrorCode.INCONSISTENT_CLUSTER_ID)))
            return
        match request, wire.only_partition(request):
            case m.FetchRequest(), m.FetchPartition() as fetch:
                replication.on_fetch(self, request_id, request, fetch)
            case m.VoteRequest(), m.VotePartition() as vote:
                elections.on_vote(self, request_id, vote)
            case _, m.QuorumEpochPartition() as partition:
                is_end = isinstance(request, m.EndQuorumEpochRequest)
                elections.on_quorum_epoch(self, request_id, partition, is_end=is_end)
            case _:
                self.emit(types.Respond(request_id, wire.error_response(request, ErrorCode.INVALID_REQUEST)))

    def _on_response(self, request_id: int, response: types.Response) -> None:
        node_id = self.end_request(request_id)
        if node_id is None:
            return
        self.has_voter_activity |= isinstance(response, m.VoteResponse)
        if isinstance(response, m.DescribeQuorumResponse):
            raise types.DriverError("unexpected DescribeQuorum response: replicas never send that request")
        match None if response.error_code else wire.only_response_partition(response):
            case m.PartitionData() as data:
                replication.on_fetch_response(self, node_id, data)
            case m.VotePartitionResponse() as vote:
                elections.on_vote_response(self, node_id, vote)
            case m.QuorumEpochPartitionResponse() as partition:
                elections.on_quorum_epoch_response(self, node_id, partition)
            case _:
                self.retry_later(node_id)

    def _poll(self) -> None:
        """Perform the due actions of the current state, and of each state that results from them."""
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
        """Return the response to a DescribeQuorum request; `wall_ms` is the wall-clock time of `now_ms`.

        A request without topics describes the metadata partition. A replica that is not the leader responds with
        NOT_LEADER_OR_FOLLOWER and the known leader. Other partitions get UNKNOWN_TOPIC_OR_PARTITION.
        """
        requested = [(topic.topic_name, topic.partition_indexes) for topic in request.topics]
        topics = []
        for name, partitions in requested or [(CLUSTER_METADATA_TOPIC, (0,))]:
            described = [
                self._describe_metadata(now_ms, wall_ms)
                if name == CLUSTER_METADATA_TOPIC and partition == 0
                else m.DescribeQuorumPartition(partition, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
                for partition in partitions
            ]
            topics.append(m.DescribeQuorumTopicResponse(name, tuple(described)))
        return m.DescribeQuorumResponse(topics=tuple(topics))

    def _describe_metadata(self, now_ms: int, wall_ms: int) -> m.DescribeQuorumPartition:
        election = self.advertised_election
        description = m.DescribeQuorumPartition(0, leader_id=election.leader_id, leader_epoch=election.epoch)
        if self.leadership is None:
            return description._replace(error_code=ErrorCode.NOT_LEADER_OR_FOLLOWER)
        voters, observers = self.leadership.describe(self.log.log_end_offset, now_ms, wall_ms)
        return description._replace(
            high_watermark=self.high_watermark, current_voters=tuple(voters), observers=tuple(observers)
        )
