"""Server and clients under loss, duplicates, reordering, evictions, restarts and changes, compared with an oracle.

The oracle is `World.read`, a read without a session. After each step, the clean partitions of all sessions match the
oracle and no fetch waits although it could complete. After the faults stop, all clients soon have the records and
offsets of the oracle (227-08, 227-10, 227-11, 227-12).
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kipmesh.core.errors import ErrorCode
from kipmesh.core.fetch_session import AdoptedPolicy, SessionRequest, Subscriptions
from kipmesh.core.fetch_session.server import FullFetch, IncrementalFetch
from kipmesh.core.fetch_session.session import Session, requires_action
from kipmesh.core.fetch_session.types import INT_MAX
from kipmesh.messages import FetchRequest, FetchResponse
from tests.unit.core.fetch_session.fetch_session_support import MORE, Client, Partition, Server, Waiting, World

TOPICS = {"t": 3, "u": 1}
TOPIC_PARTITIONS = [(topic, number) for topic, count in TOPICS.items() for number in range(count)]
SLOTS = 3
FOLLOWER, CONSUMER, BY_NAME = range(3)
ROUNDS_MAX = 60

topic_partitions = st.sampled_from(TOPIC_PARTITIONS)
client_indexes = st.integers(0, 2)
any_index = st.integers(0, 1 << 16)


@dataclass(eq=False)
class Sent:
    client: Client
    session: SessionRequest
    request: FetchRequest


@dataclass(eq=False)
class Response:
    sent: Sent
    response: FetchResponse


class FetchSessionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        for topic, count in TOPICS.items():
            self.world.create(topic, count)
        self.clients = [Client(self.world, 7), Client(self.world), Client(self.world, by_name=True)]
        self.server = self._new_server()
        self.requests: list[Sent] = []
        self.responses: list[Response] = []
        for client in self.clients:
            for place in TOPIC_PARTITIONS:
                client.follow(*place)
            session, request = client.next()
            client.apply(session, self.server.fetch(request))

    def _new_server(self) -> Server:
        self.world.subscriptions = Subscriptions()
        return Server(self.world, AdoptedPolicy(SLOTS, 1000))

    def _partition(self, place: tuple[str, int]) -> Partition | None:
        topic, number = place
        return self.world.get(topic, number) if topic in self.world.ids else None

    # -- partitions

    @rule(place=topic_partitions, count=st.integers(1, 4), size=st.integers(24, 60), commits=st.booleans())
    def append(self, place: tuple[str, int], count: int, size: int, commits: bool) -> None:
        partition = self._partition(place)
        if partition is not None and partition.is_leader:
            self.world.append(partition, count, size)
            if commits:
                self.world.commit(partition)

    @rule(place=topic_partitions)
    def commit(self, place: tuple[str, int]) -> None:
        partition = self._partition(place)
        if partition is not None and partition.is_leader:
            self.world.commit(partition)

    @rule(place=topic_partitions, offset=st.integers(1, 8))
    def delete_records(self, place: tuple[str, int], offset: int) -> None:
        partition = self._partition(place)
        if partition is not None:
            self.world.delete_records(partition, offset)

    @rule(place=topic_partitions, is_leader=st.booleans(), cut=st.integers(0, 3))
    def change_leader(self, place: tuple[str, int], is_leader: bool, cut: int) -> None:
        partition = self._partition(place)
        if partition is not None:
            self.world.lead(partition, is_leader, partition.log_end - cut)

    @rule(topic=st.sampled_from(sorted(TOPICS)), again=st.booleans())
    def recreate_topic(self, topic: str, again: bool) -> None:
        if topic in self.world.ids:
            self.world.delete(topic)
        if again:
            self.world.create(topic, TOPICS[topic])
        for client in self.clients:
            if client.by_name:  # The request in flight is about the deleted topic of the same name.
                client.handler.next_request()
                client.handler.handle_error(client.handler._in_flight)  # type: ignore[arg-type]
                client.refresh()

    # -- clients

    @rule(index=client_indexes, max_bytes=st.sampled_from([0, 40, 90, MORE]), limit=st.sampled_from([0, 50, MORE]))
    def send(self, index: int, max_bytes: int, limit: int) -> None:
        client = self.clients[index]
        if not client.handler.is_waiting:
            client.max_bytes, client.partition_max_bytes = max_bytes, limit
            self.requests.append(Sent(client, *client.next()))

    @rule(index=client_indexes, min_bytes=st.sampled_from([0, 1, 100]), outcome=st.sampled_from(["applied", "lost"]))
    def exchange(self, index: int, min_bytes: int, outcome: str) -> None:
        """Make a round trip. A duplicate of the request may arrive later."""
        client = self.clients[index]
        client.min_bytes = min_bytes
        self._finish(client)
        session, request = client.next()
        response = self.server.fetch(request, str(index))
        if outcome == "applied":
            client.apply(session, response)
        else:
            client.handler.handle_error(session)
        if request.topics and not session.is_full:
            self.requests.append(Sent(client, session, request))

    def _finish(self, client: Client) -> None:
        """Deliver the client's request in flight and its response."""
        in_flight = client.handler._in_flight
        if in_flight is None:
            return
        for sent in [sent for sent in self.requests if sent.session is in_flight]:
            self.requests.remove(sent)
            self._deliver(sent)
        for waiting in [fetch for fetch in self.server.waiting if fetch.request.replica_id == client.replica_id]:
            self.server.expire(waiting)
        for delivery in [delivery for delivery in self.responses if delivery.sent.session is in_flight]:
            self.responses.remove(delivery)
            client.apply(in_flight, delivery.response)
        client.handler.handle_error(in_flight)

    @rule(index=client_indexes, place=topic_partitions, has_record=st.booleans())
    def wait_for_more(self, index: int, place: tuple[str, int], has_record: bool) -> None:
        """Start a long poll, with too few bytes or with none."""
        client = self.clients[index]
        if not client.handler.is_waiting:
            client.max_bytes, client.min_bytes = MORE, 100
            session, request = client.next()
            if has_record:
                self.append(place, 1, 30, True)
            self._deliver(Sent(client, session, request))

    @rule(index=client_indexes)
    def give_up(self, index: int) -> None:
        handler = self.clients[index].handler
        if handler._in_flight is not None:
            handler.handle_error(handler._in_flight)

    @rule(index=client_indexes, place=topic_partitions)
    def follow(self, index: int, place: tuple[str, int]) -> None:
        self.clients[index].follow(*place)

    @rule(index=client_indexes, place=topic_partitions)
    def leave(self, index: int, place: tuple[str, int]) -> None:
        if place in self.clients[index].views:
            self.clients[index].leave(*place)

    @rule(index=client_indexes)
    def refresh(self, index: int) -> None:
        self.clients[index].refresh()

    @rule(index=client_indexes)
    def close(self, index: int) -> None:
        client = self.clients[index]
        last = client.handler.close()
        if last is not None:
            self.requests.append(Sent(client, last, last.fill(FetchRequest(replica_id=client.replica_id))))

    # -- network

    def _deliver(self, sent: Sent) -> None:
        self.server.handle(sent.request, lambda response: self.responses.append(Response(sent, response)))

    @precondition(lambda self: self.requests)
    @rule(index=any_index, twice=st.booleans())
    def deliver_request(self, index: int, twice: bool) -> None:
        index %= len(self.requests)
        sent = self.requests[index]
        if not twice:
            del self.requests[index]
        self._deliver(sent)

    @precondition(lambda self: self.requests)
    @rule(index=any_index)
    def lose_request(self, index: int) -> None:
        del self.requests[index % len(self.requests)]

    @precondition(lambda self: self.responses)
    @rule(index=any_index, twice=st.booleans(), keeps_records=st.booleans())
    def deliver_response(self, index: int, twice: bool, keeps_records: bool) -> None:
        index %= len(self.responses)
        delivery = self.responses[index]
        if not twice:
            del self.responses[index]
        delivery.sent.client.apply(delivery.sent.session, delivery.response, keeps_records)

    @precondition(lambda self: self.responses)
    @rule(index=any_index)
    def lose_response(self, index: int) -> None:
        del self.responses[index % len(self.responses)]

    # -- server

    @rule()
    def run(self) -> None:
        self.server.run()

    @precondition(lambda self: self.server.waiting)
    @rule(index=any_index)
    def expire(self, index: int) -> None:
        self.server.expire(self.server.waiting[index % len(self.server.waiting)])

    @precondition(lambda self: self.server.waiting)
    @rule(index=any_index)
    def disconnect(self, index: int) -> None:
        self.server.waiting.pop(index % len(self.server.waiting)).fetch.cancel()

    @rule(elapsed_ms=st.sampled_from([1, 500, 1001]))
    def pass_time(self, elapsed_ms: int) -> None:
        self.server.now_ms += elapsed_ms

    @rule(restarts=st.booleans(), index=any_index)
    def lose_sessions(self, restarts: bool, index: int) -> None:
        """Restart the node, or evict a session."""
        sessions = list(self.server.cache._sessions.values())
        if restarts:
            self.server = self._new_server()
        elif sessions:
            self.server.cache._close(sessions[index % len(sessions)])

    @rule(index=client_indexes)
    def approach_last_epoch(self, index: int) -> None:
        handler = self.clients[index].handler
        session = self.server.cache._sessions.get(handler.session_id)
        if session is not None and session.epoch == handler._epoch and not handler.is_waiting:
            session.epoch = handler._epoch = INT_MAX - 1

    # -- invariants

    @invariant()
    def clean_partitions_match_oracle(self) -> None:
        for session in self.server.cache._sessions.values():
            for key in session.keys:
                if not session.is_dirty(key):
                    self._check_clean(session, key)

    def _check_clean(self, session: Session, key: bytes) -> None:
        found = self.world.read(
            *session.topic_of(key), session.requested(key), replica_id=session.owner.replica_id
        ).data
        assert not found.records
        assert not requires_action(found)
        assert session.sent(key) == (found.high_watermark, found.last_stable_offset, found.log_start_offset)

    @invariant()
    def dirty_partitions_are_queued_or_held(self) -> None:
        for session in self.server.cache._sessions.values():
            fetch = session.fetch
            held = set()
            if isinstance(fetch, IncrementalFetch):
                held = {*fetch._results, *fetch._changed}
            for key in session.keys:
                if session.is_dirty(key):
                    assert (key in session.queue) != (key in held)

    @invariant()
    def waiting_fetches_cannot_complete(self) -> None:
        for waiting in self.server.waiting:
            if not waiting.is_woken:
                assert not waiting.fetch.is_complete
                assert self._bytes_for(waiting) < min(waiting.request.min_bytes, waiting.request.max_bytes)

    def _bytes_for(self, waiting: Waiting) -> int:
        fetch, total = waiting.fetch, 0
        if isinstance(fetch, IncrementalFetch):
            session = fetch._session
            requested = [(*session.topic_of(key), session.requested(key)) for key in session.keys]
        else:
            assert isinstance(fetch, FullFetch)
            requested = [(topic.topic, topic.topic_id, partition) for topic, partition in fetch._partitions]
        for topic, topic_id, partition in requested:
            found = self.world.read(
                topic,
                topic_id,
                partition,
                partition.partition_max_bytes,
                not total,
                replica_id=waiting.request.replica_id,
            )
            # A log start advance wakes no fetch, even if it passes the fetch offset (227-21).
            assert not requires_action(found.data) or found.data.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
            total += len(found.data.records)
        return total

    @invariant()
    def counters_match_sessions(self) -> None:
        cache = self.server.cache
        sessions = cache._sessions
        assert len(cache) <= SLOTS
        assert cache.partitions == sum(session.size for session in sessions.values())
        privileged = [session.owner.privileged for session in sessions.values()]
        assert cache.by_privilege == {False: privileged.count(False), True: privileged.count(True)}
        assert all(session.size and 0 < session.epoch <= INT_MAX for session in sessions.values())
        watched = {(session.owner.uses_topic_ids, key) for session in sessions.values() for key in session.keys}
        for waiting in self.server.waiting:
            if isinstance(waiting.fetch, FullFetch):
                request = waiting.request
                watched |= {(bool(request.topics[0].topic_id), key) for key in waiting.fetch._indexes}
        assert len(self.world.subscriptions) == len(watched)

    def teardown(self) -> None:
        """Stop the faults and check that all clients recover."""
        for waiting in list(self.server.waiting):
            self.server.expire(waiting)
        for topic, count in TOPICS.items():
            if topic not in self.world.ids:
                self.world.create(topic, count)
        for partition in self.world.partitions.values():
            if not partition.is_leader:
                self.world.lead(partition, True)
        for client in self.clients:
            if client.handler._in_flight is not None:
                client.handler.handle_error(client.handler._in_flight)
            client.max_bytes, client.min_bytes, client.partition_max_bytes = 100, 1, 60
            client.refresh()
        quiet, rounds = 0, 0
        while quiet < 2 * len(self.clients):
            rounds += 1
            self.server.now_ms += 400  # Abandoned sessions become inactive.
            assert rounds < ROUNDS_MAX * len(self.clients), "clients do not converge, or a partition starves"
            for client in self.clients:
                session, request = client.next()
                news = client.apply(session, self.server.fetch(request))
                wants_more = (session.is_full and len(client.handler)) or news
                quiet = 0 if wants_more else quiet + 1
        for client in self.clients:
            self._compare(client)

    def _compare(self, client: Client) -> None:
        for (topic, number), view in client.views.items():
            partition = self.world.get(topic, number)
            end = partition.log_end if client.replica_id >= 0 else partition.high_watermark
            assert (view.error, view.position, view.high_watermark) == (0, end, partition.high_watermark)
            assert view.log_start == partition.log_start
            for offset, record in view.records.items():
                assert partition.log[offset][:2] == record


FetchSessionMachine.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestFetchSessions = FetchSessionMachine.TestCase
