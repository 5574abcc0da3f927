"""Metrics of the disk space of data directories."""

from __future__ import annotations

import shutil
from pathlib import Path

from prometheus_client import CollectorRegistry

from kipmesh.core.config import BrokerConfig, ControllerConfig
from kipmesh.core.config.node import ConsumerServiceConfig
from kipmesh.node.http import DiskSpaceCollector, data_directories


def test_data_directories_come_from_configuration() -> None:
    assert data_directories(BrokerConfig.model_construct(log_dirs=("a", "b"), metadata_log_dir="")) == ("a", "b")
    assert data_directories(BrokerConfig.model_construct(log_dirs=("a", "b"), metadata_log_dir="b")) == ("a", "b")
    assert data_directories(BrokerConfig.model_construct(log_dirs=("a",), metadata_log_dir="m")) == ("a", "m")
    assert data_directories(ControllerConfig.model_construct(metadata_log_dir="m")) == ("m",)
    assert data_directories(ConsumerServiceConfig.model_construct()) == ()


def test_missing_directory_has_no_disk_metrics_and_hides_no_other(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    here, gone = str(tmp_path), str(tmp_path / "gone")
    registry.register(DiskSpaceCollector([gone, here]))
    usage = shutil.disk_usage(here)
    assert registry.get_sample_value("kipmesh_disk_size_bytes", {"logdirectory": here}) == usage.total
    free = registry.get_sample_value("kipmesh_disk_free_bytes", {"logdirectory": here})
    assert free is not None
    assert 0 < free < usage.total
    assert registry.get_sample_value("kipmesh_disk_free_bytes", {"logdirectory": gone}) is None
