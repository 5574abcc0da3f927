"""What a follower does with the leader's answer for one partition ("Log truth" in docs/rules.md).

Pure decisions over numbers; the driver holds the log. A follower never keeps a record that the leader has not: on a
diverging epoch it truncates and asks again, as often as it takes, epoch by epoch.
"""

from __future__ import annotations

from kipmesh.messages import EpochEndOffset


def truncation_offset(leader: EpochEndOffset, local: EpochEndOffset, log_end_offset: int) -> int:
    """Where to cut a diverged log.

    `leader` is the end, at the leader, of the largest epoch that is not above the follower's; `local` the follower's
    own answer to the same question (its end of the largest epoch not above `leader.epoch`).
    """
    if leader.epoch < 0 or local.epoch < 0:
        # No common epoch is known: nothing beyond the leader's offset can be trusted.
        return min(max(leader.end_offset, 0), log_end_offset)
    if local.epoch == leader.epoch:
        return min(leader.end_offset, local.end_offset, log_end_offset)
    # The follower lacks the leader's epoch: cut back to the end of its own earlier one and compare again.
    return min(local.end_offset, log_end_offset)


def has_diverged(fetch_offset: int, last_fetched_epoch: int, at_leader: EpochEndOffset) -> bool:
    """The leader's test: `at_leader` is its end of the largest epoch not above `last_fetched_epoch`."""
    return at_leader.epoch < last_fetched_epoch or at_leader.end_offset < fetch_offset


def follower_high_watermark(told: int, log_end_offset: int, before: int) -> int:
    """A follower's own high watermark: what the leader told, as far as its log reaches; never back (392-01)."""
    return max(before, min(told, log_end_offset))
