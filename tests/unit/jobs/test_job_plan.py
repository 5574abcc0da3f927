"""The plan's samples at small sizes, against figures that can be worked out, and the same again from the same seed."""

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


def test_draws_have_the_mean_that_they_should() -> None:
    rng = Random(3)
    for trials, share in ((4000, 0.001), (1000, 0.02), (100_000, 0.003)):
        draws = [binomial(rng, trials, share) for _ in range(2000)]
        assert sum(draws) / 2000 == pytest.approx(trials * share, rel=0.05)
        assert all(0 <= one <= trials for one in draws)
    assert binomial(rng, 3, 0.9) <= 3


def test_rates_add_up_to_those_of_the_mesh() -> None:
    sizes = SMALL._replace(topics=100_000)
    rates = [sizes.batches_per_s / (rank * (math.log(sizes.topics) + 0.5772156649) * 5) for rank in range(1, 100_001)]
    assert sum(rates) * 5 == pytest.approx(sizes.batches_per_s, rel=1e-3)
    rng = Random(5)
    mean = sum(zipf_rate(rng, sizes) for _ in range(200_000)) / 200_000
    assert mean == pytest.approx(sizes.batches_per_s / sizes.partitions, rel=0.5)


# -- fetches


def test_an_idle_pair_fetches_when_its_wait_ends_and_says_nothing_in_a_session() -> None:
    rng = Random(1)
    live = {}
    for name in fetches.CASES:
        pair = fetches.Pair(50, 1000, Random(2), with_sessions=name == "sessions")
        live[name] = pair.run([], 20.0, rng)
    for found in live.values():
        assert found.batches == 0
        assert found.fetches == math.ceil(20_000 / (fetches.WAIT_MS + fetches.ROUND_TRIP_MS))
    one = fetches.by_size(1, 0, with_sessions=True, sizes=SMALL, seed=1)
    assert live["sessions"].response_bytes == live["sessions"].fetches * one.response_bytes
    assert live["sessions"].request_bytes < 60 * live["sessions"].fetches
    assert live["without"].request_bytes > 50 * 16 * live["without"].fetches


@pytest.mark.parametrize("changed", [0, 1, 10])
def test_bytes_follow_what_changed_with_sessions_and_the_partitions_without(changed: int) -> None:
    costs = {
        (name, size): fetches.by_size(size, changed, with_sessions=name == "sessions", sizes=SMALL, seed=1)
        for name in fetches.CASES
        for size in (20, 200, 2_000)
    }
    # The session's id and epoch take as many bytes in each.
    assert len({costs["sessions", size][:3] for size in (20, 200, 2_000)}) == 1
    assert all(found.batches == changed for found in costs.values())
    steps = [costs["without", size].request_bytes for size in (20, 200, 2_000)]
    assert (steps[2] - steps[1]) / (steps[1] - steps[0]) == pytest.approx(10, rel=0.02)


def test_both_ways_fetch_the_same_batches() -> None:
    rates = [30.0, 0.5, 4.0, 0.0]
    counts = []
    for with_sessions in (True, False):
        pair = fetches.Pair(4, 1000, Random(2), with_sessions=with_sessions)
        found = pair.run(rates, 30.0, Random(9))
        counts.append(found.batches)
        assert found.batches == pytest.approx(34.5 * 30, rel=0.12)
    assert counts[0] == pytest.approx(counts[1], abs=2)


# -- slots


def test_everybody_hits_while_there_are_slots_for_all() -> None:
    for policy in slots.POLICIES:
        made = slots.make_policy(policy, 100, 11)
        crowd = slots.Broker(made, 11, 0, SMALL, Random(1))
        crowd.run(slots.DURATION_MS, slots.WARM_UP_MS)
        assert crowd.most == 11
        assert crowd.evictions == 0
        # 11 followers, every 30 s after the warm-up, each within a tenth of that.
        fetched = 11 * (slots.DURATION_MS - slots.WARM_UP_MS) / slots.STEADY_MS
        assert crowd.fetches["follower"] == pytest.approx(fetched, rel=0.05)
        assert crowd.incremental["follower"] == crowd.fetches["follower"]


def test_followers_keep_their_sessions_in_a_crowd_under_both_policies() -> None:
    figures = {case: slots.sample(task("slots", case)) for case in CASES["slots"]}
    for policy in slots.POLICIES:
        assert figures[f"{policy}:2"]["hits:follower"] == 1.0
        assert figures[f"{policy}:2"]["sessions_most"] <= SMALL.slots
        assert figures[f"{policy}:2"]["hits:all"] < figures[f"{policy}:0.5"]["hits:all"]
    # By size, 227-14 prefers the large ones; 227-15 does not look at it.
    assert figures["adopted:2"]["hits:large consumer"] > figures["adopted:2"]["hits:small consumer"]


def test_without_slots_nobody_hits() -> None:
    crowd = slots.Broker(slots.make_policy("adopted", 0, 3), 3, 5, SMALL, Random(1))
    crowd.run(slots.DURATION_MS, 0.0)
    assert sum(crowd.fetches.values()) > 100
    assert sum(crowd.incremental.values()) == 0


# -- failover


@pytest.mark.parametrize(("failing", "held"), [(1, 30), (2, 12)])
def test_a_failure_is_one_event_or_a_record_for_each_partition(failing: int, held: int) -> None:
    by_event = failover.fail("event", 12, failing, held, 3, Random(4))
    by_record = failover.fail("record", 12, failing, held, 3, Random(4))
    assert by_event["partitions"] == by_record["partitions"] == failing * held
    assert by_event["records"] == failing
    image = failover.make_image(12, failing, held, 3, Random(4))
    left = sum(len(image.partitions_of_broker(broker)) for broker in range(failing))
    assert left >= failing * held
    assert by_record["records"] == left + failing
    for found in (by_event, by_record):
        assert found["sent_bytes"] == found["replica_bytes"] * (12 - failing)
    assert by_event["replica_bytes"] < 40 * failing
    assert by_record["replica_bytes"] > 30 * failing * held


def test_bytes_by_record_grow_with_the_partitions_alone() -> None:
    sizes = [failover.fail("record", 12, 1, held, 3, Random(4))["replica_bytes"] for held in (50, 100, 200)]
    assert (sizes[2] - sizes[1]) / (sizes[1] - sizes[0]) == pytest.approx(2, rel=0.05)
    events = {failover.fail("event", 12, 1, held, 3, Random(4))["replica_bytes"] for held in (50, 100, 200)}
    assert len(events) == 1


# -- producers


def test_a_start_asks_for_each_topic_once_or_for_all_each_time() -> None:
    for topics in (10, 40):
        assert producers.simulate_start(topics, "paced").topics[0] == topics
        assert producers.simulate_start(topics, "all").topics[0] == topics * (topics + 1) // 2


def test_bytes_of_metadata_are_those_of_brokers_and_topics() -> None:
    empty, one, three = (sum(producers.message_bytes(SMALL, topics)) for topics in (0, 1, 3))
    assert three - empty == pytest.approx(3 * (one - empty), abs=12)
    more = sum(producers.message_bytes(SMALL._replace(brokers=24), 0))
    assert more - empty == pytest.approx(empty, rel=0.2)


def test_all_producers_are_as_many_times_the_simulated_ones() -> None:
    few = producers.sample(task("producers", "paced"))
    many = producers.sample(task("producers", "paced", SMALL._replace(producers=10_000)))
    assert many["requests_per_s"] == pytest.approx(10 * few["requests_per_s"])
    assert many["bytes_per_record"] == few["bytes_per_record"]
    # Every topic in use is refreshed within five minutes, so at least once in each.
    everything = producers.sample(task("producers", "all"))
    assert everything["topics_per_s"] > few["topics_per_s"] > 0


# -- the figures of the proposals


def test_compaction_reads_what_the_proposal_says() -> None:
    assert seeds.compaction_reads(100, 1, 0.5) == (1.0, 1.0, 3.0, 50.0)
    assert seeds.compaction_reads(100, 1, 1.0).copied == 2.0


@pytest.fixture(scope="module")
def found() -> Statistics:
    """One small plan; the seed's own failure at its own size, for its figures are exact."""
    return Statistics([one for each in all_tasks(SMALL, 1, 1) for one in simulate(each)])


def test_the_figures_of_the_proposals_come_out(found: Statistics) -> None:
    computed = seeds.figures(found.mean)
    assert [one for one in computed if one.holds is False] == []
    told = {one.what: one.computed for one in computed}
    assert told["IsrChange records of one failure"] == "30,000"
    assert told["written by a replica, 40-byte records"] == "1.14 MiB"
    assert told["sent to 99 brokers, 40-byte records"] == "113.297 MiB"
    assert told["sent to 99 brokers, an event of 8 bytes"] == "0.77 KiB"
    assert told["read with compaction: what is copied"] == "3 MB/s"
    assert {one.kip for one in computed} == {"227", "526", "630"}


def test_a_sum_of_the_proposal_by_itself_does_not_count_as_one_that_comes_out(found: Statistics) -> None:
    """Its sizes are the proposal's, so it would come out whatever the code does."""
    computed = seeds.figures(found.mean)
    sums = [one for one in computed if re.search("40-byte|of 8 bytes|^read with|between two compactions", one.what)]
    assert (len(sums), {one.holds for one in sums}) == (8, {None})
    assert sum(one.holds is True for one in computed) == 15


def test_a_figure_that_does_not_come_out_is_said() -> None:
    def mean(part: str, case: str, metric: str) -> float:
        if part == "sizes":
            return float(metric.split(":")[1])  # as if sessions saved nothing
        return 29_999.0

    wrong = [one.what for one in seeds.figures(mean) if one.holds is False]
    assert any("10 changed" in what for what in wrong)
    assert "IsrChange records of one failure" in wrong


def test_the_page_and_the_summary_have_every_part(found: Statistics) -> None:
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


def test_the_same_seed_gives_the_same_sample_and_another_one_another() -> None:
    for part in ("fetches", "producers"):
        case = CASES[part][0]
        assert simulate(task(part, case)) == simulate(task(part, case))
        assert simulate(task(part, case)) != simulate(task(part, case, seed=2))
        assert simulate(task(part, case))[0] != simulate(task(part, case, run=1))[0]


def test_cases_of_a_run_are_compared_on_the_same_draw() -> None:
    one, other = (fetches.sample(task("fetches", case)) for case in fetches.CASES)
    assert one["partitions_of_pair"] == other["partitions_of_pair"]
    assert one["batches_per_s"] == pytest.approx(other["batches_per_s"], rel=0.05)


def test_every_case_is_drawn_as_often_as_asked() -> None:
    tasks = all_tasks(SMALL, 4, 1)
    assert len(tasks) == 4 * sum(len(CASES[part]) for part in ("slots", "failover", "producers", "fetches")) + 5
    assert len(set(tasks)) == len(tasks)


def test_statistics_are_those_of_all_runs() -> None:
    found = Statistics([Sample("p", "c", run, "m", value) for run, value in enumerate((1.0, 2.0, 6.0))])
    (one,) = found.rows()
    assert (one["runs"], one["mean"], one["least"], one["most"]) == (3, 3.0, 1.0, 6.0)
    assert one["deviation"] == pytest.approx(2.1602469)
    with pytest.raises(KeyError):
        found.mean("p", "c", "n")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"brokers": 10, "replication_factor": 9, "topics": 10, "topic_partitions": 1_000_000}, "--topics"),
        ({"brokers": 100, "topics": 10, "topic_partitions": 1}, "--topics"),
        ({"brokers": 10, "replication_factor": 10}, "--replication-factor"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(given: dict[str, int], named: str) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        Options(**given)
    assert refused.value.param_hint == named
