"""Members of a group come, go and die while the broker that coordinates them is killed: nothing is lost or owned twice.

How long a partition pauses is measured by `python -m bench.groups`; here a busy machine must pass.
"""

from __future__ import annotations

import json

import pytest

from bench import groups

pytestmark = pytest.mark.slow


@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["cooperative-sticky", "range"])
def test_members_come_go_and_die(strategy: str) -> None:
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
