"""Configuration of the metadata topic: `cleanup.policy` is `snapshot` and all configs are read-only (630-07)."""

from __future__ import annotations

import pytest

from kipmesh import messages as m
from kipmesh.core.config.base import AlterOperation, ConfigSource
from kipmesh.core.errors import ErrorCode
from kipmesh.core.metadata.image import CLUSTER_METADATA_TOPIC, TOPIC_RESOURCE
from tests.unit.core.metadata.metadata_support import Controller


def described(*keys: str, documented: bool = False) -> m.DescribeConfigsResult:
    resource = m.DescribeConfigsResource(TOPIC_RESOURCE, CLUSTER_METADATA_TOPIC, keys)
    request = m.DescribeConfigsRequest([resource], include_documentation=documented)
    (result,) = Controller().core.describe_configs(request).response.results
    return result


def test_metadata_topic_cleanup_policy_is_snapshot() -> None:
    result = described()
    assert (result.error_code, result.resource_name) == (0, CLUSTER_METADATA_TOPIC)
    (entry,) = result.configs
    assert (entry.name, entry.value, entry.read_only) == ("cleanup.policy", "snapshot", True)
    assert (entry.config_source, entry.documentation) == (ConfigSource.DEFAULT, None)


def test_metadata_topic_description_honours_requested_keys_and_documentation() -> None:
    assert described("retention.ms").configs == ()
    (entry,) = described("cleanup.policy", "retention.ms", documented=True).configs
    assert "snapshot" in (entry.documentation or "")


@pytest.mark.parametrize("operation", list(AlterOperation))
@pytest.mark.parametrize("key", ["cleanup.policy", "retention.ms"])
def test_metadata_topic_configs_cannot_be_altered(operation: AlterOperation, key: str) -> None:
    altered = m.AlterConfigsResource(
        TOPIC_RESOURCE, CLUSTER_METADATA_TOPIC, [m.AlterableConfig(key, operation, "delete")]
    )
    decision = Controller().core.incremental_alter_configs(m.IncrementalAlterConfigsRequest([altered]))
    assert not decision.records
    assert decision.response.responses[0].error_code == ErrorCode.POLICY_VIOLATION
