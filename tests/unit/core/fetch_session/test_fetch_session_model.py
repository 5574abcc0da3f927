"""Server and clients through loss, duplicates, reordering, evictions, restarts and changes, against a dumb oracle.

The oracle is `World.read`: what a partition answers without any session. After each step nothing that a session takes
for told may differ from it, nobody may sleep through news, and once the faults stop every client soon has the same
records and offsets as the oracle (227-08, 227-10, 227-11, 227-12).
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
WHERE = [(topic, number) for topic, count in TOPICS.items() for number in range(count)]
SLOTS = 3
FOLLOWER, CONSUMER, BY_NAME = range(3)
ROUNDS_MAX = 60

places = st.sampled_from(WHERE)
which = st.integers(0, 2)
any_of = st.integers(0, 1 << 16)


@dataclass(eq=False)
class Sent:
    client: Client
    session: SessionRequest
    request: FetchRequest


@dataclass(eq=False)
class Answer:
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
        self.answers: list[Answer] = []
        for client in self.clients:
            for where in WHERE:
                client.follow(*where)
            session, request = client.next()
            client.take(session, self.server.ask(request))

    def _new_server(self) -> Server:
        self.world.subscriptions = Subscriptions()
        return Server(self.world, AdoptedPolicy(SLOTS, 1000))

    def _partition(self, where: tuple[str, int]) -> Partition | None:
        topic, number = where
        return self.world.get(topic, number) if topic in self.world.ids else None

    # -- what happens to partitions

    @rule(where=places, count=st.integers(1, 4), size=st.integers(24, 60), commits=st.booleans())
    def append(self, where: tuple[str, int], count: int, size: int, commits: bool) -> None:
        partition = self._partition(where)
        if partition is not None and partition.is_leader:
            self.world.append(partition, count, size)
            if commits:
                self.world.commit(partition)

    @rule(where=places)
    def commit(self, where: tuple[str, int]) -> None:
        partition = self._partition(where)
        if partition is not None and partition.is_leader:
            self.world.commit(partition)

    @rule(where=places, offset=st.integers(1, 8))
    def delete_records(self, where: tuple[str, int], offset: int) -> None:
        partition = self._partition(where)
        if partition is not None:
            self.world.delete_records(partition, offset)

    @rule(where=places, is_leader=st.booleans(), cut=st.integers(0, 3))
    def change_leader(self, where: tuple[str, int], is_leader: bool, cut: int) -> None:
        partition = self._partition(where)
        if partition is not None:
            self.world.lead(partition, is_leader, partition.log_end - cut)

    @rule(topic=st.sampled_from(sorted(TOPICS)), again=st.booleans())
    def recreate_topic(self, topic: str, again: bool) -> None:
        if topic in self.world.ids:
            self.world.delete(topic)
        if again:
            self.world.create(topic, TOPICS[topic])
        for client in self.clients:
            if client.by_name:  # what is under way is of the other topic of that name
                client.handler.next_request()
                client.handler.handle_error(client.handler._in_flight)  # type: ignore[arg-type]
                client.refresh()

    # -- what clients do

    @rule(index=which, max_bytes=st.sampled_from([0, 40, 90, MORE]), limit=st.sampled_from([0, 50, MORE]))
    def send(self, index: int, max_bytes: int, limit: int) -> None:
        client = self.clients[index]
        if not client.handler.is_waiting:
            client.max_bytes, client.partition_max_bytes = max_bytes, limit
            self.requests.append(Sent(client, *client.next()))

    @rule(index=which, min_bytes=st.sampled_from([0, 1, 100]), answer=st.sampled_from(["taken", "lost"]))
    def exchange(self, index: int, min_bytes: int, answer: str) -> None:
        """A whole round trip; the request may turn up once more, at any time."""
        client = self.clients[index]
        client.min_bytes = min_bytes
        self._finish(client)
        session, request = client.next()
        response = self.server.ask(request, str(index))
        if answer == "taken":
            client.take(session, response)
        else:
            client.handler.handle_error(session)
        if request.topics and not session.is_full:
            self.requests.append(Sent(client, session, request))

    def _finish(self, client: Client) -> None:
        """What is under way for the client arrives, if it is under way."""
        under_way = client.handler._in_flight
        if under_way is None:
            return
        for sent in [sent for sent in self.requests if sent.session is under_way]:
            self.requests.remove(sent)
            self._deliver(sent)
        for waiting in [one for one in self.server.waiting if one.request.replica_id == client.replica_id]:
            self.server.expire(waiting)
        for answer in [answer for answer in self.answers if answer.sent.session is under_way]:
            self.answers.remove(answer)
            client.take(under_way, answer.response)
        client.handler.handle_error(under_way)

    @rule(index=which, where=places, has_some=st.booleans())
    def wait_for_more(self, index: int, where: tuple[str, int], has_some: bool) -> None:
        """A long poll that is at the server, with a record that is not enough, or with none."""
        client = self.clients[index]
        if not client.handler.is_waiting:
            client.max_bytes, client.min_bytes = MORE, 100
            session, request = client.next()
            if has_some:
                self.append(where, 1, 30, True)
            self._deliver(Sent(client, session, request))

    @rule(index=which)
    def give_up(self, index: int) -> None:
        handler = self.clients[index].handler
        if handler._in_flight is not None:
            handler.handle_error(handler._in_flight)

    @rule(index=which, where=places)
    def follow(self, index: int, where: tuple[str, int]) -> None:
        self.clients[index].follow(*where)

    @rule(index=which, where=places)
    def leave(self, index: int, where: tuple[str, int]) -> None:
        if where in self.clients[index].views:
            self.clients[index].leave(*where)

    @rule(index=which)
    def refresh(self, index: int) -> None:
        self.clients[index].refresh()

    @rule(index=which)
    def close(self, index: int) -> None:
        client = self.clients[index]
        last = client.handler.close()
        if last is not None:
            self.requests.append(Sent(client, last, last.fill(FetchRequest(replica_id=client.replica_id))))

    # -- what the network does

    def _deliver(self, sent: Sent) -> None:
        self.server.handle(sent.request, lambda response: self.answers.append(Answer(sent, response)))

    @precondition(lambda self: self.requests)
    @rule(index=any_of, twice=st.booleans())
    def deliver_request(self, index: int, twice: bool) -> None:
        index %= len(self.requests)
        sent = self.requests[index]
        if not twice:
            del self.requests[index]
        self._deliver(sent)

    @precondition(lambda self: self.requests)
    @rule(index=any_of)
    def lose_request(self, index: int) -> None:
        del self.requests[index % len(self.requests)]

    @precondition(lambda self: self.answers)
    @rule(index=any_of, twice=st.booleans(), keeps=st.booleans())
    def deliver_answer(self, index: int, twice: bool, keeps: bool) -> None:
        index %= len(self.answers)
        answer = self.answers[index]
        if not twice:
            del self.answers[index]
        answer.sent.client.take(answer.sent.session, answer.response, keeps)

    @precondition(lambda self: self.answers)
    @rule(index=any_of)
    def lose_answer(self, index: int) -> None:
        del self.answers[index % len(self.answers)]

    # -- what the server does

    @rule()
    def run(self) -> None:
        self.server.run()

    @precondition(lambda self: self.server.waiting)
    @rule(index=any_of)
    def expire(self, index: int) -> None:
        self.server.expire(self.server.waiting[index % len(self.server.waiting)])

    @precondition(lambda self: self.server.waiting)
    @rule(index=any_of)
    def disconnect(self, index: int) -> None:
        self.server.waiting.pop(index % len(self.server.waiting)).fetch.cancel()

    @rule(elapsed_ms=st.sampled_from([1, 500, 1001]))
    def pass_time(self, elapsed_ms: int) -> None:
        self.server.now_ms += elapsed_ms

    @rule(restarts=st.booleans(), index=any_of)
    def lose_sessions(self, restarts: bool, index: int) -> None:
        """The node restarts, or somebody else gets a session's slot."""
        sessions = list(self.server.cache._sessions.values())
        if restarts:
            self.server = self._new_server()
        elif sessions:
            self.server.cache._close(sessions[index % len(sessions)])

    @rule(index=which)
    def come_near_the_last_epoch(self, index: int) -> None:
        handler = self.clients[index].handler
        session = self.server.cache._sessions.get(handler.session_id)
        if session is not None and session.epoch == handler._epoch and not handler.is_waiting:
            session.epoch = handler._epoch = INT_MAX - 1

    # -- what holds

    @invariant()
    def what_was_told_is_true(self) -> None:
        for session in self.server.cache._sessions.values():
            for key in session.keys:
                if not session.is_dirty(key):
                    self._check_clean(session, key)

    def _check_clean(self, session: Session, key: bytes) -> None:
        found = self.world.read(*session.topic_of(key), session.requested(key), replica_id=session.owner.replica_id).data
        assert not found.records
        assert not requires_action(found)
        assert session.sent(key) == (found.high_watermark, found.last_stable_offset, found.log_start_offset)

    @invariant()
    def dirty_partitions_are_somewhere(self) -> None:
        for session in self.server.cache._sessions.values():
            fetch = session.fetch
            held = set()
            if isinstance(fetch, IncrementalFetch):
                held = {*fetch._results, *fetch._changed}
            for key in session.keys:
                if session.is_dirty(key):
                    assert (key in session.queue) != (key in held)

    @invariant()
    def nobody_sleeps_through_news(self) -> None:
        for waiting in self.server.waiting:
            if not waiting.is_woken:
                assert not waiting.fetch.is_complete
                assert self._bytes_for(waiting) < min(waiting.request.min_bytes, waiting.request.max_bytes)

    def _bytes_for(self, waiting: Waiting) -> int:
        fetch, total = waiting.fetch, 0
        if isinstance(fetch, IncrementalFetch):
            session = fetch._session
            asked = [(*session.topic_of(key), session.requested(key)) for key in session.keys]
        else:
            assert isinstance(fetch, FullFetch)
            asked = [(topic.topic, topic.topic_id, one) for topic, one in fetch._asked]
        for topic, topic_id, one in asked:
            found = self.world.read(
                topic, topic_id, one, one.partition_max_bytes, not total, replica_id=waiting.request.replica_id
            )
            # A log start wakes nobody, not even whom it overtakes (227-21).
            assert not requires_action(found.data) or found.data.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
            total += len(found.data.records)
        return total

    @invariant()
    def the_books_are_right(self) -> None:
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
                watched |= {(bool(request.topics[0].topic_id), key) for key in waiting.fetch._places}
        assert len(self.world.subscriptions) == len(watched)

    def teardown(self) -> None:
        """The faults stop, and everything heals by itself."""
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
            self.server.now_ms += 400  # sessions of nobody get old
            assert rounds < ROUNDS_MAX * len(self.clients), "something never ends, or somebody starves"
            for client in self.clients:
                session, request = client.next()
                news = client.take(session, self.server.ask(request))
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
