"""The workload's history against a fake cluster: without faults, with failing requests and with lost records."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kipmesh.core import record_batch
from kipmesh.core.errors import ErrorCode
from kipmesh.testing import until
from kipmesh.testing.fake_broker import FakeCluster
from kipmesh_chaos import dumps
from kipmesh_chaos.experiment import WorkloadPart
from kipmesh_chaos.faults import PartitionView
from kipmesh_chaos.history import Begin, Dump, Event, Kind, Limits, NotRecovered, Phase, PhaseBegan, read_history
from kipmesh_chaos.history_checker import Verdict, check
from kipmesh_chaos.recorder import Recorder, RunClients
from kipmesh_chaos.workload import Workload, consumer_names, encode_value, is_exactly_once

PATIENT = {"request.timeout.ms": "60000", "delivery.timeout.ms": "120000", "max.block.ms": "60000"}
"""Timeouts that a slow machine does not exceed. Only injected errors cause retries and failures."""
PART = WorkloadPart(partitions=2, producers=3, records_per_s=200, racks=("rack-a", "rack-b"), producer_config=PATIENT)


NO_REPLICAS = PartitionView(-1, ())
"""Replicas of a partition of fake brokers, which have no log directories."""


async def run_workload(
    fake: FakeCluster, directory: Path, *, lose: bool = False, part: WorkloadPart = PART
) -> tuple[Verdict, list[Event]]:
    """Return the verdict on a run and its history. With `lose`, partition 1 is truncated before the final read."""
    recorder = Recorder(directory / "history.jsonl")
    recorder.add(Begin(0, "test", 1, part.partitions, Limits(), consumer_names(part), (), is_exactly_once(part)))
    recorder.add(PhaseBegan(recorder.now, Phase.FAULTS))
    clients = RunClients(fake.bootstrap, "chaos", recorder)
    async with Workload(clients, part) as workload:
        while min((workload.acknowledged.get(partition, 0) for partition in range(2)), default=0) < 20:
            workload.check()
            fake.appended.clear()
            await fake.appended.wait()
        recorder.add(PhaseBegan(recorder.now, Phase.RECOVERY))
        await workload.stop_producing()
        ends = {
            partition_number: partition.end_offset
            for partition_number, partition in enumerate(fake.topics["chaos"].partitions)
        }
        assert await workload.catch_up(ends, 60)
        if lose:
            fake.topics["chaos"].partitions[1].truncate(10)
        ends = await dumps.final_read(clients, PART.partitions, 60)
    dumps.record_ends(recorder, ends, {0: NO_REPLICAS, 1: NO_REPLICAS})
    recorder.add(PhaseBegan(recorder.now, Phase.END))
    recorder.close()
    events = list(read_history(recorder.file))
    return check(events), events


async def test_workload_without_faults_has_no_findings(tmp_path: Path) -> None:
    async with FakeCluster(2) as fake:
        fake.create_topic("chaos", 2)
        verdict, _ = await run_workload(fake, tmp_path)
        assert verdict.findings == ()
        assert verdict.figures.acknowledged == verdict.figures.invoked >= 40
        assert verdict.figures.read == 2 * verdict.figures.acknowledged


@pytest.mark.parametrize("idempotence", ["true", "false"])
async def test_failed_and_retried_requests_are_no_anomalies(tmp_path: Path, idempotence: str) -> None:
    part = PART.model_copy(update={"producer_config": {**PATIENT, "enable.idempotence": idempotence}})
    async with FakeCluster(2) as fake:
        fake.create_topic("chaos", 2)
        fake.inject("Produce", ErrorCode.NOT_LEADER_OR_FOLLOWER, times=3)
        fake.inject("Produce", ErrorCode.REQUEST_TIMED_OUT, times=2, after=True)  # appended, but retried
        fake.inject("Fetch", times=5)
        verdict, _ = await run_workload(fake, tmp_path, part=part)
        assert verdict.findings == ()
        assert verdict.figures.repeated == (0 if idempotence == "true" else 2)


@pytest.mark.parametrize(("idempotence", "expected"), [("true", 5), ("false", 1)])
async def test_producer_has_several_requests_in_flight_only_with_idempotence(
    tmp_path: Path, idempotence: str, expected: int
) -> None:
    part = PART.model_copy(update={"producers": 1, "producer_config": {**PATIENT, "enable.idempotence": idempotence}})
    calls = in_flight = most = 0
    full = asyncio.Event()

    async def hold(method: str, _node: int, _request: object) -> None:
        nonlocal calls, in_flight, most
        if method == "Produce":
            calls, in_flight = calls + 1, in_flight + 1
            most = max(most, in_flight)
            if in_flight == expected:
                full.set()
            if calls > 1:  # the first request is sent alone
                await full.wait()
            in_flight -= 1

    async with FakeCluster() as fake:
        fake.create_topic("chaos", 2)
        fake.hook = hold
        recorder = Recorder(tmp_path / "history.jsonl")
        async with Workload(RunClients(fake.bootstrap, "chaos", recorder), part) as workload:
            await until(lambda: workload.acknowledged.get(0, 0) >= 20, "20 records")
            await workload.stop_producing()
        recorder.close()
    assert most == expected


async def test_checker_finds_lost_records_of_workload(tmp_path: Path) -> None:
    async with FakeCluster(2) as fake:
        fake.create_topic("chaos", 2)
        verdict, _ = await run_workload(fake, tmp_path, lose=True)
        # Consumers that still fetch may observe the truncation, too.
        kinds = {finding.kind for finding in verdict.findings}
        assert Kind.LOST in kinds
        assert kinds <= {Kind.LOST, Kind.WENT_BACK, Kind.WATERMARK}
        assert {finding.partition for finding in verdict.findings} == {1}


async def test_failed_final_read_is_recorded_as_not_recovered(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "history.jsonl")
    await dumps.final_read(RunClients("127.0.0.1:1", "chaos", recorder), 2, 0.1)
    recorder.close()
    (event,) = [found for found in read_history(recorder.file) if isinstance(found, NotRecovered)]
    assert "the final read stopped" in event.text


def test_replica_logs_are_recorded_in_parts_up_to_a_damaged_batch(tmp_path: Path) -> None:
    directory = tmp_path / "chaos-1"
    directory.mkdir()
    count = dumps.BATCHES_OF_A_DUMP + 7
    for first in (0, 300):
        with (directory / f"{first:020}.log").open("wb") as output:
            for offset in range(first, 300 if first == 0 else count):
                records = [(None, encode_value(offset, 30))]
                output.write(record_batch.build(records, base_offset=offset, leader_epoch=2, timestamp_ms=0))
    recorder = Recorder(tmp_path / "history.jsonl")
    dumps.record_stopped(recorder, {7: tmp_path}, "chaos")
    damaged = bytearray((directory / f"{0:020}.log").read_bytes())
    damaged[-1] ^= 1
    (directory / f"{0:020}.log").write_bytes(damaged)
    dumps.record_stopped(recorder, {8: tmp_path}, "chaos")
    recorder.close()
    events = list(read_history(recorder.file))
    whole = [event for event in events if isinstance(event, Dump) and event.replica == 7]
    assert [len(event.records) for event in whole] == [dumps.BATCHES_OF_A_DUMP, 7]
    assert {(event.partition, event.log_start, event.log_end) for event in whole} == {(1, 0, count)}
    assert [record for event in whole for record in event.records] == [(offset, str(offset)) for offset in range(count)]
    assert whole[0].batches[0][:2] == (0, 0)
    (part,) = [event for event in events if isinstance(event, Dump) and event.replica == 8]
    assert part.log_end == 299
