"""Broker sessions end by silence or by a lost connection, but never because of a stall of the controller."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.sessions import BrokerSessions
from tests.unit.core.metadata.metadata_support import SESSION_MS, Controller

LOSS_MS = 200
CHECK_INTERVAL_MS = 50


def expire_sessions(sessions: BrokerSessions, now_ms: int, until_ms: int) -> dict[int, int]:
    """Check for expired sessions at each deadline and end them. Return end times by broker id."""
    ended: dict[int, int] = {}
    while (deadline := sessions.next_deadline_ms()) is not None and max(deadline, now_ms) <= until_ms:
        now_ms = max(deadline, now_ms)
        for broker_id in sessions.expired(now_ms):
            ended[broker_id] = now_ms
            sessions.end(broker_id)
    return ended


# Events of broker 1, whose session starts at 0 over connection 7, and the end of the session.
# heartbeat: (ms, connection); disconnect: (ms, connection).
TABLE: list[tuple[str, list[tuple[Any, ...]], int]] = [
    ("silence", [], SESSION_MS),
    ("disconnected", [("disconnect", 100, 7)], 300),
    ("reconnected after disconnect", [("disconnect", 100, 7), ("heartbeat", 299, 8)], 299 + SESSION_MS),
    ("reconnected before disconnect", [("heartbeat", 90, 8), ("disconnect", 100, 7)], 90 + SESSION_MS),
    ("both connections lost", [("heartbeat", 90, 8), ("disconnect", 100, 7), ("disconnect", 110, 8)], 310),
    ("heartbeat without connection", [("disconnect", 100, 7), ("heartbeat", 150, 0)], 150 + SESSION_MS),
    ("disconnect of unknown connection", [("disconnect", 100, 9)], SESSION_MS),
    ("duplicate disconnect", [("disconnect", 100, 7), ("disconnect", 150, 7)], 300),
    (
        "reconnected and disconnected again",
        [("disconnect", 100, 7), ("heartbeat", 150, 8), ("disconnect", 400, 8)],
        600,
    ),
    ("disconnected just before session timeout", [("disconnect", SESSION_MS - 20, 7)], SESSION_MS),
]


@pytest.mark.parametrize(("events", "end_ms"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_session_ends_by_silence_or_connection_loss(events: list[tuple[Any, ...]], end_ms: int) -> None:
    sessions = BrokerSessions(SESSION_MS, LOSS_MS)
    sessions.touch(1, 5, 0, connection=7)
    now = 0
    for event, at, connection in events:
        assert expire_sessions(sessions, now, at) == {}
        now = at
        if event == "heartbeat":
            sessions.touch(1, 5, at, connection=connection)
        else:
            sessions.disconnected(1, connection, at)
    assert expire_sessions(sessions, now, now + 2 * SESSION_MS) == {1: end_ms}


def test_disabled_connection_loss_timeout_ignores_disconnects() -> None:
    sessions = BrokerSessions(SESSION_MS, 0)
    sessions.touch(1, 5, 0, connection=7)
    assert not sessions.disconnected(1, 7, 100)
    assert sessions.is_live(1, 100)
    assert expire_sessions(sessions, 100, 10_000) == {1: SESSION_MS}


def test_disconnects_of_other_controllers_or_registrations_are_ignored() -> None:
    sessions = BrokerSessions(SESSION_MS, LOSS_MS)
    sessions.grant(1, 5, 0)  # a new controller grants sessions
    assert not sessions.disconnected(1, 7, 10)
    sessions.touch(1, 5, 20, connection=8)
    sessions.touch(1, 6, 30)  # registered again
    assert not sessions.disconnected(1, 8, 40)
    sessions.end(1)
    assert not sessions.disconnected(1, 8, 50)
    assert sessions.missing() == frozenset()


def test_missing_broker_is_not_live() -> None:
    sessions = BrokerSessions(SESSION_MS, LOSS_MS)
    sessions.touch(1, 5, 0, connection=7)
    assert sessions.disconnected(1, 7, 10)
    assert sessions.missing() == {1}
    assert not sessions.is_live(1, 10)
    sessions.touch(1, 5, 20)
    assert sessions.is_live(1, 20)
    assert sessions.missing() == frozenset()


@pytest.mark.parametrize("stall_ms", [2 * CHECK_INTERVAL_MS + 1, LOSS_MS, 10 * LOSS_MS])
@pytest.mark.parametrize("checks", range(4))
def test_stalled_controller_restarts_connection_loss_timeout(stall_ms: int, checks: int) -> None:
    sessions = BrokerSessions(60_000, LOSS_MS)
    sessions.touch(1, 5, 0, connection=7)
    sessions.disconnected(1, 7, 0)
    now = checks * CHECK_INTERVAL_MS
    assert expire_sessions(sessions, 0, now) == {}
    now += stall_ms
    assert sessions.expired(now) == []
    assert expire_sessions(sessions, now, now + LOSS_MS - 1) == {}
    assert expire_sessions(sessions, now + LOSS_MS - 1, now + LOSS_MS) == {1: now + LOSS_MS}


def test_disconnect_after_stall_restarts_connection_loss_timeout() -> None:
    sessions = BrokerSessions(60_000, LOSS_MS)
    for broker_id in (1, 2):
        sessions.touch(broker_id, 5, 0, connection=broker_id)
    sessions.disconnected(1, 1, 0)
    sessions.disconnected(2, 2, 1000)
    assert sessions.expired(1000) == []
    assert expire_sessions(sessions, 1000, 2000) == {1: 1200, 2: 1200}


def test_extend_restarts_all_session_timeouts() -> None:
    sessions = BrokerSessions(SESSION_MS, LOSS_MS)
    for broker_id in (1, 2):
        sessions.touch(broker_id, 5, 0, connection=broker_id)
    sessions.disconnected(1, 1, 0)
    sessions.extend(50_000)
    assert sessions.expired(50_000) == []
    assert expire_sessions(sessions, 50_000, 60_000) == {1: 50_200, 2: 53_000}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["heartbeat", "heartbeat without connection", "disconnect", "pass"]),
        st.integers(1, 3),  # broker
        st.integers(1, 3),  # connection
        st.integers(0, 400),  # elapsed ms
        st.booleans(),  # controller stalls
    ),
    max_size=40,
)


def test_unconfirmed_broker_that_refuses_connection_is_missing() -> None:
    sessions = BrokerSessions(SESSION_MS, LOSS_MS)
    for broker_id in (1, 2, 3):
        sessions.grant(broker_id, 5, 0)
    sessions.touch(2, 5, 10)
    assert sessions.unconfirmed() == [1, 3]
    assert [sessions.refused(broker_id, 100) for broker_id in (1, 2, 3, 4)] == [True, False, True, False]
    assert not sessions.refused(1, 150)  # already missing
    sessions.touch(3, 5, 299)
    assert expire_sessions(sessions, 100, SESSION_MS) == {1: 300}
    never = BrokerSessions(SESSION_MS, 0)
    never.grant(1, 5, 0)
    assert not never.refused(1, 100)
    assert expire_sessions(never, 100, SESSION_MS) == {1: SESSION_MS}


@given(STEPS)
def test_sessions_end_only_by_silence_or_connection_loss(steps: list[tuple[str, int, int, int, bool]]) -> None:
    """Compare with a model of heartbeats, connections and controller stalls."""
    sessions = BrokerSessions(SESSION_MS, LOSS_MS)
    now = 0
    last_heartbeat: dict[int, int] = {}
    open_: dict[int, set[int]] = {}
    broken: dict[int, int] = {}
    stalls: list[tuple[int, int]] = []

    def check(ended: dict[int, int]) -> None:
        for broker_id, at in ended.items():
            silent = at >= last_heartbeat[broker_id] + SESSION_MS
            since = broken.get(broker_id)
            stalled = any(
                since is not None
                and begin >= since
                and end <= at
                and end - begin > 3 * CHECK_INTERVAL_MS
                and at - end < LOSS_MS
                for begin, end in stalls
            )
            lost = since is not None and not open_[broker_id] and at >= since + LOSS_MS and not stalled
            assert silent or lost
            last_heartbeat.pop(broker_id)
            open_.pop(broker_id)
            broken.pop(broker_id, None)

    for event, broker_id, number, wait_ms, stalls_now in steps:
        connection = broker_id * 10 + number
        if event.startswith("heartbeat"):
            sessions.touch(broker_id, 5, now, connection=connection if event == "heartbeat" else 0)
            last_heartbeat[broker_id] = now
            broken.pop(broker_id, None)
            open_.setdefault(broker_id, set())
            if event == "heartbeat":
                open_[broker_id].add(connection)
        elif event == "disconnect":
            had = connection in open_.get(broker_id, ())
            is_missing = sessions.disconnected(broker_id, connection, now)
            open_.get(broker_id, set()).discard(connection)
            assert is_missing == (had and not open_[broker_id])
            if is_missing:
                broken[broker_id] = now
        if stalls_now:
            stalls.append((now, now + wait_ms))
            now += wait_ms
            ended = sessions.expired(now)
            for ended_id in ended:
                sessions.end(ended_id)
            check(dict.fromkeys(ended, now))
        else:
            check(expire_sessions(sessions, now, now + wait_ms))
            now += wait_ms
    # Every lost or silent session ends.
    check(expire_sessions(sessions, now, now + 2 * SESSION_MS))
    assert not last_heartbeat


# --- controller decisions


@pytest.fixture
def three() -> Controller:
    controller = Controller(broker_connection_loss_timeout_ms=LOSS_MS)
    for broker_id in (1, 2, 3):
        controller.join(broker_id)
        controller.connected(broker_id, broker_id * 10)
    return controller


def test_disconnected_broker_is_fenced_after_timeout(three: Controller) -> None:
    topic = three.create_assigned("t", (1, 2, 3))
    assert three.core.brokers.disconnected(1, 10, three.now_ms)
    assert three.pass_ms(LOSS_MS - 1) == []
    assert three.pass_ms(1) == [1]
    assert three.image.brokers[1].fenced
    state = three.state(topic)
    assert (state.leader, state.isr) == (2, (2, 3))


def test_reconnected_broker_is_not_fenced(three: Controller) -> None:
    assert three.core.brokers.disconnected(1, 10, three.now_ms)
    three.pass_ms(LOSS_MS - 1)
    three.connected(1, 11)
    assert three.pass_ms(SESSION_MS - LOSS_MS) == []
    assert not three.image.brokers[1].fenced


def test_new_controller_ignores_disconnects_from_previous_controller(three: Controller) -> None:
    three.core.brokers.disconnected(1, 10, three.now_ms)
    three.restart()
    assert not three.core.brokers.disconnected(2, 20, three.now_ms)
    assert three.pass_ms(SESSION_MS - 1) == []


def test_controlled_shutdown_is_no_connection_loss(three: Controller) -> None:
    three.heartbeat(1, shut_down=True)
    three.heartbeat(2)
    three.heartbeat(3)
    assert three.heartbeat(1, shut_down=True).should_shut_down
    assert not three.core.brokers.disconnected(1, 10, three.now_ms)
    assert three.core.sessions.missing() == frozenset()
    assert three.pass_ms(LOSS_MS * 2) == []


def test_disconnected_broker_can_register_new_incarnation(three: Controller) -> None:
    topic = three.create_assigned("t", (1, 2, 3))
    assert three.register(1, incarnation=2).error_code == ErrorCode.DUPLICATE_BROKER_REGISTRATION
    three.core.brokers.disconnected(1, 10, three.now_ms)
    assert three.register(1, incarnation=2).error_code == 0
    assert three.state(topic).isr == (2, 3)
    assert three.pass_ms(LOSS_MS * 2) == []  # the session belongs to the new registration
    assert not three.heartbeat(1).is_fenced
