"""The table of APIs: names and versions of Apache Kafka, handlers, and error responses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from kio.index import load_payload_module
from kio.static.constants import EntityType

from kipmesh import messages as m
from kipmesh.broker import handlers as broker_handlers
from kipmesh.broker.groups.groups import GroupsHandler
from kipmesh.broker.requests.fetch import FetchHandler
from kipmesh.broker.requests.offsets import OffsetsHandler
from kipmesh.broker.requests.producer_ids import ProducerIdsHandler
from kipmesh.controller import handlers as controller_handlers
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.controller import MetadataController
from kipmesh.messages.schema import NEVER, Message
from kipmesh.messages.table import APIS, KAFKA_APIS, METHODS, Api, Role, find_api
from kipmesh.transport.pipeline import coroutines_in
from tests.unit.messages.messages_of_tests import values


@pytest.mark.parametrize("api", KAFKA_APIS.values(), ids=lambda api: api.name)
def test_api_names_and_versions_match_kafka(api: Api) -> None:
    assert api.key is not None
    for version in range(api.versions.first, api.versions.last + 1):
        module = load_payload_module(api.key, version, EntityType.request)
        name = "ListConfigResources" if api.name == "ListConfigResources" else api.name
        assert any(hasattr(module, f"{candidate}Request") for candidate in (name, "ListClientMetricsResources")), (
            api.name,
            version,
        )


def test_api_keys_and_rpc_paths_are_unique() -> None:
    assert len(KAFKA_APIS) == len([api for api in APIS if api.versions != NEVER])
    paths = [method.path for methods in METHODS.values() for method in methods.values()]
    assert len(paths) == len(set(paths))


@pytest.mark.parametrize("api", APIS, ids=lambda api: f"{api.role.value} {api.name}")
def test_every_api_has_handler_for_its_role(api: Api) -> None:
    on_broker = coroutines_in(broker_handlers)
    on_controller = coroutines_in(controller_handlers)
    if api.role is Role.BROKER:
        parts = (FetchHandler, GroupsHandler, OffsetsHandler, ProducerIdsHandler)
        assert api.method in on_broker or any(hasattr(part, api.method) for part in parts)
    if api.role in (Role.CONTROLLER, Role.FORWARDED) and api.name != "DescribeQuorum":
        assert api.method in on_controller or hasattr(MetadataController, api.method)


@pytest.mark.parametrize("api", KAFKA_APIS.values(), ids=lambda api: api.name)
def test_every_version_encodes_its_error_response(api: Api) -> None:
    """A version without an error field has no error response; the connection is closed instead."""
    for version in range(api.versions.first, api.versions.last + 1):
        response = api.error_response(api.request(), ErrorCode.UNKNOWN_SERVER_ERROR, "message", version)
        if response is not None:
            frame = api.encode(1, version, response)
            assert len(frame) + sum(map(len, frame.parts)) > 8


def test_error_response_has_error_for_each_requested_item() -> None:
    request: Any = m.ListOffsetsRequest(topics=(m.ListOffsetsTopic("t", partitions=(m.ListOffsetsPartition(4),)),))
    response: Any = find_api("ListOffsets").error_response(request, 7, "message")
    assert response == m.ListOffsetsResponse(
        topics=(m.ListOffsetsTopicResponse("t", partitions=(m.ListOffsetsPartitionResponse(4, 7),)),)
    )
    request = m.DeleteTopicsRequest((m.DeleteTopicState("a"), m.DeleteTopicState(None, b"i" * 16)))
    response = find_api("DeleteTopics").error_response(request, 7, "message", 6)
    assert [(item.name, item.topic_id, item.error_code, item.error_message) for item in response.responses] == [
        ("a", b"", 7, "message"),
        (None, b"i" * 16, 7, "message"),
    ]
    request = m.DeleteTopicsRequest(topic_names=("a",))
    response = find_api("DeleteTopics").error_response(request, 7, "message", 1)
    assert [(item.name, item.error_code) for item in response.responses] == [("a", 7)]


def test_error_response_has_each_user_once() -> None:
    request = m.AlterUserScramCredentialsRequest(
        (m.ScramCredentialDeletion("u", 1),), (m.ScramCredentialUpsertion("u", 2), m.ScramCredentialUpsertion("v", 1))
    )
    response: Any = find_api("AlterUserScramCredentials").error_response(request, 7, "message")
    assert [result.user for result in response.results] == ["u", "v"]


def test_fetch_error_response_has_error_for_each_partition() -> None:
    """The top-level error of a Fetch response is only for session errors (227-05)."""
    topic = m.FetchTopic("t", partitions=(m.FetchPartition(3),))
    response: Any = find_api("Fetch").error_response(m.FetchRequest(topics=(topic,)), 6, None, 12)
    assert response.error_code == 0
    assert response.responses[0].partitions[0][:2] == (3, 6)


def test_error_response_repeats_repeated_topic() -> None:
    request = m.CreateTopicsRequest((m.CreatableTopic("t"), m.CreatableTopic("t")))
    response: Any = find_api("CreateTopics").error_response(request, 7, "message")
    assert [topic.name for topic in response.topics] == ["t", "t"]


def test_declaration_with_postponed_annotations_is_refused() -> None:
    source = """
from __future__ import annotations
from kipmesh.messages.schema import Int32, Message, field
class Late(Message):
    number: Int32 = field(1)
"""
    with pytest.raises(TypeError, match="got text 'Int32'"):
        exec(compile(source, "late", "exec", dont_inherit=True), {"__name__": "late"})


def _plain_errors(value: Any) -> list[int]:
    """Collect the error codes of a message and its nested messages; the oracle for `Api.errors`."""
    codes = [value.error_code] if getattr(value, "error_code", 0) else []
    for part in value:
        for item in part if isinstance(part, tuple) and not isinstance(part, Message) else ():
            codes += _plain_errors(item) if isinstance(item, Message) else []
    return codes


@pytest.mark.parametrize("api", KAFKA_APIS.values(), ids=lambda api: api.name)
def test_api_errors_finds_all_error_codes(api: Api) -> None:
    @settings(max_examples=20, deadline=None, database=None)
    @given(values(api.response, api.versions.last))
    def check(response: Any) -> None:
        assert sorted(api.errors(response)) == sorted(_plain_errors(response))

    check()


def test_reconciled_apis_are_forwarded_mutations() -> None:
    for api in APIS:
        assert not api.reconciles or (api.role is Role.FORWARDED and api.is_mutation), api.name


def test_response_with_one_successful_item_has_success() -> None:
    api = find_api("CreateTopics")
    both = (m.CreatableTopicResult("a", error_code=41), m.CreatableTopicResult("b"))
    assert api.has_success(m.CreateTopicsResponse(topics=both))
    assert not api.has_success(m.CreateTopicsResponse(topics=both[:1]))
    assert not find_api("ElectLeaders").has_success(m.ElectLeadersResponse(error_code=41))
