"""Targets, record values, damage to log files, clocks, owners of connections and the report page."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kipmesh.core import record_batch
from kipmesh.core.errors import KafkaError
from kipmesh.storage.checkpoint import write_offsets
from kipmesh.storage.fs import RealFileSystem
from kipmesh_chaos import disk, network, report
from kipmesh_chaos.experiment import Experiment
from kipmesh_chaos.faults import NoTargetError, PartitionView, View, resolve
from kipmesh_chaos.history import Controller, Event, Led, Note, NotRecovered, write_history
from kipmesh_chaos.history_checker import check
from kipmesh_chaos.network import CLIENTS, Owners, owners_of, pairs
from kipmesh_chaos.skewed_clock import set_offset
from kipmesh_chaos.target_cluster import ChaosError
from kipmesh_chaos.workload import decode_batches, decode_value, encode_value
from tests.unit.chaos.histories_of_tests import clean_history, with_fault

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


@dataclass(frozen=True)
class FakeNode:
    name: str
    node_id: int | None
    rack: str = "rack-a"
    pid: int | None = None
    grpc: str | None = None
    dir: str = ""


NODES = [
    FakeNode("controller-1", 1001),
    FakeNode("controller-2", 1002),
    FakeNode("controller-3", 1003),
    FakeNode("leader-1", 1),
    FakeNode("follower-1", 2),
    FakeNode("follower-2", 3),
]
VIEW = View(NODES, {0: PartitionView(1, (1, 2, 3)), 1: PartitionView(3, (3,))}, 1002, 3)


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("leader:0", {"leader-1"}),
        ("leader:any", {"leader-1", "follower-2"}),
        ("follower:0", {"follower-1", "follower-2"}),
        ("controller:active", {"controller-2"}),
        ("controller:other", {"controller-1", "controller-3"}),
        ("controller:any", {"controller-1", "controller-2", "controller-3"}),
        ("coordinator", {"follower-2"}),
        ("broker:any", {"leader-1", "follower-1", "follower-2"}),
        ("node:follower-2", {"follower-2"}),
    ],
)
def test_target_resolves_to_matching_nodes(target: str, names: set[str]) -> None:
    owners = {resolve(target, VIEW, random.Random(seed))[0].name for seed in range(60)}
    assert owners == names


def test_target_all_resolves_to_every_node_of_its_kind() -> None:
    assert [node.name for node in resolve("all:brokers", VIEW, random.Random(1))] == [node.name for node in NODES[3:]]
    assert [node.name for node in resolve("all:controllers", VIEW, random.Random(1))] == [
        node.name for node in NODES[:3]
    ]
    assert len(resolve("all:nodes", VIEW, random.Random(1))) == 6


@pytest.mark.parametrize("target", ["follower:1", "node:follower-9", "leader:2", "controller:active", "coordinator"])
def test_target_without_matching_node_raises_error(target: str) -> None:
    partitions = {**VIEW.partitions, 2: PartitionView(-1, ())}
    with pytest.raises(NoTargetError, match="no "):
        resolve(target, VIEW._replace(partitions=partitions, active_controller=-1, coordinator=-1), random.Random(1))


def test_pairs_connect_node_with_peers_in_the_given_direction() -> None:
    assert pairs(NODES, "leader-1", peers="brokers", direction="out") == [
        ("leader-1", "follower-1"),
        ("leader-1", "follower-2"),
    ]
    assert pairs(NODES, "leader-1", peers="clients", direction="both") == [("leader-1", CLIENTS), (CLIENTS, "leader-1")]
    assert len(pairs(NODES, "leader-1", peers="nodes", direction="in")) == 5
    assert len(pairs(NODES, "leader-1", peers="controllers", direction="both")) == 6
    assert len(pairs(NODES, "leader-1", peers="everybody", direction="both")) == 12


@linux
@pytest.mark.parametrize(("family", "address"), [("AF_INET", "127.0.0.1"), ("AF_INET6", "::ffff:127.0.0.1")])
def test_owners_of_finds_process_of_connection(family: str, address: str) -> None:
    """gRPC opens IPv6 sockets, with mapped addresses for IPv4."""
    connect = f"s=socket.socket(socket.{family}); s.connect(({address!r},int(sys.argv[1])))"
    script = f"import socket,sys; {connect}; sys.stdin.read()"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with subprocess.Popen([sys.executable, "-c", script, str(port)], stdin=subprocess.PIPE) as child:
            connection, (_, far_port) = server.accept()
            pids = {os.getpid(): "me", child.pid: "child"}
            assert owners_of([(far_port, port), (1, port)], pids) == {(far_port, port): "child"}
            assert owners_of([(far_port, port)], {os.getpid(): "me"}) == {}
            assert child.stdin is not None
            child.stdin.close()
            child.wait(30)
            assert owners_of([(far_port, port)], pids) == {(far_port, port): None}  # FIN_WAIT2: no process owns it
            connection.close()


@linux
def test_owners_of_distinguishes_connections_from_one_source_port() -> None:
    """The kernel may reuse a source port for another destination while its first connection is open."""
    connect = (
        "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind((h, p)); s.connect((h, int(sys.argv[2])))"
    )
    script = f"import socket,sys; h='127.0.0.1'; p=int(sys.argv[1]); s=socket.socket(); {connect}; sys.stdin.read()"
    with (
        socket.create_server(("127.0.0.1", 0)) as first_server,
        socket.create_server(("127.0.0.1", 0)) as second_server,
        socket.socket() as source,
    ):
        source.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        source.bind(("127.0.0.1", 0))
        source.connect(first_server.getsockname())
        second_server.settimeout(60)
        far, first, second = (opened.getsockname()[1] for opened in (source, first_server, second_server))
        command = [sys.executable, "-c", script, str(far), str(second)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
            connection, (_, far_port) = second_server.accept()
            assert far_port == far
            owners = owners_of([(far, first), (far, second)], {os.getpid(): "me", child.pid: "child"})
            assert owners == {(far, first): "me", (far, second): "child"}
            assert child.stdin is not None
            child.stdin.close()
            connection.close()


@linux
async def test_concurrent_lookups_of_owners_share_one_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    scans = []

    def scan(connections: set[tuple[int, int]], pids: dict[int, str]) -> dict[tuple[int, int], str | None]:
        scans.append(len(connections))
        if pids[1] == "broken":
            raise OSError("broken")
        known = [connection for connection in connections if connection[0] != 999 or len(scans) > 3]
        return {connection: None if connection[0] % 2 else pids[1] for connection in known}

    monkeypatch.setattr(network, "owners_of", scan)
    monkeypatch.setattr(network, "TIMEOUT_S", 60.0)
    lookup = Owners(lambda: {1: "one"})
    names = await asyncio.gather(*[lookup.of((port, 1)) for port in (*range(100), 999)])
    assert names == [*["one", None] * 50, None]
    assert scans == [101, 1, 1, 1]
    monkeypatch.setattr(network, "TIMEOUT_S", 0.0)
    scans.clear()
    assert await lookup.of((999, 1)) is None  # too late
    broken = Owners(lambda: {1: "broken"})
    with pytest.raises(OSError, match="broken"):
        await broken.of((1, 1))


def test_value_decodes_to_its_operation_unless_damaged() -> None:
    for size in (16, 17, 100, 5000):
        value = encode_value(17, size)
        assert len(value) == size
        assert decode_value(value) == "17"
        for position in range(0, size, max(size // 50, 1)):
            changed = value[:position] + bytes([value[position] ^ 1]) + value[position + 1 :]
            assert decode_value(changed) != "17"
    assert decode_value(None) == "null"
    assert decode_value(b"").startswith("not ours")


def write_partition(data: Path, batches: int, *, synced: int) -> Path:
    directory = data / "chaos-0"
    directory.mkdir(parents=True)
    file = directory / f"{0:020}.log"
    with file.open("wb") as output:
        for number in range(batches):
            records = [(None, encode_value(number, 50))]
            output.write(record_batch.build(records, base_offset=number, leader_epoch=1, timestamp_ms=0))
    write_offsets(RealFileSystem(), str(data / disk.RECOVERY_POINTS), {("chaos", 0): synced})
    return file


def test_tear_and_flip_damage_only_bytes_that_are_not_synced(tmp_path: Path) -> None:
    torn, flipped = set(), set()
    for seed in range(40):
        data = tmp_path / str(seed)
        file = write_partition(data, 10, synced=6)
        before = file.read_bytes()
        begin = len(before) // 10 * 6
        source = random.Random(seed)
        if seed % 2:
            assert disk.tear(data, "chaos", 0, source) is not None
            after = file.read_bytes()
            assert begin <= len(after) < len(before)
            assert before.startswith(after)
            torn.add(len(after))
        else:
            assert disk.flip(data, "chaos", 0, source) is not None
            after = file.read_bytes()
            (position,) = [position for position in range(len(before)) if before[position] != after[position]]
            assert position >= begin
            assert (before[position] ^ after[position]).bit_count() == 1
            flipped.add(position)
    assert len(torn) > 10
    assert len(flipped) > 10


def test_tear_and_flip_leave_synced_and_missing_partitions_unchanged(tmp_path: Path) -> None:
    file = write_partition(tmp_path, 5, synced=5)
    before = file.read_bytes()
    assert disk.tear(tmp_path, "chaos", 0, random.Random(1)) is None
    assert disk.flip(tmp_path, "chaos", 0, random.Random(1)) is None
    assert disk.flip(tmp_path, "chaos", 1, random.Random(1)) is None
    assert file.read_bytes() == before


def test_fill_requires_mount_point(tmp_path: Path) -> None:
    with pytest.raises(ChaosError, match="is not a mount point"):
        disk.fill(tmp_path)
    disk.empty(tmp_path)
    assert not list(tmp_path.iterdir())


def test_decode_batches_rejects_wrong_crc() -> None:
    data = bytearray(record_batch.build([(None, encode_value(1, 50))], base_offset=3, leader_epoch=1, timestamp_ms=0))
    ((header, records),) = decode_batches(bytes(data))
    assert (header.base_offset, records) == (3, [(3, "1")])
    data[-1] ^= 1
    with pytest.raises(KafkaError):
        list(decode_batches(bytes(data)))


CLOCK = """
import sys, time
print(time.time(), time.time_ns() / 1e9, time.monotonic(), sys.argv[1:], flush=True)
sys.stdin.readline()
from kipmesh.node import wall_ms
print(wall_ms() / 1e3, time.monotonic(), flush=True)
"""


def test_skewed_clock_jumps_while_module_runs(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CLOCK)
    file = tmp_path / "offset"
    set_offset(file, 3600)
    command = [sys.executable, "-m", "kipmesh_chaos.skewed_clock", str(file), "child", "--one", "two"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        first = child.stdout.readline().split(maxsplit=3)
        assert float(first[0]) == pytest.approx(time.time() + 3600, abs=30)
        assert float(first[1]) == pytest.approx(time.time() + 3600, abs=30)
        assert first[3].strip() == "['--one', 'two']"
        set_offset(file, -3600)
        child.stdin.write("\n")
        child.stdin.close()
        wall, monotonic = child.stdout.readline().split()
        assert float(wall) == pytest.approx(time.time() - 3600, abs=30)
        assert float(monotonic) == pytest.approx(float(first[2]), abs=30)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "onclick"}
        if tag not in ("meta", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("clean", [True, False])
def test_report_is_one_well_formed_page_without_scripts(tmp_path: Path, clean: bool) -> None:
    events: list[Event] = with_fault(clean_history(1), 1, 2, halts=False)
    others: list[Event] = [
        Led(0.1, 0, 1, 3, [1]), Led(1, 0, -1, 4, []), Controller(0.2, 1001, 1), Note(1, "<b>a note</b>")
    ]  # fmt: skip
    events = [events[0], *others, *events[1:]]
    if not clean:
        events.append(NotRecovered(3, "broker <2> is missing"))
    write_history(tmp_path / "history.jsonl", events)
    verdict = check(events)
    assert verdict.is_clean is clean
    document = {"name": "a-test", "hypothesis": "1 < 2 & so on", "duration_s": 5}
    report.write(tmp_path, verdict, Experiment.model_validate(document), 7)
    page = (tmp_path / "report.html").read_text()
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    assert "script" not in tags.tags
    assert "1 &lt; 2 &amp; so on" in page
    assert "<b>a note</b>" not in page
    assert ("no anomaly" in page) is clean
    assert ("broker &lt;2&gt; is missing" in page) is not clean
    assert "<!--" not in page
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["clean"] is clean
    assert summary["seed"] == 7
    assert summary["faults_by_kind"] == {"kill": 1}
    assert summary["acknowledged"] == verdict.figures.acknowledged
    assert summary["findings"] == [] if clean else summary["findings"][0]["kind"] == "not recovered"


def test_report_of_empty_history_counts_anomalies(tmp_path: Path) -> None:
    write_history(tmp_path / "history.jsonl", [])
    experiment = Experiment.model_validate({"name": "a-test", "hypothesis": "It holds.", "duration_s": 5})
    report.write(tmp_path, check([]), experiment, 7)
    assert (
        "1 anomalies" in (tmp_path / "report.html").read_text()
        or "2 anomalies" in (tmp_path / "report.html").read_text()
    )
