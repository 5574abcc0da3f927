"""A topic that is deleted between two requests of the planning."""

from __future__ import annotations

from typing import Any

import pytest

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.spark.cluster import ClusterConnection
from kipmesh.spark.offsets import InvalidOptionError, TopicPartition
from kipmesh.spark.options import Mode, parse_options


class FailingAdmin:
    """Admin client whose ListOffsets requests fail."""

    def __init__(self, code: ErrorCode) -> None:
        self.code = code

    def list_offsets(self, _offsets: Any) -> Any:
        raise KafkaError(self.code, "topic 't' does not exist")

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("option", "value"), [("subscribe", "t"), ("subscribePattern", "t.*"), ("assign", '{"t": [0]}')]
)
@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.REQUEST_TIMED_OUT])
def test_error_of_deleted_topic_names_the_option(
    option: str, value: str, code: ErrorCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ClusterConnection(
        parse_options({"kafka.bootstrap.servers": "127.0.0.1:1", option: value}, Mode.STREAM)
    ) as connection:
        monkeypatch.setattr(connection, "_open_admin", lambda: FailingAdmin(code))
        is_deleted = code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        with pytest.raises(
            InvalidOptionError if is_deleted else KafkaError, match=f"{option} .*'t'" if is_deleted else "'t'"
        ):
            connection.latest_offsets([TopicPartition("t", 0)])
