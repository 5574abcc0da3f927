"""When a broker's pod may stop, and whose turn it is: `kipmesh.kube.leave`."""

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
    """From (replicas, isr) of each partition."""
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
        ((1, 2, 3), (2, 3), 2, False),  # it is not in sync: nothing is lost with it
        ((1, 2, 3), (2,), 2, False),
        ((1, 2), (1, 2), 2, False),  # more than the other one there cannot be
        ((1, 2), (1,), 2, True),
        ((1, 2), (1,), 1, True),
        ((1,), (1,), 1, False),  # nobody else will ever have it
        ((1, 2, 3), (1, 2, 3), 3, False),
        ((1, 2, 3), (), 2, False),
    ],
)
def test_leaving_broker_is_needed_by_partitions_at_min_isr(
    replicas: tuple[int, ...], isr: tuple[int, ...], minimum: int, is_needed: bool
) -> None:
    assert bool(partitions_needing([topic("t", (replicas, isr))], {"t": minimum}, 1)) is is_needed


def test_lacking_partitions_are_named() -> None:
    topics = [topic("a", ((1, 2), (1,)), ((2, 1), (1, 2))), topic("b", ((1, 2), (1,)))]
    assert partitions_needing(topics, {"a": 1, "b": 1}, 1) == ["a-0", "b-0"]


class LeaseOfTests:
    """A Lease as the API keeps it."""

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


def turns(api: LeaseOfTests, pod: str, broker_id: int) -> StopLease:
    return StopLease(api, PodRef("ns", "m-followers", pod, "m-leaving"), broker_id)


def test_brokers_take_the_lease_one_after_the_other() -> None:
    api = LeaseOfTests()
    first, second = turns(api, "m-followers-0", 101), turns(api, "m-leaders-0", 1)
    everybody = [1, 101, 102]
    assert first.acquire(everybody, 0) == ""
    assert second.acquire(everybody, 0) == "m-followers-0/101"
    assert second.acquire(everybody, LEASE_S) == "m-followers-0/101"
    assert second.acquire([1, 102], LEASE_S) == ""  # its broker has stopped
    assert first.acquire(everybody, LEASE_S) == "m-leaders-0/1"


def test_lease_without_renewal_is_lost() -> None:
    api = LeaseOfTests()
    first, second = turns(api, "m-followers-0", 101), turns(api, "m-leaders-0", 1)
    everybody = [1, 101]
    assert first.acquire(everybody, 0) == ""
    assert second.acquire(everybody, 100) == "m-followers-0/101"
    first.renew()
    assert second.acquire(everybody, 101 + LEASE_S) == "m-followers-0/101"
    assert second.acquire(everybody, 102 + 2 * LEASE_S) == ""


def test_lost_lease_is_not_renewed() -> None:
    api = LeaseOfTests()
    first, second = turns(api, "m-followers-0", 101), turns(api, "m-leaders-0", 1)
    assert first.acquire([1, 101], 0) == ""
    assert second.acquire([1], 0) == ""
    first.renew()
    assert api.holder == "m-leaders-0/1"


def test_conflicting_write_names_the_faster_holder() -> None:
    api = LeaseOfTests()
    api.loses = True
    assert turns(api, "m-followers-0", 101).acquire([1, 101], 0) == "another pod that acquired the lease first"


class AdminOfTests:
    """Gives, or raises, one thing after the other."""

    def __init__(self, *answers: list[TopicMetadata] | KafkaError) -> None:
        self.answers = list(answers)

    async def list_topics(self) -> list[TopicMetadata]:
        answer = self.answers.pop(0)
        if isinstance(answer, KafkaError):
            raise answer
        return answer


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(leave, "log_line", lines.append)
    monkeypatch.setattr(leave, "POLL_INTERVAL_S", 0.0)
    return lines


async def test_what_fails_on_a_busy_machine_is_asked_again(said: list[str]) -> None:
    slow = KafkaError(ErrorCode.REQUEST_TIMED_OUT, "slow")
    admin: Any = AdminOfTests(slow, slow, [])
    assert await leave._wait_until_not_needed(admin, 1, math.inf) == 0
    assert [line for line in said if "retries" in line] == ["broker 1 retries: REQUEST_TIMED_OUT: slow"]
    assert "broker 1 may stop" in said[-1]


@pytest.mark.parametrize(
    ("code", "deadline"), [(ErrorCode.REQUEST_TIMED_OUT, -math.inf), (ErrorCode.INVALID_REPLICATION_FACTOR, math.inf)]
)
async def test_what_cannot_succeed_is_not_asked_again(code: ErrorCode, deadline: float, said: list[str]) -> None:
    admin: Any = AdminOfTests(KafkaError(code, "no"), [])
    with pytest.raises(KafkaError, match="no"):
        await leave._wait_until_not_needed(admin, 1, deadline)
    assert not said


class KubeOfTests:
    """An API server on a clock of its own: `answers` are given one after the other, the last one for ever."""

    def __init__(self, *answers: int | KubeError | None) -> None:
        self.answers = list(answers)
        self.now_s = 0.0

    def replicas_wanted(self, namespace: str, name: str) -> int | None:
        assert (namespace, name) == ("ns", "m-followers")
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, KubeError):
            raise answer
        return answer

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


REFUSED = ForbiddenError("cannot get statefulset m-followers: 403 Forbidden")
SLOW = KubeError("cannot get statefulset m-followers: read timed out")
FOR_GOOD, RESTART, AT_ONCE = "for good", "restart", "at once"


@pytest.mark.parametrize(
    ("answers", "expected", "seconds"),
    [
        ((1,), FOR_GOOD, 0),
        ((2,), RESTART, 0),
        ((None,), AT_ONCE, 0),
        ((REFUSED, 1), FOR_GOOD, 1),  # an API server that has just started
        ((*[REFUSED] * 9, 1), FOR_GOOD, 9),
        ((REFUSED,), AT_ONCE, 10),
        ((*[REFUSED] * 9, SLOW, *[REFUSED] * 9, 2), RESTART, 19),
        ((SLOW, 1), FOR_GOOD, 1),
        ((*[SLOW] * 60, 1), FOR_GOOD, 60),
        ((SLOW,), RESTART, 61),
        ((*[SLOW] * 60, REFUSED), RESTART, 61),  # not refused for long enough to be believed
    ],
)
def test_whether_it_goes_for_good_is_asked_for_again(
    answers: tuple[int | KubeError | None, ...], expected: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = KubeOfTests(*answers)
    left: list[bool] = []

    async def leaves(*_: object, is_scaled_down: bool) -> int:
        left.append(is_scaled_down)
        return 0

    def retry(ask: Callable[[], Any]) -> Any:
        return real(ask, lambda: api.now_s, api.sleep)

    real = leave.retry
    lines: list[str] = []
    for name, value in (("retry", retry), ("KubeApi", lambda: api), ("_leave", leaves), ("log_line", lines.append)):
        monkeypatch.setattr(leave, name, value)
    client: Mapping[str, str] = {"bootstrap.servers": "m:19092"}
    assert leave.main(PodRef("ns", "m-followers", "m-followers-1", "m-leaving"), 101, client, 600) == 0
    assert left == {FOR_GOOD: [True], RESTART: [False], AT_ONCE: []}[expected]
    assert api.now_s == seconds
    assert all(one != after for one, after in itertools.pairwise(lines))
