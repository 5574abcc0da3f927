"""When sessions end: by silence, and by a connection that broke, but never by what the controller could not see."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.sessions import BrokerSessions
from tests.unit.core.metadata.metadata_support import SESSION_MS, Controller

LOSS_MS = 200
LOOK_MS = 50


def look(sessions: BrokerSessions, now_ms: int, until_ms: int) -> dict[int, int]:
    """Ask whenever it is time for it; broker -> when its session ended. Ended ones are forgotten."""
    ended: dict[int, int] = {}
    while (deadline := sessions.next_deadline_ms()) is not None and max(deadline, now_ms) <= until_ms:
        now_ms = max(deadline, now_ms)
        for broker_id in sessions.expired(now_ms):
            ended[broker_id] = now_ms
            sessions.end(broker_id)
    return ended


# What happens to broker 1, whose session began at 0 over connection 7 -> when it ends.
# heard: (ms, connection); broken: (ms, connection).
TABLE: list[tuple[str, list[tuple[Any, ...]], int]] = [
    ("silence", [], SESSION_MS),
    ("its connection broke", [("broken", 100, 7)], 300),
    ("it broke and another one came", [("broken", 100, 7), ("heard", 299, 8)], 299 + SESSION_MS),
    ("another one came first", [("heard", 90, 8), ("broken", 100, 7)], 90 + SESSION_MS),
    ("both broke", [("heard", 90, 8), ("broken", 100, 7), ("broken", 110, 8)], 310),
    ("it was heard without a connection", [("broken", 100, 7), ("heard", 150, 0)], 150 + SESSION_MS),
    ("a connection that brought nothing of it", [("broken", 100, 9)], SESSION_MS),
    ("the same one told twice", [("broken", 100, 7), ("broken", 150, 7)], 300),
    ("back, and broken again", [("broken", 100, 7), ("heard", 150, 8), ("broken", 400, 8)], 600),
    ("silent for long already", [("broken", SESSION_MS - 20, 7)], SESSION_MS),
]


@pytest.mark.parametrize(("events", "end_ms"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_when_a_session_ends(events: list[tuple[Any, ...]], end_ms: int) -> None:
    sessions = BrokerSessions(SESSION_MS, LOSS_MS)
    sessions.touch(1, 5, 0, connection=7)
    now = 0
    for what, at, connection in events:
        assert look(sessions, now, at) == {}
        now = at
        if what == "heard":
            sessions.touch(1, 5, at, connection=connection)
        else:
            sessions.disconnected(1, connection, at)
    assert look(sessions, now, now + 2 * SESSION_MS) == {1: end_ms}


def test_switched_off_a_broken_connection_means_nothing() -> None:
    sessions = BrokerSessions(SESSION_MS, 0)
    sessions.touch(1, 5, 0, connection=7)
    assert not sessions.disconnected(1, 7, 100)
    assert sessions.is_live(1, 100)
    assert look(sessions, 100, 10_000) == {1: SESSION_MS}


def test_connections_of_another_controller_or_registration_mean_nothing() -> None:
    sessions = BrokerSessions(SESSION_MS, LOSS_MS)
    sessions.grant(1, 5, 0)  # as every new controller does
    assert not sessions.disconnected(1, 7, 10)
    sessions.touch(1, 5, 20, connection=8)
    sessions.touch(1, 6, 30)  # registered again
    assert not sessions.disconnected(1, 8, 40)
    sessions.end(1)
    assert not sessions.disconnected(1, 8, 50)
    assert sessions.missing() == frozenset()


def test_whoever_is_missing_is_not_alive() -> None:
    sessions = BrokerSessions(SESSION_MS, LOSS_MS)
    sessions.touch(1, 5, 0, connection=7)
    assert sessions.disconnected(1, 7, 10)
    assert sessions.missing() == {1}
    assert not sessions.is_live(1, 10)
    sessions.touch(1, 5, 20)
    assert sessions.is_live(1, 20)
    assert sessions.missing() == frozenset()


@pytest.mark.parametrize("stall_ms", [2 * LOOK_MS + 1, LOSS_MS, 10 * LOSS_MS])
@pytest.mark.parametrize("looks", range(4))
def test_a_controller_that_stood_still_begins_to_look_anew(stall_ms: int, looks: int) -> None:
    sessions = BrokerSessions(60_000, LOSS_MS)
    sessions.touch(1, 5, 0, connection=7)
    sessions.disconnected(1, 7, 0)
    now = looks * LOOK_MS
    assert look(sessions, 0, now) == {}
    now += stall_ms
    assert sessions.expired(now) == []
    assert look(sessions, now, now + LOSS_MS - 1) == {}
    assert look(sessions, now + LOSS_MS - 1, now + LOSS_MS) == {1: now + LOSS_MS}


def test_a_stall_is_noticed_by_the_next_connection_that_breaks_too() -> None:
    sessions = BrokerSessions(60_000, LOSS_MS)
    for broker_id in (1, 2):
        sessions.touch(broker_id, 5, 0, connection=broker_id)
    sessions.disconnected(1, 1, 0)
    sessions.disconnected(2, 2, 1000)
    assert sessions.expired(1000) == []
    assert look(sessions, 1000, 2000) == {1: 1200, 2: 1200}


def test_a_controller_that_was_away_gives_everybody_their_time() -> None:
    sessions = BrokerSessions(SESSION_MS, LOSS_MS)
    for broker_id in (1, 2):
        sessions.touch(broker_id, 5, 0, connection=broker_id)
    sessions.disconnected(1, 1, 0)
    sessions.extend(50_000)
    assert sessions.expired(50_000) == []
    assert look(sessions, 50_000, 60_000) == {1: 50_200, 2: 53_000}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["heard", "heard without", "broken", "pass"]),
        st.integers(1, 3),  # broker
        st.integers(1, 3),  # connection
        st.integers(0, 400),  # ms that pass
        st.booleans(),  # while the controller stands still
    ),
    max_size=40,
)


def test_who_was_not_heard_of_and_refuses_is_missing() -> None:
    sessions = BrokerSessions(SESSION_MS, LOSS_MS)
    for broker_id in (1, 2, 3):
        sessions.grant(broker_id, 5, 0)
    sessions.touch(2, 5, 10)
    assert sessions.unconfirmed() == [1, 3]
    assert [sessions.refused(broker_id, 100) for broker_id in (1, 2, 3, 4)] == [True, False, True, False]
    assert not sessions.refused(1, 150)  # it is already
    sessions.touch(3, 5, 299)
    assert look(sessions, 100, SESSION_MS) == {1: 300}
    never = BrokerSessions(SESSION_MS, 0)
    never.grant(1, 5, 0)
    assert not never.refused(1, 100)
    assert look(never, 100, SESSION_MS) == {1: SESSION_MS}


@given(STEPS)
def test_no_session_ends_without_cause(steps: list[tuple[str, int, int, int, bool]]) -> None:
    """A model of what the controller could see: running time since the last sign of life of each broker."""
    sessions = BrokerSessions(SESSION_MS, LOSS_MS)
    now = 0
    heard: dict[int, int] = {}
    open_: dict[int, set[int]] = {}
    broken: dict[int, int] = {}
    stalls: list[tuple[int, int]] = []

    def check(ended: dict[int, int]) -> None:
        for broker_id, at in ended.items():
            silent = at >= heard[broker_id] + SESSION_MS
            since = broken.get(broker_id)
            stood = any(
                since is not None and begin >= since and end <= at and end - begin > 3 * LOOK_MS and at - end < LOSS_MS
                for begin, end in stalls
            )
            gone = since is not None and not open_[broker_id] and at >= since + LOSS_MS and not stood
            assert silent or gone
            heard.pop(broker_id)
            open_.pop(broker_id)
            broken.pop(broker_id, None)

    for what, broker_id, number, wait_ms, stands in steps:
        connection = broker_id * 10 + number
        if what.startswith("heard"):
            sessions.touch(broker_id, 5, now, connection=connection if what == "heard" else 0)
            heard[broker_id] = now
            broken.pop(broker_id, None)
            open_.setdefault(broker_id, set())
            if what == "heard":
                open_[broker_id].add(connection)
        elif what == "broken":
            had = connection in open_.get(broker_id, ())
            told = sessions.disconnected(broker_id, connection, now)
            open_.get(broker_id, set()).discard(connection)
            assert told == (had and not open_[broker_id])
            if told:
                broken[broker_id] = now
        if stands:
            stalls.append((now, now + wait_ms))
            now += wait_ms
            ended = sessions.expired(now)
            for each in ended:
                sessions.end(each)
            check(dict.fromkeys(ended, now))
        else:
            check(look(sessions, now, now + wait_ms))
            now += wait_ms
    # Whoever is gone or silent does not stay for ever.
    check(look(sessions, now, now + 2 * SESSION_MS))
    assert not heard


# --- the same as decisions


@pytest.fixture
def three() -> Controller:
    controller = Controller(broker_connection_loss_timeout_ms=LOSS_MS)
    for broker_id in (1, 2, 3):
        controller.join(broker_id)
        controller.connected(broker_id, broker_id * 10)
    return controller


def test_a_broker_whose_connection_broke_is_fenced(three: Controller) -> None:
    topic = three.assigned("t", (1, 2, 3))
    assert three.core.brokers.disconnected(1, 10, three.now_ms)
    assert three.pass_ms(LOSS_MS - 1) == []
    assert three.pass_ms(1) == [1]
    assert three.image.brokers[1].fenced
    state = three.state(topic)
    assert (state.leader, state.isr) == (2, (2, 3))


def test_a_broker_that_is_back_in_time_is_not_fenced(three: Controller) -> None:
    assert three.core.brokers.disconnected(1, 10, three.now_ms)
    three.pass_ms(LOSS_MS - 1)
    three.connected(1, 11)
    assert three.pass_ms(SESSION_MS - LOSS_MS) == []
    assert not three.image.brokers[1].fenced


def test_a_new_controller_fences_nobody_for_connections_of_the_one_before(three: Controller) -> None:
    three.core.brokers.disconnected(1, 10, three.now_ms)
    three.restart()
    assert not three.core.brokers.disconnected(2, 20, three.now_ms)
    assert three.pass_ms(SESSION_MS - 1) == []


def test_a_clean_end_by_controlled_shutdown_is_no_loss(three: Controller) -> None:
    three.heartbeat(1, shut_down=True)
    three.heartbeat(2)
    three.heartbeat(3)
    assert three.heartbeat(1, shut_down=True).should_shut_down
    assert not three.core.brokers.disconnected(1, 10, three.now_ms)
    assert three.core.sessions.missing() == frozenset()
    assert three.pass_ms(LOSS_MS * 2) == []


def test_a_restart_does_not_wait_for_a_session_whose_connection_broke(three: Controller) -> None:
    topic = three.assigned("t", (1, 2, 3))
    assert three.register(1, incarnation=2).error_code == ErrorCode.DUPLICATE_BROKER_REGISTRATION
    three.core.brokers.disconnected(1, 10, three.now_ms)
    assert three.register(1, incarnation=2).error_code == 0
    assert three.state(topic).isr == (2, 3)
    assert three.pass_ms(LOSS_MS * 2) == []  # the session is the new registration's
    assert not three.heartbeat(1).is_fenced
