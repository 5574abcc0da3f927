"""The rules of isolation, by table; times in ms, the timeout is 1000."""

from __future__ import annotations

import pytest

from kipmesh.core.replica.serving import isolated_at_ms, refuses_clients


@pytest.mark.parametrize(
    ("answered_ms", "controller_changed_ms", "at_ms"),
    [
        (5000, 0, 6000),
        (5000, 4000, 6000),  # answered since
        (5000, 5900, 6900),  # the new one gives everybody a whole session
    ],
)
def test_when_a_broker_is_isolated(answered_ms: int, controller_changed_ms: int, at_ms: int) -> None:
    assert isolated_at_ms(answered_ms, controller_changed_ms, 1000) == at_ms


@pytest.mark.parametrize(
    ("is_isolated", "is_leader", "members_last_fetch_ms", "expected"),
    [
        (False, True, [0], False),
        (False, False, [], False),
        (True, False, [], True),
        (True, True, [], False),  # alone in the ISR: nobody else may lead
        (True, True, [9001], False),
        (True, True, [9000], True),
        (True, True, [0, 9001], False),  # one is enough: it does not know another leader
        (True, True, [0, 9000], True),
    ],
)
def test_whose_clients_are_sent_away(
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
