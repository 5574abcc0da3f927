"""Conditions and lease for stopping the pod of a broker: `kipmesh.kube.leave`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kipmesh.client.types import PartitionMetadata, TopicMetadata
from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.kube import leave
from kipmesh.kube.api import ForbiddenError, KubeError, Lease
from kipmesh.kube.leave import LEASE_S, PodRef, StopLease, partitions_needing


def topic(name: str, *partitions: tuple[tuple[int, ...], tuple[int, ...]]) -> TopicMetadata:
    """Build metadata from (replicas, isr) of each partition."""
    return TopicMetadata(
        name,
        bytes(16),
        {
            number: PartitionMetadata(number, isr[0] if isr else -1, 1, replicas, isr, ())
            for number, (replicas, isr) in enumerate(partitions)
        },
    )


@pytest.mark.parametrize(
    ("replicas", "isr", "minimum", "is_needed"),
    [
        ((1, 2, 3), (1, 2, 3), 2, False),
        ((1, 2, 3), (1, 2), 2, True),
        ((1, 2, 3), (1, 2), 1, False),
        ((1, 2, 3), (2, 3), 2, False),  # not in the ISR: no replica is lost
        ((1, 2, 3), (2,), 2, False),
        ((1, 2), (1, 2), 2, False),  # at most one other replica can be in sync
        ((1, 2), (1,), 2, True),
        ((1, 2), (1,), 1, True),
        ((1,), (1,), 1, False),  # no other replica exists
        ((1, 2, 3), (1, 2, 3), 3, False),
        ((1, 2, 3), (), 2, False),
    ],
)
def test_leaving_broker_is_needed_by_partitions_at_min_isr(
    replicas: tuple[int, ...], isr: tuple[int, ...], minimum: int, is_needed: bool
) -> None:
    assert bool(partitions_needing([topic("t", (replicas, isr))], {"t": minimum}, 1)) is is_needed


def test_partitions_that_need_the_broker_are_named() -> None:
    topics = [topic("a", ((1, 2), (1,)), ((2, 1), (1, 2))), topic("b", ((1, 2), (1,)))]
    assert partitions_needing(topics, {"a": 1, "b": 1}, 1) == ["a-0", "b-0"]


class FakeLeaseApi:
    """A Lease with optimistic concurrency, like in the API."""

    def __init__(self) -> None:
        self.holder = ""
        self.version = 1
        self.loses = False

    def replicas_wanted(self, namespace: str, name: str) -> int | None:
        raise NotImplementedError

    def read_lease(self, namespace: str, name: str) -> Lease:
        assert (namespace, name) == ("ns", "m-leaving")
        return Lease(self.holder, LEASE_S, str(self.version))

    def write_lease(self, namespace: str, name: str, holder: str, duration_s: int, version: str) -> bool:
        if self.loses or version != str(self.version):
            return False
        self.holder, self.version = holder, self.version + 1
        return True


def make_lease(api: FakeLeaseApi, pod: str, broker_id: int) -> StopLease:
    return StopLease(api, PodRef("ns", "m-followers", pod, "m-leaving"), broker_id)


def test_brokers_acquire_lease_one_after_another() -> None:
    api = FakeLeaseApi()
    first, second = make_lease(api, "m-followers-0", 101), make_lease(api, "m-leaders-0", 1)
    broker_ids = [1, 101, 102]
    assert first.acquire(broker_ids, 0) == ""
    assert second.acquire(broker_ids, 0) == "m-followers-0/101"
    assert second.acquire(broker_ids, LEASE_S) == "m-followers-0/101"
    assert second.acquire([1, 102], LEASE_S) == ""  # broker 101 has stopped
    assert first.acquire(broker_ids, LEASE_S) == "m-leaders-0/1"


def test_lease_without_renewal_is_lost() -> None:
    api = FakeLeaseApi()
    first, second = make_lease(api, "m-followers-0", 101), make_lease(api, "m-leaders-0", 1)
    broker_ids = [1, 101]
    assert first.acquire(broker_ids, 0) == ""
    assert second.acquire(broker_ids, 100) == "m-followers-0/101"
    first.renew()
    assert second.acquire(broker_ids, 101 + LEASE_S) == "m-followers-0/101"
    assert second.acquire(broker_ids, 102 + 2 * LEASE_S) == ""


def test_lost_lease_is_not_renewed() -> None:
    api = FakeLeaseApi()
    first, second = make_lease(api, "m-followers-0", 101), make_lease(api, "m-leaders-0", 1)
    assert first.acquire([1, 101], 0) == ""
    assert second.acquire([1], 0) == ""
    first.renew()
    assert api.holder == "m-leaders-0/1"


def test_conflicting_write_names_the_faster_holder() -> None:
    api = FakeLeaseApi()
    api.loses = True
    assert make_lease(api, "m-followers-0", 101).acquire([1, 101], 0) == "another pod that acquired the lease first"


class FakeAdmin:
    """Returns or raises the given results in order."""

    def __init__(self, *results: list[TopicMetadata] | KafkaError) -> None:
        self.results = list(results)

    async def list_topics(self) -> list[TopicMetadata]:
        result = self.results.pop(0)
        if isinstance(result, KafkaError):
            raise result
        return result


@pytest.fixture
def log_lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(leave, "log_line", lines.append)
    monkeypatch.setattr(leave, "POLL_INTERVAL_S", 0.0)
    return lines


async def test_retriable_error_is_retried_and_logged_once(log_lines: list[str]) -> None:
    slow = KafkaError(ErrorCode.REQUEST_TIMED_OUT, "slow")
    admin: Any = FakeAdmin(slow, slow, [])
    assert await leave._wait_until_not_needed(admin, 1, math.inf) == 0
    assert [line for line in log_lines if "retries" in line] == ["broker 1 retries: REQUEST_TIMED_OUT: slow"]
    assert "broker 1 may stop" in log_lines[-1]


@pytest.mark.parametrize(
    ("code", "deadline"), [(ErrorCode.REQUEST_TIMED_OUT, -math.inf), (ErrorCode.INVALID_REPLICATION_FACTOR, math.inf)]
)
async def test_fatal_or_late_error_is_not_retried(code: ErrorCode, deadline: float, log_lines: list[str]) -> None:
    admin: Any = FakeAdmin(KafkaError(code, "no"), [])
    with pytest.raises(KafkaError, match="no"):
        await leave._wait_until_not_needed(admin, 1, deadline)
    assert not log_lines


class FakeKubeApi:
    """An API server with a simulated clock. Returns the given results in order and repeats the last."""

    def __init__(self, *results: int | KubeError | None) -> None:
        self.results = list(results)
        self.now_s = 0.0

    def replicas_wanted(self, namespace: str, name: str) -> int | None:
        assert (namespace, name) == ("ns", "m-followers")
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, KubeError):
            raise result
        return result

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


REFUSED = ForbiddenError("cannot get statefulset m-followers: 403 Forbidden")
SLOW = KubeError("cannot get statefulset m-followers: read timed out")
SCALED_DOWN, RESTART, NO_WAIT = "scaled down", "restart", "no wait"


@pytest.mark.parametrize(
    ("results", "expected", "seconds"),
    [
        ((1,), SCALED_DOWN, 0),
        ((2,), RESTART, 0),
        ((None,), NO_WAIT, 0),
        ((REFUSED, 1), SCALED_DOWN, 1),  # an API server that has just started
        ((*[REFUSED] * 9, 1), SCALED_DOWN, 9),
        ((REFUSED,), NO_WAIT, 10),
        ((*[REFUSED] * 9, SLOW, *[REFUSED] * 9, 2), RESTART, 19),
        ((SLOW, 1), SCALED_DOWN, 1),
        ((*[SLOW] * 60, 1), SCALED_DOWN, 60),
        ((SLOW,), RESTART, 61),
        ((*[SLOW] * 60, REFUSED), RESTART, 61),  # one refusal is too short to count
    ],
)
def test_request_for_replicas_is_retried_until_decided(
    results: tuple[int | KubeError | None, ...], expected: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = FakeKubeApi(*results)
    scaled_down: list[bool] = []

    async def record_leave(*_: object, is_scaled_down: bool) -> int:
        scaled_down.append(is_scaled_down)
        return 0

    def retry(request: Callable[[], Any]) -> Any:
        return original_retry(request, lambda: api.now_s, api.sleep)

    original_retry = leave.retry
    lines: list[str] = []
    for name, value in (
        ("retry", retry),
        ("KubeApi", lambda: api),
        ("_leave", record_leave),
        ("log_line", lines.append),
    ):
        monkeypatch.setattr(leave, name, value)
    client: Mapping[str, str] = {"bootstrap.servers": "m:19092"}
    assert leave.main(PodRef("ns", "m-followers", "m-followers-1", "m-leaving"), 101, client, 600) == 0
    assert scaled_down == {SCALED_DOWN: [True], RESTART: [False], NO_WAIT: []}[expected]
    assert api.now_s == seconds
    assert all(line != following for line, following in itertools.pairwise(lines))
