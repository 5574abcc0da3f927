"""`python -m bench.clients`: figures, and the kipmesh programs on a cluster."""

from __future__ import annotations

import statistics

import pytest

from bench import clients, workload
from kipmesh.client.sync import AdminClient, Consumer
from kipmesh.client.types import NewTopic
from kipmesh.cluster import LocalCluster


def test_benchmark_values_are_unique_and_deterministic() -> None:
    values = workload.json_values(1000)
    assert len(set(values)) == len(values)
    assert 500 <= min(map(len, values)) < 600
    assert 1400 < max(map(len, values)) <= 1500
    assert statistics.mean(map(len, values)) == pytest.approx(1000, rel=0.05)
    assert values == workload.json_values(1000)


@pytest.mark.parametrize("program", [clients.ours_async, clients.ours_sync])
def test_kipmesh_programs_write_all_values(program: clients.Program) -> None:
    values = workload.json_values(100, 7)
    with LocalCluster(mode="single") as cluster:
        with AdminClient(cluster.bootstrap) as admin:
            admin.create_topics([NewTopic("t", 2, 1)])
        assert program(cluster.bootstrap, "t", values, 20) > 0
        with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
            consumer.subscribe(["t"])
            read: list[bytes | None] = []
            while len(read) < 20:
                read += [record.value for record in consumer.poll(10_000)]
    assert sorted(map(bytes, filter(None, read))) == sorted(values[i % 7] for i in range(20))


def test_client_ratio_compares_producers_of_one_round() -> None:
    found = {("async", 100): [(30.0, 10.0), (8.0, 4.0), (100.0, 100.0)]}
    (row,) = clients.rows_of(found)
    assert (row["ratio"], row["ratio_min"], row["ratio_max"], row["rounds"]) == (2.0, 1.0, 3.0, 3)
    assert (row["ours_records_s"], row["theirs_records_s"]) == (30.0, 10.0)
    table = clients.as_markdown([row]).splitlines()
    assert table[-1] == "| async: aiokafka | 100 B | 30.0 | 10.0 | 2.00 | 1.00 .. 3.00 | 3 |"


def test_number_of_runs_is_bounded() -> None:
    with pytest.raises(SystemExit):
        clients.arguments(["--runs", "0"])
