"""Isolation of brokers, by table. The timeout is 1000 ms."""

from __future__ import annotations

import pytest

from kipmesh.core.replica.serving import isolated_at_ms, refuses_clients


@pytest.mark.parametrize(
    ("response_ms", "controller_changed_ms", "at_ms"),
    [
        (5000, 0, 6000),
        (5000, 4000, 6000),  # response after the controller change
        (5000, 5900, 6900),  # a new controller grants a full session
    ],
)
def test_broker_is_isolated_after_session_timeout(response_ms: int, controller_changed_ms: int, at_ms: int) -> None:
    assert isolated_at_ms(response_ms, controller_changed_ms, 1000) == at_ms


@pytest.mark.parametrize(
    ("is_isolated", "is_leader", "members_last_fetch_ms", "expected"),
    [
        (False, True, [0], False),
        (False, False, [], False),
        (True, False, [], True),
        (True, True, [], False),  # sole ISR member: no other leader possible
        (True, True, [9001], False),
        (True, True, [9000], True),
        (True, True, [0, 9001], False),  # one fetching member suffices: it has no other leader
        (True, True, [0, 9000], True),
    ],
)
def test_isolated_broker_refuses_clients_if_others_may_lead(
    is_isolated: bool, is_leader: bool, members_last_fetch_ms: list[int], expected: bool
) -> None:
    found = refuses_clients(
        is_isolated=is_isolated,
        is_leader=is_leader,
        members_last_fetch_ms=members_last_fetch_ms,
        now_ms=10_000,
        timeout_ms=1000,
    )
    assert found == expected
