"""Server side of fetch sessions: fetch kinds, response contents, order, limits, waiting (227-01 to 227-12, 227-21)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kipmesh.core.errors import ErrorCode
from kipmesh.core.fetch_session import AdoptedPolicy, FetchKind, FetchSessionCache, Refusal, Subscriptions
from kipmesh.core.fetch_session.types import INT_MAX, next_epoch
from kipmesh.messages import FetchPartition, FetchRequest, FetchResponse, FetchTopic, ForgottenTopic
from tests.unit.core.fetch_session.fetch_session_support import (
    MORE,
    Server,
    World,
    fetch_request,
    fetch_topic,
    partitions_by_index,
    records_in,
)

FOLLOWER = 7


def new_server(partitions: int = 4, **settings: int) -> Server:
    world = World()
    world.create("t", partitions)
    return Server(world, None, **settings)


def open_session(server: Server, *numbers: int, **fields: Any) -> int:
    numbers = numbers or tuple(number for _, number in server.world.partitions)
    response = server.fetch(fetch_request([fetch_topic(server.world, "t", *numbers)], **fields))
    assert response.session_id
    return response.session_id


def error_of(response: FetchResponse) -> ErrorCode:
    assert response.error_code == 0 or (response.responses, response.session_id) == ([] or (), 0)
    return ErrorCode(response.error_code)


def test_next_epoch_skips_0_and_wraps_to_1() -> None:
    assert [next_epoch(epoch) for epoch in (-1, 0, 1, INT_MAX - 1, INT_MAX)] == [-1, 1, 2, INT_MAX, 1]


def test_full_fetch_returns_all_partitions_with_and_without_session() -> None:
    server = new_server()
    topics = [fetch_topic(server.world, "t", 2, 0, 9)]
    for epoch, session_count in ((-1, 0), (0, 1)):
        response = server.fetch(fetch_request(topics, session_epoch=epoch))
        assert list(partitions_by_index(response)) == [2, 0, 9]
        assert partitions_by_index(response)[9].error_code == ErrorCode.UNKNOWN_TOPIC_ID
        assert (bool(response.session_id), len(server.cache)) == (bool(session_count), session_count)
    assert server.cache.partitions == 3
    assert server.cache.metrics.fetches == {FetchKind.SESSIONLESS: 1, FetchKind.FULL: 1}


def test_full_fetch_with_session_id_closes_that_session() -> None:
    server = new_server()
    topics = [fetch_topic(server.world, "t", 0)]
    first = open_session(server)
    second = server.fetch(fetch_request(topics, first, 0)).session_id
    assert second not in (0, first)
    assert [info.session_id for info in server.cache.list(0)] == [second]
    assert server.fetch(fetch_request(topics, second, -1)).session_id == 0
    assert len(server.cache) == server.cache.partitions == len(server.world.subscriptions) == 0
    for epoch in (0, -1):  # An unknown session id is not an error.
        assert error_of(server.fetch(fetch_request(topics, 999, epoch))) is ErrorCode.NONE
    assert server.fetch(fetch_request([], second, -1)).responses == []


def test_session_errors_leave_session_unchanged() -> None:
    server = new_server()
    session_id = open_session(server)
    server.now_ms = 50
    id_not_found, wrong_epoch = ErrorCode.FETCH_SESSION_ID_NOT_FOUND, ErrorCode.INVALID_FETCH_SESSION_EPOCH
    wrong_topic = ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR
    by_name = [FetchTopic("t", b"", [FetchPartition(1)])]
    forgotten = [ForgottenTopic("t", b"", [1])]
    cases = [
        (fetch_request([], session_id + 1, 1), id_not_found),
        (fetch_request([], 0, 1), id_not_found),
        (fetch_request([], -session_id, 1), id_not_found),
        (fetch_request([], session_id, 1, replica_id=FOLLOWER), id_not_found),
        (fetch_request([], session_id, 2), wrong_epoch),
        (fetch_request([], session_id, INT_MAX), wrong_epoch),
        (fetch_request([], session_id, -2), wrong_epoch),
        (fetch_request(by_name, session_id, 1), wrong_topic),
        (fetch_request([], session_id, 1, forgotten), wrong_topic),
    ]
    before = list(server.cache.list(0))
    for request, error in cases:
        assert error_of(server.fetch(request)) is error
        assert list(server.cache.list(0)) == before
    assert before[0].idle_ms == 0
    assert server.cache.metrics.errors == {id_not_found: 4, wrong_epoch: 3, wrong_topic: 2}
    assert error_of(server.fetch(fetch_request([], session_id, 1))) is ErrorCode.NONE


@pytest.mark.parametrize("topic", [FetchTopic("t" * 250), FetchTopic("\u00e9" * 125), FetchTopic("t", b"i" * 250)])
def test_impossible_topic_names_and_ids_are_refused_without_side_effects(topic: FetchTopic) -> None:
    server = new_server()
    session_id = open_session(server)
    before = list(server.cache.list(0))
    topics = [topic._replace(partitions=[FetchPartition(number) for number in range(10)])]
    for request in (fetch_request(topics), fetch_request(topics, session_id, 0), fetch_request(topics, session_id, 1)):
        fetch = server.cache.begin(request, "", 0)
        assert fetch.is_complete
        assert error_of(fetch.respond(0)) is ErrorCode.INVALID_REQUEST
        assert list(server.cache.list(0)) == before
    assert error_of(server.fetch(fetch_request([], session_id, 1))) is ErrorCode.NONE


def test_session_id_source_is_retried_until_valid_and_unused() -> None:
    offered = iter([0, -3, INT_MAX + 1, 77, 77, 78])
    world = World()
    world.create("t", 1)
    server = Server(world)
    server.cache = FetchSessionCache(world.subscriptions, AdoptedPolicy(), lambda: next(offered))
    assert [open_session(server), open_session(server)] == [77, 78]
    server.cache = FetchSessionCache(world.subscriptions, AdoptedPolicy(), lambda: 0)
    watched = len(world.subscriptions)
    assert server.fetch(fetch_request([fetch_topic(world, "t", 0)])).session_id == 0
    assert len(world.subscriptions) == watched


def test_incremental_response_returns_changed_partitions_only() -> None:
    server = new_server()
    world, session_id = server.world, open_session(server)
    assert partitions_by_index(server.fetch(fetch_request([], session_id, 1))) == {}
    first, second, third = (world.get("t", number) for number in (1, 2, 3))
    world.append(first)  # uncommitted, invisible to consumers
    world.append(second)
    world.commit(second)
    world.lead(third, False)
    response = server.fetch(fetch_request([], session_id, 2))
    assert response.session_id == session_id
    assert [topic.topic_id for topic in response.responses] == [world.ids["t"]]
    assert response.responses[0].topic == "t"
    partitions = partitions_by_index(response)
    assert set(partitions) == {2, 3}
    assert len(records_in(partitions[2].records)) == 1
    assert partitions[3].error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    # The client received the record and names the partition with its new offset: no changes.
    world.lead(third, True)
    partitions = partitions_by_index(server.fetch(fetch_request([fetch_topic(world, "t", 2, offset=1)], session_id, 3)))
    assert set(partitions) == {3}, "the end of an error is a change"
    assert partitions[3].error_code == 0
    world.delete_records(second, 1)
    assert set(partitions_by_index(server.fetch(fetch_request([], session_id, 4)))) == {2}
    assert partitions_by_index(server.fetch(fetch_request([], session_id, 5))) == {}
    assert server.cache.metrics.bytes_saved > 0


def test_unacknowledged_records_are_returned_again() -> None:
    server = new_server()
    session_id = open_session(server)
    partition = server.world.get("t", 1)
    server.world.append(partition, 3)
    server.world.commit(partition)
    for epoch in range(1, 4):
        partitions = partitions_by_index(server.fetch(fetch_request([], session_id, epoch)))
        assert [offset for offset, _, _ in records_in(partitions[1].records)] == [0, 1, 2]


def test_forgotten_partition_is_omitted_and_forgetting_the_last_closes_session() -> None:
    server = new_server()
    world, session_id = server.world, open_session(server, 0, 1)
    topic_id = world.ids["t"]
    forget = [ForgottenTopic("", topic_id, [0, 55]), ForgottenTopic("", b"?" * 16, [0])]
    assert server.fetch(fetch_request([], session_id, 1, forget)).session_id == session_id
    world.append(world.get("t", 0))
    world.commit(world.get("t", 0))
    assert partitions_by_index(server.fetch(fetch_request([], session_id, 2))) == {}
    response = server.fetch(fetch_request([], session_id, 3, [ForgottenTopic("", topic_id, [1])]))
    assert (response.session_id, response.error_code, response.responses) == (0, 0, [])
    assert len(server.cache) == len(world.subscriptions) == 0


@pytest.mark.parametrize("by_id", [True, False])
def test_server_replaces_recreated_topic_in_one_request(by_id: bool) -> None:
    server = new_server(1)
    world = server.world
    old = world.ids["t"] if by_id else b""
    session_id = server.fetch(fetch_request([FetchTopic("t", old, [FetchPartition(0)])])).session_id
    world.delete("t")
    world.create("t", 1)
    new = world.ids["t"] if by_id else b""
    topics = [FetchTopic("t", new, [FetchPartition(0)])]
    response = server.fetch(fetch_request(topics, session_id, 1, [ForgottenTopic("t", old, [0])]))
    assert partitions_by_index(response)[0].error_code == 0, (
        "the response names it, although its offsets equal those of the deleted topic"
    )
    assert server.cache.partitions == 1
    world.append(world.get("t", 0))
    world.commit(world.get("t", 0))
    assert records_in(partitions_by_index(server.fetch(fetch_request([], session_id, 2)))[0].records)


def test_empty_mixed_or_oversized_request_gets_no_session() -> None:
    server = new_server(partitions_max=3)
    world = server.world
    assert server.fetch(fetch_request([])).session_id == 0
    mixed = [fetch_topic(world, "t", 0), FetchTopic("t", b"", [FetchPartition(1)])]
    assert server.fetch(fetch_request(mixed)).session_id == 0
    assert server.fetch(fetch_request([fetch_topic(world, "t", 0, 1, 2, 3)])).session_id == 0
    session_id = open_session(server, 0, 1, 2)
    response = server.fetch(fetch_request([fetch_topic(world, "t", 2, 3)], session_id, 1))
    assert error_of(response) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert len(server.cache) == len(world.subscriptions) == 0
    assert server.cache.metrics.refusals == {Refusal.TOO_LARGE: 2}


def test_byte_limit_starves_no_partition() -> None:
    server = new_server(10)
    world, session_id = server.world, open_session(server)
    for partition in world.partitions.values():
        world.append(partition, 50, 100)
        world.commit(partition)
    offsets = dict.fromkeys(range(10), 0)
    served: list[int] = []
    topics: list[FetchTopic] = []
    for epoch in range(1, 101):
        partitions = partitions_by_index(server.fetch(fetch_request(topics, session_id, epoch, max_bytes=250)))
        topics = []
        for number, data in partitions.items():
            if data.records:
                served.append(number)
                offsets[number] += len(records_in(data.records))
                topics.append(fetch_topic(world, "t", number, offset=offsets[number]))
    assert all(sorted(served[start : start + 10]) == list(range(10)) for start in range(0, len(served) - 10, 10))
    assert sum(offsets.values()) == 200


def test_oversized_batch_is_returned_when_its_partition_is_first() -> None:
    server = new_server(3)
    world, session_id = server.world, open_session(server)
    for number, size in ((0, 30), (1, 5000), (2, 30)):
        world.append(world.get("t", number), 1, size)
        world.commit(world.get("t", number))
    first = partitions_by_index(server.fetch(fetch_request([], session_id, 1, max_bytes=60)))
    second = partitions_by_index(
        server.fetch(fetch_request([fetch_topic(world, "t", 0, offset=1)], session_id, 2, max_bytes=60))
    )
    assert (len(first[0].records), first[1].records) == (30, b"")
    assert len(second[1].records) == 5000


def test_high_watermark_advances_despite_byte_limit() -> None:
    """The follower's position counts for each requested partition, even if the byte limit omits it."""
    server = new_server(3)
    world = server.world
    for partition in world.partitions.values():
        world.append(partition, 2, 100)
    session_id = open_session(server, 0, 1, 2, replica_id=FOLLOWER)
    topics = [fetch_topic(world, "t", 0, 1, 2, offset=1)]
    server.fetch(fetch_request(topics, session_id, 1, replica_id=FOLLOWER, max_bytes=100))
    assert [partition.high_watermark for partition in world.partitions.values()] == [1, 1, 1]


# -- waiting


def wait(server: Server, request: FetchRequest) -> list[FetchResponse]:
    responses: list[FetchResponse] = []
    server.handle(request._replace(max_wait_ms=500), responses.append)
    return responses


@pytest.mark.parametrize("epoch", [-1, 0, 1])
@pytest.mark.parametrize("min_bytes", [1, 61])
def test_fetch_waits_for_min_bytes(epoch: int, min_bytes: int) -> None:
    server = new_server()
    world = server.world
    session_id = open_session(server) if epoch > 0 else 0
    topics = [] if epoch > 0 else [fetch_topic(world, "t", 0, 1, 2, 3)]
    responses = wait(server, fetch_request(topics, session_id, epoch, min_bytes=min_bytes))
    for number in (2, 1, 2):
        assert not responses
        world.append(world.get("t", number), 1, 30)
        server.run()
        assert not responses, "consumers do not receive uncommitted records"
        world.commit(world.get("t", number))
        server.run()
        if min_bytes == 1:
            break
    assert sum(len(records_in(data.records)) for data in partitions_by_index(responses[0]).values()) == (
        1 if min_bytes == 1 else 3
    )
    assert bool(responses[0].session_id) is (epoch >= 0)
    assert not server.waiting


@pytest.mark.parametrize("epoch", [-1, 0, 1])
def test_error_completes_waiting_fetch_but_log_start_does_not(epoch: int) -> None:
    server = new_server()
    world = server.world
    world.append(world.get("t", 1))
    world.commit(world.get("t", 1))
    topics = [fetch_topic(world, "t", 1, offset=1)]
    session_id = server.fetch(fetch_request(topics)).session_id if epoch > 0 else 0
    responses = wait(server, fetch_request([] if epoch > 0 else topics, session_id, epoch, min_bytes=1))
    world.delete_records(world.get("t", 1), 1)
    assert not any(waiting.is_woken for waiting in server.waiting)
    server.run()
    assert not responses
    if epoch < 0:  # The response at max_wait_ms contains the change.
        server.expire(server.waiting[0])
        assert partitions_by_index(responses[0])[1].log_start_offset == 1
        return
    world.lead(world.get("t", 1), False)
    server.run()
    assert partitions_by_index(responses[0])[1].error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER


@pytest.mark.parametrize("completes_immediately", [True, False])
def test_stale_follower_high_watermark_completes_fetch(completes_immediately: bool) -> None:
    """392-02. `wakes_on_high_watermark` disables it."""
    server = new_server(1, wakes_on_high_watermark=int(completes_immediately))
    world, partition = server.world, server.world.get("t", 0)
    topics = [fetch_topic(world, "t", 0)]
    responses = wait(server, fetch_request(topics, replica_id=FOLLOWER, min_bytes=1))
    assert bool(responses) is completes_immediately, "first fetch of a session"
    world.append(partition)
    server.run()
    session_id = responses[0].session_id
    topics = [fetch_topic(world, "t", 0, offset=1)]
    server.fetch(fetch_request(topics, session_id, 1, replica_id=FOLLOWER, max_wait_ms=1))
    assert partition.high_watermark == 1
    world.append(partition)
    topics = [fetch_topic(world, "t", 0, offset=2)]
    world.commit(partition)
    responses = wait(server, fetch_request(topics, session_id, 2, replica_id=FOLLOWER, min_bytes=1))
    assert bool(responses) is completes_immediately
    if not responses:
        server.expire(server.waiting[0])
    assert partitions_by_index(responses[0])[0].high_watermark == 2


def test_superseded_request_ends_with_71_and_loses_no_records() -> None:
    server = new_server()
    session_id = open_session(server)
    first = wait(server, fetch_request([], session_id, 1, min_bytes=100))
    server.world.append(server.world.get("t", 3))
    server.world.commit(server.world.get("t", 3))
    server.run()
    second = wait(server, fetch_request([], session_id, 2, min_bytes=1))
    server.run()
    assert error_of(first[0]) is ErrorCode.INVALID_FETCH_SESSION_EPOCH
    assert records_in(partitions_by_index(second[0])[3].records)


def test_waiting_request_gets_70_when_its_session_closes() -> None:
    server = new_server()
    session_id = open_session(server)
    responses = wait(server, fetch_request([], session_id, 1, min_bytes=1))
    server.fetch(fetch_request([], session_id, -1))
    server.run()
    assert error_of(responses[0]) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND


def test_cancelled_fetch_loses_no_changes() -> None:
    server = new_server()
    world, session_id = server.world, open_session(server)
    world.append(world.get("t", 0))
    world.commit(world.get("t", 0))
    wait(server, fetch_request([], session_id, 1, min_bytes=100))
    world.append(world.get("t", 1))
    world.commit(world.get("t", 1))
    server.waiting.pop().fetch.cancel()
    assert set(partitions_by_index(server.fetch(fetch_request([], session_id, 2)))) == {0, 1}
    wait(server, fetch_request([fetch_topic(world, "t", 2)], session_epoch=-1, min_bytes=100))
    server.waiting.pop().fetch.cancel()
    assert len(world.subscriptions) == 4


def test_waiting_fetch_keeps_session_active() -> None:
    server = new_server()
    server.cache.policy = AdoptedPolicy(1, 1000)
    open_session(server)
    session_id = next(info.session_id for info in server.cache.list(0))
    wait(server, fetch_request([], session_id, 1, min_bytes=1))
    server.now_ms = 5000
    assert next(server.cache.list(5000)).is_waiting
    assert server.fetch(fetch_request([fetch_topic(server.world, "t", 0)])).session_id == 0
    server.expire(server.waiting[0])
    assert next(server.cache.list(5000)).idle_ms == 0


def test_changed_read_options_reread_all_partitions() -> None:
    server = new_server()
    session_id = open_session(server)
    for epoch, fields in enumerate(({}, {"isolation_level": 1}, {"isolation_level": 1}, {"replica_epoch": 4}), 1):
        before = server.world.reads
        server.fetch(fetch_request([], session_id, epoch, **fields))  # type: ignore[arg-type]
        assert server.world.reads - before == (4 if epoch in (2, 4) else 0)


def test_reregistered_broker_loses_sessions_of_older_epochs() -> None:
    server = new_server()
    topics = [fetch_topic(server.world, "t", 0, 1)]
    for broker, epoch in ((FOLLOWER, 1), (FOLLOWER, 2), (FOLLOWER, 2), (FOLLOWER + 1, 1), (-1, -1)):
        server.fetch(fetch_request(topics, replica_id=broker)._replace(replica_epoch=epoch))
    old, *others = [info.session_id for info in server.cache.list(0)]
    waiting = server.cache.begin(fetch_request([], old, 1, replica_id=FOLLOWER)._replace(replica_epoch=1), "", 0)
    server.cache.close_superseded(FOLLOWER, 1)
    assert len(server.cache) == 5
    server.cache.close_superseded(FOLLOWER, 2)
    assert [info.session_id for info in server.cache.list(0)] == others
    assert error_of(waiting.respond(0)) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    server.cache.close_superseded(-1, 5)
    assert (len(server.cache), server.cache.partitions, server.cache.metrics.closed) == (4, 8, 1)


def test_flood_of_one_shot_clients_keeps_follower_sessions() -> None:
    server = new_server(3)
    server.cache.policy = AdoptedPolicy(500, 1000)
    world = server.world
    followers = {broker: open_session(server, 0, 1, 2, replica_id=broker) for broker in (1, 2, 3)}
    topics = [fetch_topic(world, "t", 0)]
    for count in range(50_000):
        if not count % 500:
            server.now_ms += 100
            for broker, session_id in followers.items():
                epoch = count // 500 + 1
                assert server.fetch(fetch_request([], session_id, epoch, replica_id=broker)).error_code == 0
        server.fetch(fetch_request(topics), f"client-{count}")
    assert len(server.cache) == 500
    assert {info.replica_id for info in server.cache.list(0) if info.privileged} == {1, 2, 3}


# -- arbitrary requests

_int32 = st.one_of(st.integers(-3, 4), st.sampled_from([1000, 1001, INT_MAX, -INT_MAX - 1]))
_int64 = st.one_of(_int32, st.sampled_from([(1 << 63) - 1, -(1 << 63)]))
_topics = st.one_of(
    st.tuples(st.just("t"), st.just(b"")),
    st.tuples(st.just(""), st.just((1).to_bytes(16, "big"))),
    st.tuples(st.text(max_size=3), st.binary(max_size=17)),
)
_partitions = st.builds(FetchPartition, _int32, _int32, _int64, _int32, _int64, _int32)
_fetch_topics = st.builds(
    lambda topic, many: FetchTopic(topic[0], topic[1], many), _topics, st.lists(_partitions, max_size=4)
)
_forgotten = st.builds(
    lambda topic, many: ForgottenTopic(topic[0], topic[1], many), _topics, st.lists(_int32, max_size=3)
)
_requests = st.builds(
    FetchRequest,
    replica_id=st.sampled_from([-1, -1, -2, 7]),
    max_wait_ms=_int32,
    min_bytes=_int32,
    max_bytes=_int32,
    isolation_level=_int32,
    session_id=st.sampled_from([0, 1000, 1000, 1001, -7]),
    session_epoch=st.sampled_from([-1, 0, 1, 2, INT_MAX, -INT_MAX - 1]),
    topics=st.lists(_fetch_topics, max_size=3),
    forgotten_topics_data=st.lists(_forgotten, max_size=3),
)


@settings(deadline=None)
@given(st.lists(_requests, max_size=6))
def test_arbitrary_requests_get_valid_responses_and_keep_other_sessions(requests: list[FetchRequest]) -> None:
    server = new_server()
    world = server.world
    bystander = open_session(server, replica_id=FOLLOWER + 1)
    for request in requests:
        response = server.fetch(request)
        assert error_of(response).name in (
            "NONE",
            "FETCH_SESSION_ID_NOT_FOUND",
            "INVALID_FETCH_SESSION_EPOCH",
            "FETCH_SESSION_TOPIC_ID_ERROR",
        )
    assert not server.waiting
    partition = world.get("t", 2)
    world.append(partition)
    request = fetch_request([], bystander, 1, replica_id=FOLLOWER + 1, max_bytes=MORE)
    assert set(partitions_by_index(server.fetch(request))) >= {2}
    for info in list(server.cache.list(0)):
        server.fetch(fetch_request([], info.session_id, -1, replica_id=info.replica_id))
    assert len(server.cache) == server.cache.partitions == len(world.subscriptions) == 0


def test_subscriptions_notify_each_watcher_of_a_key_once() -> None:
    class Watcher:
        def __init__(self) -> None:
            self.count = 0

        def mark(self, key: bytes, change: int) -> None:
            self.count += 1

    subscriptions = Subscriptions()
    watchers = [Watcher() for _ in range(12)]
    for count, watcher in enumerate(watchers, 1):
        subscriptions.subscribe(b"t\0\0\0\1", watcher, True)
        subscriptions.subscribe(b"t\0\0\0\1", watcher, True)
        subscriptions.changed(b"t\0\0\0\1", "t", 1)
        assert sum(watcher.count for watcher in watchers) == count * (count + 1) // 2
    for watcher in [Watcher(), *watchers[::2], *watchers[1::2]]:
        subscriptions.unsubscribe(b"t\0\0\0\1", watcher, True)
        subscriptions.changed(b"t\0\0\0\1", "t", 1)
    assert len(subscriptions) == 0
    subscriptions.subscribe(b"t\0\0\0\1", watchers[0], False)
    before = watchers[0].count
    subscriptions.changed(b"0123456789abcdef\0\0\0\1", "t", 1)
    subscriptions.changed(b"0123456789abcdef\0\0\0\2", "t", 1)
    assert watchers[0].count == before + 1
