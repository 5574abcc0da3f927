"""Job plan: samples of small clusters compared with closed-form figures, and reproducibility by seed."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from random import Random

import pytest
import typer

from kipmesh_jobs.plan import failover, fetches, producers, seeds, slots
from kipmesh_jobs.plan.job import Options, summarize
from kipmesh_jobs.plan.simulation import CASES, Statistics, all_tasks, make_page, simulate
from kipmesh_jobs.plan.sizes import Sample, Sizes, Task, binomial, zipf_rate
from kipmesh_jobs.report import render

TITLES = (
    "Figures of the proposals",
    "Fetches with and without sessions",
    "Session caches under both policies",
    "Broker failures",
    "Metadata of the producers",
)
SMALL = Sizes(
    brokers=12,
    topics=120,
    topic_partitions=5,
    producers=1_000,
    batches_per_s=2_000.0,
    slots=40,
    pairs=3,
    simulated_s=4,
    producers_simulated=2,
)


def task(part: str, case: str, sizes: Sizes = SMALL, run: int = 0, seed: int = 1) -> Task:
    return Task(part, case, run, seed, sizes)


# -- draws


def test_binomial_draws_have_expected_mean() -> None:
    rng = Random(3)
    for trials, share in ((4000, 0.001), (1000, 0.02), (100_000, 0.003)):
        draws = [binomial(rng, trials, share) for _ in range(2000)]
        assert sum(draws) / 2000 == pytest.approx(trials * share, rel=0.05)
        assert all(0 <= draw <= trials for draw in draws)
    assert binomial(rng, 3, 0.9) <= 3


def test_topic_rates_add_up_to_rate_of_cluster() -> None:
    sizes = SMALL._replace(topics=100_000)
    rates = [sizes.batches_per_s / (rank * (math.log(sizes.topics) + 0.5772156649) * 5) for rank in range(1, 100_001)]
    assert sum(rates) * 5 == pytest.approx(sizes.batches_per_s, rel=1e-3)
    rng = Random(5)
    mean = sum(zipf_rate(rng, sizes) for _ in range(200_000)) / 200_000
    assert mean == pytest.approx(sizes.batches_per_s / sizes.partitions, rel=0.5)


# -- fetches


def test_idle_pair_fetches_once_per_wait_and_sends_little_in_session() -> None:
    rng = Random(1)
    runs = {}
    for name in fetches.CASES:
        pair = fetches.Pair(50, 1000, Random(2), with_sessions=name == "sessions")
        runs[name] = pair.run([], 20.0, rng)
    for found in runs.values():
        assert found.batches == 0
        assert found.fetches == math.ceil(20_000 / (fetches.WAIT_MS + fetches.ROUND_TRIP_MS))
    empty = fetches.by_size(1, 0, with_sessions=True, sizes=SMALL, seed=1)
    assert runs["sessions"].response_bytes == runs["sessions"].fetches * empty.response_bytes
    assert runs["sessions"].request_bytes < 60 * runs["sessions"].fetches
    assert runs["without"].request_bytes > 50 * 16 * runs["without"].fetches


@pytest.mark.parametrize("changed", [0, 1, 10])
def test_bytes_depend_on_changes_with_sessions_and_on_partitions_without(changed: int) -> None:
    costs = {
        (name, size): fetches.by_size(size, changed, with_sessions=name == "sessions", sizes=SMALL, seed=1)
        for name in fetches.CASES
        for size in (20, 200, 2_000)
    }
    # The id and epoch of the session have a fixed size.
    assert len({costs["sessions", size][:3] for size in (20, 200, 2_000)}) == 1
    assert all(found.batches == changed for found in costs.values())
    steps = [costs["without", size].request_bytes for size in (20, 200, 2_000)]
    assert (steps[2] - steps[1]) / (steps[1] - steps[0]) == pytest.approx(10, rel=0.02)


def test_fetches_with_and_without_sessions_return_same_batches() -> None:
    rates = [30.0, 0.5, 4.0, 0.0]
    counts = []
    for with_sessions in (True, False):
        pair = fetches.Pair(4, 1000, Random(2), with_sessions=with_sessions)
        found = pair.run(rates, 30.0, Random(9))
        counts.append(found.batches)
        assert found.batches == pytest.approx(34.5 * 30, rel=0.12)
    assert counts[0] == pytest.approx(counts[1], abs=2)


# -- slots


def test_all_sessions_hit_while_slots_suffice() -> None:
    for policy in slots.POLICIES:
        policy_cache = slots.make_policy(policy, 100, 11)
        broker_cache = slots.Broker(policy_cache, 11, 0, SMALL, Random(1))
        broker_cache.run(slots.DURATION_MS, slots.WARM_UP_MS)
        assert broker_cache.most == 11
        assert broker_cache.evictions == 0
        # 11 followers fetch every 30 s after the warm-up, with a jitter of one tenth.
        fetched = 11 * (slots.DURATION_MS - slots.WARM_UP_MS) / slots.STEADY_MS
        assert broker_cache.fetches["follower"] == pytest.approx(fetched, rel=0.05)
        assert broker_cache.incremental["follower"] == broker_cache.fetches["follower"]


def test_both_policies_keep_sessions_of_followers_when_slots_are_scarce() -> None:
    figures = {case: slots.sample(task("slots", case)) for case in CASES["slots"]}
    for policy in slots.POLICIES:
        assert figures[f"{policy}:2"]["hits:follower"] == 1.0
        assert figures[f"{policy}:2"]["sessions_most"] <= SMALL.slots
        assert figures[f"{policy}:2"]["hits:all"] < figures[f"{policy}:0.5"]["hits:all"]
    # Policy 227-14 prefers large sessions, 227-15 ignores their size.
    assert figures["adopted:2"]["hits:large consumer"] > figures["adopted:2"]["hits:small consumer"]


def test_no_session_hits_without_slots() -> None:
    broker_cache = slots.Broker(slots.make_policy("adopted", 0, 3), 3, 5, SMALL, Random(1))
    broker_cache.run(slots.DURATION_MS, 0.0)
    assert sum(broker_cache.fetches.values()) > 100
    assert sum(broker_cache.incremental.values()) == 0


# -- failover


@pytest.mark.parametrize(("failed_brokers", "held"), [(1, 30), (2, 12)])
def test_broker_failure_writes_one_event_or_one_record_per_partition(failed_brokers: int, held: int) -> None:
    by_event = failover.fail("event", 12, failed_brokers, held, 3, Random(4))
    by_record = failover.fail("record", 12, failed_brokers, held, 3, Random(4))
    assert by_event["partitions"] == by_record["partitions"] == failed_brokers * held
    assert by_event["records"] == failed_brokers
    image = failover.make_image(12, failed_brokers, held, 3, Random(4))
    left = sum(len(image.partitions_of_broker(broker)) for broker in range(failed_brokers))
    assert left >= failed_brokers * held
    assert by_record["records"] == left + failed_brokers
    for found in (by_event, by_record):
        assert found["sent_bytes"] == found["replica_bytes"] * (12 - failed_brokers)
    assert by_event["replica_bytes"] < 40 * failed_brokers
    assert by_record["replica_bytes"] > 30 * failed_brokers * held


def test_only_bytes_of_records_grow_with_partitions() -> None:
    sizes = [failover.fail("record", 12, 1, held, 3, Random(4))["replica_bytes"] for held in (50, 100, 200)]
    assert (sizes[2] - sizes[1]) / (sizes[1] - sizes[0]) == pytest.approx(2, rel=0.05)
    events = {failover.fail("event", 12, 1, held, 3, Random(4))["replica_bytes"] for held in (50, 100, 200)}
    assert len(events) == 1


# -- producers


def test_start_requests_each_topic_once_or_all_topics_every_time() -> None:
    for topics in (10, 40):
        assert producers.simulate_start(topics, "paced").topics[0] == topics
        assert producers.simulate_start(topics, "all").topics[0] == topics * (topics + 1) // 2


def test_metadata_bytes_grow_with_brokers_and_topics() -> None:
    empty, single, three = (sum(producers.message_bytes(SMALL, topics)) for topics in (0, 1, 3))
    assert three - empty == pytest.approx(3 * (single - empty), abs=12)
    more = sum(producers.message_bytes(SMALL._replace(brokers=24), 0))
    assert more - empty == pytest.approx(empty, rel=0.2)


def test_figures_of_producers_scale_with_their_number() -> None:
    few = producers.sample(task("producers", "paced"))
    many = producers.sample(task("producers", "paced", SMALL._replace(producers=10_000)))
    assert many["requests_per_s"] == pytest.approx(10 * few["requests_per_s"])
    assert many["bytes_per_record"] == few["bytes_per_record"]
    # Each topic in use is refreshed at least every five minutes.
    everything = producers.sample(task("producers", "all"))
    assert everything["topics_per_s"] > few["topics_per_s"] > 0


# -- figures of the proposals


def test_compaction_reads_match_the_proposal() -> None:
    assert seeds.compaction_reads(100, 1, 0.5) == (1.0, 1.0, 3.0, 50.0)
    assert seeds.compaction_reads(100, 1, 1.0).copied == 2.0


@pytest.fixture(scope="module")
def found() -> Statistics:
    """Statistics of a small plan. The proposal's failure has its original size, because its figures are exact."""
    return Statistics([sample for job_task in all_tasks(SMALL, 1, 1) for sample in simulate(job_task)])


def test_computed_figures_match_the_proposals(found: Statistics) -> None:
    computed = seeds.figures(found.mean)
    assert [figure for figure in computed if figure.holds is False] == []
    values = {figure.what: figure.computed for figure in computed}
    assert values["IsrChange records of one failure"] == "30,000"
    assert values["written by a replica, 40-byte records"] == "1.14 MiB"
    assert values["sent to 99 brokers, 40-byte records"] == "113.297 MiB"
    assert values["sent to 99 brokers, an event of 8 bytes"] == "0.77 KiB"
    assert values["read with compaction: what is copied"] == "3 MB/s"
    assert {figure.kip for figure in computed} == {"227", "526", "630"}


def test_figures_computed_from_the_proposal_alone_have_no_verdict(found: Statistics) -> None:
    """Their sizes are those of the proposal, so they match whatever the code computes."""
    computed = seeds.figures(found.mean)
    sums = [
        figure for figure in computed if re.search("40-byte|of 8 bytes|^read with|between two compactions", figure.what)
    ]
    assert (len(sums), {figure.holds for figure in sums}) == (8, {None})
    assert sum(figure.holds is True for figure in computed) == 15


def test_figures_that_miss_the_proposal_are_reported() -> None:
    def mean(part: str, case: str, metric: str) -> float:
        if part == "sizes":
            return float(metric.split(":")[1])  # as if sessions saved nothing
        return 29_999.0

    wrong = [figure.what for figure in seeds.figures(mean) if figure.holds is False]
    assert any("10 changed" in name for name in wrong)
    assert "IsrChange records of one failure" in wrong


def test_page_and_summary_have_all_parts(found: Statistics) -> None:
    computed = seeds.figures(found.mean)
    page = make_page(SMALL, 1, 1, found, computed)
    html = render(page, generated=datetime(2026, 1, 1, tzinfo=UTC))
    assert all(html.count(f"<h2>{title}</h2>") == 1 for title in TITLES)
    assert html.count("<svg") == 4
    assert html.count(">KIP-") == len(computed)
    assert "No values" not in html
    assert '<td class="text">adopted</td><td>' in re.sub(r"\s+(?=<)", "", html)
    summary = summarize(Options(brokers=12, topics=120, topic_partitions=5, slots=40, runs=1), found, computed)
    assert summary["passed"]
    assert summary["fetch_bytes_per_s"]["ratio"] > 1
    assert summary["failover_sent_bytes"]["record:1"] > summary["failover_sent_bytes"]["event:1"]
    assert summary["session_hits"].keys() == set(CASES["slots"])


# -- samples


def test_sample_depends_on_seed_and_run_only() -> None:
    for part in ("fetches", "producers"):
        case = CASES[part][0]
        assert simulate(task(part, case)) == simulate(task(part, case))
        assert simulate(task(part, case)) != simulate(task(part, case, seed=2))
        assert simulate(task(part, case))[0] != simulate(task(part, case, run=1))[0]


def test_cases_of_a_run_use_the_same_draw() -> None:
    with_sessions, without = (fetches.sample(task("fetches", case)) for case in fetches.CASES)
    assert with_sessions["partitions_of_pair"] == without["partitions_of_pair"]
    assert with_sessions["batches_per_s"] == pytest.approx(without["batches_per_s"], rel=0.05)


def test_all_tasks_include_each_case_in_each_run() -> None:
    tasks = all_tasks(SMALL, 4, 1)
    assert len(tasks) == 4 * sum(len(CASES[part]) for part in ("slots", "failover", "producers", "fetches")) + 5
    assert len(set(tasks)) == len(tasks)


def test_statistics_aggregate_all_runs() -> None:
    found = Statistics([Sample("p", "c", run, "m", value) for run, value in enumerate((1.0, 2.0, 6.0))])
    (row,) = found.rows()
    assert (row["runs"], row["mean"], row["least"], row["most"]) == (3, 3.0, 1.0, 6.0)
    assert row["deviation"] == pytest.approx(2.1602469)
    with pytest.raises(KeyError):
        found.mean("p", "c", "n")


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"brokers": 10, "replication_factor": 9, "topics": 10, "topic_partitions": 1_000_000}, "--topics"),
        ({"brokers": 100, "topics": 10, "topic_partitions": 1}, "--topics"),
        ({"brokers": 10, "replication_factor": 10}, "--replication-factor"),
    ],
)
def test_impossible_cluster_sizes_are_rejected(options: dict[str, int], option: str) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        Options(**options)
    assert refused.value.param_hint == option
