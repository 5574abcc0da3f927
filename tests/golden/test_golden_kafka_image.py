"""Apache Kafka's image classes load and rewrite a metadata snapshot, as in `bench.snapshot --kafka`."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import kafka, snapshot
from bench.images import balanced_image
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.fencing import FENCING_FEATURE, FENCING_LEVEL
from kipmesh.core.metadata.image import MetadataDelta
from kipmesh.core.metadata.image_writer import image_values
from kipmesh.storage.fs import RealFileSystem
from kipmesh.storage.quorum.snapshots import SnapshotStore

pytestmark = [pytest.mark.kafka_tools, pytest.mark.timeout(600)]


def test_kafka_image_classes_load_a_metadata_snapshot(tmp_path: Path) -> None:
    image = balanced_image(100)
    image.apply(r.FeatureLevelRecord(FENCING_FEATURE, FENCING_LEVEL), MetadataDelta())
    for mechanism in (1, 2):
        image.apply(r.UserScramCredentialRecord("alice", mechanism, b"s", b"k" * 32, b"v" * 32, 4096), MetadataDelta())
    captured = image.capture()
    writer = SnapshotStore(RealFileSystem(), str(tmp_path)).create(
        captured.snapshot_id, last_contained_log_timestamp=1, now_ms=1
    )
    for _ in writer.write(image_values(captured)):
        pass
    size = writer.freeze()
    try:
        rounds = snapshot.measure_kafka(tmp_path, captured.snapshot_id)
    except kafka.KafkaMissingError as error:
        if "KafkaSnapshot failed" in str(error):
            raise
        pytest.skip(str(error))
    assert len(rounds) == snapshot.KAFKA_ROUNDS
    for one in rounds:
        assert (one["records"], one["topics"]) == (writer.records, 100)
        assert one["bytes"] == pytest.approx(size, rel=0.05)
    compared = snapshot.compare({"generate_s": 1, "load_s": 1, "bytes": size, "image_mib": 1}, rounds)
    assert compared["load_s"]["best"] <= compared["load_s"]["median"]
    assert "Apache Kafka 4" in snapshot.comparison_lines(compared)[0]
