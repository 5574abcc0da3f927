from __future__ import annotations

import pytest

from kipmesh.transport.grpc.server import RequestContext


@pytest.mark.parametrize(
    ("time_left_s", "limit_s", "wanted"),
    [(None, 10.0, 10.0), (20.0, 10.0, 10.0), (2.0, 10.0, 1.8)],
)
def test_respond_within_leaves_time_before_timeout_of_caller(
    time_left_s: float | None, limit_s: float, wanted: float
) -> None:
    context = RequestContext("client", "peer", time_left_s=time_left_s)
    assert context.respond_within(limit_s) == pytest.approx(wanted)
