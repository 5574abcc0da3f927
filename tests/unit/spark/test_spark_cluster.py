"""A topic that goes between two questions of the planning."""

from __future__ import annotations

from typing import Any

import pytest

from kipmesh.core.errors import ErrorCode, KafkaError
from kipmesh.spark.cluster import ClusterConnection
from kipmesh.spark.offsets import InvalidOptionError, TopicPartition
from kipmesh.spark.options import Mode, parse_options


class GoneAdmin:
    """Of a cluster where the topic was deleted a moment ago, or nobody answers."""

    def __init__(self, code: ErrorCode) -> None:
        self.code = code

    def list_offsets(self, _asked: Any) -> Any:
        raise KafkaError(self.code, "topic 't' does not exist")

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("option", "value"), [("subscribe", "t"), ("subscribePattern", "t.*"), ("assign", '{"t": [0]}')]
)
@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.REQUEST_TIMED_OUT])
def test_the_option_that_names_it_is_named(
    option: str, value: str, code: ErrorCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ClusterConnection(
        parse_options({"kafka.bootstrap.servers": "127.0.0.1:1", option: value}, Mode.STREAM)
    ) as mesh:
        monkeypatch.setattr(mesh, "_open_admin", lambda: GoneAdmin(code))
        is_gone = code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        with pytest.raises(
            InvalidOptionError if is_gone else KafkaError, match=f"{option} .*'t'" if is_gone else "'t'"
        ):
            mesh.latest_offsets([TopicPartition("t", 0)])
