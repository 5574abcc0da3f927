"""When a broker takes itself for cut off from the controllers, and whose clients it then sends away (ADR 7).

| what is known                                                             | then                             |
| ------------------------------------------------------------------------- | -------------------------------- |
| a heartbeat that was sent within the session timeout was answered         | not isolated                     |
| another controller, or another term of it, became known within that time  | not isolated                     |
| neither                                                                   | isolated: asks to be fenced      |
| isolated, follows, or has no leader                                       | sends its clients away           |
| isolated, leads, a member of the ISR fetched within the time              | serves: nobody leads in its place |
| isolated, leads, is the ISR's only member                                 | serves: nobody else may lead     |
| isolated, leads, no member of the ISR fetched within the time             | sends its clients away           |

So the loss of all controllers stops no partition whose replicas still reach each other. Times are of one monotonic
clock, in ms. They count from the sending of what was answered, as leases do: the controller's own time for the broker
begins later.
"""

from __future__ import annotations

from collections.abc import Collection


def isolated_at_ms(answered_ms: int, controller_changed_ms: int, timeout_ms: int) -> int:
    """When a broker is isolated if nothing more is heard; both times are the last of their kind."""
    return max(answered_ms, controller_changed_ms) + timeout_ms


def sends_clients_away(
    *, is_isolated: bool, is_leader: bool, members_heard_ms: Collection[int], now_ms: int, timeout_ms: int
) -> bool:
    """Whether a replica answers producers and consumers with NOT_LEADER_OR_FOLLOWER.

    `members_heard_ms`: when each other member of a leader's ISR fetched last; empty on followers.
    """
    if not is_isolated or not is_leader:
        return is_isolated
    return bool(members_heard_ms) and now_ms - max(members_heard_ms) >= timeout_ms
