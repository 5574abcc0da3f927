"""preStop hook of a broker's pod: waits until the broker may stop, and drains it if the pod is scaled down.

1. Acquires the release's Lease, so that one broker stops at a time across both StatefulSets. The Lease expires when its
   holder is no longer registered, or has not renewed it for its duration.
2. A pod that is scaled down (ordinal >= `replicas`) drains its broker, limited only by `terminationGracePeriodSeconds`.
   This fails if too few other brokers remain; the replicas then stay on the volume.
3. Any other pod waits until every partition has enough in-sync replicas without it: `min.insync.replicas`, or all other
   replicas if there are fewer. After the time limit it stops anyway and logs that.

A deleted StatefulSet ends the hook immediately. So does a refusal by the API server that lasts for FORBIDDEN_FOR_S,
because uninstalling a release deletes its account. Without a response for RETRY_TIMEOUT_S the hook assumes a restart.
It does not release the Lease, because the broker stops only after the hook.
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
RETRY_TIMEOUT_S = 60.0
FORBIDDEN_FOR_S = 10.0
POLL_INTERVAL_S = 1.0
LEASE_S = 20
RENEW_S = 5.0
ADMIN_TIMEOUT_MS = 10_000
NAMES_MAX = 3
T = TypeVar("T")


class PodRef(NamedTuple):
    """Names of a pod, its namespace, its StatefulSet and the release's Lease."""

    namespace: str
    stateful_set: str
    pod: str
    lease: str


class Api(Protocol):
    """The methods of KubeApi that this module uses."""

    def replicas_wanted(self, namespace: str, name: str) -> int | None: ...  # noqa: D102
    def read_lease(self, namespace: str, name: str) -> Lease: ...  # noqa: D102
    def write_lease(self, namespace: str, name: str, holder: str, duration_s: int, version: str) -> bool: ...  # noqa: D102


def log_line(text: str) -> None:
    """Write a line to the container's log, through the node's stdout, or else to this process's stdout.

    Kubernetes discards the output of hooks.
    """
    line = f"kipmesh.kube: {text}\n"
    try:
        with Path(f"/proc/{node_process()}/fd/1").open("w") as log:
            log.write(line)
    except OSError:
        sys.stdout.write(line)
        sys.stdout.flush()


def main(pod: PodRef, first_id: int, client: Mapping[str, str], timeout_s: float) -> int:
    """Run the hook. Return 0 if the broker may stop, or if it stops without waiting because its StatefulSet is being
    deleted.

    Returns 1 and logs the reason if the broker is scaled down but was not drained, or if it stops while partitions
    still need it or after a failed check.

    Args: first_id: node.id of the pod with ordinal 0; client: client settings with `bootstrap.servers`; timeout_s: time
    limit in seconds for waiting, but not for draining. Raises ValueError if the pod's name has no ordinal.
    """
    number = ordinal(pod.pod)
    broker_id = first_id + number
    wanted: int | None = number + 1
    try:
        # A new client each time reads the account's token again, which may have expired.
        wanted = retry(lambda: KubeApi().replicas_wanted(pod.namespace, pod.stateful_set))
    except ForbiddenError as error:  # uninstalling a release deletes its account while its pods stop
        log_line(f"{error}: stopping without waiting")
        return 0
    except KubeError as error:
        log_line(f"{error}: assuming a restart")
    if wanted is None:
        log_line(f"{pod.stateful_set} is being deleted: stopping without waiting")
        return 0
    api: Api | None = None
    with contextlib.suppress(KubeError):
        api = KubeApi()
    return asyncio.run(_leave(api, pod, broker_id, client, timeout_s, is_scaled_down=number >= wanted))


def retry(
    call: Callable[[], T],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Return the result of `call`, repeated every POLL_INTERVAL_S while it raises KubeError.

    Raises ForbiddenError if every call was refused for FORBIDDEN_FOR_S, or KubeError (not ForbiddenError) after
    RETRY_TIMEOUT_S. `clock` returns monotonic seconds.
    """
    deadline = clock() + RETRY_TIMEOUT_S
    forbidden_at: float | None = None
    logged = ""
    while True:
        try:
            return call()
        except ForbiddenError as error:
            failure: KubeError = error
            forbidden_at = clock() if forbidden_at is None else forbidden_at
            if clock() - forbidden_at >= FORBIDDEN_FOR_S:
                raise
        except KubeError as error:
            failure, forbidden_at = error, None
        if clock() > deadline:
            raise KubeError(str(failure))
        if str(failure) != logged:
            logged = str(failure)
            log_line(f"{logged}; retrying")
        sleep(POLL_INTERVAL_S)


async def _leave(
    api: Api | None, pod: PodRef, broker_id: int, client: Mapping[str, str], timeout_s: float, *, is_scaled_down: bool
) -> int:
    limits = {"default.api.timeout.ms": ADMIN_TIMEOUT_MS, "request.timeout.ms": ADMIN_TIMEOUT_MS}
    more = {key: value for key, value in client.items() if key != "bootstrap.servers"}
    admin = AdminClient(client["bootstrap.servers"], **{**limits, **more})
    deadline = time.monotonic() + timeout_s
    try:
        async with admin, _exclusive(api, pod, admin, broker_id, deadline):
            if is_scaled_down:
                log_line(f"broker {broker_id} is scaled down: draining it")
                # Without a limit: replicas that have not moved are lost with the pod.
                done = await _retry_admin(lambda: admin.drain_broker(broker_id), broker_id, math.inf)
                log_line(f"broker {broker_id}: {done.total} replicas moved, it has none")
                return 0
            return await _wait_until_not_needed(admin, broker_id, deadline)
    except KafkaError as error:
        log_line(f"broker {broker_id} {'is not drained' if is_scaled_down else 'stops without check'}: {error}")
        return 1


async def _wait_until_not_needed(admin: AdminClient, broker_id: int, deadline: float) -> int:
    logged: Sequence[str] = ()
    while True:
        needed = await _retry_admin(lambda: needed_by(admin, broker_id), broker_id, deadline)
        if not needed:
            log_line(f"broker {broker_id} may stop: no partition needs it")
            return 0
        if time.monotonic() > deadline:
            log_line(f"broker {broker_id} stops although partitions need it: {_first_names(needed)}")
            return 1
        if needed != logged:
            log_line(f"broker {broker_id} waits for partitions that need it: {_first_names(needed)}")
            logged = needed
        await asyncio.sleep(POLL_INTERVAL_S)


async def _retry_admin(call: Callable[[], Awaitable[T]], broker_id: int, deadline: float) -> T:
    """Return the result of `call`, repeated until the deadline while it raises a retriable KafkaError.

    Raises other KafkaErrors immediately, and the last one after the deadline (monotonic seconds).
    """
    logged = ""
    while True:
        try:
            return await call()
        except KafkaError as error:
            if not error.retriable or time.monotonic() > deadline:
                raise
            if str(error) != logged:
                log_line(f"broker {broker_id} retries: {error}")
                logged = str(error)
        await asyncio.sleep(POLL_INTERVAL_S)


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return ", ".join(names[:NAMES_MAX]) + more


async def needed_by(admin: AdminClient, broker_id: int) -> list[str]:
    """Return the partitions (TOPIC-NUMBER) that would have too few in-sync replicas without the broker.

    The list is empty if the broker may stop. Raises KafkaError if the topics or their configurations cannot be read.
    """
    topics = [
        topic for topic in await admin.list_topics() if any(broker_id in one.isr for one in topic.partitions.values())
    ]
    resources = [ConfigResource(ResourceType.TOPIC, topic.name) for topic in topics]
    configs = await admin.describe_configs(resources, keys=[MIN_ISR]) if resources else {}
    minimums = {resource.name: int(values[MIN_ISR].value or 1) for resource, values in configs.items()}
    return partitions_needing(topics, minimums, broker_id)


def partitions_needing(topics: Sequence[TopicMetadata], minimums: Mapping[str, int], broker_id: int) -> list[str]:
    """Return the partitions (TOPIC-NUMBER) that would have too few in-sync replicas without the broker.

    A partition needs `min.insync.replicas` in-sync replicas (from `minimums` by topic, default 1), or all of its other
    replicas if there are fewer. Partitions in which the broker is not in sync are not returned.
    """
    found = []
    for topic in topics:
        for number, one in sorted(topic.partitions.items()):
            others = [replica for replica in one.isr if replica != broker_id]
            required = min(minimums.get(topic.name, 1), len(one.replicas) - 1)
            if broker_id in one.isr and len(others) < required:
                found.append(f"{topic.name}-{number}")
    return found


class StopLease:
    """The Lease that lets only one broker of the release stop at a time. The holder is POD/BROKER_ID."""

    def __init__(self, api: Api, pod: PodRef, broker_id: int) -> None:
        self._api = api
        self._pod = pod
        self._me = f"{pod.pod}/{broker_id}"
        self._seen: tuple[str, float] = ("", 0.0)

    def acquire(self, brokers: Collection[int], now: float) -> str:
        """Acquire or renew the Lease. Return "" on success, or a description of the other holder. Does not wait.

        Also acquires another pod's Lease if that pod's broker is not in `brokers`, or if this object has seen no change
        of the Lease for the duration of the Lease.

        Args: brokers: ids of the registered brokers; now: monotonic time in seconds. Raises KubeError if an API call
        fails.
        """
        lease = self._api.read_lease(self._pod.namespace, self._pod.lease)
        if lease.version != self._seen[0]:
            self._seen = (lease.version, now)
        if lease.holder not in ("", self._me) and not self._is_expired(lease, brokers, now):
            return lease.holder
        return "" if self._write(lease) else "another pod that acquired the lease first"

    def renew(self) -> None:
        """Renew the Lease if this pod still holds it, else do nothing. Raises KubeError if an API call fails."""
        lease = self._api.read_lease(self._pod.namespace, self._pod.lease)
        if lease.holder == self._me:
            self._write(lease)

    def _write(self, lease: Lease) -> bool:
        return self._api.write_lease(self._pod.namespace, self._pod.lease, self._me, LEASE_S, lease.version)

    def _is_expired(self, lease: Lease, brokers: Collection[int], now: float) -> bool:
        holder = lease.holder.rpartition("/")[2]
        return (holder.isdecimal() and int(holder) not in brokers) or now - self._seen[1] > lease.duration_s


@asynccontextmanager
async def _exclusive(
    api: Api | None, pod: PodRef, admin: AdminClient, broker_id: int, deadline: float
) -> AsyncIterator[None]:
    """Hold the release's Lease within the block, and renew it. It is not released after the block.

    Waits for the Lease until the deadline (monotonic seconds), then continues without it. Does not wait if `api` is
    None. Raises KafkaError if the cluster cannot be described.
    """
    if api is None:
        yield
        return
    lease = StopLease(api, pod, broker_id)
    logged = ""
    while True:
        brokers = [node.node_id for node in (await _retry_admin(admin.describe_cluster, broker_id, deadline)).brokers]
        try:
            holder = await asyncio.to_thread(lease.acquire, brokers, time.monotonic())
        except KubeError as error:
            holder = str(error)
        if not holder:
            break
        if time.monotonic() > deadline:
            log_line(f"broker {broker_id} stops waiting for {holder}")
            yield
            return
        if holder != logged:
            log_line(f"broker {broker_id} waits for {holder}")
            logged = holder
        await asyncio.sleep(POLL_INTERVAL_S)
    renewing = asyncio.create_task(_renew(lease), name="renew")
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)


async def _renew(lease: StopLease) -> None:
    while True:
        await asyncio.sleep(RENEW_S)
        with contextlib.suppress(KubeError):
            await asyncio.to_thread(lease.renew)
