"""Members of a group join, leave and fail while their coordinator is killed.

Time limits suit a busy machine. `python -m bench.groups` measures how long a partition pauses.
"""

from __future__ import annotations

import json

import pytest

from bench import groups

pytestmark = pytest.mark.slow


@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["cooperative-sticky", "range"])
def test_partitions_have_one_owner_while_members_and_coordinators_fail(strategy: str) -> None:
    options = groups.arguments(["--quick", "--strategy", strategy, "--seed", "7"])
    outcome = groups.run(options)
    assert outcome.problems() == []
    assert outcome.kills == 1
    assert outcome.ledger.joins > options.members
    assert outcome.acknowledged
    assert outcome.log.stable_generations > 0
    for options.markdown in (False, True):
        assert groups.as_table(outcome, options)
    assert json.dumps(groups.figures(outcome, options))
