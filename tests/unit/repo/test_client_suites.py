"""Tools of `make client-suites`: log directories of Apache Kafka, and stages and outcomes of kafka-tester."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kipmesh.cluster.layout import NodeInfo, Role
from kipmesh.core.control_records import LeaderChange, decode_leader_change
from kipmesh.core.metadata import records as r
from kipmesh.core.metadata.image import MetadataDelta, MetadataImage
from kipmesh.core.record_batch import build, parse_header, read_records

TOOLS = Path(__file__).resolve().parents[3] / "tools"
CLUSTER, TOPIC_ID, DIRECTORY = "IAAAAAAAQACAAAAAAAAAAQ", bytes(range(16)), bytes(range(16, 32))
SERVER = """process.roles=broker,controller
node.id=1
listeners={listeners}
controller.listener.names=CONTROLLER
log.dirs={log_dir}"""
META = f"""#
#Wed Jan 28 11:05:46 UTC 2026
cluster.id={CLUSTER}
directory.id=EAAAAAAAQACAAAAAAAAAAQ==
node.id=1
version=1
"""


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a NamedTuple of the module resolves its annotations there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


LOG_DIR_TOOL, SUITES = load_tool("kafka_log_dir_cluster"), load_tool("client_suites")


def write_properties(tmp_path: Path, listeners: str = "CONTROLLER://:9093,PLAINTEXT://:9092", meta: str = META) -> Path:
    """Write a log directory and its `server.properties`. Return the path of the properties."""
    log_dir = tmp_path / "logs"
    log_dir.mkdir()
    (log_dir / "meta.properties").write_text(meta)
    server = tmp_path / "server.properties"
    server.write_text(SERVER.format(listeners=listeners, log_dir=log_dir))
    return server


def metadata_log(first_offset: int) -> bytes:
    """Return records of one topic with one partition, in versions of Kafka 3.9."""
    partition = r.PartitionRecord(0, TOPIC_ID, (1,), (1,), (), (), 1, 0, 0, 0, (DIRECTORY,))
    batches = [
        [r.encode_record(r.FeatureLevelRecord("metadata.version", 20))],
        [r.encode_record(r.TopicRecord("t", TOPIC_ID)), r.encode_record(partition, 1)],
    ]
    data, offset = b"", first_offset
    for values in batches:
        data += build([(None, value) for value in values], base_offset=offset, leader_epoch=3, timestamp_ms=17)
        offset += len(values)
    return data


def test_log_dir_cluster_node_and_port_are_read_from_properties(tmp_path: Path) -> None:
    assert LOG_DIR_TOOL.read_log_dir(write_properties(tmp_path)) == (tmp_path / "logs", CLUSTER, 1, 9092)


@pytest.mark.parametrize("listeners", ["CONTROLLER://:9093", "PLAINTEXT://:some"])
def test_properties_without_client_port_are_rejected(tmp_path: Path, listeners: str) -> None:
    with pytest.raises(LOG_DIR_TOOL.LogDirError, match=r"server\.properties must have log\.dirs with one directory"):
        LOG_DIR_TOOL.read_log_dir(write_properties(tmp_path, listeners))


def test_log_dir_without_cluster_id_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(LOG_DIR_TOOL.LogDirError, match=r"meta\.properties must have cluster\.id and node\.id"):
        LOG_DIR_TOOL.read_log_dir(write_properties(tmp_path, meta="version=1\n"))


def test_metadata_log_without_leader_change_is_completed() -> None:
    data = metadata_log(first_offset=1)
    completed_log = LOG_DIR_TOOL.completed(data, 1)
    assert completed_log.endswith(data)
    header = parse_header(completed_log)
    assert (header.base_offset, header.partition_leader_epoch, header.is_control) == (0, 3, True)
    (record,) = read_records(completed_log, 0, header)
    assert decode_leader_change(record.key, record.value) == LeaderChange(1, (1,), (1,))
    image = MetadataImage()
    image.replay(completed_log, MetadataDelta())
    assert image.offset == 3
    state = image.topics[TOPIC_ID].partitions[0]
    assert (image.topics[TOPIC_ID].name, state.leader, state.directories) == ("t", 1, (DIRECTORY,))


def test_other_metadata_logs_are_not_completed() -> None:
    for data in (b"", metadata_log(first_offset=0), metadata_log(first_offset=5)):
        assert LOG_DIR_TOOL.completed(data, 1) == data


def test_only_metadata_log_is_moved(tmp_path: Path) -> None:
    log_dir, home = tmp_path / "logs", tmp_path / "home"
    LOG_DIR_TOOL.take_metadata_log(tmp_path, home, 1)  # no metadata log exists
    assert not home.exists()
    for name in ("__cluster_metadata-0", "t-0"):
        (log_dir / name).mkdir(parents=True)
        (log_dir / name / "00000000000000000000.log").write_bytes(metadata_log(1))
    LOG_DIR_TOOL.take_metadata_log(log_dir, home, 1)
    assert [path.name for path in log_dir.iterdir()] == ["t-0"]
    moved = (home / "__cluster_metadata-0" / "00000000000000000000.log").read_bytes()
    assert parse_header(moved).base_offset == 0


def test_nodes_have_cluster_id_and_broker_has_log_dir(tmp_path: Path) -> None:
    log_dir, home = LOG_DIR_TOOL.read_log_dir(write_properties(tmp_path)), tmp_path / "home"
    controller = NodeInfo("controller-1", Role.CONTROLLER, 1001, "r", grpc="127.0.0.1:1")
    assert LOG_DIR_TOOL.properties(controller, log_dir, home) == {
        "cluster.id": CLUSTER,
        "metadata.log.dir": str(home / "controller"),
    }
    broker = NodeInfo("leader-1", Role.LEADER, 1, "r", grpc="127.0.0.1:2", kafka="127.0.0.1:3")
    assert LOG_DIR_TOOL.properties(broker, log_dir, home) == {
        "cluster.id": CLUSTER,
        "log.dirs": str(tmp_path / "logs"),
        "metadata.log.dir": str(home / "broker"),
        "advertised.listeners": "MESH://127.0.0.1:2,KAFKA://localhost:9092",
    }
    with pytest.raises(LOG_DIR_TOOL.LogDirError, match="belongs to node 7"):
        LOG_DIR_TOOL.properties(broker, log_dir._replace(node_id=7), home)


DEFINITION = """
	TestCases: []tester_definition.TestCase{
		{
			Slug:     "vi6",
			TestFunc: testBindToPort,
			Timeout:  15 * time.Second,
		},
		{
			Slug:     "nv3",
			TestFunc: testHardcodedCorrelationId,
		},
"""


def test_stages_are_parsed_from_source_of_the_suite() -> None:
    first, second = SUITES.stages(DEFINITION)
    assert (first.name, second.name) == ("vi6:testBindToPort", "nv3:testHardcodedCorrelationId")
    (stage,) = json.loads(first.selection)
    assert (stage["slug"], stage["title"]) == ("vi6", "testBindToPort")
    assert all(stage.values())  # kafka-tester rejects empty values


def test_suite_does_not_start_with_existing_files_or_used_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SUITES, "SHARED", tmp_path)
    monkeypatch.setattr(SUITES.ports, "is_free", lambda port: port == SUITES.PORT)
    SUITES._check_unused()
    (tmp_path / "kraft-combined-logs").mkdir()
    with pytest.raises(SUITES.SuiteError, match=r"kraft-combined-logs exists$"):
        SUITES._check_unused()
    monkeypatch.setattr(SUITES.ports, "is_free", lambda port: False)
    with pytest.raises(SUITES.SuiteError, match="kraft-combined-logs exists, port 9092 is in use"):
        SUITES._run_tester(tmp_path, "", tmp_path / "log")
    assert (tmp_path / "kraft-combined-logs").exists()


def test_unlisted_failures_and_listed_passes_are_problems() -> None:
    outcomes = [SUITES.Outcome("a:one", "failed", "why"), SUITES.Outcome("b:two", "passed")]
    assert SUITES.problems(outcomes, SUITES.Lists({}, {"a:*": "a reason"})) == []
    assert SUITES.problems(outcomes, SUITES.Lists({}, {})) == ["fails: a:one\nwhy"]
    listed = SUITES.Lists({}, {"a:one": "a reason", "b:two": "an old reason"})
    assert SUITES.problems(outcomes, listed) == ["listed in [fails] but does not fail: b:two"]
