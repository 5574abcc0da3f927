"""What a broker's pod does before it stops, whoever wants that: an upgrade, a drained node, a smaller replica count.

1. It takes the release's Lease: one broker leaves at a time, although leaders and followers are two StatefulSets, which
   Kubernetes restarts without regard to each other. Who has the Lease is believed gone when no broker sees it any more,
   or when it has not renewed for the Lease's duration, by the clock of who looks.
2. A pod that goes for good (its ordinal is not below the StatefulSet's `replicas`) drains its broker, for as long as
   that takes; Kubernetes' own limit is `terminationGracePeriodSeconds`. It fails at once when there are too few other
   brokers, and the replicas stay on the volume, which is kept.
3. Any other waits until each partition that it is in sync with can do without it: `min.insync.replicas` of the others
   are in sync, or all of the others if there are not so many. After its time limit it goes nevertheless, and says so.

A StatefulSet that is being deleted takes everything with it: nothing is waited for. Nor is it without the account's
rights, which go when a release is uninstalled; an API server that has just started may refuse as well, so that is
believed when it lasts for REFUSED_FOR_S. Without an answer of Kubernetes for ASK_FOR_S it is taken for a restart. The
Lease is kept when this ends: the process only stops then.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from kipmesh.client import AdminClient
from kipmesh.client.types import ConfigResource, ResourceType, TopicMetadata
from kipmesh.core.errors import KafkaError
from kipmesh.kube.api import ForbiddenError, KubeApi, KubeError, Lease
from kipmesh.kube.inside import node_process
from kipmesh.kube.prepare import ordinal

MIN_ISR = "min.insync.replicas"
ASK_FOR_S = 60.0
REFUSED_FOR_S = 10.0
LOOK_AGAIN_S = 1.0
LEASE_S = 20
RENEW_S = 5.0
ADMIN_TIMEOUT_MS = 10_000
SHOWN_MAX = 3
Answer = TypeVar("Answer")


class Place(NamedTuple):
    """Where a pod is: names."""

    namespace: str
    stateful_set: str
    pod: str
    lease: str


class Api(Protocol):
    """What is asked of Kubernetes."""

    def replicas_wanted(self, namespace: str, name: str) -> int | None: ...  # noqa: D102
    def read_lease(self, namespace: str, name: str) -> Lease: ...  # noqa: D102
    def write_lease(self, namespace: str, name: str, holder: str, duration_s: int, version: str) -> bool: ...  # noqa: D102


def say(text: str) -> None:
    """To the container's log, where the node's own lines are: nobody keeps what a hook writes."""
    line = f"kipmesh.kube: {text}\n"
    try:
        with Path(f"/proc/{node_process()}/fd/1").open("w") as log:
            log.write(line)
    except OSError:
        sys.stdout.write(line)
        sys.stdout.flush()


def main(place: Place, first_id: int, client: Mapping[str, str], timeout_s: float) -> int:
    """The hook's exit code: 0 when the broker may stop, 1 when it will although it should not.

    `client` has `bootstrap.servers`, and how brokers are reached.
    """
    broker_id = first_id + ordinal(place.pod)
    wanted: int | None = ordinal(place.pod) + 1
    try:
        # A new one each time: it reads the account's token, which may be the reason of a refusal.
        wanted = asked(lambda: KubeApi().replicas_wanted(place.namespace, place.stateful_set))
    except ForbiddenError as error:  # a release that is uninstalled loses its account while its pods stop
        say(f"{error}: nothing is waited for")
        return 0
    except KubeError as error:
        say(f"{error}: taken for a restart")
    if wanted is None:
        say(f"{place.stateful_set} is being deleted: nothing is waited for")
        return 0
    api: Api | None = None
    with contextlib.suppress(KubeError):
        api = KubeApi()
    return asyncio.run(_leave(api, place, broker_id, client, timeout_s, for_good=ordinal(place.pod) >= wanted))


def asked(
    ask: Callable[[], Answer],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Answer:
    """What `ask` gives, tried again while it fails. `clock` gives seconds.

    Raises ForbiddenError when it was refused for REFUSED_FOR_S without another answer in between, and a KubeError
    that is none when nothing else came for ASK_FOR_S.
    """
    deadline = clock() + ASK_FOR_S
    refused_at: float | None = None
    told = ""
    while True:
        try:
            return ask()
        except ForbiddenError as error:
            failure: KubeError = error
            refused_at = clock() if refused_at is None else refused_at
            if clock() - refused_at >= REFUSED_FOR_S:
                raise
        except KubeError as error:
            failure, refused_at = error, None
        if clock() > deadline:
            raise KubeError(str(failure))
        if str(failure) != told:
            told = str(failure)
            say(f"{told}; trying again")
        sleep(LOOK_AGAIN_S)


async def _leave(
    api: Api | None, place: Place, broker_id: int, client: Mapping[str, str], timeout_s: float, *, for_good: bool
) -> int:
    limits = {"default.api.timeout.ms": ADMIN_TIMEOUT_MS, "request.timeout.ms": ADMIN_TIMEOUT_MS}
    more = {key: value for key, value in client.items() if key != "bootstrap.servers"}
    admin = AdminClient(client["bootstrap.servers"], **{**limits, **more})
    deadline = time.monotonic() + timeout_s
    try:
        async with admin, _turn(api, place, admin, broker_id, deadline):
            if for_good:
                say(f"broker {broker_id} goes for good: it is drained")
                # Kubernetes' own limit is the only one: what is not moved is missing when the pod is gone.
                done = await _again(lambda: admin.drain_broker(broker_id), broker_id, math.inf)
                say(f"broker {broker_id}: {done.total} replicas moved, it has none")
                return 0
            return await _wait_until_spared(admin, broker_id, deadline)
    except KafkaError as error:
        say(f"broker {broker_id} {'is not drained' if for_good else 'goes unasked'}: {error}")
        return 1


async def _wait_until_spared(admin: AdminClient, broker_id: int, deadline: float) -> int:
    told: Sequence[str] = ()
    while True:
        needed = await _again(lambda: needed_by(admin, broker_id), broker_id, deadline)
        if not needed:
            say(f"broker {broker_id} may stop: all partitions can do without it")
            return 0
        if time.monotonic() > deadline:
            say(f"broker {broker_id} stops although it is needed by {_shown(needed)}")
            return 1
        if needed != told:
            say(f"broker {broker_id} is needed by {_shown(needed)}")
            told = needed
        await asyncio.sleep(LOOK_AGAIN_S)


async def _again(ask: Callable[[], Awaitable[Answer]], broker_id: int, deadline: float) -> Answer:
    """What `ask` gives; asked again while it fails and may succeed later, on a busy machine. Raises KafkaError."""
    told = ""
    while True:
        try:
            return await ask()
        except KafkaError as error:
            if not error.retriable or time.monotonic() > deadline:
                raise
            if str(error) != told:
                say(f"broker {broker_id} asks again: {error}")
                told = str(error)
        await asyncio.sleep(LOOK_AGAIN_S)


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
    return ", ".join(names[:SHOWN_MAX]) + more


async def needed_by(admin: AdminClient, broker_id: int) -> list[str]:
    """The partitions that would have too few in-sync replicas without the broker; raises KafkaError."""
    topics = [
        topic for topic in await admin.list_topics() if any(broker_id in one.isr for one in topic.partitions.values())
    ]
    resources = [ConfigResource(ResourceType.TOPIC, topic.name) for topic in topics]
    configs = await admin.describe_configs(resources, keys=[MIN_ISR]) if resources else {}
    minimums = {resource.name: int(values[MIN_ISR].value or 1) for resource, values in configs.items()}
    return lacking(topics, minimums, broker_id)


def lacking(topics: Sequence[TopicMetadata], minimums: Mapping[str, int], broker_id: int) -> list[str]:
    """As `needed_by`, of what metadata says; `minimums` are the topics' `min.insync.replicas`."""
    found = []
    for topic in topics:
        for number, one in sorted(topic.partitions.items()):
            others = [replica for replica in one.isr if replica != broker_id]
            required = min(minimums.get(topic.name, 1), len(one.replicas) - 1)
            if broker_id in one.isr and len(others) < required:
                found.append(f"{topic.name}-{number}")
    return found


class Turns:
    """Whose turn it is, by a Lease. A holder is a pod's name and its broker's id."""

    def __init__(self, api: Api, place: Place, broker_id: int) -> None:
        self._api = api
        self._place = place
        self._me = f"{place.pod}/{broker_id}"
        self._seen: tuple[str, float] = ("", 0.0)

    def take(self, brokers: Collection[int], now: float) -> str:
        """Take or renew the Lease: empty when it is this pod's, or who has it. `brokers` are those that serve."""
        lease = self._api.read_lease(self._place.namespace, self._place.lease)
        if lease.version != self._seen[0]:
            self._seen = (lease.version, now)
        if lease.holder not in ("", self._me) and not self._is_over(lease, brokers, now):
            return lease.holder
        return "" if self._write(lease) else "somebody who was faster"

    def renew(self) -> None:
        """Keep the Lease, if nobody else has taken it."""
        lease = self._api.read_lease(self._place.namespace, self._place.lease)
        if lease.holder == self._me:
            self._write(lease)

    def _write(self, lease: Lease) -> bool:
        return self._api.write_lease(self._place.namespace, self._place.lease, self._me, LEASE_S, lease.version)

    def _is_over(self, lease: Lease, brokers: Collection[int], now: float) -> bool:
        holder = lease.holder.rpartition("/")[2]
        return (holder.isdecimal() and int(holder) not in brokers) or now - self._seen[1] > lease.duration_s


@asynccontextmanager
async def _turn(
    api: Api | None, place: Place, admin: AdminClient, broker_id: int, deadline: float
) -> AsyncIterator[None]:
    """Within, no other pod of the release leaves."""
    if api is None:
        yield
        return
    turns = Turns(api, place, broker_id)
    told = ""
    while True:
        brokers = [node.node_id for node in (await _again(admin.describe_cluster, broker_id, deadline)).brokers]
        try:
            holder = await asyncio.to_thread(turns.take, brokers, time.monotonic())
        except KubeError as error:
            holder = str(error)
        if not holder:
            break
        if time.monotonic() > deadline:
            say(f"broker {broker_id} does not wait any longer for {holder}")
            yield
            return
        if holder != told:
            say(f"broker {broker_id} waits for {holder}")
            told = holder
        await asyncio.sleep(LOOK_AGAIN_S)
    renewing = asyncio.create_task(_renew(turns), name="renew")
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)


async def _renew(turns: Turns) -> None:
    while True:
        await asyncio.sleep(RENEW_S)
        with contextlib.suppress(KubeError):
            await asyncio.to_thread(turns.renew)
