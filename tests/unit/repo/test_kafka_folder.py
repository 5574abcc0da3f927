"""What `make client-suites` makes of a folder of Apache Kafka's broker, and of kafka-tester's source and outcomes."""

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
log.dirs={folder}"""
META = f"""#
#Wed Jan 28 11:05:46 UTC 2026
cluster.id={CLUSTER}
directory.id=EAAAAAAAQACAAAAAAAAAAQ==
node.id=1
version=1
"""


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a NamedTuple of the module looks there for what its annotations name
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


MESH, SUITES = tool("kafka_folder_mesh"), tool("client_suites")


def folder_of(tmp_path: Path, listeners: str = "CONTROLLER://:9093,PLAINTEXT://:9092", meta: str = META) -> Path:
    """The properties file of a folder beside it."""
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "meta.properties").write_text(meta)
    server = tmp_path / "server.properties"
    server.write_text(SERVER.format(listeners=listeners, folder=folder))
    return server


def metadata_log(first_offset: int) -> bytes:
    """A topic of one partition, in versions of Kafka 3.9."""
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


def test_the_files_say_whose_the_folder_is_and_where_clients_come(tmp_path: Path) -> None:
    found = MESH.read_folder(folder_of(tmp_path))
    assert found == (tmp_path / "logs", CLUSTER, 1, 9092)


@pytest.mark.parametrize("listeners", ["CONTROLLER://:9093", "PLAINTEXT://:some"])
def test_a_file_without_a_port_for_clients_is_refused(tmp_path: Path, listeners: str) -> None:
    with pytest.raises(MESH.FolderError, match=r"server\.properties names no one folder and listener"):
        MESH.read_folder(folder_of(tmp_path, listeners))


def test_a_folder_of_nobody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MESH.FolderError, match=r"meta\.properties does not say"):
        MESH.read_folder(folder_of(tmp_path, meta="version=1\n"))


def test_a_metadata_log_without_its_first_leader_gets_it_and_is_read_as_it_is() -> None:
    data = metadata_log(first_offset=1)
    whole = MESH.completed(data, 1)
    assert whole.endswith(data)
    header = parse_header(whole)
    assert (header.base_offset, header.partition_leader_epoch, header.is_control) == (0, 3, True)
    (record,) = read_records(whole, 0, header)
    assert decode_leader_change(record.key, record.value) == LeaderChange(1, (1,), (1,))
    image = MetadataImage()
    image.replay(whole, MetadataDelta())
    assert image.offset == 3
    state = image.topics[TOPIC_ID].partitions[0]
    assert (image.topics[TOPIC_ID].name, state.leader, state.directories) == ("t", 1, (DIRECTORY,))


def test_any_other_metadata_log_stays_as_it_is() -> None:
    for data in (b"", metadata_log(first_offset=0), metadata_log(first_offset=5)):
        assert MESH.completed(data, 1) == data


def test_the_metadata_log_moves_and_nothing_else(tmp_path: Path) -> None:
    folder, home = tmp_path / "logs", tmp_path / "home"
    MESH.take_metadata_log(tmp_path, home, 1)  # there is none
    assert not home.exists()
    for name in ("__cluster_metadata-0", "t-0"):
        (folder / name).mkdir(parents=True)
        (folder / name / "00000000000000000000.log").write_bytes(metadata_log(1))
    MESH.take_metadata_log(folder, home, 1)
    assert [path.name for path in folder.iterdir()] == ["t-0"]
    moved = (home / "__cluster_metadata-0" / "00000000000000000000.log").read_bytes()
    assert parse_header(moved).base_offset == 0


def test_nodes_are_of_that_cluster_and_the_broker_has_the_folder(tmp_path: Path) -> None:
    folder, home = MESH.read_folder(folder_of(tmp_path)), tmp_path / "home"
    controller = NodeInfo("controller-1", Role.CONTROLLER, 1001, "r", grpc="127.0.0.1:1")
    assert MESH.properties(controller, folder, home) == {
        "cluster.id": CLUSTER,
        "metadata.log.dir": str(home / "controller"),
    }
    broker = NodeInfo("leader-1", Role.LEADER, 1, "r", grpc="127.0.0.1:2", kafka="127.0.0.1:3")
    assert MESH.properties(broker, folder, home) == {
        "cluster.id": CLUSTER,
        "log.dirs": str(tmp_path / "logs"),
        "metadata.log.dir": str(home / "broker"),
        "advertised.listeners": "MESH://127.0.0.1:2,KAFKA://localhost:9092",
    }
    with pytest.raises(MESH.FolderError, match="is of node 7"):
        MESH.properties(broker, folder._replace(node_id=7), home)


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


def test_stages_are_read_from_the_suite_s_own_source() -> None:
    first, second = SUITES.stages(DEFINITION)
    assert (first.name, second.name) == ("vi6:testBindToPort", "nv3:testHardcodedCorrelationId")
    (told,) = json.loads(first.told)
    assert (told["slug"], told["title"]) == ("vi6", "testBindToPort")
    assert all(told.values())  # it refuses an empty one


def test_files_and_a_port_of_somebody_else_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SUITES, "SHARED", tmp_path)
    monkeypatch.setattr(SUITES.ports, "is_free", lambda port: port == SUITES.PORT)
    SUITES._check_nobody_is_there()
    (tmp_path / "kraft-combined-logs").mkdir()
    with pytest.raises(SUITES.SuiteError, match=r"kraft-combined-logs is there$"):
        SUITES._check_nobody_is_there()
    monkeypatch.setattr(SUITES.ports, "is_free", lambda port: False)
    with pytest.raises(SUITES.SuiteError, match="kraft-combined-logs is there, port 9092 is taken"):
        SUITES._run_tester(tmp_path, "", tmp_path / "log")
    assert (tmp_path / "kraft-combined-logs").exists()


def test_what_fails_beside_the_lists_and_what_passes_of_them_is_a_problem() -> None:
    found = [SUITES.Outcome("a:one", "failed", "why"), SUITES.Outcome("b:two", "passed")]
    assert SUITES.problems(found, SUITES.Lists({}, {"a:*": "it is so"})) == []
    assert SUITES.problems(found, SUITES.Lists({}, {})) == ["fails: a:one\nwhy"]
    listed = SUITES.Lists({}, {"a:one": "it is so", "b:two": "it was so"})
    assert SUITES.problems(found, listed) == ["is listed as failing and does not: b:two"]
