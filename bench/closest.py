"""`python -m bench.closest`: bytes that consumers read across racks, and the effect of a failure of the nearby replica.

One controller and three brokers run as processes in three racks. The broker in rack-a leads four partitions, to which
records are produced at a steady rate. Consumers in rack-b and rack-c read them: from the leader, or from the replica in
their rack by each `replica.selection.mode`, each on a new cluster. Bytes are the consumers' counts during a steady
state. Brokers count too (392-18) if fetches carry the rack: without a selector and in mode `fetch`.

Then the replica in rack-c is killed and restarted. Measured are the longest time without records of a partition at the
consumer there, and the time from the replica's return to the ISR to the last byte from another rack.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from math import isnan, nan
from statistics import median
from typing import Any, NamedTuple, Self

from bench import harness, workload
from bench.harness import BenchError
from kipmesh.client import AdminClient, Consumer, Producer
from kipmesh.cluster import LocalCluster
from kipmesh.cluster.layout import NodeInfo

RACKS = ("rack-b", "rack-c")
SELECTOR = "RackAwareReplicaSelector"
TOPIC = "near"
PARTITIONS = 4
RECORD_BYTES = 1000
STEP_S = 0.02
METRIC = "kipmesh_broker_consumer_fetched_bytes_total"
WAIT_S = 60.0
QUIET_S = 2.0
"""Time without a byte from another rack after which all partitions count as read nearby."""
NEAR_READS = 10
"""Minimum of reads of each partition in that time, because nothing is read during a stall either."""
SHARE_TARGET, GAP_TARGET_S = 99.0, 2.0


class Mode(NamedTuple):
    """A way to select a replica: its label, and the configurations that brokers and consumers need for it."""

    label: str
    brokers: Mapping[str, str]
    consumers: Mapping[str, str]


MODES: Mapping[str, Mode] = {
    "off": Mode("the leader (no selector)", {}, {}),
    "fetch": Mode("`fetch`: leaders redirect", {"replica.selector.class": SELECTOR}, {}),
    "metadata": Mode(
        "`metadata`: brokers propose",
        {"replica.selector.class": SELECTOR, "replica.selection.mode": "metadata"},
        {"replica.selection.mode": "metadata", "replica.selection.policy": "preferred"},
    ),
    "consumer": Mode(
        "`consumer`: its own selector",
        {},
        {
            "replica.selector.class": SELECTOR,
            "replica.selection.mode": "consumer",
            "replica.selection.policy": "preferred",
        },
    ),
}
OFF = "off"
NOTHING: Mapping[str, str] = {}


# -- load


class Bytes(NamedTuple):
    """Bytes that consumers read from brokers in their own rack and from others."""

    own: float = 0
    other: float = 0

    @property
    def share(self) -> float:
        """Percentage (0 to 100) of bytes read within the consumer's rack; nan if nothing was read."""
        return 100 * self.own / (self.own + self.other) if self.own + self.other else nan

    def since(self, before: Bytes) -> Bytes:
        """Return how many bytes were read since an earlier count."""
        return Bytes(self.own - before.own, self.other - before.other)


async def bytes_of_brokers(nodes: Iterable[NodeInfo]) -> Bytes:
    """Return the bytes that these brokers have served to consumers so far, according to their metrics. Only fetches
    that specify a rack are counted. Raises OSError.
    """
    found: Counter[str] = Counter()
    for node in nodes:
        for sample in await asyncio.to_thread(harness.samples, node.http):
            if sample.name == METRIC:
                found[sample.labels["rack"]] += int(sample.value)
    return Bytes(found["same"], found["cross"])


class Reader:
    """A consumer that is in one rack and reads all partitions. `near` are the ids of the brokers in that rack.

    The caller starts and closes `consumer`.
    """

    def __init__(self, bootstrap: str, rack: str, near: Sequence[int], config: Mapping[str, Any]) -> None:
        common = {"client.id": f"reader-{rack}", "client.rack": rack, "auto.offset.reset": "earliest"}
        self.consumer = Consumer(bootstrap, **{**common, **config})
        self.rack = rack
        self.times: dict[int, list[float]] = {partition: [] for partition in range(PARTITIONS)}
        """Times at which records of each partition were returned (`time.monotonic`)."""
        self.near_at = self.other_at = 0.0
        """Time of the last byte from the own rack, and from another rack."""
        self._near = frozenset(near)
        self._read = asyncio.Event()

    @property
    def bytes(self) -> Bytes:
        """Bytes that the consumer has fetched so far, by rack of the broker."""
        by_node = self.consumer.fetch_stats.bytes_by_node
        own = sum(count for node, count in by_node.items() if node in self._near)
        return Bytes(own, sum(by_node.values()) - own)

    async def read(self) -> None:
        """Read all partitions until cancelled, and record when records and bytes arrive. Raises KafkaError."""
        self.consumer.assign([(TOPIC, partition) for partition in range(PARTITIONS)])
        before = self.bytes
        while True:
            records = await self.consumer.poll(timeout_ms=1000)
            now, after = time.monotonic(), self.bytes
            for partition in {record.partition for record in records}:
                self.times[partition].append(now)
            self.near_at = now if after.own > before.own else self.near_at
            self.other_at = now if after.other > before.other else self.other_at
            before = after
            self._read.set()

    async def _until(self, condition: Callable[[], bool], name: str) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                while not condition():
                    self._read.clear()
                    await self._read.wait()
        except TimeoutError:
            raise BenchError(f"closest: consumer in {self.rack}: no {name} within {WAIT_S:g} s") from None

    async def wait_for_records(self, since: float) -> None:
        """Wait until records of every partition were returned after `since` (`time.monotonic`). Raises BenchError after
        60 s.
        """
        await self._until(lambda: all(times and times[-1] > since for times in self.times.values()), "records")

    async def wait_until_near(self, quiet_s: float) -> None:
        """Wait until all partitions have been read only from the consumer's rack for `quiet_s` seconds. Raises
        BenchError after 60 s.
        """
        began = time.monotonic()

        def is_near() -> bool:
            since = max(self.other_at, began)
            return self.near_at - since >= quiet_s and all(
                len(times) >= NEAR_READS and times[-NEAR_READS] > since for times in self.times.values()
            )

        await self._until(is_near, f"{quiet_s:g} s of reads in its own rack only")

    def gap_s(self, since: float) -> float:
        """Return the longest gap in seconds between records of a partition, of those gaps that ended at or after
        `since`. Raises ValueError if there is none.
        """
        return max(
            after - before for times in self.times.values() for before, after in pairwise(times) if after >= since
        )


class Load:
    """A producer with acks=all at a steady rate and a reader in each rack. They run inside `async with`.

    Leaving the block raises the first error of the producer or a reader.
    """

    def __init__(
        self, nodes: Sequence[NodeInfo], racks: Sequence[str], records_s: float, config: Mapping[str, Any]
    ) -> None:
        self.bootstrap = ",".join(node.grpc for node in nodes if node.grpc)
        near = {rack: [node.node_id for node in nodes if node.rack == rack and node.node_id] for rack in racks}
        self.readers = [Reader(self.bootstrap, rack, near[rack], config) for rack in racks]
        self._records_s = records_s
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            producer = await stack.enter_async_context(
                Producer(self.bootstrap, **{"acks": "all", "linger.ms": 0, "buffer.memory": 64 << 20})
            )
            for reader in self.readers:
                await stack.enter_async_context(reader.consumer)
            self._stack = stack.pop_all()
        work = [self._produce(producer), *(reader.read() for reader in self.readers)]
        self._tasks = [asyncio.create_task(each) for each in work]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()
        failures = [one for one in results if isinstance(one, Exception)]
        if failures:
            raise failures[0]

    @property
    def bytes(self) -> Bytes:
        """Bytes that all readers have fetched so far, by rack of the broker."""
        return Bytes(sum(one.bytes.own for one in self.readers), sum(one.bytes.other for one in self.readers))

    async def _produce(self, producer: Producer) -> None:
        began, sent, value = time.monotonic(), 0, b"x" * RECORD_BYTES
        while True:
            while sent < (time.monotonic() - began) * self._records_s:
                await producer.send(TOPIC, value, partition=sent % PARTITIONS)
                sent += 1
            await asyncio.sleep(STEP_S)


async def wait_in_sync(bootstrap: str, replicas: int) -> float:
    """Wait until every partition has `replicas` replicas in sync, and return the time (`time.monotonic`). Raises
    KafkaError, or BenchError after 60 s.
    """
    deadline = time.monotonic() + WAIT_S
    async with AdminClient(bootstrap) as admin:
        while True:
            (topic,) = await admin.describe_topics([TOPIC])
            now = time.monotonic()
            if all(len(one.isr) == replicas for one in topic.partitions.values()):
                return now
            if now > deadline:
                raise BenchError(f"closest: not {replicas} replicas in sync within {WAIT_S:g} s")
            await asyncio.sleep(STEP_S)


# -- measurement


class Outcome(NamedTuple):
    """Figures of one run of a mode: bytes counted by the consumers and by the brokers during the steady state, and
    times.
    """

    clients: Bytes
    brokers: Bytes
    """Zero if fetches do not carry the rack."""
    gap_s: float
    """Longest time without records of a partition after the kill; nan if nothing was killed."""
    return_s: float
    """From the replica's return to the ISR to the last byte from another rack; nan if nothing was killed."""


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Exits with 2 on a bad option."""
    parser = harness.Parser("bench.closest", __doc__, "measure each mode for a few seconds", harness.TABLE)
    parser.number("--runs", "runs of each mode", 3, 1)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="only these modes")
    parser.number("--seconds", "duration of the steady state", 15.0, 3.0, least=0.1, most=600)
    parser.number("--records", "records of 1,000 B per second, in total", 400.0, least=0.1, most=5000)
    parser.number("--max-age-ms", "metadata.max.age.ms of the consumers", 3000, least=1000, most=60_000)
    return parser.parse(given)


async def steady(brokers: Sequence[NodeInfo], load: Load, seconds: float, *, is_off: bool) -> tuple[Bytes, Bytes]:
    """Wait for a steady state, and return the bytes counted by consumers and by brokers in the next `seconds`.

    In the steady state, consumers read only from their own rack, except with `is_off`. Raises BenchError, OSError.
    """
    began = time.monotonic()
    for reader in load.readers:
        await reader.wait_for_records(began)
        if not is_off:
            await reader.wait_until_near(QUIET_S / 2)
    before, clients_before = await bytes_of_brokers(brokers), load.bytes
    await asyncio.sleep(seconds)
    return load.bytes.since(clients_before), (await bytes_of_brokers(brokers)).since(before)


async def measure(
    cluster: LocalCluster, mode: str, options: argparse.Namespace, *, kills: bool, consumers: Mapping[str, str]
) -> Outcome:
    """Measure a mode on a new cluster. With `kills`, the replica in the last rack is killed and restarted, unless the
    mode is `off`.

    `consumers` is additional configuration of the consumers. Raises BenchError, ClusterError, KafkaError, OSError,
    TimeoutError.
    """
    brokers = [node for node in cluster.nodes if node.role.is_broker]
    await workload.create_topic(cluster.bootstrap, TOPIC, PARTITIONS, len(brokers))
    config = {**MODES[mode].consumers, "metadata.max.age.ms": options.max_age_ms, **consumers}
    async with Load(brokers, RACKS, options.records, config) as load:
        counts = await steady(brokers, load, options.seconds, is_off=mode == OFF)
        if not kills or mode == OFF:
            return Outcome(*counts, nan, nan)
        reader = load.readers[-1]
        victim = next(node.name for node in brokers if node.rack == reader.rack)
        killed = time.monotonic()
        await asyncio.to_thread(cluster.kill, victim)
        await reader.wait_for_records(killed + QUIET_S)
        gap_s = reader.gap_s(killed)
        await asyncio.to_thread(cluster.start, victim)
        back = await wait_in_sync(load.bootstrap, len(brokers))
        await reader.wait_until_near(QUIET_S)
        return Outcome(*counts, gap_s, max(0.0, reader.other_at - back))


def run_mode(
    mode: str,
    options: argparse.Namespace,
    *,
    kills: bool = True,
    brokers: Mapping[str, str] = NOTHING,
    consumers: Mapping[str, str] = NOTHING,
) -> Outcome:
    """Start a cluster, measure a mode on it and stop it. `brokers` and `consumers` are additional configuration. Raises
    the errors of `measure`.
    """
    with harness.three_brokers(config={**MODES[mode].brokers, **brokers}) as cluster:
        return asyncio.run(measure(cluster, mode, options, kills=kills, consumers=consumers))


# -- report


Found = dict[str, list[Outcome]]


def _seconds(values: Sequence[float], target: float) -> str:
    """Format the median, the range and whether the median is at most `target`, or `-` if nothing was killed."""
    middle = median(values)
    return "-" if isnan(middle) else f"{harness.spread(values, ' s')}: {harness.met(middle <= target)}"


def _percent(shares: Iterable[float]) -> str:
    least = min(shares)
    return "-" if isnan(least) else f"{least:.2f} %"


def as_markdown(found: Found, max_age_ms: int) -> str:
    """Format the outcomes as a table for docs/benchmarks.md."""
    back_target_s = max_age_ms / 1000
    head = ["selection", "own rack, MB", "across, MB", "share in the own rack", "the same, by brokers"]
    head += [f"gap after a kill (target: {GAP_TARGET_S:g} s)", f"return after in sync (target: {back_target_s:g} s)"]
    rows = []
    for mode, outcomes in found.items():
        own, other = (sum(part) / 1e6 for part in zip(*(one.clients for one in outcomes), strict=True))
        share = min(one.clients.share for one in outcomes)
        verdict = "" if mode == OFF else f": {harness.met(share >= SHARE_TARGET)}"
        rows.append(
            (
                MODES[mode].label,
                f"{own:.2f}",
                f"{other:.2f}",
                f"{share:.2f} %{verdict}",
                _percent(one.brokers.share for one in outcomes),
                _seconds([one.gap_s for one in outcomes], GAP_TARGET_S),
                _seconds([one.return_s for one in outcomes], back_target_s),
            )
        )
    return harness.table(head, rows)


def as_text(found: Found) -> str:
    """Format each outcome as a line for a terminal."""
    return "\n".join(
        f"{mode:<9} own rack {one.clients.own / 1e6:8.2f} MB, across {one.clients.other / 1e6:8.2f} MB, "
        f"share {_percent([one.clients.share])} (brokers: {_percent([one.brokers.share])}), "
        f"gap {one.gap_s:.2f} s, near again after {one.return_s:.2f} s"
        for mode, outcomes in found.items()
        for one in outcomes
    )


def figures(found: Found) -> dict[str, Any]:
    """Return the outcomes by mode, for `--json`. Times are None if nothing was killed."""
    return {
        mode: [
            {
                "own_bytes": one.clients.own,
                "other_bytes": one.clients.other,
                "brokers_own_bytes": one.brokers.own,
                "brokers_other_bytes": one.brokers.other,
                **{key: None if isnan(value := getattr(one, key)) else value for key in ("gap_s", "return_s")},
            }
            for one in outcomes
        ]
        for mode, outcomes in found.items()
    }


def main(given: Sequence[str]) -> int:
    """Run the benchmark, print the figures that were measured, and return the exit code of `harness.run`."""
    options = arguments(given)
    found: Found = {}

    def measure_all() -> None:
        for number in range(1, options.runs + 1):
            for mode in options.modes:
                harness.say(f"run {number}/{options.runs}: {mode} ...")
                found.setdefault(mode, []).append(outcome := run_mode(mode, options))
                harness.say(f"  {as_text({mode: [outcome]})}")

    def text() -> str:
        return as_markdown(found, options.max_age_ms) if options.markdown and found else as_text(found)

    about = {"max_age_ms": options.max_age_ms, "seconds": options.seconds}
    return harness.run(options, measure_all, figures=lambda: {**about, "modes": figures(found)}, text=text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
